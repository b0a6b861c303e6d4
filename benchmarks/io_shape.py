"""What a checkpoint asks of storage, by the number of ranks: ``python -m benchmarks.io_shape``.

Files of a checkpoint (all lie under one prefix), requests of a rank that saves and of one that
loads at another world size, and how many ranks read the same file, for 64 to 16,384 ranks.  From
layouts alone: a rank's shards are what ``layout.simulate`` says (FSDP1) or rows (FSDP2), files are
filled as ``storage.pack`` does, ranges are joined by the reader's own ``coalesce``.

Left out: what all ranks want alike and one reads (scalars, groups), and the metadata.  Of large
worlds some ranks are planned, the first and the last among them, the others evenly spaced; how many
ranks read a file is scaled up from those.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import table, write_json
from dcp_fsdp_osd.layout.flat import simulate, units_of
from dcp_fsdp_osd.layout.geometry import boxes_of_interval
from dcp_fsdp_osd.storage.pack import SMALL, place_of
from dcp_fsdp_osd.storage.ranges import FileRange, Span, coalesce

__all__ = ["Saved", "llama", "main", "shape_of"]

WORLDS = (64, 256, 1024, 4096, 16384)
STATES = ("weight", "exp_avg", "exp_avg_sq")  # float32 each
ITEM = 4  # bytes
_ENVELOPE = 1545  # of an entry: 704 bytes before its payload, 841 after it
_SMALL_ENVELOPE = 800
_READ_WHOLE = 1 << 14
_PART, _FILE, _FILES = 8 << 20, 64 << 20, 4
_PLANNED = 24
Shapes = dict[str, tuple[int, ...]]


def llama(kind: str) -> Shapes:
    """Names and shapes of Llama 3's parameters."""
    width, hidden, kv, depth = {
        "8B": (4096, 14336, 1024, 32),
        "70B": (8192, 28672, 1024, 80),
        "tiny": (64, 160, 16, 4),
    }[kind]
    words = 128 if kind == "tiny" else 128256
    shapes: Shapes = {"tok_embeddings.weight": (words, width)}
    for layer in range(depth):
        for name, shape in {
            "attention.wq": (width, width),
            "attention.wk": (kv, width),
            "attention.wv": (kv, width),
            "attention.wo": (width, width),
            "feed_forward.w1": (hidden, width),
            "feed_forward.w2": (width, hidden),
            "feed_forward.w3": (hidden, width),
            "attention_norm": (width,),
            "ffn_norm": (width,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return {**shapes, "norm.weight": (width,), "output.weight": (words, width)}


Piece = tuple[str, int, int]
"""Elements [start, stop) of a parameter, row-major, that make one box."""


@dataclass(frozen=True)
class Layout:
    """Which pieces each rank of a world holds: ``"fsdp1"`` (flat, a unit for each block) or
    ``"fsdp2"`` (rows)."""

    kind: str
    model: str
    world: int

    @functools.cached_property
    def shapes(self) -> Shapes:
        return llama(self.model)

    def pieces(self, rank: int) -> Iterator[Piece]:
        if self.kind == "fsdp2":
            for fqn, shape in self.shapes.items():
                rows = -(-shape[0] // self.world)
                row = math.prod(shape[1:])
                first, last = min(rows * rank, shape[0]), min(rows * (rank + 1), shape[0])
                if first < last:
                    yield fqn, first * row, last * row
            return
        units, outside = self._units
        for param in simulate(units, outside, world_size=self.world, rank=rank).params:
            for each in param.segments:
                at = each.start
                for box in boxes_of_interval(each.shape, each.start, each.stop):
                    count = math.prod(box.sizes)
                    yield each.fqn, at, at + count
                    at += count

    @functools.cached_property
    def _units(self) -> Any:
        depth = sum(name.endswith("ffn_norm.weight") for name in self.shapes)
        return units_of(self.shapes, ("", *(f"layers.{n}" for n in range(depth))))

    def holders(self, piece: Piece, fraction: float, share: float) -> range:
        """Ranks that may hold some of a piece, for whom it lies at a `fraction` of each flat
        tensor, and makes a `share` of one."""
        fqn, start, stop = piece
        if self.kind == "fsdp1":
            first = math.floor(fraction * self.world) - 1
            last = math.ceil((fraction + share) * self.world) + 1
            return range(max(first, 0), min(last, self.world))
        shape = self.shapes[fqn]
        rows, row = -(-shape[0] // self.world), math.prod(shape[1:])
        return range(start // row // rows, min((stop - 1) // row // rows + 1, self.world))


@dataclass(frozen=True)
class _Entry:
    file: int
    offset: int
    start: int
    stop: int
    nbytes: int


class Saved:
    """A checkpoint that a layout's ranks saved; with ``ordered`` as it is now, else as before
    small entries were laid together by what they are."""

    def __init__(self, layout: Layout, *, ordered: bool = True) -> None:
        self.layout, self._ordered = layout, ordered
        self._of = functools.lru_cache(maxsize=20_000)(self._entries)

    def sizes(self, rank: int) -> list[int]:
        """Bytes of a rank's files."""
        sizes: Counter[int] = Counter()
        for entries in self._of(rank).values():
            for each in entries:
                size = each.offset + each.nbytes + _ENVELOPE
                sizes[each.file] = max(sizes[each.file], size)
        return list(sizes.values())

    def _entries(self, rank: int) -> dict[tuple[str, str], list[_Entry]]:
        items = [
            (piece, state, (piece[2] - piece[1]) * ITEM)
            for state in STATES
            for piece in self.layout.pieces(rank)
        ]
        if self._ordered:
            items.sort(key=lambda i: place_of(f"{i[1]}.{i[0][0]}", i[2], small=i[2] < SMALL))
        else:
            items.sort(key=lambda item: item[2] >= SMALL)
        total = sum(nbytes + _ENVELOPE for _, _, nbytes in items)
        count = max(1, min(_FILES, total // _FILE))
        filled = [0] * count
        position = 0
        found: dict[tuple[str, str], list[_Entry]] = {}
        for (fqn, start, stop), state, nbytes in items:
            size = nbytes + (_ENVELOPE if nbytes > _READ_WHOLE else _SMALL_ENVELOPE)
            file = 0
            if nbytes >= SMALL:
                file = min(count - 1, (position + size // 2) * count // max(total, 1))
            entry = _Entry(file, filled[file], start, stop, nbytes)
            found.setdefault((fqn, state), []).append(entry)
            filled[file] += size
            position += size
        return found

    def reads(self, target: Layout, rank: int, gap: int) -> tuple[int, set[str], int, int]:
        """Requests, files, bytes read and bytes needed of a rank of another layout that loads."""
        wanted: list[tuple[str, FileRange]] = []
        needed = 0
        fraction, share = rank / target.world, 1 / target.world
        for fqn, start, stop in target.pieces(rank):
            for source in self.layout.holders((fqn, start, stop), fraction, share):
                entries = self._of(source)
                for state in STATES:
                    for each in entries.get((fqn, state), ()):
                        first, last = max(start, each.start), min(stop, each.stop)
                        if first < last:
                            needed += (last - first) * ITEM
                            wanted.append((f"{source}/{each.file}", _range(each, first, last)))
        fetches = coalesce(wanted, max_gap_bytes=gap, max_bytes=_PART)
        nbytes = sum(each.end - each.start for each in fetches)
        return len(fetches), {each.name for each in fetches}, nbytes, needed


def _range(entry: _Entry, first: int, last: int) -> FileRange:
    if entry.nbytes <= _READ_WHOLE:
        end = entry.offset + entry.nbytes + _SMALL_ENVELOPE
        return FileRange(entry.offset, end, 0, entry.offset, (Span(0, 1, 0, 0),))
    block = 1 << 14
    start = (first - entry.start) * ITEM // block * block
    stop = min(-(-(last - entry.start) * ITEM // block) * block, entry.nbytes)
    origin = entry.offset + 704
    return FileRange(origin + start, origin + stop, 0, origin, (), block)


def shape_of(source: Layout, target: Layout, *, gap: int, ordered: bool = True) -> dict[str, Any]:
    """A row of the table."""
    saved = Saved(source, ordered=ordered)
    ranks = _some(target.world)
    found = [saved.reads(target, rank, gap) for rank in ranks]
    requests = [each[0] for each in found]
    readers = Counter(name for _, files, _, _ in found for name in files)
    sizes = [saved.sizes(rank) for rank in _some(source.world)]
    return {
        "model": source.model,
        "saved by": f"{source.world} {source.kind}",
        "loaded by": f"{target.world} {target.kind}",
        "files": round(source.world * statistics.mean(map(len, sizes))),
        "parts a rank": round(statistics.mean(sum(-(-s // _PART) for s in each) for each in sizes)),
        "requests median": statistics.median(requests),
        "requests worst": max(requests),
        "files worst": max(len(each[1]) for each in found),
        "readers of one file": round(max(readers.values()) * target.world / len(ranks)),
        "read / needed": sum(each[2] for each in found) / sum(each[3] for each in found),
    }


def _some(world: int) -> list[int]:
    if world <= _PLANNED:
        return list(range(world))
    return sorted({round(n * (world - 1) / (_PLANNED - 1)) for n in range(_PLANNED)})


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    lines: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        world, kind = row["saved by"].split()
        name = f"{row['model']} {kind} to {row['loaded by'].split()[1]}"
        lines.setdefault((name, row["files are"]), []).append((int(world), row))
    for (name, how), points in lines.items():
        style = "-" if how == "now" else ":"
        worlds = [world for world, _ in points]
        worst = [row["requests worst"] for _, row in points]
        axes[0].loglog(worlds, worst, style, marker="o", label=f"{name}, {how}")
        if how == "now":
            axes[1].loglog(worlds, [row["files"] for _, row in points], marker="o", label=name)
    axes[0].set(title="requests of the rank with the most", xlabel="ranks that saved")
    axes[1].set(title="files of a checkpoint", xlabel="ranks that saved")
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["8B", "70B"])
    parser.add_argument("--worlds", nargs="*", type=int, default=WORLDS)
    parser.add_argument(
        "--gap", type=int, default=1 << 17, help="bytes; object storage has 128 KiB"
    )
    parser.add_argument("--plot", type=Path, help="write a plot here (extra: plot)")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for world in options.worlds:
            for kind in ("fsdp1", "fsdp2"):
                source = Layout(kind, model, world)
                target = Layout("fsdp1", model, max(world * 3 // 4, 1))
                for how in ("before", "now"):
                    row = shape_of(source, target, gap=options.gap, ordered=how == "now")
                    rows.append({"files are": how, **row})
                    print(*rows[-1].values(), flush=True)
    print(table([list(row.values()) for row in rows], header=list(rows[0])))
    if options.plot:
        _plot(rows, options.plot)
    write_json(options.json, {"gap": options.gap, "rows": rows})


if __name__ == "__main__":
    main()
