"""Entries that are read whole: byte items, ``torch.save`` objects, and small tensors.

Small entries lie side by side.  Neighbours are read in one piece, whatever their number, and
handed over one by one.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError, UnsafeCheckpointError
from dcp_fsdp_osd.layout.geometry import narrowed_view
from dcp_fsdp_osd.storage.checksum import Checksum
from dcp_fsdp_osd.storage.foreign import ForeignTensor, parse_foreign
from dcp_fsdp_osd.storage.memory import DTYPES, is_plain
from dcp_fsdp_osd.storage.plain_objects import names_nothing, numpy_object
from dcp_fsdp_osd.storage.ranges import FileRange, Span, file_ranges
from dcp_fsdp_osd.storage.unpack import GRAIN, ITEMSIZES, Entry, Index, Item, TensorEntry

__all__ = ["SMALL", "SmallEntries", "WholeEntry", "neighbours"]

SMALL = 1 << 14
"""Entries up to this many bytes are read whole: what is read of them is a block at least."""


@dataclass
class WholeEntry(Entry):
    """An entry that is read whole into `data`: byte items, ``torch.save`` objects, small foreign
    tensors.
    """

    items: list[Item] = field(default_factory=list)
    data: bytearray | None = None
    shapes: Index | None = None  # of the metadata, which a plain tensor has to agree with

    def plan(self) -> list[FileRange]:
        """What to read: all of it."""
        size = self.info.length
        return file_ranges(
            [Span(0, size, -1, 0)],
            entry=self.number,
            origin=self.info.offset,
            nbytes=size,
            block=0,
            grain=GRAIN,
        )

    def check(self, checksum: Checksum) -> None:
        """Compare the checksum of all bytes, if the writer left one.

        Raises:
            CorruptCheckpointError: they differ.
        """
        assert self.data is not None
        if self.info.crc is None:
            return
        found = checksum.extend(0, memoryview(self.data))
        if found != self.info.crc:
            raise CorruptCheckpointError(
                f"{self.where()}: checksum mismatch: expected {self.info.crc:08x}, found "
                f"{found:08x}. The file was altered after it was written; load another checkpoint."
            )

    def deliver(
        self, planner: LoadPlanner, checksum: Checksum | None, *, allow_pickle: bool
    ) -> None:
        """Check the complete `data`, hand them to the planner, and drop them."""
        if checksum is not None:
            self.check(checksum)
        if self.items[0].read.type == LoadItemType.BYTE_IO:
            self._deliver_bytes(planner, allow_pickle=allow_pickle)
        else:
            self._deliver_tensor(planner, allow_pickle=allow_pickle)
        self.data = None
        self.items = []

    def _deliver_bytes(self, planner: LoadPlanner, *, allow_pickle: bool) -> None:
        """Hand the bytes to the planner, which will unpickle them, after a look at them."""
        assert self.data is not None
        data: bytes | bytearray = self.data
        if not allow_pickle and not names_nothing(data):
            try:
                self._load(allow_pickle=False)
            except UnsafeCheckpointError:
                made = numpy_object(self.data)
                if made is None:
                    raise
                data = made
        for item in self.items:
            planner.load_bytes(item.read, io.BytesIO(data))

    def _deliver_tensor(self, planner: LoadPlanner, *, allow_pickle: bool) -> None:
        """Copy the boxes that the items want out of the tensor that the bytes hold."""
        assert self.data is not None
        tensor = self._tensor(allow_pickle=allow_pickle)
        if self.shapes is not None and is_plain(tensor):
            at = self.items[0].read.storage_index
            self.shapes.check(at, tensor.shape, tensor.dtype, self.info)
        for item in self.items:
            read = item.read
            box = narrowed_view(tensor, read.storage_offsets, read.lengths)
            target = planner.resolve_tensor(read).detach()
            if tuple(target.shape) != tuple(box.shape):
                raise StorageError(
                    f"{self.where()}: the planner resolved shape {tuple(target.shape)}, its plan "
                    f"reads {tuple(box.shape)}"
                )
            target.copy_(box)
            planner.commit_tensor(read, target)

    def _tensor(self, *, allow_pickle: bool) -> torch.Tensor:
        assert self.data is not None
        raw = bytes(memoryview(self.data)[: 1 << 16]) if len(self.data) <= 1 << 16 else b""
        plain = parse_foreign(raw, raw, len(raw), ITEMSIZES) if raw else None
        if plain is not None:
            return _payload(self.data, plain)
        tensor = self._load(allow_pickle=allow_pickle)
        if not isinstance(tensor, torch.Tensor):
            raise CorruptCheckpointError(
                f"{self.where()}: expected a tensor, found {type(tensor).__name__}"
            )
        return tensor

    def _load(self, *, allow_pickle: bool) -> Any:
        assert self.data is not None
        try:
            return torch.load(
                io.BytesIO(self.data), map_location="cpu", weights_only=not allow_pickle
            )
        except Exception as error:
            if allow_pickle:
                raise CorruptCheckpointError(f"{self.where()}: torch.load: {error}") from error
            raise UnsafeCheckpointError(
                f"{self.where()}: unpickling it could run code: it wants "
                f"{_unsafe_names(self.data, error)}. Pass allow_pickle=True only if you trust "
                "where the checkpoint comes from, or allow the classes with "
                "torch.serialization.add_safe_globals."
            ) from None


def _unsafe_names(data: bytearray, error: Exception) -> str:
    """What a pickle names that ``torch.load(weights_only=True)`` does not allow."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:
        names = []
    return ", ".join(names) or f"what torch.load refuses ({' '.join(str(error).split())[-300:]})"


def _payload(data: bytearray, plain: ForeignTensor) -> torch.Tensor:
    if plain.nbytes == 0:
        return torch.empty(plain.sizes, dtype=DTYPES[plain.dtype], device="cpu")
    payload = bytearray(memoryview(data)[plain.payload : plain.payload + plain.nbytes])
    return torch.frombuffer(payload, dtype=DTYPES[plain.dtype]).view(plain.sizes)


@dataclass
class SmallEntries(Entry):
    """Neighbours in a file that are read in one piece."""

    members: Sequence[TensorEntry | WholeEntry] = ()

    def deliver(
        self,
        data: memoryview,
        planner: LoadPlanner,
        checksum: Checksum | None,
        *,
        allow_pickle: bool,
    ) -> None:
        """Check `data`, the bytes of all of them, and hand all items to the planner.

        Raises:
            CorruptCheckpointError: they were altered.
        """
        for member in self.members:
            at = member.info.offset - self.info.offset
            part = data[at : at + member.info.length]
            if isinstance(member, WholeEntry):
                member.data = bytearray(part)
                member.deliver(planner, checksum, allow_pickle=allow_pickle)
                continue
            payload = member.take_whole(part, checksum)
            for item in member.items:
                item.resolve(planner, member.dtype)
                item.fill(payload)
                item.commit(planner)
        self.members = ()


def neighbours(
    entries: list[TensorEntry | WholeEntry], limit: int
) -> list[list[TensorEntry | WholeEntry]]:
    """`entries` by file and offset, in groups of at most `limit` bytes without holes."""
    groups: list[list[TensorEntry | WholeEntry]] = []
    name, begin, end = "", 0, -1
    for entry in sorted(entries, key=lambda entry: (entry.info.name, entry.info.offset)):
        info = entry.info
        if info.name == name and info.offset == end and end + info.length - begin <= limit:
            groups[-1].append(entry)
        else:
            groups.append([entry])
            name, begin = info.name, info.offset
        end = info.offset + info.length
    return groups
