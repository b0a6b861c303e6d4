"""A checkpoint that is looked into by one process: its metadata, and any part of any tensor.

No process group, no GPU, and no more memory than the caller's own buffers and a bounded number of
requests under way.  What is read goes through :class:`StreamingReader`, so it is verified where the
checkpoint has checksums, and nothing in it is unpickled that could run code.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.layout.geometry import Box, box_view, boxes_of_interval, narrowed_view
from dcp_fsdp_osd.storage.checksum import Checksum, checksum_named
from dcp_fsdp_osd.storage.chunks import ChunkTable, chunk_table
from dcp_fsdp_osd.storage.metadata import EntryInfo, checksum_name, entry_info
from dcp_fsdp_osd.storage.reader import StreamingReader
from dcp_fsdp_osd.storage.session import LONG, Session, make_session
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.transfer import Stats
from dcp_fsdp_osd.tree import Path

__all__ = [
    "WINDOW",
    "Checkpoint",
    "Part",
    "Progress",
    "Want",
    "cut",
    "missing_key",
    "no_progress",
    "opened",
]

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done, and those there are."""

WINDOW = 32 << 20
"""Bytes of elements that are looked at together."""
_INFLIGHT = 64 << 20
_ALIGN = 64
_GAP, _TOGETHER = 1 << 16, 8 << 20  # objects this close, and so much of them, are read as one


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Want:
    """A box of a tensor, and where it goes: a tensor of the box's sizes and of the saved dtype."""

    key: str
    box: Box
    into: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a tensor, in row-major order."""

    key: str
    start: int
    stop: int


class _Planner(DefaultLoadPlanner):
    """Where what is read goes; plans nothing."""

    def __init__(self, wants: Sequence[Want]) -> None:
        super().__init__()
        self._wants = wants
        self.objects: dict[str, io.BytesIO] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        into = self._wants[int(read_item.dest_index.fqn)].into
        return narrowed_view(into, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value


class Checkpoint:
    """An open checkpoint; a context manager.

    Args:
        path_or_url: as for ``StreamingReader``, as are the next three.
        backend: what serves it.
        storage_options: of the storage client.
        allow_pickle: unpickle whatever is named; runs code of the author's choice.
        verify: check what is read against the checkpoint's checksums.

    Attributes:
        metadata: DCP's.
        metadata_nbytes: that were read for it: with an index those of that alone.
        entries: key -> its storage metadata.
        tensors: those of tensors.
        checksum: algorithm of the checksums; None where there are none.

    Raises:
        StorageError: there is no checkpoint, or storage fails.
        CorruptCheckpointError: its metadata are damaged.
        UnsafeCheckpointError: they would run code.
    """

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        *,
        backend: Backend = "auto",
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        verify: bool = True,
    ) -> None:
        reader = self._reader = StreamingReader(
            path_or_url,
            max_inflight_bytes=_INFLIGHT,
            verify=verify,
            allow_pickle=allow_pickle,
            backend=backend,
            storage_options=storage_options,
        )
        self.session: Session = make_session(
            path_or_url, backend=backend, storage_options=storage_options
        )
        self.stats = Stats()
        self.metadata: Metadata = reader.read_metadata()
        self.metadata_nbytes = reader.stats.bytes
        self.entries: dict[str, Any] = dict(self.metadata.state_dict_metadata)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in self.entries.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.checksum = checksum_name(self.metadata)
        self._checksum: Checksum | None = None
        if verify and self.checksum is not None:
            self._checksum = checksum_named(self.checksum)
        reader.set_up_storage_reader(self.metadata, False)
        self._chunks: dict[str, ChunkTable] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop connections."""
        self.session.close()

    @property
    def url(self) -> str:
        """The path or URL, fit to be shown."""
        return self.session.url

    # ---- what there is ----

    def path(self, key: str) -> Path:
        """Where a key lies in the nested state dict, as far as that was recorded."""
        planner_data = self.metadata.planner_data
        found = planner_data.get(key) if isinstance(planner_data, Mapping) else None
        return tuple(found) if found else (key,)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(map(int, self.tensors[key].size))

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def nbytes(self, key: str) -> int:
        """Bytes of a tensor's elements."""
        return math.prod(self.shape(key)) * self.dtype(key).itemsize

    def chunks(self, key: str) -> ChunkTable:
        """The boxes that a tensor was saved in."""
        if key not in self._chunks:
            self._chunks[key] = chunk_table(self.tensors[key])
        return self._chunks[key]

    def sizes(self) -> dict[str, int]:
        """Names and bytes of the files that lie in the checkpoint's folder."""
        return self.call(self.session.store.sizes, "list", patience=LONG)

    def call(self, call: Callable[[], T], what: str, *, nbytes: int = 0, patience: int = 1) -> T:
        """`call()` of the store with the retries of a load; errors hold no secret."""
        try:
            return self.session.call(call, what, self.stats, nbytes=nbytes, patience=patience)
        except Exception as error:
            failure = self.session.portable(error)
            if failure is error:
                raise
        raise failure

    # ---- reading ----

    def read(self, wants: Sequence[Want]) -> None:
        """Fill all `wants`.

        Raises:
            CorruptCheckpointError: bytes are missing or altered.
            StorageError: storage failed.
        """
        items = [item for number, want in enumerate(wants) for item in self._items(number, want)]
        if items:
            self._reader.read_data(LoadPlan(items), _Planner(wants))

    def _items(self, number: int, want: Want) -> Iterator[ReadItem]:
        for found in self.chunks(want.key).overlapping(want.box.offsets, want.box.sizes):
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(str(number)),
                dest_offsets=_minus(found.offsets, want.box.offsets),
                storage_index=MetadataIndex(want.key, torch.Size(found.saved), found.number),
                storage_offsets=_minus(found.offsets, found.saved),
                lengths=torch.Size(found.sizes),
            )

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """A box of a tensor, in memory of its own."""
        into = torch.empty(box.sizes, dtype=self.dtype(key))
        self.read([Want(key, box, into)])
        return into

    def read_parts(self, parts: Sequence[Part], buffer: torch.Tensor) -> list[torch.Tensor]:
        """Parts of tensors as 1-D tensors, views of the uint8 `buffer` (see :func:`room`)."""
        wants: list[Want] = []
        found = []
        begin = 0
        for part in parts:
            dtype, shape = self.dtype(part.key), self.shape(part.key)
            size = (part.stop - part.start) * dtype.itemsize
            flat = buffer[begin : begin + size].view(dtype)
            begin += size + -size % _ALIGN
            found.append(flat)
            position = 0
            for box in boxes_of_interval(shape, part.start, part.stop):
                if box.numel:
                    wants.append(Want(part.key, box, box_view(flat, position, box.sizes)))
                    position += box.numel
        self.read(wants)
        return found

    def room(self, windows: Iterable[Sequence[Part]]) -> torch.Tensor:
        """A buffer that holds any of `windows`."""
        most = 0
        for parts in windows:
            sizes = [(p.stop - p.start) * self.dtype(p.key).itemsize for p in parts]
            most = max(most, sum(size + -size % _ALIGN for size in sizes))
        return torch.empty(most, dtype=torch.uint8)

    def windows(self, keys: Iterable[str], window: int = WINDOW) -> list[list[Part]]:
        """All elements of some tensors, in groups of about `window` bytes."""
        sizes = [(key, math.prod(self.shape(key)), self.dtype(key).itemsize) for key in keys]
        return list(cut(sizes, window))

    def read_bytes(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Objects as they are stored, by key: verified, but not fit to be unpickled unseen.

        Raises:
            CorruptCheckpointError: bytes are missing or altered.
        """
        names: set[str] = set()
        infos = {
            key: entry_info(self.metadata.storage_data.get(MetadataIndex(key)), key, names)
            for key in keys
        }
        found: dict[str, bytes] = {}
        together: list[str] = []
        for key in sorted(infos, key=lambda each: (infos[each].name, infos[each].offset)):
            if together:
                first, last = infos[together[0]], infos[together[-1]]
                near = infos[key].offset - last.offset - last.length < _GAP
                small = infos[key].offset + infos[key].length - first.offset <= _TOGETHER
                if infos[key].name != first.name or not near or not small:
                    found.update(self._read_neighbours(together, infos))
                    together = []
            together.append(key)
        if together:
            found.update(self._read_neighbours(together, infos))
        return found

    def _read_neighbours(
        self, keys: Sequence[str], infos: Mapping[str, EntryInfo]
    ) -> dict[str, bytes]:
        name, begin = infos[keys[0]].name, infos[keys[0]].offset
        data = bytearray(max(infos[k].offset + infos[k].length for k in keys) - begin)
        store = self.session.store
        try:
            self.call(
                lambda: store.read_into(name, begin, [memoryview(data)]),
                f"read {name}",
                nbytes=len(data),
            )
        except (EOFError, FileNotFoundError) as error:
            raise CorruptCheckpointError(
                f"{self.url}: {name}: {keys[0]}: the file is missing or too short ({error})"
            ) from error
        found = {}
        for key in keys:
            info = infos[key]
            found[key] = bytes(data[info.offset - begin : info.offset - begin + info.length])
            if info.crc is not None and self._checksum is not None:
                crc = self._checksum.extend(0, found[key])
                if crc != info.crc:
                    raise CorruptCheckpointError(
                        f"{self.url}: {name}: {key}: checksum mismatch: expected "
                        f"{info.crc:08x}, found {crc:08x}"
                    )
        return found

    def read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Objects by key.

        Raises:
            UnsafeCheckpointError: unpickling one could run code, and not `allow_pickle`.
        """
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size((0,)),
                storage_index=MetadataIndex(key),
                storage_offsets=torch.Size((0,)),
                lengths=torch.Size((0,)),
            )
            for key in keys
        ]
        planner = _Planner(())
        if items:
            self._reader.read_data(LoadPlan(items), planner)
        # The reader has looked at the bytes: what is here is plain, or was allowed.
        return {
            key: torch.load(stream, map_location="cpu", weights_only=False)
            for key, stream in planner.objects.items()
        }

    def objects(self) -> list[str]:
        """The keys of what is no tensor."""
        return [key for key in self.entries if key not in self.tensors]


def cut(tensors: Iterable[tuple[str, int, int]], window: int) -> Iterator[list[Part]]:
    """(key, elements, bytes of an element) of tensors as groups of parts of about `window` bytes.

    Pure.  A tensor without elements is in no group.
    """
    parts: list[Part] = []
    left = window
    for key, numel, itemsize in tensors:
        start = 0
        while start < numel:
            stop = min(numel, start + max(1, left // itemsize))
            parts.append(Part(key, start, stop))
            left -= (stop - start) * itemsize
            start = stop
            if left <= 0 or left < itemsize:
                yield parts
                parts, left = [], window
    if parts:
        yield parts


def _minus(offsets: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size([a - b for a, b in zip(offsets, origin, strict=True)])


@contextlib.contextmanager
def opened(
    path_or_url: str | os.PathLike[str] | Checkpoint, **options: Any
) -> Iterator[Checkpoint]:
    """The checkpoint at a path or URL, or the one that the caller has open already."""
    if isinstance(path_or_url, Checkpoint):
        yield path_or_url
        return
    with Checkpoint(path_or_url, **options) as checkpoint:
        yield checkpoint


def missing_key(checkpoint: Checkpoint, key: str) -> StorageError:
    """What to say of a key that a checkpoint does not have."""
    import difflib

    close = difflib.get_close_matches(key, checkpoint.entries, 3, 0.4)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return StorageError(
        f"{checkpoint.url} has no entry {key!r} among its {len(checkpoint.entries)}{hint}"
    )
