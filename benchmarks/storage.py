"""StreamingWriter and StreamingReader against torch's, a vendor's and the client's own speed.

    python -m benchmarks.storage [--quick] [--json out.json] [--only disk s3 seaweed]
        [--worlds 1 2 4] [--save 1 2 4] [--load 1-1 4-2 ...] [--latency 0 30]

Everything takes about half an hour on two cores; the options cut it into pieces, say a place and
a world size each: ``--only s3 --latency 0 --save 1 --load 1-1``, ``--only disk --save --load 4-2
2-4 1-4`` (``--save`` or ``--load`` without a value: none).

Places: the local disk (``--folder``), the embedded S3 server at 0 and at 30 ms a request, and
SeaweedFS.  State: rows of float32 matrices spread over the ranks as FSDP2 does, biases, and 64
scalars.  Loads: from a checkpoint of the same world size, and 4->2, 2->4, 1->4.  Every variant of
a table is run in turn with the others, after a warm-up of each; figures are medians.

Rates are state bytes / wall seconds of the slowest rank.  ``x stock`` and ``x raw`` are ratios of
rates within a table; raw is the variant named after the same client.  ``read`` is bytes read by all
ranks / bytes that they need.  ``CPU`` is seconds of all ranks, without the server's.  ``peak`` is
the worst rank's resident memory above its start, in MiB.

All ranks and the server share this machine's cores: at several ranks the cores are the limit, so
compare ratios, not rates.  SeaweedFS takes uploads at the disk's speed, so it is saved to at world
size 1 alone.  s3torchconnector is measured where it is installed.

``columns`` reads boxes of short runs from the local disk, ``small`` saves and loads many small
entries there, both in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.launch import run_ranks
from benchmarks.measure import Measured, combine, median, table, write_json
from benchmarks.s3_server import s3_server
from benchmarks.storage_columns import columns
from benchmarks.storage_ranks import Job, Phase, state_bytes
from benchmarks.storage_small import small_entries
from benchmarks.storage_variants import Place, connector_missing

__all__ = ["main"]

_PARTS = ("disk", "s3", "seaweed", "columns", "small")
_RESHARDED = {2: (4,), 4: (2, 1)}
_HEADER = ("variant", "MB/s", "x stock", "x raw", "requests", "read", "CPU s", "peak MiB")


@contextlib.contextmanager
def _places(
    only: list[str], folder: str | None, mib: int, latencies: list[float]
) -> Iterator[list[tuple[Place, float]]]:
    """Places with their latency, running until the block is left."""
    with contextlib.ExitStack() as stack:
        places: list[tuple[Place, float]] = []
        if "disk" in only:
            disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="storage-", dir=folder))
            places.append((Place("disk", disk), 0.0))
        if "s3" in only:
            server = stack.enter_context(s3_server(prewarm=4 * mib << 20))
            for latency in latencies:
                places.append((Place(f"s3 {latency:.0f} ms", "bench", server), latency / 1000))
        if "seaweed" in only:
            from tests.servers import seaweed_server

            weed = stack.enter_context(seaweed_server())
            plain = weed.behind(weed.endpoint_url)  # what ranks need of it can be pickled
            places.append((Place("seaweed", "bench", plain), 0.0))
        yield places


def _raw_of(variant: str, names: list[str]) -> str | None:
    """The raw variant that ``variant`` is to be compared with."""
    if not variant.startswith("ours"):
        return None
    for raw in (name for name in names if name.startswith("raw")):
        if raw.split()[-1] in variant or raw == "raw readinto":
            return raw
    return None


def _summary(
    phase: Phase, world: int, ranks: list[dict[str, Any]], size: int
) -> dict[str, dict[str, float]]:
    """Figures by variant of one phase."""
    figures: dict[str, dict[str, float]] = {}
    names = list(ranks[0]["runs"])
    for name in names:
        runs = [[Measured(**m) for m in rank["runs"][name]] for rank in ranks]
        found = combine(runs)
        found["mb_per_s"] = size / 1e6 / found["wall"]
        counts = ranks[0]["server"].get(name, [])[1:]  # the first is the warm-up
        if counts:
            found["requests"] = median(count.get("requests", 0) for count in counts)
        if phase.kind == "load":
            needed = sum(rank["needed"] for rank in ranks)
            if counts:
                read = median(count.get("bytes_out", 0) for count in counts)
                found["read_ratio"] = read / needed
            elif phase.place.endpoint is None:
                read = sum(median(m.extra["syscall_read"] for m in run) for run in runs)
                found["read_ratio"] = read / needed
        figures[name] = found
    for name, found in figures.items():
        found["x_stock"] = figures["stock"]["wall"] / found["wall"]
        raw = _raw_of(name, names)
        if raw is not None:
            found["x_raw"] = figures[raw]["wall"] / found["wall"]
    return figures


def _print(title: str, figures: dict[str, dict[str, float]]) -> None:
    rows = [
        (
            name,
            found["mb_per_s"],
            found["x_stock"],
            found.get("x_raw", ""),
            int(found["requests"]) if "requests" in found else "",
            f"{found['read_ratio']:.4f}" if "read_ratio" in found else "",
            found["cpu"],
            found["peak_extra"] / (1 << 20),
        )
        for name, found in figures.items()
    ]
    print(f"\n{title}\n{table(rows, header=_HEADER)}", flush=True)


def main() -> None:
    """Run, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 MiB, 2 rounds, world sizes 1, 2")
    parser.add_argument("--mib", type=int, help="state in MiB, a multiple of 64 (default 1024)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default 3)")
    parser.add_argument("--worlds", type=int, nargs="+", help="world sizes (default 1 2 4)")
    parser.add_argument("--save", type=int, nargs="*", help="world sizes of the saves alone")
    parser.add_argument("--load", type=_way, nargs="*", help="loads alone, as SAVED-LOADING")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 30.0], help="ms, of s3")
    parser.add_argument("--only", nargs="+", default=list(_PARTS))
    parser.add_argument("--folder", help="where on the local disk (default: the temporary folder)")
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    mib = options.mib or (128 if options.quick else 1024)
    rounds = options.rounds or (2 if options.quick else 3)
    worlds = options.worlds or ([1, 2] if options.quick else [1, 2, 4])
    saves = worlds if options.save is None else options.save
    loads: list[tuple[int, int]] = options.load
    if loads is None:
        loads = [(w, w) for w in worlds]
        loads += [(s, w) for w in worlds for s in _RESHARDED.get(w, ()) if s in worlds]
    if mib % 64 or not {*saves, *(n for way in loads for n in way)} <= {1, 2, 4}:
        parser.error("--mib must be a multiple of 64 and world sizes among 1, 2, 4")

    size, results = state_bytes(mib), []
    print(f"{size / 1e6:.0f} MB of state, median of {rounds} rounds")
    missing = connector_missing()
    if missing is not None:
        print(missing)
    begin = time.monotonic()
    if "columns" in options.only:
        results += columns(options.folder, rounds)
    if "small" in options.only:
        results += small_entries(options.folder, rounds)
    with _places(options.only, options.folder, mib, options.latency) as places:
        roots = {(place.root, place.endpoint): place for place, _ in places}
        sources = {source for source, _ in loads}
        for world in sorted({*saves, *sources}):
            phases = [
                Phase("save", place, latency)
                for place, latency in places
                if world in saves and (world == 1 or place.label != "seaweed")
            ]
            if world in sources:
                phases += [Phase("prepare", place) for place in roots.values()]
            results += _run_and_print(phases, world, mib, rounds, size)
        for world in sorted({world for _, world in loads}):
            ways = [source for source, to in loads if to == world]
            phases = [Phase("load", p, latency, s) for s in ways for p, latency in places]
            results += _run_and_print(phases, world, mib, rounds, size)
    print(f"\n{time.monotonic() - begin:.0f} s in all")
    write_json(options.json, {"state_bytes": size, "rounds": rounds, "results": results})


def _way(text: str) -> tuple[int, int]:
    """``4-2``: saved by 4 ranks, loaded by 2."""
    saved, loading = text.split("-")
    return int(saved), int(loading)


def _run_and_print(
    phases: list[Phase], world: int, mib: int, rounds: int, size: int
) -> list[dict[str, Any]]:
    if not phases:  # of columns or small entries alone
        return []
    job = Job(phases, mib, rounds)
    ranks = run_ranks("benchmarks.storage_ranks", job, world, timeout=600.0 * len(phases))
    found = []
    for phase, each in zip(phases, zip(*ranks, strict=True), strict=True):
        if phase.kind == "prepare":
            continue
        figures = _summary(phase, world, list(each), size)
        way = f"{phase.source}->{world} " if phase.kind == "load" else f"world {world} "
        _print(f"{phase.kind} {way}{phase.place.label}", figures)
        found.append(
            {
                "kind": phase.kind,
                "place": phase.place.label,
                "world": world,
                "source": phase.source or None,
                "variants": figures,
            }
        )
    return found


if __name__ == "__main__":
    main()
