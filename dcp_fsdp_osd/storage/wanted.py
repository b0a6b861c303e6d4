"""From the items of a load plan to entries and the byte ranges that are read of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage.metadata import KIND_TENSOR, EntryInfo
from dcp_fsdp_osd.storage.ranges import FileRange
from dcp_fsdp_osd.storage.transfer import Stats
from dcp_fsdp_osd.storage.unpack import (
    Entry,
    Index,
    Item,
    TensorEntry,
    foreign_entry,
    tensor_entry,
)
from dcp_fsdp_osd.storage.whole import SMALL, SmallEntries, WholeEntry, neighbours

__all__ = ["Group", "Wanted"]

_CHECK_SIZE = 64 << 20  # what is held whole is checked against the file's size above this

Group = tuple[EntryInfo, list[ReadItem]]
"""An entry and the items that read of it."""
_Ranges = list[tuple[str, FileRange]]  # with the file that each lies in


class Wanted:
    """What a load plan reads.

    Items that want nothing are committed to the planner as they are found.

    Args:
        limit: longest range of one request, in bytes.
        verify: whether checksums are compared, which the ranges then cover whole blocks for.
        label: what errors begin with.
        size_of: bytes of a file, by its name; FileNotFoundError if there is none.
        ends_of: the first ``HEAD_BYTES`` and last ``TAIL_BYTES`` of each of some entries.

    Attributes:
        entries: by number, which ranges bear.
        items: by number, which their spans bear.
        first: ranges to read before all else.
        rest: all other ranges.
    """

    def __init__(
        self,
        reads: Sequence[ReadItem],
        index: Index,
        planner: LoadPlanner,
        *,
        stats: Stats,
        limit: int,
        verify: bool,
        label: str,
        size_of: Callable[[str], int],
        ends_of: Callable[[Sequence[Group]], Sequence[tuple[bytes, bytes]]],
    ) -> None:
        self._index = index
        self._planner = planner
        self._stats = stats
        self._limit = limit
        self._label = label
        self._size_of = size_of
        self._sizes: dict[str, int] = {}  # of files with large entries that are held whole
        self.entries: list[Entry] = []
        self.items: list[Item] = []
        self.first: _Ranges = []
        self.rest: _Ranges = []
        self._small: list[TensorEntry | WholeEntry] = []
        by_index: dict[object, list[ReadItem]] = {}
        for read in reads:
            by_index.setdefault(read.storage_index, []).append(read)
        foreign: list[Group] = []
        for group in by_index.values():
            at = group[0].storage_index
            info = index.entry(at)
            if group[0].type == LoadItemType.BYTE_IO:
                self._whole(info, group)
            elif info.kind == KIND_TENSOR:
                entry = tensor_entry(len(self.entries), info, at, index, verify=verify)
                if info.length <= SMALL:
                    self._small_tensor(entry, group)
                else:
                    self._tensor(entry, group)
            elif info.kind is not None or info.length <= SMALL:
                self._whole(info, group)
            else:
                foreign.append((info, group))
        for (info, group), ends in zip(foreign, ends_of(foreign), strict=True):
            at = group[0].storage_index
            parsed = foreign_entry(len(self.entries), info, at, index, ends)
            if parsed is None:
                self._whole(info, group)
            else:
                self._tensor(parsed, group)
        self._gather()

    def _whole(self, info: EntryInfo, group: list[ReadItem]) -> None:
        entry = WholeEntry(len(self.entries), info, group[0].storage_index.fqn)
        entry.items = [Item(read, entry) for read in group]
        if info.kind is None and group[0].type != LoadItemType.BYTE_IO:
            entry.shapes = self._index
        if info.length <= SMALL:
            self._small.append(entry)
            return
        self.entries.append(entry)
        self._stats.add(needed=info.length)
        self._check_size(entry)
        self.rest += [(info.name, file_range) for file_range in entry.plan()]

    def _small_tensor(self, entry: TensorEntry, group: list[ReadItem]) -> None:
        items = [Item(read, entry) for read in group]
        for item in items:
            entry.want(item)
            if item.wanted == 0:
                item.resolve(self._planner, entry.dtype)
                item.commit(self._planner)
        entry.items = [item for item in items if item.wanted]
        if entry.items:
            self._small.append(entry)

    def _gather(self) -> None:
        """Small entries that lie side by side are one entry from here on."""
        needed = 0
        for members in neighbours(self._small, self._limit):
            first, last = members[0].info, members[-1].info
            batch = SmallEntries(len(self.entries), first, members[0].fqn, members=members)
            end = last.offset + last.length
            file_range = FileRange(first.offset, end, batch.number, first.offset, ())
            self.entries.append(batch)
            self.rest.append((first.name, file_range))
            for member in members:
                if isinstance(member, WholeEntry):
                    needed += member.info.length
                else:
                    needed += sum(item.wanted for item in member.items)
        self._stats.add(needed=needed)

    def _tensor(self, entry: TensorEntry, group: list[ReadItem]) -> None:
        items = dict(enumerate((Item(read, entry) for read in group), len(self.items)))
        self.items += items.values()
        self.entries.append(entry)
        found, first = entry.plan(items, self._limit)
        for item in items.values():
            self._stats.add(needed=item.wanted)
            if item.wanted == 0:
                item.resolve(self._planner, entry.dtype)
                item.commit(self._planner)
        self.first += [(entry.info.name, file_range) for file_range in first]
        self.rest += [(entry.info.name, file_range) for file_range in found]

    def _check_size(self, entry: WholeEntry) -> None:
        """Do not allocate for a large entry that its file cannot hold."""
        info = entry.info
        if info.length <= _CHECK_SIZE:
            return
        if info.name not in self._sizes:
            try:
                size = self._size_of(info.name)
            except FileNotFoundError:
                size = 0
            self._sizes[info.name] = size
        if info.offset + info.length > self._sizes[info.name]:
            raise CorruptCheckpointError(
                f"{self._label}: {entry.where()}: the file has only {self._sizes[info.name]} bytes"
            )
