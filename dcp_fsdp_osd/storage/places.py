"""Where the entries of a checkpoint lie: values of ``Metadata.storage_data``, and what holds them.

:class:`Places` is such a ``storage_data``: to others a mapping from ``MetadataIndex`` to DCP's
``_StorageInfo``, which are made as they are asked for; to us it has :class:`EntryInfo`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage.store import check_name

__all__ = [
    "ATTRIBUTE",
    "KIND_BYTES",
    "KIND_OPAQUE",
    "KIND_TENSOR",
    "EntryInfo",
    "Place",
    "Places",
    "Row",
    "WrittenPlaces",
    "entry_info",
    "entry_of",
    "file_names",
    "storage_info",
]

ATTRIBUTE = "dcp_fsdp_osd"
"""Under which our own lies in objects of DCP's."""
KIND_BYTES = 0
"""The entry is the bytes of a BYTE_IO item as the planner gave them."""
KIND_TENSOR = 1
"""The entry is one of ``entry.py``."""
KIND_OPAQUE = 2
"""The entry is ``torch.save`` of a tensor that is more than its elements' bytes."""


class EntryInfo(NamedTuple):
    """Where an entry lies, and what we know about it beyond what stock DCP does.

    Attributes:
        name: the file, relative to the checkpoint.
        offset, length: of the entry in the file, in bytes.
        kind: one of the KIND_ constants; None for an entry that stock DCP wrote.
        crc: of the whole entry, or for KIND_TENSOR of its trailer; None where not checksummed.
        payload, nbytes, dtype: KIND_TENSOR only: offset of the payload in the entry, its length,
            and the name of the dtype.
    """

    name: str
    offset: int
    length: int
    kind: int | None = None
    crc: int | None = None
    payload: int = 0
    nbytes: int = 0
    dtype: str = ""


Place = tuple[str, torch.Size | None]
"""Key and offset of a box: what tells entries apart."""
Row = tuple[str, torch.Size | None, int | None, EntryInfo]
"""A ``MetadataIndex``, field by field, and its entry."""


def storage_info(entry: EntryInfo) -> _StorageInfo:
    """`entry` as the value in ``Metadata.storage_data``."""
    info = _StorageInfo(entry.name, entry.offset, entry.length)
    if entry.kind is None:
        return info
    extra: tuple[Any, ...] = (entry.kind, entry.crc)
    if entry.kind == KIND_TENSOR:
        extra += (entry.payload, entry.nbytes, entry.dtype)
    setattr(info, ATTRIBUTE, extra)
    return info


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def entry_info(info: object, what: str, names: set[str]) -> EntryInfo:
    """The value in ``Metadata.storage_data`` as an :class:`EntryInfo`; nothing of it is trusted.

    `names` are those of files that were checked before; it is added to.

    Raises:
        UnsafeCheckpointError: the file lies outside of the checkpoint.
        CorruptCheckpointError: the values make no entry.
    """
    if not isinstance(info, _StorageInfo):
        raise CorruptCheckpointError(
            f"{what}: expected a _StorageInfo in the metadata's storage_data, found "
            f"{type(info).__name__}. Checkpoints of other storage writers are not read."
        )
    fields = vars(info)
    name = fields.get("relative_path")
    if type(name) is not str or name not in names:
        names.add(name := check_name(name))
    offset, length = fields.get("offset"), fields.get("length")
    if fields.get("transform_descriptors"):
        raise CorruptCheckpointError(
            f"{what}: the entry was written through stream transforms "
            f"{fields['transform_descriptors']!r}, which are not supported; read it with "
            "torch.distributed.checkpoint.FileSystemReader"
        )
    if not (_is_count(offset) and _is_count(length)):
        raise CorruptCheckpointError(
            f"{what}: {name} offset {offset!r} length {length!r}: expected byte counts"
        )
    assert isinstance(offset, int) and isinstance(length, int)  # for the type checker
    extra = fields.get(ATTRIBUTE)
    if extra is None:
        return EntryInfo(name, offset, length)
    match extra:
        case (0 | 2 as kind, crc) if crc is None or _is_count(crc):
            return EntryInfo(name, offset, length, kind, crc)
        case (1, crc, payload, nbytes, str(dtype)) if (
            (crc is None or _is_count(crc))
            and _is_count(payload)
            and _is_count(nbytes)
            and payload + nbytes < length
        ):
            return EntryInfo(name, offset, length, KIND_TENSOR, crc, payload, nbytes, dtype)
    raise CorruptCheckpointError(f"{what}: {name}: {extra!r} describes no entry")


class Places(Mapping[MetadataIndex, _StorageInfo]):
    """Entries by their index.  Read-only; a pickle or a deep copy of it is a dict."""

    @abstractmethod
    def entry(self, index: MetadataIndex) -> EntryInfo | None:
        """Where an entry lies, checked as :func:`entry_info` does; None if there is none."""

    def located(
        self, fqn: str, offsets: Sequence[tuple[int, ...] | None]
    ) -> list[tuple[str, int] | None]:
        """File and offset of entries of a key, by the offsets of its boxes (None: of an object)."""
        found = [self.entry(MetadataIndex(fqn, offset)) for offset in offsets]
        return [None if entry is None else (entry.name, entry.offset) for entry in found]

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Of the files that it may name, the first entry's first; unchecked."""

    @abstractmethod
    def holds(self, fqn: str, kind: int) -> bool:
        """Whether an entry of a key is of a kind."""

    def rows(self) -> Iterator[Row]:
        """All entries, without an object for the index of each."""
        for index in self:
            found = self.entry(index)
            assert found is not None  # it is one of its own
            yield index.fqn, index.offset, index.index, found

    def by_place(self) -> Mapping[Place, EntryInfo]:
        """All entries."""
        return {(fqn, offset): entry for fqn, offset, _, entry in self.rows()}

    def __getitem__(self, index: MetadataIndex) -> _StorageInfo:
        found = self.entry(index) if isinstance(index, MetadataIndex) else None
        if found is None:
            raise KeyError(index)
        return storage_info(found)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, MetadataIndex) and self.entry(index) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries)"


class WrittenPlaces(Places):
    """Of entries that this job has written.  Of what several ranks have written the last is taken.

    No ``MetadataIndex`` is kept: making and hashing one takes longer than all else.

    Attributes:
        files: how far entries reach in each file, those that were replaced as well.
    """

    def __init__(self, entries: Iterable[tuple[MetadataIndex, EntryInfo]] = ()) -> None:
        self._entries: dict[Place, EntryInfo] = {}
        self._hints: list[int | None] = []  # of the first of its place, in that order
        self.files: dict[str, int] = {}
        known = list(entries)
        indices = [index for index, _ in known]
        self.extend(
            [(index.fqn, index.offset) for index in indices],
            [index.index for index in indices],
            [entry for _, entry in known],
        )

    def extend(
        self, places: Sequence[Place], hints: Sequence[int | None], entries: Sequence[EntryInfo]
    ) -> None:
        """What a rank has written, in columns of one length."""
        files = self.files
        for name, offset, length in map(itemgetter(0, 1, 2), entries):
            if files.get(name, 0) < offset + length:
                files[name] = offset + length
        before = len(self._entries)
        self._entries.update(zip(places, entries, strict=True))
        count = len(self._entries) - before
        if count == len(hints):
            self._hints += hints
        else:  # of those that are new
            first = dict(zip(reversed(places), reversed(hints), strict=True))
            new = list(islice(reversed(self._entries), count))
            self._hints += [first[place] for place in reversed(new)]

    def entry(self, index: MetadataIndex) -> EntryInfo | None:
        return self._entries.get((index.fqn, index.offset))

    def holds(self, fqn: str, kind: int) -> bool:
        return any(info.kind == kind for (key, _), info in self._entries.items() if key == fqn)

    def rows(self) -> Iterator[Row]:
        places, infos = self._entries, self._entries.values()
        fqns, offsets = map(itemgetter(0), places), map(itemgetter(1), places)
        return zip(fqns, offsets, self._hints, infos, strict=True)

    def by_place(self) -> Mapping[Place, EntryInfo]:
        return self._entries

    def names(self) -> Iterable[str]:
        return dict.fromkeys(info.name for info in self._entries.values())

    def __iter__(self) -> Iterator[MetadataIndex]:
        for (fqn, offset), hint in zip(self._entries, self._hints, strict=True):
            yield MetadataIndex(fqn, offset, hint)

    def __len__(self) -> int:
        return len(self._entries)


def entry_of(entries: Any, index: MetadataIndex, names: set[str]) -> EntryInfo | None:
    """The entry of `index` in a ``storage_data`` of anybody's; `names` as for :func:`entry_info`.

    Raises:
        UnsafeCheckpointError, CorruptCheckpointError: as :func:`entry_info`.
    """
    if isinstance(entries, Places):
        return entries.entry(index)
    info = entries.get(index) if isinstance(entries, Mapping) else None
    return None if info is None else entry_info(info, index.fqn, names)


def file_names(entries: Any) -> Iterator[str]:
    """Names of the files that a ``storage_data`` of anybody's names, perhaps more than once."""
    if isinstance(entries, Places):
        yield from entries.names()
    elif isinstance(entries, Mapping):
        for info in entries.values():
            yield str(getattr(info, "relative_path", ""))
