"""What a picture of a checkpoint shows, as plain values: which boxes lie where in which tensor, in
which file and of which rank; how large the files are; what a load would ask for, and when.

Nothing is drawn here (see ``picture.py`` and ``page.py``).  Pictures have limits: beyond them
boxes, files and requests are merged and tensors left out, and :attr:`Chart.notes` say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_fsdp_osd.errors import StorageError, several
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.metadata import EntryInfo
from dcp_fsdp_osd.tools.describe import describe, entry_infos, rank_of_file
from dcp_fsdp_osd.tools.looks import size_text
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.reads import Request, requests_of
from dcp_fsdp_osd.tools.sharding import Layout

__all__ = ["Chart", "Drawn", "FileBar", "Limits", "Load", "TensorRow", "draw"]


@dataclass(frozen=True)
class Limits:
    """The most that is drawn: tensors, boxes of all of them, files, requests."""

    tensors: int
    boxes: int
    files: int = 256
    requests: int = 2000


@dataclass(frozen=True)
class Drawn:
    """A box of a tensor as it is stored, or several neighbours that are drawn as one.

    Attributes:
        box: in the tensor; around all of them where there are several.
        ranks: least and most rank that wrote them; None where names of files do not tell.
        file, offset: where it is stored; of the first one.
        nbytes: of their elements.
        boxes, files: how many it stands for.
    """

    box: Box
    ranks: tuple[int, int] | None
    file: str
    offset: int
    nbytes: int
    boxes: int = 1
    files: int = 1

    def place(self, shape: Sequence[int]) -> tuple[float, float, float, float]:
        """Left, top, width and height in a tensor that is drawn as the unit square.

        Its first dimension runs to the right.  All others together run down, as they lie in memory;
        so boxes of three and more dimensions may be drawn larger than they are.
        """
        if not shape:
            return 0.0, 0.0, 1.0, 1.0
        first, count, rows = self.box.offsets[0], self.box.sizes[0], max(shape[0], 1)
        below = math.prod(shape[1:])
        strides = [math.prod(shape[dim + 1 :]) for dim in range(1, len(shape))]
        inner = list(zip(self.box.offsets[1:], self.box.sizes[1:], strides, strict=True))
        top = sum(offset * stride for offset, _, stride in inner)
        bottom = top + sum((size - 1) * stride for _, size, stride in inner) + 1
        below = max(below, 1)
        return first / rows, top / below, count / rows, (bottom - top) / below


@dataclass(frozen=True)
class TensorRow:
    """A tensor, and what is drawn of it.

    Attributes:
        chunks: boxes that it is stored in, those without elements left out.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: int
    drawn: tuple[Drawn, ...]


@dataclass(frozen=True)
class FileBar:
    """A file, or several that are drawn as one.

    Attributes:
        nbytes: by the metadata, up to its last entry's end; of the largest, if several.
        least: of the smallest.
        problem: ``"is missing"`` or its true size, where that is another one.
        files: how many it stands for.
    """

    name: str
    rank: int | None
    nbytes: int
    least: int
    problem: str = ""
    files: int = 1


@dataclass(frozen=True)
class Load:
    """The requests of one rank of a load, as they are forecast (see ``forecast``), not measured.

    Attributes:
        requests: by start; several of one lane may have been merged.
        count: how many they stand for.
        seconds: until the last of them has ended.
    """

    world_size: int
    rank: int
    layout: str
    bandwidth: float
    latency: float
    concurrency: int
    requests: tuple[Request, ...]
    count: int
    seconds: float

    @property
    def title(self) -> str:
        """What it is, and of what it was computed; two lines."""
        return (
            f"Forecast, not measured: rank {self.rank} of {self.world_size} ({self.layout}) reads "
            f"{size_text(sum(each.nbytes for each in self.requests))} in {self.count} requests, "
            f"{self.concurrency} at a time,\nat {self.bandwidth / 1e6:g} MB/s and "
            f"{self.latency * 1000:g} ms each: {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class Chart:
    """All of it.

    Attributes:
        title: url, fit to be shown, and who wrote it.
        ranks: how many wrote files; None where names of files do not tell.
        tensors, boxes: how many there are, of those that were asked for; drawn or not.
        notes: what was left out, merged, or is wrong.
    """

    url: str
    title: str
    ranks: int | None
    nbytes: int
    rows: tuple[TensorRow, ...]
    tensors: int
    boxes: int
    files: tuple[FileBar, ...]
    load: Load | None
    notes: tuple[str, ...]


def draw(
    checkpoint: Checkpoint,
    limits: Limits,
    globs: Iterable[str] = (),
    *,
    world_size: int | None = None,
    rank: int = 0,
    layout: Layout = "fsdp1",
    wrapped: Iterable[str] | None = None,
    bandwidth: float = 1e9,
    latency: float = 0.02,
    concurrency: int = 16,
) -> Chart:
    """What a picture of a checkpoint shows, from its metadata and the list of its files.

    Args:
        globs: keys of the tensors that are drawn; by default all of them.
        world_size, rank, layout, wrapped, bandwidth, latency, concurrency: of the load whose
            requests are drawn, as for :func:`forecast`; by default by as many ranks as have saved.

    Raises:
        StorageError: no entry matches `globs`.
        ValueError: an argument is out of its range.
    """
    found = describe(checkpoint, tuple(globs))
    notes = list(found.notes)
    rows, tensors, boxes = _rows(checkpoint, [row.key for row in found.rows], limits, notes)
    objects = sum(row.kind == "object" for row in found.rows)
    if objects:
        notes.append(f"{objects} objects (no tensors) are not drawn.")
    load = None
    try:
        requests = requests_of(
            checkpoint,
            world_size or found.ranks or 1,
            rank,
            layout=layout,
            wrapped=wrapped,
            bandwidth=bandwidth,
            latency=latency,
            concurrency=concurrency,
        )
    except StorageError as error:
        notes.append(f"No load is drawn: {error}.")
    else:
        load = Load(
            world_size or found.ranks or 1,
            rank,
            layout,
            bandwidth,
            latency,
            concurrency,
            tuple(_merged_requests(requests, limits.requests, notes)),
            len(requests),
            max(each.end for each in requests),
        )
    ranks = f" by {found.ranks} rank{'' if found.ranks == 1 else 's'}" if found.ranks else ""
    return Chart(
        url=found.url,
        title=f"{found.url}, written by {found.writer}{ranks}",
        ranks=found.ranks,
        nbytes=found.nbytes,
        rows=tuple(rows),
        tensors=tensors,
        boxes=boxes,
        files=tuple(_files(checkpoint, found.files, limits.files, notes)),
        load=load,
        notes=tuple(notes),
    )


# ---- tensors ----


def _rows(
    checkpoint: Checkpoint, keys: Sequence[str], limits: Limits, notes: list[str]
) -> tuple[list[TensorRow], int, int]:
    """The rows; and how many tensors and boxes there are in all."""
    wanted = [key for key in keys if key in checkpoint.tensors]
    shown = set(sorted(wanted, key=lambda key: -checkpoint.nbytes(key))[: limits.tensors])
    if len(shown) < len(wanted):
        notes.append(
            f"{len(shown)} of {len(wanted)} tensors are drawn, the largest ones; name the keys of "
            "others to draw those."
        )
    count = {key: sum(0 not in c.sizes for c in checkpoint.tensors[key].chunks) for key in wanted}
    shares = _shares({key: count[key] for key in wanted if key in shown}, limits.boxes)
    infos: dict[str, dict[tuple[int, ...], EntryInfo]] = {key: {} for key in shares}
    for index, info in entry_infos(checkpoint):
        if index.fqn in infos:
            infos[index.fqn][tuple(index.offset or ())] = info
    rows, drawn = [], 0
    for key, share in shares.items():
        boxes = _boxes(checkpoint, key, infos[key])
        rows.append(
            TensorRow(
                key,
                str(checkpoint.dtype(key)).removeprefix("torch."),
                checkpoint.shape(key),
                checkpoint.nbytes(key),
                len(boxes),
                tuple(_merged(boxes, share)),
            )
        )
        drawn += len(rows[-1].drawn)
    there = sum(row.chunks for row in rows)
    if drawn < there:
        notes.append(
            f"{there} boxes are drawn as {drawn}: neighbours are merged, and say how many they are."
        )
    return rows, len(wanted), sum(count.values())


def _shares(counts: dict[str, int], most: int) -> dict[str, int]:
    """How many marks each gets of `most`, one at least: what small ones leave goes to large ones.

    Pure.
    """
    shares = {}
    left, waiting = most, len(counts)
    for key in sorted(counts, key=lambda key: counts[key]):
        shares[key] = min(counts[key], max(left // waiting, 1))
        left, waiting = left - shares[key], waiting - 1
    return {key: shares[key] for key in counts}


def _boxes(
    checkpoint: Checkpoint, key: str, infos: dict[tuple[int, ...], EntryInfo]
) -> list[Drawn]:
    """Those with elements, in the order of their first ones."""
    itemsize = checkpoint.dtype(key).itemsize
    found = []
    for chunk in checkpoint.tensors[key].chunks:
        box = Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
        if not box.numel:
            continue
        info = infos.get(box.offsets) or infos.get(())
        name, offset = ("no entry holds it", 0) if info is None else (info.name, info.offset)
        rank = rank_of_file(name)
        ranks = None if rank is None else (rank, rank)
        found.append(Drawn(box, ranks, name, offset, box.numel * itemsize))
    return sorted(found, key=lambda each: each.box.offsets)


def _merged(boxes: Sequence[Drawn], share: int) -> list[Drawn]:
    """At most `share` of them: as many neighbours as that takes are drawn as one.  Pure."""
    together = -(-len(boxes) // max(share, 1))
    if together <= 1:
        return list(boxes)
    found = []
    for begin in range(0, len(boxes), together):
        members = boxes[begin : begin + together]
        dims = range(len(members[0].box.offsets))
        low = tuple(min(m.box.offsets[dim] for m in members) for dim in dims)
        high = (max(m.box.offsets[dim] + m.box.sizes[dim] for m in members) for dim in dims)
        ranks = [rank for m in members if m.ranks is not None for rank in m.ranks]
        found.append(
            Drawn(
                Box(low, tuple(b - a for a, b in zip(low, high, strict=True))),
                (min(ranks), max(ranks)) if ranks else None,
                members[0].file,
                members[0].offset,
                sum(m.nbytes for m in members),
                len(members),
                len({m.file for m in members}),
            )
        )
    return found


# ---- files and requests ----


def _files(
    checkpoint: Checkpoint, expected: Mapping[str, int], most: int, notes: list[str]
) -> list[FileBar]:
    there = checkpoint.sizes()
    bars, damaged = [], []
    for name, nbytes in expected.items():
        problem = ""
        if name not in there:
            problem = "is missing"
        elif there[name] != nbytes:
            problem = f"has {there[name]} bytes, not {nbytes}"
        if problem:
            damaged.append(f"{name} {problem}")
        bars.append(FileBar(name, rank_of_file(name), nbytes, nbytes, problem))
    if damaged:
        notes.append(f"Damaged: {several(damaged, 3)}.")
    bars.sort(key=lambda bar: (bar.rank is None, bar.rank or 0, bar.name))
    together = -(-len(bars) // most)
    if together <= 1:
        return bars
    notes.append(
        f"{len(bars)} files are drawn {together} to a bar: the largest of them, and in darker "
        "colour the smallest."
    )
    found = []
    for begin in range(0, len(bars), together):
        members = bars[begin : begin + together]
        problems = [f"{bar.name} {bar.problem}" for bar in members if bar.problem]
        found.append(
            FileBar(
                members[0].name,
                members[0].rank,
                max(bar.nbytes for bar in members),
                min(bar.nbytes for bar in members),
                "; ".join(problems[:3]),
                len(members),
            )
        )
    return found


def _merged_requests(requests: Sequence[Request], most: int, notes: list[str]) -> list[Request]:
    together = -(-len(requests) // most)
    if together <= 1:
        return list(requests)
    lanes: dict[int, list[Request]] = {}
    for each in requests:
        lanes.setdefault(each.lane, []).append(each)
    found = []
    for members in lanes.values():
        for begin in range(0, len(members), together):
            found.append(_one_request(members[begin : begin + together]))
    notes.append(
        f"{len(requests)} requests are drawn as {len(found)}: some that follow one another."
    )
    return sorted(found, key=lambda each: each.start)


def _one_request(members: Sequence[Request]) -> Request:
    keys = dict.fromkeys(itertools.chain.from_iterable(each.keys for each in members))
    first, last = members[0], members[-1]
    return Request(
        first.start,
        last.end,
        first.lane,
        first.file,
        first.offset,
        sum(each.nbytes for each in members),
        tuple(keys),
        len(members),
    )
