"""Replicated optimizer state: every rank reads all of it, or each a part for all.

    python -m benchmarks.exchange [--parts compare sweep setup] [--quick] [--json out.json]

Four ranks on gloo: FSDP1 HSDP on a 2x2 mesh (2 ranks want the same), FSDP1 NO_SHARD and DDP (4
ranks do).  Checkpoints lie on the local disk (in the page cache) or on the embedded S3 server, with
a delay a request and a limit of bytes a second for the whole job.  After each load the state is
compared with what was trained, bit for bit; a difference ends the benchmark.

compare: ``stock`` is ``get_optimizer_state_dict``, ``dcp.load``, ``set_optimizer_state_dict`` with
torch's own reader, and ``its dcp.load`` that part of it alone; the others are our planner and
StreamingReader with ``broadcast=False`` and ``True``, and ``True`` with torch's reader.  Columns:
seconds of the slowest rank, and their range; how many times faster than stock, than its
``dcp.load``, and than ``broadcast=False``; bytes that all ranks asked their readers for, and that
were read (counted at the server; on disk by the kernel) / bytes of all distinct tensors (torch's
reader uses s3fs, which reads 50 MiB ahead); requests of all ranks; MiB that the worst rank sent and
received; the worst rank's resident memory above its start, less the state that a load has to
allocate, in MiB; seconds in parts (``finish plan`` connects and allocates, and on a rank that reads
nothing waits for what it receives).

sweep: seconds with ``broadcast=True`` / seconds with ``False`` by size of the state and place, and
what ``"auto"`` does there (``*``: it broadcasts).  Under 1 the exchange pays.

setup: what an exchange costs apart from its bytes, and the rate at which bytes are broadcast.

Variants of a table run in turn, after a warm-up at full speed; figures are medians.  Ranks and the
server share this machine's cores: compare within a table.  Sizes are powers of 2.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exchange_ranks import EXACT, KINDS, OURS, STOCK, Job, Setting, Size
from benchmarks.launch import run_ranks
from benchmarks.measure import Measured, combine, median, table, write_json
from benchmarks.s3_server import s3_server
from benchmarks.storage_variants import Place

__all__ = ["main"]

_MIB = 1 << 20
_MODULE = "benchmarks.exchange_ranks"
_WORLD = 4
_RATIO_LIMIT = 1.02
_HEADER = ("", "s", "range", "x stock", "x its dcp.load", "x False", "asked", "read", "requests")
_HEADER_MOVED = ("sent", "received", "extra", "seconds in parts")
_PARTS = ("get", "dcp.load", "set", "local plan", "global plan", "finish plan", "handing on")


@dataclass(frozen=True)
class _Limits:
    """Latency in seconds; bandwidths in bytes a second, None for no limit."""

    latency: float
    bandwidths: tuple[float | None, ...]


@contextlib.contextmanager
def _settings(
    folder: str | None, only: Sequence[str], limits: Sequence[_Limits], memory: int
) -> Iterator[list[Setting]]:
    """Where checkpoints are read from; servers and folders are gone when the block is left."""
    with contextlib.ExitStack() as stack:
        found = []
        if "disk" in only:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="exchange-", dir=folder))
            found.append(Setting("disk", Place("disk", root)))
        if "s3" in only:
            server = stack.enter_context(s3_server(memory=memory))
            place = Place("s3", "exchange", server)
            for each in limits:
                for bandwidth in each.bandwidths:
                    label = f"S3 {each.latency * 1000:.0f} ms"
                    label += "" if bandwidth is None else f" {bandwidth / 1e6:.0f} MB/s"
                    found.append(Setting(label, place, each.latency, bandwidth))
        yield found


# ------------------------------------------------------------ compare


def _figures(ranks: list[dict[str, Any]], label: str) -> dict[str, dict[str, Any]]:
    """Of one size and setting, per variant: medians over the runs; ``ranks`` as reported."""
    unique = ranks[0]["unique"]
    own = max(rank["state_bytes"] for rank in ranks)
    of = [rank["settings"][label] for rank in ranks]
    figures: dict[str, dict[str, Any]] = {}
    for name in of[0]["runs"]:
        runs = [[Measured(**run) for run in each["runs"][name]] for each in of]
        rounds = list(zip(*runs, strict=True))
        counts = of[0]["server"][name]
        figure: dict[str, Any] = combine(runs)
        # Every load begins without state, so has to allocate it.
        figure["extra"] = max(0.0, figure["peak_extra"] - own)
        if counts:
            figure["read_ratio"] = median(c["bytes_out"] for c in counts) / unique
            figure["requests"] = median(c["requests"] for c in counts)
        else:
            read = median(sum(m.extra["read_bytes"] for m in run) for run in rounds)
            figure["read_ratio"] = read / unique
        asked = median(sum(m.extra["asked"] for m in run) for run in rounds)
        figure["asked_ratio"] = asked / unique
        for key in ("sent", "received"):
            figure[key] = median(max(m.extra.get(key, 0) for m in run) for run in rounds)
        figure["exchange_rounds"] = rounds[0][0].extra.get("rounds", 0)
        figure["parts"] = {
            part: median(max(m.extra.get(part, 0.0) for m in run) for run in rounds)
            for part in _PARTS
            if any(part in m.extra for m in rounds[0])
        }
        figure["walls"] = [max(m.wall for m in run) for run in rounds]
        figures[name] = figure
    return figures


def _print_figures(figures: dict[str, dict[str, Any]]) -> None:
    stock, alone = figures[STOCK], figures["broadcast=False"]
    faster = (stock["wall"], stock["parts"]["dcp.load"], alone["wall"])
    rows = []
    for name, figure in figures.items():
        rows.append(
            (
                name,
                figure["wall"],
                f"{figure['wall_min']:.2f}-{figure['wall_max']:.2f}",
                *(seconds / figure["wall"] for seconds in faster),
                f"{figure['asked_ratio']:.4f}",
                f"{figure['read_ratio']:.4f}",
                int(figure["requests"]) if "requests" in figure else "",
                figure["sent"] / _MIB,
                figure["received"] / _MIB,
                figure["extra"] / _MIB,
                ", ".join(f"{part} {value:.2f}" for part, value in figure["parts"].items()),
            )
        )
    print(table(rows, header=[*_HEADER, *_HEADER_MOVED]), flush=True)


def _compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    limits = [_Limits(options.latency / 1000, tuple(b * 1e6 for b in options.bandwidths))]
    found = []
    for kind in options.kinds:
        memory = 3 * options.mib * _MIB + (64 << 20)
        with _settings(options.folder, options.only, limits, memory) as settings:
            size = Size(options.mib, options.rounds)
            job = Job(kind, [size], settings, (STOCK, *OURS))
            ranks = run_ranks(_MODULE, job, _WORLD, timeout=1800)
        sizes = [rank["sizes"][0] for rank in ranks]
        for setting in settings:
            figures = _figures(sizes, setting.label)
            auto = "broadcasts" if sizes[0]["settings"][setting.label]["auto"] else "does not"
            print(
                f"\n{kind}, {KINDS[kind]} ranks want the same, {sizes[0]['unique'] / _MIB:.0f} MiB"
                f" of state, {setting.label}, {options.rounds} rounds; 'auto' {auto}"
            )
            _print_figures(figures)
            _print_target(kind, setting, figures)
            found.append(
                {
                    "kind": kind,
                    "replicas": KINDS[kind],
                    "setting": setting.label,
                    "unique": sizes[0]["unique"],
                    "auto": sizes[0]["settings"][setting.label]["auto"],
                    "variants": figures,
                }
            )
    return found


def _print_target(kind: str, setting: Setting, figures: dict[str, dict[str, Any]]) -> None:
    line = f"  bytes read / distinct bytes (<= {_RATIO_LIMIT}):"
    readers = {
        "broadcast=True": "StreamingReader",
        "True, stock reader": "stock's",
        EXACT: "stock's without read-ahead",
    }
    for name, reader in readers.items():
        if name not in figures:
            continue
        ratio = figures[name]["read_ratio"]
        line += f" {reader} {ratio:.4f} {'met' if ratio <= _RATIO_LIMIT else 'NOT MET'},"
    line += f" asked of stock's {figures['True, stock reader']['asked_ratio']:.4f}"
    if setting.bandwidth is not None:
        wall = figures["broadcast=True"]["wall"]
        line += (
            f"; {KINDS[kind]} replicas: {figures['broadcast=False']['wall'] / wall:.2f} times as"
            f" fast as False, {figures[STOCK]['parts']['dcp.load'] / wall:.2f} as stock's dcp.load,"
            f" {figures[STOCK]['wall'] / wall:.2f} as all of stock"
        )
    print(line, flush=True)


# ------------------------------------------------------------ sweep and setup


def _sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    latency, bandwidth = options.latency / 1000, options.bandwidths[-1] * 1e6
    limits = [_Limits(0.0, (None,)), _Limits(latency, (None, bandwidth))]
    found = []
    variants = ("broadcast=False", "broadcast=True")
    for kind in options.kinds:
        memory = 4 * sum(options.sizes) * _MIB + (64 << 20)
        with _settings(options.folder, options.only, limits, memory) as settings:
            sizes = [Size(mib, options.sweep_rounds) for mib in options.sizes]
            job = Job(kind, sizes, settings, variants)
            ranks = run_ranks(_MODULE, job, _WORLD, timeout=1800)
        rows = []
        for index, size in enumerate(sizes):
            row: list[object] = [f"{size.mib} MiB"]
            for setting in settings:
                of = [rank["sizes"][index] for rank in ranks]
                figures = _figures(of, setting.label)
                off, on = (figures[name] for name in variants)
                ratio = on["wall"] / off["wall"]
                auto = of[0]["settings"][setting.label]["auto"]
                row.append(
                    f"{ratio:.2f} ({on['wall']:.3f}/{off['wall']:.3f}){'*' if auto else ' '}"
                )
                found.append(
                    {
                        "kind": kind,
                        "mib": size.mib,
                        "setting": setting.label,
                        "ratio": ratio,
                        "auto": auto,
                        "variants": figures,
                    }
                )
            rows.append(row)
        print(
            f"\n{kind}: seconds with broadcast=True / False, {options.sweep_rounds} rounds;"
            f" *: 'auto' broadcasts"
        )
        print(table(rows, header=["state", *(setting.label for setting in settings)]), flush=True)
    return found


def _setup(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for world in options.worlds:
        job = Job("ddp", [], [], (), profile=True)
        ranks = run_ranks(_MODULE, job, world, timeout=300)
        profiles = [rank["profile"] for rank in ranks]
        worst = {
            key: max(p[key] for p in profiles)
            for key in ("connect", "connect, first", "group", "agree")
        }
        rates = {size: min(p["rates"][size] for p in profiles) for size in profiles[0]["rates"]}
        print(
            f"\n{world} ranks: what an exchange costs apart from its bytes, ms of the slowest rank"
        )
        for key, value in worst.items():
            print(f"  {key:16}{value * 1000:8.2f}")
        print("  to all, in rounds of (MiB): MB/s")
        print("   ", ", ".join(f"{size}: {rate / 1e6:.0f}" for size, rate in rates.items()))
        found.append({"world": world, **worst, "rates": rates})
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, 1 round")
    parser.add_argument("--parts", nargs="+", default=["compare", "sweep", "setup"])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--only", nargs="+", choices=["disk", "s3"], default=["disk", "s3"])
    parser.add_argument("--mib", type=int, help="compare: size of the state (default 512)")
    parser.add_argument("--rounds", type=int, help="compare: default 3")
    parser.add_argument("--latency", type=float, default=30, help="ms a request (default 30)")
    parser.add_argument(
        "--bandwidths",
        type=float,
        nargs="+",
        default=[100, 200],
        help="MB/s of the job (default 100 200); the sweep takes the last",
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="sweep: default 1 4 16 64 256")
    parser.add_argument("--sweep-rounds", type=int, help="default 5")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8], help="setup")
    parser.add_argument("--folder", help="where on the local disk (default: the temporary folder)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(argv)
    quick = options.quick
    options.mib = options.mib or (16 if quick else 512)
    options.rounds = options.rounds or (1 if quick else 3)
    options.sizes = options.sizes or ([1] if quick else [1, 4, 16, 64, 256])
    options.sweep_rounds = options.sweep_rounds or (1 if quick else 5)
    parts = {"compare": _compare, "sweep": _sweep, "setup": _setup}
    if not set(options.parts) <= parts.keys():
        parser.error(f"--parts are among {', '.join(parts)}")
    if any(mib < 1 or mib & (mib - 1) for mib in (options.mib, *options.sizes)):
        parser.error("--mib and --sizes must be powers of 2")
    write_json(options.json, {part: parts[part](options) for part in options.parts})


if __name__ == "__main__":
    main()
