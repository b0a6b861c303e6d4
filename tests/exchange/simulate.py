"""Ranks that exist in memory only: they plan, read from an array and broadcast as real ones do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_fsdp_osd.exchange.buffers import pack, unpack
from dcp_fsdp_osd.exchange.messages import RankSchedule
from dcp_fsdp_osd.exchange.reads import in_order
from dcp_fsdp_osd.exchange.regions import Part, Participant
from dcp_fsdp_osd.exchange.schedule import ExchangePlan
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.load.schedule import object_item

Want = tuple[str, Box | None]


@dataclass
class Saved:
    """A checkpoint in memory: whole tensors (saved in chunks), objects, and who reads what."""

    tensors: dict[str, torch.Tensor]
    chunks: dict[str, list[Box]]
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def metadata(self) -> Metadata:
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, tensor in self.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes))
                for b in self.chunks[name]
            ]
            properties = TensorProperties.create_from_tensor(tensor)
            entries[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            for k, chunk in enumerate(chunks):
                info = _StorageInfo(f"__{k}_0.distcp", len(places) * 1000, 1000)
                places[MetadataIndex(name, chunk.offsets)] = info
        for name in self.objects:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo("__0_0.distcp", len(places) * 1000, 1000)
        return Metadata(entries, storage_data=places)

    def reads(self, wants: Sequence[Want]) -> list[ReadItem]:
        """The reads that fill boxes of the tensors; what has no box is an object."""
        metadata = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for name, box in wants:
            if box is None:
                items.append(object_item(name))
                continue
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            items += create_read_items_for_chunk_list(name, metadata[name], [chunk])
        return items

    def read(self, item: ReadItem, out: torch.Tensor) -> None:
        """What a storage reader does."""
        index = item.storage_index
        assert index.offset is not None
        tensor = self.tensors[index.fqn]
        for d, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(d, index.offset[d] + start, size)
        out.copy_(tensor)


def participant(
    saved: Saved,
    wants: Sequence[Want],
    rank: int,
    *,
    host: str = "host",
    can_read: bool = True,
    dtype: torch.dtype | None = None,
    items: Sequence[ReadItem] | None = None,
) -> Participant:
    """A rank that wants these boxes; ``dtype``: of its tensors, if not as saved."""
    ordered = tuple(in_order(saved.reads(wants) if items is None else items))
    dtypes = tuple(
        None
        if i.type == LoadItemType.BYTE_IO
        else dtype or saved.tensors[i.storage_index.fqn].dtype
        for i in ordered
    )
    cuda = (False,) * len(ordered)
    digest = Participant.digest_of(ordered, dtypes, cuda)
    return Participant(rank, host, can_read, ordered, dtypes, cuda, digest)


@dataclass
class Outcome:
    """What simulated ranks did.

    Attributes:
        memory: for each rank, what is in its destinations: item -> tensor.
        objects: for each rank, FQN -> bytes, in the order that they came.
        got: for each rank and item, how often each element was written.
        read: how often each byte was read from storage, job-wide: chunk and dtype -> counts.
        requests: how many reads each rank made.
        load: the most bytes that each rank sent and received in a round.
        held: the most bytes that each rank held of what it read for others.
    """

    memory: list[dict[ReadItem, torch.Tensor]]
    objects: list[list[tuple[str, bytes]]]
    got: list[dict[ReadItem, torch.Tensor]]
    read: dict[tuple[Any, ...], torch.Tensor]
    requests: Counter[int]
    load: list[int]
    held: list[int]


def execute(plan: ExchangePlan, participants: Sequence[Participant], saved: Saved) -> Outcome:
    """Run a plan as :class:`~dcp_fsdp_osd.exchange.worker.Exchange` does, all ranks in lockstep."""
    memory: list[dict[ReadItem, torch.Tensor]] = []
    got: list[dict[ReadItem, torch.Tensor]] = []
    for p in participants:
        memory.append(
            {
                i: torch.zeros(i.lengths, dtype=d)
                for i, d in zip(p.items, p.dtypes, strict=True)
                if d is not None
            }
        )
        got.append({i: torch.zeros(i.lengths, dtype=torch.int32) for i in memory[-1]})
    count = len(participants)
    out = Outcome(memory, [[] for _ in range(count)], got, {}, Counter(), [0] * count, [0] * count)
    sources: list[dict[int, Any]] = [{} for _ in range(count)]
    for n, (p, schedule) in enumerate(zip(participants, plan.ranks, strict=True)):
        assert (schedule.number, schedule.ranks[n]) == (n, p.rank)
        names = [(p.items[r.item], r) if isinstance(r, Part) else r for r in schedule.reads]
        own = {i for i, r in names if isinstance(r, Part)}
        assert not own & {i for i, r in names if not isinstance(r, Part)}
        for number, read in enumerate(schedule.reads):
            out.requests[n] += 1
            if isinstance(read, Part):
                view, item = _part(memory[n], p, read), read.of(p.items)
                if item.type == LoadItemType.BYTE_IO:
                    sources[n][number] = saved.objects[item.storage_index.fqn]
                    out.objects[n].append((item.storage_index.fqn, sources[n][number]))
                    continue
                _part(got[n], p, read).add_(1)
                saved.read(item, view)
                sources[n][number] = view
            else:
                item, dtype = read
                if dtype is None:
                    sources[n][number] = saved.objects[item.storage_index.fqn]
                    continue
                sources[n][number] = torch.empty(item.lengths, dtype=dtype)
                saved.read(item, sources[n][number])
            _count(out.read, item, saved)
        for item, parts in schedule.alone.items():
            for part in parts:
                _part(got[n], p, part).add_(1)
                saved.read(part.of(p.items), _part(memory[n], p, part))
                _count(out.read, part.of(p.items), saved)
                out.requests[n] += 1
            assert p.items[item] is not None
        for number, item in enumerate(p.items):
            if number not in schedule.alone:
                if item.type == LoadItemType.BYTE_IO:
                    fqn = item.storage_index.fqn
                    out.objects[n].append((fqn, saved.objects[fqn]))
                else:
                    got[n][item].add_(1)
                    saved.read(item, memory[n][item])
                    _count(out.read, item, saved)
                out.requests[n] += 1
        out.held[n] = _held(schedule)
    assert len({len(schedule.rounds) for schedule in plan.ranks}) == 1
    for messages in zip(*(schedule.rounds for schedule in plan.ranks), strict=True):
        _round(messages, participants, sources, out)
    return out


def _held(schedule: RankSchedule) -> int:
    """Bytes that are read for others, from the first message of each to its last."""
    uses: dict[int, list[int]] = {}
    for r, messages in enumerate(schedule.rounds):
        for message in messages:
            for source in message.sources:
                uses.setdefault(source.read, []).append(r)
    most = 0
    for r in range(len(schedule.rounds)):
        alive = [schedule.reads[n] for n, at in uses.items() if min(at) <= r <= max(at)]
        sizes = [
            read[0].lengths.numel() * read[1].itemsize
            for read in alive
            if not isinstance(read, Part) and read[1] is not None
        ]
        most = max(most, sum(sizes))
    return most


def _round(
    messages: Sequence[Any], participants: Sequence[Participant], sources: Any, out: Outcome
) -> None:
    by_tag: dict[int, dict[int, Any]] = {}
    for n, mine in enumerate(messages):
        assert [m.tag for m in mine] == sorted(m.tag for m in mine)
        out.load[n] = max(out.load[n], sum(m.nbytes for m in mine))
        for message in mine:
            by_tag.setdefault(message.tag, {})[n] = message
    for those in by_tag.values():
        first = next(iter(those.values()))
        members, root = first.members, first.root
        assert sorted(those) == list(members)
        assert len({(m.members, m.root, m.nbytes, m.objects, m.cuda) for m in those.values()}) == 1
        sender = those[root]
        if first.objects:
            payloads = [sources[root][k] for k in sender.needs]
        else:
            data = torch.empty(first.nbytes, dtype=torch.uint8)
            if sender.sources:
                views = [_narrow(sources[root][s.read], s) for s in sender.sources]
            else:
                p = participants[root]
                views = [_part(out.memory[root], p, part) for part in sender.parts]
            assert sum(view.nbytes for view in views) == first.nbytes
            pack(views, data)
        for n, message in those.items():
            p = participants[n]
            if first.objects:
                names = [p.items[part.item].storage_index.fqn for part in message.parts]
                if n != root:
                    out.objects[n] += zip(names, payloads, strict=True)
                continue
            if n == root and not message.sources:
                continue
            views = [_part(out.memory[n], p, part) for part in message.parts]
            assert sum(view.nbytes for view in views) == (first.nbytes if message.parts else 0)
            unpack(data, views)
            for part in message.parts:
                _part(out.got[n], p, part).add_(1)


def _part(memory: dict[ReadItem, torch.Tensor], p: Participant, part: Part) -> Any:
    item = p.items[part.item]
    return _narrow(memory[item], part) if item in memory else None


def _narrow(tensor: torch.Tensor, part: Any) -> torch.Tensor:
    if part.offsets is not None:
        for d, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            tensor = tensor.narrow(d, start, size)
    return tensor


def _count(read: dict[tuple[Any, ...], torch.Tensor], item: ReadItem, saved: Saved) -> None:
    index = item.storage_index
    key = (index.fqn, tuple(index.offset or ()))
    box = next(b for b in saved.chunks[index.fqn] if b.offsets == key[1])
    counts = read.setdefault(key, torch.zeros(box.sizes, dtype=torch.int32))
    for d, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        counts = counts.narrow(d, start, size)
    counts.add_(1)


def wanted(
    participants: Sequence[Participant], saved: Saved
) -> dict[tuple[Any, ...], torch.Tensor]:
    """By how many ranks each element is wanted, as :attr:`Outcome.read`."""
    found: dict[tuple[Any, ...], torch.Tensor] = {}
    for p in participants:
        for item in p.items:
            if item.type != LoadItemType.BYTE_IO:
                _count(found, item, saved)
    return found


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes that cuts along each dimension make of a tensor."""
    boxes = [Box((), ())]
    for size, at in zip(shape, cuts, strict=True):
        edges = sorted({0, size, *(c for c in at if 0 < c < size)}) if size else [0, 0]
        pairs = list(itertools.pairwise(edges))
        boxes = [
            Box((*b.offsets, low), (*b.sizes, high - low)) for b in boxes for low, high in pairs
        ]
    return boxes


def numbered(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator)
    return (
        data.to(torch.uint8).view(dtype).reshape(tuple(shape))
        if size
        else torch.empty(tuple(shape), dtype=dtype)
    )
