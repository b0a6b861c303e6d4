"""The schedule by which ranks read for one another, on simulated ranks: no process, no storage."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_fsdp_osd.compact import packed
from dcp_fsdp_osd.exchange.reads import SentItems
from dcp_fsdp_osd.exchange.regions import Part
from dcp_fsdp_osd.exchange.rounds import Sizes
from dcp_fsdp_osd.exchange.schedule import ExchangePlan, plan_exchange
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval
from tests.exchange.simulate import (
    Saved,
    execute,
    grid,
    numbered,
    participant,
    wanted,
)
from tests.planners.checks import raw
from tests.torch_gaps import comparable

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
]


@dataclasses.dataclass
class Case:
    """A drawn job.

    Attributes:
        classes: what ranks want: boxes by tensor; None for an object.
        ranks: for each rank its class, host, whether it can read, and a dtype to cast to.
    """

    saved: Saved
    classes: list[list[tuple[str, Box | None]]]
    ranks: list[tuple[int, str, bool, torch.dtype | None]]
    reads_parts: bool
    spread: bool
    sizes: Sizes

    def participants(self, order: int | None = None) -> list[Any]:
        found = []
        for number, (kind, host, can_read, dtype) in enumerate(self.ranks):
            items = self.saved.reads(self.classes[kind])
            if order is not None:
                random.Random(order + number).shuffle(items)
            found.append(
                participant(
                    self.saved,
                    [],
                    10 + number,
                    host=host,
                    can_read=can_read,
                    dtype=dtype,
                    items=items,
                )
            )
        return found

    def plan(self, order: int | None = None) -> ExchangePlan | None:
        return plan_exchange(
            self.participants(order),
            self.saved.metadata,
            reads_parts=self.reads_parts,
            spread=self.spread,
            sizes=self.sizes,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def cuts(shape: list[int]) -> list[list[int]]:
        return [draw(st.lists(st.integers(1, max(n, 1)), max_size=2)) for n in shape]

    saved = Saved({}, {})
    for k in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        if len(shape) == 1:
            shape = [shape[0] * 9]
        saved.tensors[f"t{k}"] = numbered(shape, draw(st.sampled_from(DTYPES)), k)
        saved.chunks[f"t{k}"] = grid(shape, cuts(shape))
    for k in range(draw(st.integers(0, 2))):
        saved.objects[f"o{k}"] = bytes([k]) * draw(st.integers(0, 9))
    classes: list[list[tuple[str, Box | None]]] = []
    for _ in range(draw(st.integers(1, 4))):
        wants: list[tuple[str, Box | None]] = []
        for name, tensor in saved.tensors.items():
            shape = list(tensor.shape)
            kind = draw(st.sampled_from(["none", "whole", "grid", "interval"]))
            if kind == "whole":
                wants.append((name, Box((0,) * len(shape), tuple(shape))))
            elif kind == "grid":
                boxes = grid(shape, cuts(shape))
                wants += [(name, box) for box in boxes if draw(st.booleans())]
            elif kind == "interval" and tensor.numel():
                a = draw(st.integers(0, tensor.numel()))
                b = draw(st.integers(a, tensor.numel()))
                wants += [(name, box) for box in boxes_of_interval(shape, a, b)]
        wants += [(name, None) for name in saved.objects if draw(st.booleans())]
        classes.append(wants)
    ranks = [
        (
            draw(st.integers(0, len(classes) - 1)),
            draw(st.sampled_from(["a", "b"])),
            draw(st.sampled_from([True, True, False])),
            draw(st.sampled_from([None, None, None, torch.float16])),
        )
        for _ in range(draw(st.integers(2, 6)))
    ]
    if not any(can_read for _, _, can_read, _ in ranks):
        ranks[0] = (ranks[0][0], "a", True, None)
    sizes = Sizes(
        round=draw(st.sampled_from([16, 64, 4096])),
        reader=draw(st.sampled_from([8, 64])),
        message=draw(st.sampled_from([4, 32])),
        block=draw(st.sampled_from([1, 8])),
    )
    return Case(saved, classes, ranks, draw(st.booleans()), draw(st.booleans()), sizes)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_rank_gets_what_it_wants_and_nothing_is_read_twice(case: Case) -> None:
    participants = case.participants()
    plan = case.plan()
    counts = wanted(participants, case.saved)
    casts = len({dtype for _, _, _, dtype in case.ranks})  # each dtype is read by itself
    if plan is None:
        assert not any(p.items for p in participants if not p.can_read) or not _numel(participants)
        assert casts > 1 or all(count.le(1).all() for count in counts.values())
        return
    done = execute(plan, participants, case.saved)
    for n, p in enumerate(participants):
        for item in p.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            expected = torch.empty(item.lengths, dtype=done.memory[n][item].dtype)
            case.saved.read(item, expected)
            assert raw(comparable(done.memory[n][item])) == raw(comparable(expected)), (n, item)
            assert done.got[n][item].eq(1).all(), (n, item)
        objects = sorted(i.storage_index.fqn for i in p.items if i.type == LoadItemType.BYTE_IO)
        assert sorted(done.objects[n]) == [(name, case.saved.objects[name]) for name in objects]
    for key, count in done.read.items():
        if case.reads_parts:
            assert (count <= casts).all()
            if casts == 1:
                assert ((count > 0) == (counts[key] > 0)).all()
        elif casts == 1 and count.numel() and int(counts[key].max()) > 1:
            assert int(count.max()) == 1, key
    element = max((d.itemsize for p in participants for d in p.dtypes if d is not None), default=0)
    assert max(done.load) <= max(case.sizes.round, element)
    if all(p.can_read for p in participants) and not case.spread:
        chunk = max(
            (box.numel * 16 for boxes in case.saved.chunks.values() for box in boxes), default=0
        )
        assert max(done.held) <= case.sizes.round + chunk


def _numel(participants: Sequence[Any]) -> int:
    return sum(i.lengths.numel() for p in participants for i in p.items)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 99))
def test_the_same_whatever_order_reads_come_in(case: Case, order: int) -> None:
    plan = case.plan()
    assert plan == case.plan(order)
    assert plan == pickle.loads(pickle.dumps(plan))
    arrived = [
        dataclasses.replace(p, items=SentItems(SentItems.pack(p.items), len(p.items), True))
        for p in case.participants()
    ]
    metadata, sizes = case.saved.metadata, case.sizes
    assert plan == plan_exchange(
        arrived, metadata, reads_parts=case.reads_parts, spread=case.spread, sizes=sizes
    )
    assert all([*p.items] == [*q.items] for p, q in zip(arrived, case.participants(), strict=True))


def ddp(world: int, sizes: list[int], chunk: int | None = None) -> tuple[Saved, list[Any]]:
    """Flat float32 tensors of so many elements, that all ranks want; saved whole or in chunks."""
    tensors = {f"t{k}": torch.empty(size, device="meta") for k, size in enumerate(sizes)}
    chunks = {
        name: grid([t.numel()], [range(0, t.numel(), chunk or t.numel() + 1)])
        for name, t in tensors.items()
    }
    saved = Saved(tensors, chunks)
    items = saved.reads([(name, Box((0,), (t.numel(),))) for name, t in tensors.items()])
    first = participant(saved, [], 0, items=items)
    return saved, [
        dataclasses.replace(first, rank=rank, host=f"host{rank // 8}") for rank in range(world)
    ]


MIB = 1 << 18  # elements of float32


@pytest.mark.parametrize("world", [2, 3, 8])
def test_runs_are_balanced(world: int) -> None:
    saved, ranks = ddp(world, [40 * MIB + 17, 3, 100 * MIB, 999_999, 7 * MIB])
    plan = plan_exchange(ranks, saved.metadata, reads_parts=True)
    assert plan is not None
    read = [sum(_bytes(r, p) for r in s.reads) for s, p in zip(plan.ranks, ranks, strict=True)]
    total = sum(t.nbytes for t in saved.tensors.values())
    assert sum(read) == total == plan.unique
    assert plan.spared == total * (world - 1)
    for bytes_ in read:
        assert abs(bytes_ - total / world) <= Sizes().block + 16


def _bytes(read: Any, p: Any) -> int:
    item = read.of(p.items) if isinstance(read, Part) else read[0]
    return int(item.lengths.numel()) * 4


@pytest.mark.parametrize("reads_parts", [True, False])
@pytest.mark.parametrize("world", [2, 7, 40])
def test_rounds_are_bounded(world: int, reads_parts: bool) -> None:
    """By 32 MiB for each rank, however many ranks send."""
    saved, ranks = ddp(world, [300 * MIB, 5, 90 * MIB + 1], chunk=70 * MIB + 3)
    plan = plan_exchange(ranks, saved.metadata, reads_parts=reads_parts)
    assert plan is not None
    for schedule in plan.ranks:
        for messages in schedule.rounds:
            assert sum(m.nbytes for m in messages) <= 32 << 20
        assert sum(m.nbytes for r in schedule.rounds for m in r) == plan.unique


def test_small_things_come_together_from_one_reader() -> None:
    saved, ranks = ddp(4, [1] * 500)
    saved.objects.update({f"o{k}": b"x" for k in range(300)})
    items = [*ranks[0].items, *saved.reads([(name, None) for name in saved.objects])]
    first = participant(saved, [], 0, items=items)
    ranks = [dataclasses.replace(first, rank=n) for n in range(4)]
    plan = plan_exchange(ranks, saved.metadata, reads_parts=True)
    assert plan is not None
    assert len([m for r in plan.ranks[0].rounds for m in r]) == 2
    assert sum(1 for schedule in plan.ranks if schedule.reads) <= 2


def test_a_chunk_that_is_read_whole_is_read_by_one_rank() -> None:
    """Readers that read chunks whole, and ranks that want parts of it that overlap in part."""
    saved = Saved({"w": numbered([6, 8], torch.float32, 0)}, {"w": grid([6, 8], [[], []])})
    boxes = [Box((0, 0), (6, 8)), Box((0, 0), (3, 8)), Box((3, 0), (3, 8)), Box((1, 2), (4, 3))]
    ranks = [participant(saved, [("w", box)], n) for n, box in enumerate(boxes)]
    plan = plan_exchange(ranks, saved.metadata, reads_parts=False)
    assert plan is not None
    assert sum(len(schedule.reads) for schedule in plan.ranks) == 1
    assert not any(parts for schedule in plan.ranks for parts in schedule.alone.values())
    done = execute(plan, ranks, saved)
    assert all(count.eq(1).all() for got in done.got for count in got.values())


@pytest.mark.parametrize(
    ("rows", "readers"),
    [
        ([8, 4, 2, 2, 2], [0, 1, 1, 1, 0]),
        ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1]),
        ([2, 9, 2, 2, 2, 2, 2], [0, 1, 0, 0, 0, 0, 1]),
    ],
)
def test_chunks_that_are_read_whole_are_shared_out(rows: list[int], readers: list[int]) -> None:
    """Each to the rank that has least to read, the first of several; who wants nothing, nothing."""
    tensors = {f"w{n}": numbered([count, 4], torch.float32, n) for n, count in enumerate(rows)}
    saved = Saved(tensors, {name: grid(list(t.shape), [[], []]) for name, t in tensors.items()})
    boxes = [(0, 3), (1, 3)]
    ranks = [
        participant(saved, [(name, Box((0, at), (len(t), n))) for name, t in tensors.items()], r)
        for r, (at, n) in enumerate(boxes)
    ]
    ranks.append(participant(saved, [], 2))
    plan = plan_exchange(ranks, saved.metadata, reads_parts=False)
    assert plan is not None
    of_rank = [{_name(read, p) for read in s.reads} for s, p in zip(plan.ranks, ranks, strict=True)]
    assert of_rank == [
        {f"w{n}" for n, reader in enumerate(readers) if reader == rank} for rank in range(3)
    ]
    done = execute(plan, ranks, saved)
    assert all(count.eq(1).all() for got in done.got for count in got.values())


def _name(read: Any, p: Any) -> str:
    item = read.of(p.items) if isinstance(read, Part) else read[0]
    return str(item.storage_index.fqn)


def test_little_is_held_though_some_want_much_and_others_little() -> None:
    """A message to ranks that want a byte of each chunk must not wait for all chunks."""
    saved = Saved(
        {"w": numbered([200, 8], torch.float32, 0)}, {"w": grid([200, 8], [range(200), []])}
    )
    boxes = [Box((0, 0), (200, 8)), Box((0, 3), (200, 1))]
    ranks = [participant(saved, [("w", box)], n) for n, box in enumerate(boxes)]
    sizes = Sizes(round=128, reader=64, message=32, block=1)
    plan = plan_exchange(ranks, saved.metadata, reads_parts=False, sizes=sizes)
    assert plan is not None
    done = execute(plan, ranks, saved)
    assert all(count.eq(1).all() for got in done.got for count in got.values())
    assert max(done.held) <= sizes.round + 32


def test_ranks_that_share_nothing_have_no_plan() -> None:
    saved = Saved({"w": numbered([8], torch.float32, 0)}, {"w": grid([8], [[4]])})
    ranks = [participant(saved, [("w", Box((4 * n,), (4,)))], n) for n in range(2)]
    assert plan_exchange(ranks, saved.metadata, reads_parts=True) is None
    assert plan_exchange(ranks, saved.metadata, reads_parts=False) is None


def test_nobody_can_read() -> None:
    saved, ranks = ddp(2, [4])
    mute = [dataclasses.replace(p, can_read=False) for p in ranks]
    with pytest.raises(ValueError, match="at least one rank that can read"):
        plan_exchange(mute, saved.metadata, reads_parts=True)


def test_a_read_for_others_is_never_taken_for_an_own_one() -> None:
    """Rank 0 wants float32 for itself, and reads bfloat16 for rank 1, which cannot read."""
    saved = Saved({"w": numbered([8], torch.float32, 0)}, {"w": grid([8], [[]])})
    want = [("w", Box((0,), (8,)))]
    ranks = [
        participant(saved, want, 0),
        participant(saved, want, 1, can_read=False, dtype=torch.bfloat16),
    ]
    plan = plan_exchange(ranks, saved.metadata, reads_parts=True)
    assert plan is not None
    read = [r if isinstance(r, Part) else r[0] for r in plan.ranks[0].reads]
    assert not set(read) & set(ranks[0].items)
    done = execute(plan, ranks, saved)
    assert torch.equal(
        done.memory[0][ranks[0].items[0]].nan_to_num(), saved.tensors["w"].nan_to_num()
    )


@pytest.mark.each_value
@pytest.mark.parametrize("reads_parts", [True, False])
@pytest.mark.parametrize("shape", ["ddp", "hsdp"])
def test_thousands_of_ranks(shape: str, reads_parts: bool) -> None:
    """The plan of a large job is made, is small on its way to a rank."""
    if shape == "ddp":
        saved, ranks = ddp(1024, [4 * MIB] * 300, chunk=2 * MIB)
    else:
        saved, ranks = hsdp(shards=256, replicas=8, tensors=12, rows=4096, columns=512)
    plan = plan_exchange(ranks, saved.metadata, reads_parts=reads_parts)
    assert plan is not None
    total = sum(t.nbytes for t in saved.tensors.values())
    assert plan.unique == total
    assert plan.spared == total * (len(ranks) // (1 if shape == "ddp" else 256) - 1)
    for schedule in (plan.ranks[0], plan.ranks[-1]):
        assert len(packed(schedule)) < 4096
    for schedule in plan.ranks:
        assert all(sum(m.nbytes for m in r) <= 32 << 20 for r in schedule.rounds)


def hsdp(
    *, shards: int, replicas: int, tensors: int, rows: int, columns: int
) -> tuple[Saved, list[Any]]:
    """Matrices flattened and cut over ``shards`` ranks, saved by twice as many; in replicas."""
    saved = Saved({}, {})
    shape, numel = [rows, columns], rows * columns
    wants: list[list[tuple[str, Box | None]]] = [[] for _ in range(shards)]
    for k in range(tensors):
        name = f"layers.{k}.weight"
        saved.tensors[name] = torch.empty(shape, device="meta")
        cut = [numel * s // (2 * shards) for s in range(2 * shards + 1)]
        saved.chunks[name] = [
            box for a, b in itertools.pairwise(cut) for box in boxes_of_interval(shape, a, b)
        ]
        for s in range(shards):
            a, b = numel * s // shards, numel * (s + 1) // shards
            wants[s] += [(name, box) for box in boxes_of_interval(shape, a, b)]
    found = []
    for s, want in enumerate(wants):
        first = participant(saved, [], s, items=_nearby(saved, want, s / shards))
        found.append(first)
    return saved, [
        dataclasses.replace(p, rank=r * shards + p.rank, host=f"host{(r * shards + p.rank) // 8}")
        for r in range(replicas)
        for p in found
    ]


def _nearby(saved: Saved, wants: list[tuple[str, Box | None]], at: float) -> list[Any]:
    """The reads, looking only at chunks near by: DCP looks at all of them."""
    near: dict[str, list[Box]] = {}
    for name, boxes in saved.chunks.items():
        middle = int(at * len(boxes))
        near[name] = boxes[max(middle - 8, 0) : middle + 12]
    return Saved(saved.tensors, near).reads(wants)
