"""Saving while the training goes on: how long it stops, and what it costs meanwhile.

    python -m benchmarks.async_save [--world 2] [--kinds thread process] [--json out.json]

A model with about 104 million parameters under FSDP1 on CPU (gloo) with AdamW, weights and
optimizer saved to local disk by ``dcp.async_save`` over a process group of its own, while training
steps go on until all ranks' saves are done.  Everything runs in one go, warmed up, variants in
turn; figures are medians.

``stock`` is ``get_state_dict`` (which gathers) and ``async_save`` with its default stager and
``FileSystemWriter``; ``ours`` is ``FlatModelState`` and ``FlatOptimState`` with our planner, our
writer and a :class:`FlatStager`; ``raw copy`` copies the rank's weights and optimizer state into
memory that is already there.

Columns: ``stall``, seconds of the slowest rank from the call to its return, all that blocks before
it included; ``of raw``, as a multiple of the raw copy's; ``shorter``, how many times shorter than
stock's; ``background``, seconds until the save was done; ``steps``, how many times as long as alone
a training step took meanwhile; ``peak``, the worst rank's resident memory above its start, MiB
(what a stager holds from save to save is there at the start).
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from benchmarks.async_save_ranks import Job
from benchmarks.launch import run_ranks
from benchmarks.measure import median, table, write_json
from benchmarks.stock_vs_ours_ranks import Job as Size

__all__ = ["main"]

_MIB = 1 << 20


def _figures(ranks: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per variant: medians over the runs, of the slowest or worst rank."""
    found: dict[str, dict[str, float]] = {}
    for name in ranks[0]["runs"]:
        runs = list(zip(*(rank["runs"][name] for rank in ranks), strict=True))
        found[name] = {
            part: median(max(one["extra"][part] for one in run) for run in runs)
            for part in runs[0][0]["extra"]
        }
        found[name]["peak"] = median(max(one["peak_extra"] for one in run) for run in runs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["thread", "process"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="async-save-") as folder:
        size = Size(folder, True, args.width, args.layers, args.rounds, args.fsync, True)
        job = Job(size, tuple(args.kinds))
        ranks = run_ranks("benchmarks.async_save_ranks", job, args.world, timeout=1200)
    figures = _figures(ranks)
    raw = figures["raw copy"]["stall"]
    rows = []
    for name, figure in figures.items():
        stock = figures.get(name.replace("ours", "stock"))
        rows.append(
            [
                name,
                figure["stall"],
                figure["stall"] / raw,
                stock["stall"] / figure["stall"] if stock and "ours" in name else "",
                figure.get("background", ""),
                figure.get("slower", ""),
                figure["peak"] / _MIB,
            ]
        )
    held = sum(rank["state_bytes"] for rank in ranks) / _MIB
    print(f"{held:.0f} MiB of weights and optimizer state over {args.world} ranks\n")
    header = ["variant", "stall", "of raw", "shorter", "background", "steps", "peak"]
    print(table(rows, header=header))
    write_json(args.json, {"arguments": vars(args), "figures": figures})


if __name__ == "__main__":
    main()
