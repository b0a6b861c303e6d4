"""One rank of :mod:`benchmarks.exchange`: the replicated model, its loads, their measurement."""

from __future__ import annotations

import statistics
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.heap import release_freed_memory
from benchmarks.launch import report
from benchmarks.measure import Measured, interleave, raw_bytes
from benchmarks.s3_server import EmbeddedS3
from benchmarks.storage_variants import Place
from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner, StreamingReader
from dcp_fsdp_osd.compat import job_store
from dcp_fsdp_osd.exchange.messages import Message
from dcp_fsdp_osd.exchange.transport import Channels
from dcp_fsdp_osd.storage import StreamingWriter

__all__ = ["KINDS", "OURS", "STOCK", "Job", "Setting", "Size", "shape_of"]

KINDS = {"hsdp": 2, "no_shard": 4, "ddp": 4}
"""How many of 4 ranks want the same."""
STOCK = "stock"
EXACT = "True, stock reader, no read-ahead"
"""s3fs without its read-ahead, which reads bytes that nobody asked for."""
OURS = ("broadcast=False", "broadcast=True", "True, stock reader", EXACT)

_MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Where a checkpoint is read from.  ``latency`` in seconds; ``bandwidth`` in bytes a second
    for the whole job, None for no limit; both need a `place` on the embedded S3 server.
    """

    label: str
    place: Place
    latency: float = 0.0
    bandwidth: float | None = None


@dataclass(frozen=True)
class Size:
    """A model whose Adam state has ``mib`` MiB (a power of 2), and how many rounds to measure."""

    mib: int
    rounds: int


@dataclass(frozen=True)
class Job:
    """What the ranks do: for each size in turn, for each setting, all variants interleaved."""

    kind: str
    sizes: list[Size]
    settings: list[Setting]
    variants: tuple[str, ...]
    profile: bool = False


def shape_of(mib: int) -> tuple[int, int]:
    """Width and blocks of the model whose matrices have ``mib`` MiB of Adam state."""
    power = mib.bit_length() - 1
    if mib != 1 << power:
        raise ValueError(f"expected a power of 2 MiB, found {mib}")
    return 64 << power // 2, 8 if power % 2 else 4


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _wrapped(kind: str, mib: int) -> nn.Module:
    width, blocks = shape_of(mib)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(width) for _ in range(blocks)))
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = None
    if kind == "hsdp":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh else ShardingStrategy.NO_SHARD,
        device_mesh=mesh,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _read_by_syscalls() -> int:
    """Bytes that this process got from ``read`` so far: from files, not from gloo's sockets."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.partition(":")[2])


def _asking(base: type) -> type:
    """One of torch's readers, which notes in ``asked`` the bytes of the entries it is asked for.

    What it then reads can be more: s3fs reads 50 MiB ahead, by default.
    """

    class Asking(base):
        def read_data(self, plan: Any, planner: Any) -> Any:
            self.asked = sum(self.storage_data[i.storage_index].length for i in plan.items)
            return super().read_data(plan, planner)

    return Asking


class _TimedPlanner(FlatOptimLoadPlanner):
    """Notes the seconds of each planning hook."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: dict[str, float] = {}
        super().set_up_planner(*args, **kwargs)

    def _timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.seconds[name] = time.perf_counter() - start
        return result

    def create_local_plan(self) -> Any:
        return self._timed("local plan", super().create_local_plan)

    def create_global_plan(self, plans: Any) -> Any:
        return self._timed("global plan", super().create_global_plan, plans)

    def finish_plan(self, plan: Any) -> Any:
        return self._timed("finish plan", super().finish_plan, plan)


class _Bench:
    def __init__(self, job: Job, size: Size) -> None:
        self.job, self.size = job, size
        self.rank = dist.get_rank()
        self.model = _wrapped(job.kind, size.mib)
        self.optim = self._new_optim()
        width = shape_of(size.mib)[0]
        self.model(torch.randn(4, width)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.trained = self._digests()
        self.state_bytes = sum(value.nbytes for value in self._tensors())

    # ------------------------------------------------------------ the optimizer's state

    def _new_optim(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _tensors(self) -> list[torch.Tensor]:
        states = (self.optim.state.get(p, {}) for p in self.model.parameters())
        return [value for state in states for _, value in sorted(state.items())]

    def _digests(self) -> list[int]:
        return [zlib.crc32(raw_bytes(value)) for value in self._tensors()]

    # ------------------------------------------------------------ checkpoints

    def _url(self, place: Place, name: str) -> str:
        return place.url(f"{self.job.kind}-{self.size.mib}-{name}")

    def save(self, place: Place) -> int:
        """Write stock's checkpoint and ours; returns bytes of all distinct tensors."""
        state = {"optim": get_optimizer_state_dict(self.model, self.optim)}
        url = self._url(place, "stock")
        if place.endpoint is None:
            writer: Any = dcp.FileSystemWriter(url, sync_files=False)
        else:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            writer = FsspecWriter(url, sync_files=False, **place.endpoint.storage_options)
        dcp.save(state, storage_writer=writer)
        options = {"fsync": False} if place.endpoint is None else self._options(place)
        dcp.save(
            {"optim": self.optim.state_dict()},
            storage_writer=StreamingWriter(self._url(place, "ours"), **options),
            planner=FlatOptimSavePlanner(self.model, self.optim),
        )
        metadata = self._streaming(place, "ours").read_metadata()
        return sum(
            entry.size.numel() * entry.properties.dtype.itemsize
            for entry in metadata.state_dict_metadata.values()
            if hasattr(entry, "size")
        )

    @staticmethod
    def _options(place: Place) -> dict[str, Any]:
        if place.endpoint is None:
            return {}
        return {"backend": "obstore", "storage_options": place.endpoint.obstore_options}

    def _streaming(self, place: Place, name: str) -> StreamingReader:
        return StreamingReader(self._url(place, name), **self._options(place))

    def _stock_reader(self, place: Place, name: str, *, ahead: bool = True) -> Any:
        if place.endpoint is None:
            return _asking(dcp.FileSystemReader)(self._url(place, name))
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        options = dict(place.endpoint.storage_options)
        if not ahead:
            options["default_cache_type"] = "none"
        return _asking(FsspecReader)(self._url(place, name), **options)

    # ------------------------------------------------------------ loads

    def stock(self, place: Place) -> dict[str, Any]:
        start = time.perf_counter()
        state = {"optim": get_optimizer_state_dict(self.model, self.optim)}
        got, before = time.perf_counter(), _read_by_syscalls()
        reader = self._stock_reader(place, "stock")
        dcp.load(state, storage_reader=reader)
        read = time.perf_counter()
        seen = _read_by_syscalls() - before
        set_optimizer_state_dict(self.model, self.optim, state["optim"])
        return {
            "get": got - start,
            "dcp.load": read - got,
            "set": time.perf_counter() - read,
            "read_bytes": seen,
            "asked": reader.asked,
        }

    def ours(
        self, place: Place, broadcast: bool | str, stock_reader: bool, *, ahead: bool = True
    ) -> dict[str, Any]:
        before = _read_by_syscalls()
        if stock_reader:
            reader = self._stock_reader(place, "ours", ahead=ahead)
        else:
            reader = self._streaming(place, "ours")
        planner = _TimedPlanner(self.model, self.optim, broadcast=broadcast)  # type: ignore[arg-type]
        state: dict[str, Any] = {"optim": {}}
        dcp.load(state, storage_reader=reader, planner=planner)
        self.optim.load_state_dict(state["optim"])
        moved = planner.exchanged
        found: dict[str, Any] = dict(planner.seconds)
        found["exchanged"] = moved is not None
        found["read_bytes"] = _read_by_syscalls() - before
        if moved is not None:
            found |= {"sent": moved.sent, "received": moved.received, "rounds": moved.rounds}
            found["handing on"] = moved.seconds
        found["asked"] = reader.asked if stock_reader else reader.stats.needed
        return found

    def variant(self, name: str, place: Place) -> dict[str, Any]:
        if name == STOCK:
            return self.stock(place)
        if name == "auto":
            return self.ours(place, "auto", False)
        return self.ours(place, "True" in name, "stock reader" in name, ahead=name != EXACT)

    # ------------------------------------------------------------ measuring

    @staticmethod
    def _interleave(
        variants: Mapping[str, Callable[[], dict[str, Any]]],
        rounds: int,
        before: Callable[[str], None],
        after: Callable[[str], None],
    ) -> dict[str, list[Measured]]:
        return interleave(
            variants, rounds=rounds, warmup=0, barrier=dist.barrier, before=before, after=after
        )

    def run(self, setting: Setting) -> dict[str, Any]:
        server = setting.place.endpoint
        assert server is None or isinstance(server, EmbeddedS3)
        history: dict[str, list[dict[str, int]]] = {name: [] for name in self.job.variants}

        def before(_: str) -> None:
            self.optim = self._new_optim()
            release_freed_memory()
            dist.barrier()
            if server is not None and self.rank == 0:
                server.reset_stats()

        def after(name: str) -> None:
            dist.barrier()
            if server is not None and self.rank == 0:
                history[name].append(server.stats())
            if self._digests() != self.trained:
                raise RuntimeError(f"{name} loaded something else than what was saved")

        variants = {
            name: lambda name=name: self.variant(name, setting.place)  # type: ignore[misc]
            for name in self.job.variants
            if name != EXACT or server is not None
        }
        if server is not None and self.rank == 0:
            server.configure()  # the warm-up at full speed: it is not measured
        self._interleave(variants, 1, before, after)
        before("")
        chosen = self.variant("auto", setting.place)["exchanged"]
        if server is not None and self.rank == 0:
            server.configure(latency=setting.latency, bandwidth=setting.bandwidth)
        for counts in history.values():
            counts.clear()
        start = time.monotonic()
        runs = self._interleave(variants, self.size.rounds, before, after)
        if self.rank == 0:
            took = time.monotonic() - start
            text = f"  {self.job.kind} {self.size.mib} MiB {setting.label} took {took:.0f} s"
            print(text, file=sys.stderr, flush=True)
        return {
            "runs": {name: [asdict(run) for run in each] for name, each in runs.items()},
            "server": history,
            "auto": chosen,
        }


def _profile() -> dict[str, Any]:
    """What the parts of an exchange cost by themselves; seconds, and bytes a second by size."""
    number, size = dist.get_rank(), dist.get_world_size()
    everyone = tuple(range(size))

    def connect() -> Channels:
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names)
        dist.barrier()
        start = time.perf_counter()
        channels = Channels(job_store(), names[0], number=number, size=size, timeout=60)
        connecting.append(time.perf_counter() - start)
        dist.barrier()  # one that closes at once would break another's connecting
        return channels

    connecting: list[float] = []
    for _ in range(20):
        connect().close()
    channels = connect()
    group: list[float] = []
    if size > 2:  # a group of fewer members, made when it is first used
        members = everyone[:-1]
        dist.barrier()
        if number in members:
            start = time.perf_counter()
            channels.send(Message(members, 0, 0, 8, False, False), torch.zeros(8)).wait()
            group.append(time.perf_counter() - start)
    flags = torch.zeros(2, dtype=torch.int64)
    channels.all_reduce_max(flags)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(200):
        channels.all_reduce_max(flags)
    agree = (time.perf_counter() - start) / 200
    rates: dict[str, float] = {}
    for mib in (1, 2, 4, 8, 16, 32, 64):
        data = torch.zeros(mib * _MIB, dtype=torch.uint8)
        channels.send(Message(everyone, 0, 0, data.nbytes, False, False), data).wait()
        times = []
        for _ in range(max(4, 64 // mib)):
            dist.barrier()
            start = time.perf_counter()
            under_way = [  # as in a round: every member sends its part at the same time
                channels.send(Message(everyone, root, 0, part.nbytes, False, False), part)
                for root, part in zip(everyone, data.chunk(size), strict=True)
            ]
            for work in under_way:
                work.wait()
            times.append(time.perf_counter() - start)
        rates[str(mib)] = data.nbytes / statistics.median(times)
    channels.close()
    return {
        "connect": statistics.median(connecting),
        "connect, first": connecting[0],
        "group": group[0] if group else 0.0,
        "agree": agree,
        "rates": rates,
    }


def _run(job: Job) -> dict[str, Any]:
    result: dict[str, Any] = {"sizes": []}
    if job.profile:
        result["profile"] = _profile()
    places: Mapping[str, Place] = {s.place.label: s.place for s in job.settings}
    for size in job.sizes:
        bench = _Bench(job, size)
        unique = 0
        for place in places.values():
            if isinstance(place.endpoint, EmbeddedS3) and dist.get_rank() == 0:
                place.endpoint.configure()
            dist.barrier()
            unique = bench.save(place)
        result["sizes"].append(
            {
                "mib": size.mib,
                "unique": unique,
                "state_bytes": bench.state_bytes,
                "settings": {s.label: bench.run(s) for s in job.settings},
            }
        )
    return result


if __name__ == "__main__":
    report(_run)
