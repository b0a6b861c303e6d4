"""From the items of a load plan to what is read for them, and the state of each while it is read.

Everything here is bookkeeping on the caller's thread; IO is in ``reader.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.layout.geometry import Box, box_view, boxes_of_interval, narrowed_view
from dcp_fsdp_osd.storage.checksum import Checksum
from dcp_fsdp_osd.storage.chunks import ChunkTable
from dcp_fsdp_osd.storage.entry import block_size, table_bytes, unpack_table
from dcp_fsdp_osd.storage.foreign import parse_foreign
from dcp_fsdp_osd.storage.memory import DTYPES, copy_flat_range, is_plain, view_bytes
from dcp_fsdp_osd.storage.places import KIND_TENSOR, EntryInfo, entry_of
from dcp_fsdp_osd.storage.ranges import FileRange, Span, box_spans, file_ranges

__all__ = [
    "GRAIN",
    "ITEMSIZES",
    "Entry",
    "Index",
    "Item",
    "TensorEntry",
    "foreign_entry",
    "tensor_entry",
]

GRAIN = 16
"""Bytes of the largest element: what is read is cut at multiples of it."""
_ENVELOPE = 1 << 14  # more than a header, or a trailer without its table, can have
_NEAR = 1 << 16  # runs that begin this close together are read with what lies between them
_SERIAL = 1 << 15  # elements that torch copies on one thread
ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class Index:
    """Looks up entries and their shapes in a checkpoint's metadata; nothing of it is trusted."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._shapes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._names: set[str] = set()

    def entry(self, index: MetadataIndex) -> EntryInfo:
        """Where the entry of `index` lies."""
        found = entry_of(self._metadata.storage_data, index, self._names)
        if found is None:
            raise StorageError(
                f"{index.fqn} at offset {index.offset}: the plan reads an entry that the "
                "checkpoint's metadata does not have"
            )
        return found

    def sizes(self, index: MetadataIndex) -> tuple[int, ...]:
        """The shape of the box that the entry of `index` holds."""
        stored = self._metadata.state_dict_metadata.get(index.fqn)
        table = getattr(stored, "chunks", None)
        if isinstance(table, ChunkTable):
            number = 0 if index.offset is None and len(table) else None
            if number is None:
                number = table.find(index.offset or (), index.index)
            if number is None:
                raise _no_chunk(index)
            return table.at(number)[1]
        shapes = self._shapes.get(index.fqn)
        if shapes is None:
            shapes = self._shapes[index.fqn] = self._read_shapes(index.fqn)
        offset = tuple(index.offset) if index.offset is not None else next(iter(shapes), ())
        found = shapes.get(offset)
        if found is None:
            raise _no_chunk(index)
        return found

    def check(
        self, index: MetadataIndex, sizes: Sequence[int], dtype: torch.dtype, info: EntryInfo
    ) -> None:
        """Compare an entry's own description with the metadata's, where no checksum does.

        Raises:
            CorruptCheckpointError: they differ.
        """
        expected = self.sizes(index)
        stored = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(stored, TensorStorageMetadata)  # it has sizes
        wanted = stored.properties.dtype
        if tuple(sizes) != expected or dtype != wanted:
            raise CorruptCheckpointError(
                f"{info.name}: {index.fqn} (entry at byte {info.offset}): expected {wanted} of "
                f"sizes {expected}, as the metadata say, found {dtype} of sizes {tuple(sizes)}. "
                "One of them was altered; load another checkpoint."
            )

    def _read_shapes(self, fqn: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        stored = self._metadata.state_dict_metadata.get(fqn)
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptCheckpointError(f"{fqn}: the metadata does not describe a tensor")
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for chunk in stored.chunks:
            offsets = tuple(map(int, chunk.offsets))
            sizes = tuple(map(int, chunk.sizes))
            if len(offsets) != len(sizes) or min((*offsets, *sizes), default=0) < 0:
                raise CorruptCheckpointError(f"{fqn}: chunk at {offsets} of sizes {sizes}")
            # An empty chunk may share its offset with one that holds something.
            if offsets not in shapes or 0 not in sizes:
                shapes[offsets] = sizes
        return shapes


def _no_chunk(index: MetadataIndex) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{index.fqn}: an entry at offset {index.offset}, but no such chunk in the metadata"
    )


@dataclass
class Item:
    """One read item on its way into its destination.

    `tensor` is what the planner resolved; `view` its bytes where payload bytes can land in them
    directly; `staged` a stand-in for a destination that only ``copy_`` can fill.
    """

    read: ReadItem
    entry: Entry
    wanted: int = 0  # bytes
    left: int = 0  # file ranges that have not landed
    tensor: torch.Tensor | None = None
    view: memoryview | None = None
    staged: torch.Tensor | None = None

    def resolve(self, planner: LoadPlanner, dtype: str) -> None:
        """Ask the planner for the destination, once."""
        if self.tensor is not None:
            return
        tensor = planner.resolve_tensor(self.read).detach()
        if tuple(tensor.shape) != tuple(self.read.lengths):
            raise StorageError(
                f"{self.read.storage_index.fqn}: the planner resolved shape {tuple(tensor.shape)}, "
                f"its plan reads {tuple(self.read.lengths)}"
            )
        self.tensor = tensor
        if not is_plain(tensor):
            self.staged = torch.empty(tuple(self.read.lengths), dtype=DTYPES[dtype], device="cpu")
            self.view = view_bytes(self.staged)
        elif tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == DTYPES[dtype]:
            self.view = view_bytes(tensor)
            # Autograd has to hear of what is written behind its back.
            torch.autograd.graph.increment_version(tensor)

    @property
    def device(self) -> torch.device | None:
        """The destination's, if it is not the CPU."""
        return None if self.tensor is None or self.tensor.is_cpu else self.tensor.device

    def land(self, span: Span, flat: torch.Tensor) -> None:
        """Put a span's elements from a buffer where bytes could not land directly."""
        assert self.tensor is not None
        if span.dest is None:
            self._scatter(span.start // flat.element_size(), flat)
        elif self.view is not None:
            raw = flat.view(torch.uint8) if flat.numel() else flat
            self.view[span.dest : span.dest + raw.numel()] = view_bytes(raw)
        else:
            first = span.dest // flat.element_size()
            copy_flat_range(self.tensor, first, flat, into_tensor=True)

    def fill(self, data: memoryview) -> None:
        """Take the whole payload of an entry, and copy what lies in the item's box."""
        assert self.tensor is not None and isinstance(self.entry, TensorEntry)
        if self.view is not None and self.wanted == len(data):
            self.view[:] = data
        elif self.wanted:
            flat = torch.frombuffer(data, dtype=DTYPES[self.entry.dtype])
            read = self.read
            box = narrowed_view(flat.view(self.entry.sizes), read.storage_offsets, read.lengths)
            (self.tensor if self.staged is None else self.staged).copy_(box)

    def _scatter(self, first: int, flat: torch.Tensor) -> None:
        """Copy what lies in the item's box, of the entry's elements from `first` on.

        A few strided copies, however many runs they are.
        """
        assert self.tensor is not None and isinstance(self.entry, TensorEntry)
        wanted = Box(tuple(self.read.storage_offsets), tuple(self.read.lengths))
        target = self.tensor
        if self.view is not None:
            target = torch.frombuffer(self.view, dtype=flat.dtype).view(wanted.sizes)
        position = 0
        for box in boxes_of_interval(self.entry.sizes, first, first + flat.numel()):
            part = box.overlap(wanted)
            if part is not None:
                source = narrowed_view(
                    box_view(flat, position, box.sizes), _minus(part, box), part.sizes
                )
                _copy(narrowed_view(target, _minus(part, wanted), part.sizes), source)
            position += box.numel

    def commit(self, planner: LoadPlanner) -> None:
        """Hand the complete destination back."""
        assert self.tensor is not None
        if self.staged is not None:
            self.tensor.copy_(self.staged)
        planner.commit_tensor(self.read, self.tensor)
        self.tensor = self.view = self.staged = None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in steps that torch does not spread over threads, which other threads' reads delay."""
    if not target.is_cpu:
        target.copy_(source, non_blocking=True)
        return
    dim = next((dim for dim, size in enumerate(source.shape) if size > 1), 0)
    if source.numel() <= _SERIAL or not source.dim():
        target.copy_(source)
        return
    step = max(_SERIAL * source.shape[dim] // source.numel(), 1)
    for to, piece in zip(
        torch.split(target, step, dim), torch.split(source, step, dim), strict=True
    ):
        to.copy_(piece)


def _minus(box: Box, origin: Box) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(box.offsets, origin.offsets, strict=True))


@dataclass
class Entry:
    """An entry of which something is read.  Complete when no range of it is left."""

    number: int
    info: EntryInfo
    fqn: str
    left: int = 0  # file ranges

    def where(self) -> str:
        """For errors: file, FQN and offset."""
        info = self.info
        return f"{info.name}: {self.fqn} (entry at byte {info.offset}, {info.length} bytes)"


@dataclass
class TensorEntry(Entry):
    """An entry whose payload is addressed directly.

    `items` are those of an entry that is read whole, with its neighbours (see ``whole.py``).
    `origin` is the payload's offset in the file; `crcs` what was computed of header (-1) and blocks
    and not compared yet; `table` what to compare it with, once the trailer is read; `landed` items
    that are complete, and not compared yet.  Ours are verified, stock's have nothing to verify.
    """

    dtype: str = ""
    sizes: tuple[int, ...] = ()
    origin: int = 0
    nbytes: int = 0
    block: int = 0  # 0: not verified
    crcs: dict[int, int] = field(default_factory=dict)
    table: tuple[int, ...] = ()
    landed: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def plan(self, items: dict[int, Item], limit: int) -> tuple[list[FileRange], list[FileRange]]:
        """What to read for `items`, which come by the caller's numbers for them; and what of it to
        read first.

        That is the trailer, where several items share more than `limit` bytes: so that each can be
        verified and committed as it comes, not all of them at the end.
        """
        itemsize = ITEMSIZES[self.dtype]
        spans: list[Span] = []
        for number, item in items.items():
            read = item.read
            self.want(item)
            spans += box_spans(
                self.sizes,
                read.storage_offsets,
                read.lengths,
                itemsize,
                key=number,
                near_bytes=max(_NEAR, block_size(self.nbytes)),
            )
        found = file_ranges(
            spans,
            entry=self.number,
            origin=self.origin,
            nbytes=self.nbytes,
            block=self.block,
            grain=GRAIN,
        )
        first: list[FileRange] = []
        if self.block and found:
            begin, end = self.info.offset, self.info.offset + self.info.length
            covered = sum(file_range.end - file_range.start for file_range in found)
            early = covered > limit and sum(item.wanted > 0 for item in items.values()) > 1
            if covered == self.nbytes:
                found.insert(0, FileRange(begin, self.origin, self.number, -1, ()))
            trailer = FileRange(self.origin + self.nbytes, end, self.number, -1, ())
            (first if early else found).append(trailer)
        return found, first

    def want(self, item: Item) -> None:
        """Check an item's box, and count its bytes."""
        _check_box(self, item.read)
        item.wanted = math.prod(item.read.lengths) * ITEMSIZES[self.dtype]

    def take_whole(self, data: memoryview, checksum: Checksum | None) -> memoryview:
        """Check the bytes of all of the entry, whose payload has one block at most; the payload.

        Raises:
            CorruptCheckpointError: they were altered.
        """
        begin, end = self.info.payload, self.info.payload + self.nbytes
        payload = data[begin:end]
        if self.block and checksum is not None:
            self._take_trailer(bytes(data[end:]), checksum)
            self.crcs[-1] = checksum.raw(data[:begin], 0)
            if self.nbytes:
                self.crcs[0] = checksum.raw(payload, 0)
            self.check()
        return payload

    def take_around(self, file_range: FileRange, data: bytes, checksum: Checksum) -> None:
        """Take the header or the trailer.

        Raises:
            CorruptCheckpointError: the trailer was altered.
        """
        if file_range.start == self.info.offset:
            self.crcs[-1] = checksum.raw(data, 0)
        else:
            self._take_trailer(data, checksum)

    def _take_trailer(self, data: bytes, checksum: Checksum) -> None:
        crc = checksum.raw(data, 0)
        if crc != self.info.crc:
            raise self._mismatch("trailer", self.info.crc or 0, crc)
        self.table = unpack_table(data, self.nbytes)

    def check(self) -> list[Item]:
        """Compare what was computed with the table; the items that landed since the last time.

        None before the trailer is read.

        Raises:
            CorruptCheckpointError: they differ.
        """
        if self.block and not self.table:
            return []
        for block, crc in self.crcs.items():
            if self.table[block + 1] != crc:
                if block < 0:
                    raise self._mismatch("header", self.table[0], crc)
                start = block * self.block
                raise self._mismatch(
                    f"payload bytes {start} to {min(start + self.block, self.nbytes)}",
                    self.table[block + 1],
                    crc,
                )
        self.crcs.clear()
        landed, self.landed = self.landed, []
        return landed

    def _mismatch(self, part: str, expected: int, found: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.where()}: checksum mismatch in the {part}: expected {expected:08x}, found "
            f"{found:08x}. The file was altered after it was written; load another checkpoint."
        )


def _check_box(entry: TensorEntry, read: ReadItem) -> None:
    sizes, offsets, lengths = entry.sizes, tuple(read.storage_offsets), tuple(read.lengths)
    inside = len(sizes) == len(offsets) == len(lengths) and all(
        o >= 0 and n >= 0 and o + n <= size
        for o, n, size in zip(offsets, lengths, sizes, strict=True)
    )
    if not inside:
        raise StorageError(
            f"{entry.where()}: the plan reads offsets {offsets} lengths {lengths} of an entry of "
            f"shape {sizes}"
        )


def tensor_entry(
    number: int, info: EntryInfo, index: MetadataIndex, shapes: Index, *, verify: bool
) -> TensorEntry:
    """An entry of ours, as its metadata describes it.

    Raises:
        CorruptCheckpointError: dtype, shape and length do not agree.
    """
    assert info.kind == KIND_TENSOR
    sizes = shapes.sizes(index)
    entry = TensorEntry(number, info, index.fqn, dtype=info.dtype, sizes=sizes, nbytes=info.nbytes)
    if info.dtype not in ITEMSIZES or math.prod(sizes) * ITEMSIZES[info.dtype] != info.nbytes:
        raise CorruptCheckpointError(
            f"{entry.where()}: {info.nbytes} bytes of {info.dtype!r} are no tensor of shape {sizes}"
        )
    trailer = info.length - info.payload - info.nbytes
    if max(info.payload, trailer - table_bytes(info.nbytes)) > _ENVELOPE:
        raise CorruptCheckpointError(
            f"{entry.where()}: header and trailer of {info.payload} and {trailer} bytes are no "
            f"envelope of a tensor of {info.nbytes} bytes"
        )
    entry.origin = info.offset + info.payload
    entry.block = block_size(info.nbytes) if verify and info.crc is not None else 0
    return entry


def foreign_entry(
    number: int, info: EntryInfo, index: MetadataIndex, shapes: Index, ends: tuple[bytes, bytes]
) -> TensorEntry | None:
    """An entry of stock's, as its own header describes it; None where it must be loaded whole.

    Raises:
        CorruptCheckpointError: it holds another tensor than the metadata say.
    """
    plain = parse_foreign(*ends, info.length, ITEMSIZES)
    if plain is None:
        return None
    fqn = index.fqn
    shapes.check(index, plain.sizes, DTYPES[plain.dtype], info)
    return TensorEntry(
        number,
        info,
        fqn,
        dtype=plain.dtype,
        sizes=plain.sizes,
        origin=info.offset + plain.payload,
        nbytes=plain.nbytes,
    )
