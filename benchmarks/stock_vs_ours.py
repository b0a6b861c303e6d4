"""Saving and loading FSDP1's optimizer state: PyTorch's own ways, ours, and raw file IO.

    python -m benchmarks.stock_vs_ours [--whole] [--quick] [--json out.json] [--worlds 2 4]

A model with about 104 million parameters under FSDP1 on CPU (gloo), AdamW, so about 830 MiB of
state over all ranks; ``use_orig_params`` on and off.  Everything runs in one go, warmed up,
variants in turn; figures are medians.  After each load the state is compared with what was saved.

Save: ``stock`` is ``FSDP.optim_state_dict`` (sharded) + ``dcp.save`` with ``FileSystemWriter``.
Load: ``stock A`` is ``load_sharded_optimizer_state_dict`` + ``FSDP.optim_state_dict_to_load`` +
``load_state_dict``; ``stock B`` is ``get_optimizer_state_dict`` + ``dcp.load`` +
``set_optimizer_state_dict``.  ``ours`` is our planner with StreamingWriter and StreamingReader,
and again with stock's writer and reader.  Loads start from an optimizer without state and so
allocate it, but for ``in place``, which loads into a live ``optim.state_dict()``.  Raw is the
same bytes as one file a rank, ``write`` and ``readinto``, into resident memory and into fresh.

With ``--whole`` the model's weights are in the checkpoint too: ``stock`` is ``get_state_dict`` +
``dcp.save``, and for a load ``get_state_dict`` + ``dcp.load`` + ``set_state_dict``; ``ours`` is
``FlatModelState`` and ``FlatOptimState``.

Columns: seconds of the slowest rank; ``x`` how many times faster than that stock way; ``of raw``
the speed as a share of raw's; ``peak`` the worst rank's resident memory above its start in MiB, and
``extra`` the same less the state that a load has to allocate; ``tensors`` MiB that ranks sent one
another, all ranks together, and ``objects`` KiB of them pickled objects (plans): counted at the
sockets, see :mod:`benchmarks.wire`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from benchmarks.launch import run_ranks
from benchmarks.measure import Measured, combine, median, table, write_json
from benchmarks.stock_vs_ours_ranks import FRESH, Job

__all__ = ["main"]

_MIB = 1 << 20
_TARGETS = (
    # what must be shown at world size 4: label, value of a summary, limit, which side is good
    ("save, times faster than stock", "save_ratio", 3.0, ">="),
    ("load, times faster than the slower stock way", "load_ratio_slower", 20.0, ">="),
    ("load, times faster than the faster stock way", "load_ratio_faster", 10.0, ">="),
    ("tensor MiB between ranks, save and load", "tensors_mib", 0.01, "<="),
    ("extra MiB of a rank, save", "save_extra_mib", 64.0, "<="),
    ("extra MiB of a rank, load", "load_extra_mib", 64.0, "<="),
)


def _figures(ranks: list[dict[str, Any]], phase: str) -> dict[str, dict[str, Any]]:
    """Per variant: medians over the runs, of the slowest or worst rank, or summed over ranks."""
    figures: dict[str, dict[str, Any]] = {}
    for name in ranks[0][phase]:
        of = [rank[phase][name] for rank in ranks]
        runs = [[Measured(**run) for run in one["runs"]] for one in of]
        figure: dict[str, Any] = combine(runs)
        own = max(rank["optim_bytes"] for rank in ranks) if name in FRESH else 0
        # A load from no state must allocate it, whoever loads.
        figure["extra"] = max(0.0, figure["peak_extra"] - (own if phase == "load" else 0))
        figure["tensor_bytes_sent"] = sum(one["tensor_bytes_sent"] for one in of)
        figure["object_bytes_sent"] = sum(one["object_bytes_sent"] for one in of)
        figure["parts"] = {
            part: median(max(m.extra[part] for m in run) for run in zip(*runs, strict=True))
            for part in runs[0][0].extra
        }
        figures[name] = figure
    return figures


def _print_table(
    phase: str, figures: dict[str, dict[str, Any]], stock: list[str], raw: str
) -> None:
    rows = []
    for name, figure in figures.items():
        rows.append(
            [
                f"{phase}: {name}",
                figure["wall"],
                f"{figure['wall_min']:.2f}-{figure['wall_max']:.2f}",
                *(figures[way]["wall"] / figure["wall"] for way in stock),
                figures[raw]["wall"] / figure["wall"],
                figure["peak_extra"] / _MIB,
                figure["extra"] / _MIB,
                figure["tensor_bytes_sent"] / _MIB,
                figure["object_bytes_sent"] / 1024,
                ", ".join(f"{part} {value:.2f}" for part, value in figure["parts"].items()),
            ]
        )
    header = ["", "s", "range", *(f"x {way}" for way in stock), "of raw", "peak", "extra"]
    print(table(rows, header=[*header, "tensors", "objects", "seconds in parts"]))


def _summary(save: dict[str, Any], load: dict[str, Any]) -> dict[str, float]:
    stock = sorted(load[name]["wall"] for name in load if name.startswith("stock"))
    ours = load["ours"]["wall"]
    return {
        "save_ratio": save["stock"]["wall"] / save["ours"]["wall"],
        "load_ratio_slower": stock[-1] / ours,
        "load_ratio_faster": stock[0] / ours,
        "tensors_mib": (save["ours"]["tensor_bytes_sent"] + load["ours"]["tensor_bytes_sent"])
        / _MIB,
        "save_extra_mib": save["ours"]["extra"] / _MIB,
        "load_extra_mib": load["ours"]["extra"] / _MIB,
    }


def _print_targets(summary: dict[str, float], *, whole: bool) -> None:
    for label, key, limit, side in _TARGETS:
        if whole and key == "load_ratio_slower":  # there is one stock way
            continue
        value = summary[key]
        met = value >= limit if side == ">=" else value <= limit
        print(f"  {'met   ' if met else 'NOT MET'} {label}: {value:.3g} ({side} {limit:g})")


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="model and optimizer")
    parser.add_argument("--quick", action="store_true", help="50 MiB of state, 1 round, 2 ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--worlds", type=int, nargs="+", metavar="N", help="default: 2 4")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--no-fsync", action="store_true", help="no writer waits for the disk")
    parser.add_argument("--folder", help="where checkpoints go; default: the temporary folder")
    args = parser.parse_args(argv)
    worlds = args.worlds or ([2] if args.quick else [2, 4])
    rounds = args.rounds or (1 if args.quick else 3)
    width, layers = (256, 8) if args.quick else (1024, 8)

    settings = {"fsync": not args.no_fsync, "rounds": rounds, "whole": args.whole}
    results: dict[str, Any] = {**settings, "runs": []}
    for world in worlds:
        for use_orig_params in (True, False):
            with tempfile.TemporaryDirectory(prefix="stock-vs-ours-", dir=args.folder) as folder:
                job = Job(
                    folder, use_orig_params, width, layers, rounds, not args.no_fsync, args.whole
                )
                timeout = 120.0 + 150.0 * (rounds + 3)
                ranks = run_ranks("benchmarks.stock_vs_ours_ranks", job, world, timeout)
            save, load = _figures(ranks, "save"), _figures(ranks, "load")
            total = sum(rank["state_bytes"] for rank in ranks)
            print(
                f"\n{world} ranks, use_orig_params={use_orig_params}, {total / _MIB:.0f} MiB of"
                f" {'weights and state' if args.whole else 'state'},"
                f" fsync {'off' if args.no_fsync else 'on'}, {rounds} rounds"
            )
            _print_table("save", save, ["stock"], "raw write")
            print()
            _print_table("load", load, [n for n in load if n.startswith("stock")], "raw read")
            summary = _summary(save, load)
            if world == 4 and not args.quick:
                _print_targets(summary, whole=args.whole)
            results["runs"].append(
                {
                    "world": world,
                    "use_orig_params": use_orig_params,
                    "state_bytes": total,
                    "save": save,
                    "load": load,
                    "summary": summary,
                }
            )
    write_json(args.json, results)


if __name__ == "__main__":
    main()
