"""What ``benchmarks.model`` measures: on ranks, and the planning of all of them in one process."""

from __future__ import annotations

import gc
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from benchmarks.launch import report
from benchmarks.llama import llama_units
from benchmarks.measure import raw_bytes, read_as_reader
from benchmarks.nothing import NoLoadPlanner, NoPlanner, NoReader, NoWriter
from benchmarks.repeated_saves import Rank
from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader, StreamingWriter
from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout import FlatLayout, ParamKind, ParamLayout, Unit, simulate
from dcp_fsdp_osd.storage.checksum import best_checksum
from dcp_fsdp_osd.storage.metadata import FOOT_BYTES, dump_metadata, fill_metadata, index_start
from dcp_fsdp_osd.storage.results import unpack_results

__all__ = ["Job", "Played", "Work", "play"]

_PIECE = 8 << 20


@dataclass(frozen=True)
class Job:
    """`mib` of state, of all ranks together, below `folder`."""

    folder: str
    mib: int
    rounds: int
    blocks: int = 8

    def units(self) -> list[Unit]:
        """A Llama's, of about as much state: two moments, float32."""
        elements = self.mib * 2**20 / 8
        width = max(32, round(math.sqrt(elements / (13 * self.blocks + 4)) / 32) * 32)
        return llama_units(width, self.blocks, 2 * width)


@dataclass(frozen=True)
class Work:
    """What a save and a load have to do; bytes and seconds.

    Attributes:
        state: bytes of all ranks, each counted once; ``replicas`` hold the same.
        own, load_own: CPU seconds of one rank, alone.
        coordinator, load_coordinator: seconds of its unpickling, planning, pickling.
        results: seconds of unpickling them; ``metadata``: of filling and pickling.
        up, down, told: bytes of a rank's plan, answer, results; ``load_up``, ``load_down``.
        file: bytes of ``.metadata``; ``index``: what is read of it.
        requests: of one rank's writes; ``load_requests``: of its reads, the most of any rank.
    """

    ranks: int
    state: float
    own: float
    load_own: float
    coordinator: float
    load_coordinator: float
    results: float
    metadata: float
    up: float
    down: float
    told: float
    load_up: float
    load_down: float
    file: float
    index: float
    requests: float = 0
    load_requests: float = 0
    replicas: int = 1


@dataclass(frozen=True)
class Played:
    """Planning of all ranks by one process.

    Attributes:
        boxes: of all ranks.
        plan, load_plan: CPU seconds in which a rank plans, reading the metadata included.
        item, load_item: CPU seconds of handing one to the threads that write or read.
    """

    work: Work
    boxes: int
    plan: float
    load_plan: float
    item: float
    load_item: float


def play(job: Job, world: int, folder: Path) -> Played:
    """All ranks of a world save and load, but for the data; the second time, when all is warm."""
    torch.set_num_threads(1)
    items = _items(replace(job, mib=0), folder / "items")
    _played(job, world, folder, items)
    return _played(job, world, folder, items)


class _Writer(StreamingWriter):
    seconds = 0.0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        begin = time.process_time()
        done = super().write_data(plan, planner)
        self.seconds = time.process_time() - begin
        return done


class _Reader(StreamingReader):
    seconds = 0.0

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        begin = time.process_time()
        done = super().read_data(plan, planner)
        self.seconds = time.process_time() - begin
        return done


def _items(job: Job, folder: Path) -> tuple[float, float]:
    """CPU seconds of one item in writes and in reads of next to no bytes, by one rank alone."""
    layout = simulate(job.units(), world_size=1, rank=0)
    rank = _rank(layout, 0)
    state = rank.state(1)
    seconds: list[tuple[float, float]] = []
    for _ in range(4):
        writer = _Writer(folder, overwrite=True, fsync=False)
        dcp.save(state, storage_writer=writer, planner=rank.planner, no_dist=True)
        reader = _Reader(folder)
        dcp.load(state, storage_reader=reader, planner=_load_planner(layout), no_dist=True)
        seconds.append((writer.seconds, reader.seconds))
    items = 3 * len(layout.params)
    save, load = (min(each) / items for each in zip(*seconds, strict=True))
    return save, load


def _played(job: Job, world: int, folder: Path, items: tuple[float, float]) -> Played:
    units = job.units()
    layouts = [simulate(units, world_size=world, rank=number) for number in range(world)]
    ranks = [_rank(layout, number) for number, layout in enumerate(layouts)]
    clock = time.process_time  # one thread's work, whatever else the machine does
    begin = clock()
    sent = [rank.plan(1, rank is ranks[0]) for rank in ranks]
    plan = clock() - begin
    gc.collect()
    begin = clock()
    plans, metadata = ranks[0].planner.create_global_plan([pickle.loads(each) for each in sent])
    answers = [pickle.dumps(each) for each in plans]
    coordinator = clock() - begin
    begin = clock()
    told = [rank.finish(answer) for rank, answer in zip(ranks, answers, strict=True)]
    plan = (plan + clock() - begin) / world
    with no_collections():
        begin = clock()
        written, _ = unpack_results([pickle.loads(each) for each in told])
        unpacked = clock()
        metadata.storage_meta = StorageMeta(checkpoint_id="played", save_id="f" * 32)
        fill_metadata(metadata, written, "crc32c")
        data = dump_metadata(metadata)
        filled = clock()
    (folder / ".metadata").write_bytes(data)
    start = index_start(data[-FOOT_BYTES:], len(data), "played") or 0
    planners, load_sent = [], []
    states = [rank.state(1) for rank in ranks]
    load_begin = clock()
    for rank, layout, state in zip(ranks, layouts, states, strict=True):
        reader, planner = StreamingReader(folder), _load_planner(layout)
        found = reader.read_metadata()
        planner.set_up_planner(state, found, rank is ranks[0])
        reader.set_up_storage_reader(found, rank is ranks[0])
        load_sent.append(pickle.dumps(reader.prepare_local_plan(planner.create_local_plan())))
        planners.append(planner)
    planned = clock()
    load_plan = (planned - load_begin) / world
    global_plans = planners[0].create_global_plan([pickle.loads(each) for each in load_sent])
    down = [pickle.dumps(each) for each in global_plans]
    ended = clock()
    work = Work(
        ranks=world,
        state=8.0 * sum(tensor.numel() for rank in ranks for tensor in rank.tensors),
        own=plan + items[0] * len(written) / world,
        load_own=load_plan + items[1] * len(written) / world,
        coordinator=coordinator,
        load_coordinator=ended - planned,
        results=unpacked - begin,
        metadata=filled - unpacked,
        up=_mean(sent),
        down=_mean(answers),
        told=_mean(told),
        load_up=_mean(load_sent),
        load_down=_mean(down),
        file=len(data),
        index=len(data) - start,
    )
    return Played(work, len(written), plan, load_plan, *items)


def _mean(messages: list[bytes]) -> float:
    return sum(map(len, messages)) / len(messages)


def _shape(param: ParamLayout) -> tuple[int, ...]:
    """Of what the optimizer holds: a world of one has whole parameters."""
    return param.shapes[0] if param.kind is ParamKind.WHOLE else (param.numel,)


def _rank(layout: FlatLayout, number: int) -> Rank:
    rank = Rank(layout, number)
    rank.tensors = [torch.zeros(_shape(param)) for param in layout.params]
    return rank


def _load_planner(layout: FlatLayout) -> FlatOptimLoadPlanner:
    params = tuple(
        torch.nn.Parameter(torch.empty(_shape(param), device="meta")) for param in layout.params
    )
    target = Target(layout, params, (torch.device("cpu"),) * len(params))
    return FlatOptimLoadPlanner.from_targets(
        {"optim": torch.optim.AdamW(params)}, {"optim": target}
    )


# ------------------------------------------------------------------- a real rank


def _run(job: Job) -> dict[str, list[float]]:
    """Seconds of each round, but the first, on this rank; all ranks begin together."""
    number, world = dist.get_rank(), dist.get_world_size()
    layout = simulate(job.units(), world_size=world, rank=number)
    rank = _rank(layout, number)
    for each in rank.tensors:
        each.uniform_()
    state: dict[str, Any] = rank.state(1)
    for each in state["optim"]["state"].values():
        each["exp_avg_sq"] = each["exp_avg_sq"].clone()
    memory = torch.ones(2 * sum(tensor.numel() for tensor in rank.tensors) + 1)
    view = raw_bytes(memory)
    raw = Path(job.folder) / f"raw-{world}-{number}"
    path = f"{job.folder}/saved-{world}"
    checksum = best_checksum()

    def write() -> None:
        with raw.open("wb", buffering=0) as file:
            for begin in range(0, len(view), 4 * _PIECE):
                file.write(view[begin : begin + 4 * _PIECE])
            os.fsync(file.fileno())

    def read() -> None:
        with raw.open("rb", buffering=0) as file:
            for begin in range(0, len(view), _PIECE):
                file.readinto(view[begin : begin + _PIECE])

    def read_by_chunk() -> None:
        with raw.open("rb", buffering=0) as file:
            read_as_reader(file, view, None)

    def hash_it() -> None:
        for begin in range(0, len(view), _PIECE):
            checksum.raw(view[begin : begin + _PIECE], 0)

    def small() -> None:
        with raw.with_suffix(".small").open("wb", buffering=0) as file:
            file.write(b"x" * 1000)
            os.fsync(file.fileno())

    def save() -> None:
        writer = StreamingWriter(path, overwrite=True)
        dcp.save(state, storage_writer=writer, planner=rank.planner)

    def load() -> None:
        dcp.load(state, storage_reader=StreamingReader(path), planner=_load_planner(layout))

    def nothing() -> None:
        dcp.save({}, storage_writer=NoWriter(), planner=NoPlanner())

    def load_nothing() -> None:
        dcp.load({}, storage_reader=NoReader(), planner=NoLoadPlanner())

    steps: dict[str, Callable[[], None]] = {
        "raw write": write,
        "hash": hash_it,
        "small file": small,
        "nothing": nothing,
        "save": save,
        "raw read": read,
        "read by chunk": read_by_chunk,
        "load nothing": load_nothing,
        "load": load,
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + job.rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - begin)
    raw.unlink()
    return {name: seconds[1:] for name, seconds in found.items()}


if __name__ == "__main__":
    report(_run)
