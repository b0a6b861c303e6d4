"""What a checkpoint asks of storage, by the number of ranks: ``python -m benchmarks.io_shape``.

    python -m benchmarks.io_shape [--models 8B] [--worlds 64 256 1024 4096 16384]
                                  [--json out.json] [--plot out.svg]

From layouts alone: a rank's shards are what ``layout.simulate`` says (``fsdp1``: a unit for each
block; ``fsdp1-whole``: one unit) or rows (``fsdp2``), files are filled as ``storage.pack`` does,
ranges are joined by the reader's own ``coalesce``.  Weights and two moments, float32.

``files``: of the checkpoint, all under one prefix.  ``requests``: of one rank that loads, the
median and the worst of those planned; ``least``: what the worst would make if it read what it needs
in requests of 8 MiB, one for each file at least.  ``opened``: files that one rank reads, the worst.
``readers``: ranks that read the same file, the most.  ``all``: requests of all ranks together.

Left out: what all ranks want alike and one reads (scalars, groups), and the metadata.  Of large
worlds some ranks are planned: evenly spaced ones, which stand for all in ``requests``, ``all`` and
``read / needed``, the first and the last, and those that hold the first and the last block's norms.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import table, write_json
from dcp_fsdp_osd.layout.flat import simulate, units_of
from dcp_fsdp_osd.layout.geometry import boxes_of_interval
from dcp_fsdp_osd.storage.pack import SMALL, place_of
from dcp_fsdp_osd.storage.ranges import FileRange, Span, coalesce

__all__ = ["Layout", "Saved", "llama", "main", "rows_of", "shape_of"]

WORLDS = (64, 256, 1024, 4096, 16384)
STATES = ("weight", "exp_avg", "exp_avg_sq")  # float32 each
ITEM = 4  # bytes
_ENVELOPE = 1545  # of an entry: 704 bytes before its payload, 841 after it
_SMALL_ENVELOPE = 800
_READ_WHOLE = 1 << 14
_PART, _FILE, _FILES = 8 << 20, 64 << 20, 4
_PLANNED = 12
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
    """Which pieces each rank of a world holds; see the module for `kind`."""

    kind: str
    model: str
    world: int

    def __str__(self) -> str:
        return f"{self.world} {self.kind}"

    @functools.cached_property
    def shapes(self) -> Shapes:
        return llama(self.model)

    def pieces(self, rank: int) -> list[Piece]:
        if self.kind == "fsdp2":
            return [
                (fqn, first * row, last * row)
                for fqn, rows, row, each in self._rows
                if (first := min(each * rank, rows)) < (last := min(each * (rank + 1), rows))
            ]
        found = []
        units, outside = self._units
        for param in simulate(units, outside, world_size=self.world, rank=rank).params:
            for each in param.segments:
                at = each.start
                for box in boxes_of_interval(each.shape, each.start, each.stop):
                    count = math.prod(box.sizes)
                    found.append((each.fqn, at, at + count))
                    at += count
        return found

    @functools.cached_property
    def _rows(self) -> list[tuple[str, int, int, int]]:
        """Of each parameter: rows, elements of a row, rows of a rank."""
        return [
            (fqn, shape[0], math.prod(shape[1:]), -(-shape[0] // self.world))
            for fqn, shape in self.shapes.items()
        ]

    @functools.cached_property
    def _units(self) -> Any:
        depth = sum(name.endswith("ffn_norm.weight") for name in self.shapes)
        blocks = () if self.kind == "fsdp1-whole" else (f"layers.{n}" for n in range(depth))
        return units_of(self.shapes, ("", *blocks))

    @functools.cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Of each parameter: where it begins and how much a rank holds, in the elements of its flat
        tensor or in its own."""
        if self.kind == "fsdp2":
            return {fqn: (0, row * each) for fqn, _, row, each in self._rows}
        found = {}
        for unit in self._units[0]:
            position = 0
            share = -(-sum(math.prod(shape) for _, shape in unit.params) // self.world)
            for fqn, shape in unit.params:
                found[fqn] = position, share
                position += math.prod(shape)
        return found

    def holders(self, piece: Piece) -> range:
        """Ranks that hold some of a piece."""
        fqn, start, stop = piece
        begin, share = self._places[fqn]
        return range((begin + start) // share, (begin + stop - 1) // share + 1)


@dataclass(frozen=True)
class _Entry:
    file: int
    offset: int
    nbytes: int


class Saved:
    """A checkpoint that a layout's ranks saved."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._of = functools.lru_cache(maxsize=20_000)(self._entries)
        # Where pieces have the same names and lengths, so have entries and places.
        self._laid: dict[Any, list[_Entry]] = {}

    def sizes(self, rank: int) -> list[int]:
        """Bytes of a rank's files."""
        sizes: Counter[int] = Counter()
        for entries in self._of(rank).values():
            for _, _, each in entries:
                for one in each:
                    size = one.offset + one.nbytes + _ENVELOPE
                    sizes[one.file] = max(sizes[one.file], size)
        return list(sizes.values())

    def _entries(self, rank: int) -> dict[str, list[tuple[int, int, list[_Entry]]]]:
        """By parameter: start and stop of each piece, and its entry of each state."""
        pieces = self.layout.pieces(rank)
        key = tuple((fqn, stop - start) for fqn, start, stop in pieces)
        if key not in self._laid:
            self._laid[key] = _laid(pieces)
        laid = self._laid[key]
        found: dict[str, list[tuple[int, int, list[_Entry]]]] = {}
        for number, (fqn, start, stop) in enumerate(pieces):
            found.setdefault(fqn, []).append((start, stop, laid[number :: len(pieces)]))
        return found

    def reads(self, target: Layout, rank: int, gap: int) -> tuple[int, set[str], int, int]:
        """Requests, files, bytes read and bytes needed of a rank of another layout that loads."""
        wanted: list[tuple[str, FileRange]] = []
        needed = 0
        for piece in target.pieces(rank):
            fqn, start, stop = piece
            for source in self.layout.holders(piece):
                for begin, end, entries in self._of(source).get(fqn, ()):
                    first, last = max(start, begin), min(stop, end)
                    if first < last:
                        needed += (last - first) * ITEM * len(entries)
                        for each in entries:
                            found = _range(each, first - begin, last - begin)
                            wanted.append((f"{source}/{each.file}", found))
        fetches = coalesce(wanted, max_gap_bytes=gap, max_bytes=_PART)
        nbytes = sum(each.end - each.start for each in fetches)
        return len(fetches), {each.name for each in fetches}, nbytes, needed

    def readers(self, target: Layout, rank: int) -> int:
        """Ranks that read something of what a rank has saved."""
        found: set[int] = set()
        for piece in self.layout.pieces(rank):
            found.update(target.holders(piece))
        return len(found)


def _laid(pieces: list[Piece]) -> list[_Entry]:
    """Where a rank's items lie: those of the first state, then those of the next."""
    items = [
        (number * len(pieces) + n, f"{state}.{fqn}", (stop - start) * ITEM)
        for number, state in enumerate(STATES)
        for n, (fqn, start, stop) in enumerate(pieces)
    ]
    items.sort(key=lambda item: place_of(item[1], item[2], small=item[2] < SMALL))
    total = sum(nbytes + _ENVELOPE for _, _, nbytes in items)
    count = max(1, min(_FILES, total // _FILE))
    filled = [0] * count
    position = 0
    found: list[Any] = [None] * len(items)
    for number, _, nbytes in items:
        size = nbytes + (_ENVELOPE if nbytes > _READ_WHOLE else _SMALL_ENVELOPE)
        file = 0
        if nbytes >= SMALL:
            file = min(count - 1, (position + size // 2) * count // max(total, 1))
        found[number] = _Entry(file, filled[file], nbytes)
        filled[file] += size
        position += size
    return found


def _range(entry: _Entry, first: int, last: int) -> FileRange:
    """What is read for elements [first, last) of an entry."""
    if entry.nbytes <= _READ_WHOLE:
        end = entry.offset + entry.nbytes + _SMALL_ENVELOPE
        return FileRange(entry.offset, end, 0, entry.offset, (Span(0, 1, 0, 0),))
    block = 1 << 14
    start = first * ITEM // block * block
    stop = min(-(-last * ITEM // block) * block, entry.nbytes)
    origin = entry.offset + 704
    return FileRange(origin + start, origin + stop, 0, origin, (), block)


def shape_of(source: Layout, target: Layout, *, gap: int) -> dict[str, Any]:
    """A row of the table."""
    saved = Saved(source)
    by_rank = {rank: saved.reads(target, rank, gap) for rank in _some(target)}
    found = list(by_rank.values())
    even = [by_rank[rank] for rank in _even(target)]
    requests = [each[0] for each in found]
    worst = max(found, key=lambda each: each[0])
    sizes = [saved.sizes(rank) for rank in _some(source)]
    return {
        "model": source.model,
        "saved by": str(source),
        "loaded by": str(target),
        "files": round(source.world * statistics.mean(map(len, sizes))),
        "MiB of a file": round(statistics.mean(s for each in sizes for s in each) / 2**20, 2),
        "requests": statistics.median(each[0] for each in even),
        "worst": max(requests),
        "least": max(len(worst[1]), -(-worst[3] // _PART)),
        "opened": max(len(each[1]) for each in found),
        "readers": max(saved.readers(target, rank) for rank in _some(source)),
        "all": round(statistics.mean(each[0] for each in even) * target.world),
        "read / needed": round(sum(each[2] for each in even) / sum(each[3] for each in even), 3),
    }


def _even(layout: Layout) -> list[int]:
    """Ranks that stand for all."""
    if layout.world <= _PLANNED:
        return list(range(layout.world))
    # Not the ends: the last one's pieces are short.
    return [int((n + 0.5) * layout.world / _PLANNED) for n in range(_PLANNED)]


def _some(layout: Layout) -> list[int]:
    """Those, and ranks that are not like others."""
    some = {0, *_even(layout), layout.world - 1}
    norms = [name for name in layout.shapes if name.endswith("ffn_norm.weight")]
    for name in (norms[0], norms[-1]):
        holders = layout.holders((name, 0, layout.shapes[name][0]))
        some |= {holders[0], holders[-1]}
    return sorted(some)


def rows_of(model: str, world: int, gap: int) -> Iterator[dict[str, Any]]:
    """A world that saves, and those that load it."""
    block = Layout("fsdp1", model, world)
    whole, rows = Layout("fsdp1-whole", model, world), Layout("fsdp2", model, world)
    pairs = [(block, block), (block, Layout("fsdp1", model, world // 2))]
    pairs += [(block, Layout("fsdp1", model, 2 * world)), (block, whole), (whole, block)]
    pairs += [(block, rows), (rows, block)]
    for source, target in pairs:
        yield shape_of(source, target, gap=gap)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    lines: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        world, kind = row["saved by"].split()
        other, into = row["loaded by"].split()
        many = {0.5: "N/2 ", 2.0: "2N "}.get(int(other) / int(world), "")
        lines.setdefault(f"{kind} to {many}{into}", []).append((int(world), row))
    for name, points in lines.items():
        worlds = [world for world, _ in points]
        for axis, column in zip(axes, ("worst", "readers", "all"), strict=True):
            axis.loglog(worlds, [row[column] for _, row in points], marker="o", label=name)
    axes[0].set(title="requests of the rank with the most")
    axes[1].set(title="ranks that read the same file")
    axes[2].set(title="requests of all ranks")
    for axis in axes:
        axis.set(xlabel="ranks that saved (N)")
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["8B"])
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS)
    parser.add_argument(
        "--gap", type=int, default=1 << 17, help="bytes; object storage has 128 KiB"
    )
    parser.add_argument("--plot", type=Path, help="write a plot here (extra: plot)")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args(argv)
    rows = []
    for model in options.models:
        for world in options.worlds:
            for row in rows_of(model, world, options.gap):
                rows.append(row)
                print(*row.values(), flush=True)
    print(table([list(row.values()) for row in rows], header=list(rows[0])))
    if options.plot:
        _plot(rows, options.plot)
    write_json(options.json, {"gap": options.gap, "rows": rows})


if __name__ == "__main__":
    main()
