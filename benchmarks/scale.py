"""What planning costs the coordinator as the world grows, and what it sends: ours and stock's.

    python -m benchmarks.scale [--ranks 64 256 1024 4096 16384] [--stock 1024] [--flat]
                               [--json out.json] [--plot out.svg]

One process plays all ranks of Llama-3-8B under FSDP1, wrapped per block, with AdamW, as
``benchmarks.repeated_saves`` has it. Each world has a process of its own. Seconds are CPU seconds
of one thread, the cycle collector left on.

``save``: seconds in which all ranks wait for the coordinator in their first save: it unpickles
what it is sent, plans, and pickles the answers. ``stock``: the same of ``DefaultSavePlanner`` and
the same boxes, up to ``--stock`` ranks. ``up`` and ``down``: bytes of one rank's plan and of its
answer, the most of any rank. ``memory``: what the coordinator's process grew by, at its peak, MiB.

Ranks of one shape differ in their intervals and signatures alone: one of each shape makes its plan
with the planner, the others' are made of it, and sampled ones are compared with the planner's.

``load``: seconds for the plans of sampled ranks, scaled to all; the checkpoint is that of the save.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.measure import table, write_json
from benchmarks.repeated_saves import Rank, llama
from dcp_fsdp_osd import FlatOptimLoadPlanner
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout import FlatLayout, simulate
from dcp_fsdp_osd.save.wire import Run, Sent, SentPlan

__all__ = ["exponent", "main", "measure", "messages"]

_SAMPLED = 32


def messages(world: int, flat: bool) -> tuple[Rank, list[bytes]]:
    """The coordinator, and what each rank sends it."""
    units = llama(flat)
    shapes: dict[tuple[bool, ...], tuple[SentPlan, Any, Any]] = {}
    sent: list[bytes] = []
    first = Rank(simulate(units, world_size=world, rank=0), 0)
    for number in range(world):
        layout = simulate(units, world_size=world, rank=number)
        segments = [s for param in layout.params for s in param.segments]
        shape = (number == 0, *(s.numel > 0 for s in segments))
        if shape not in shapes:
            rank = first if number == 0 else Rank(layout, number)
            text = rank.plan(1, number == 0)
            plan = pickle.loads(text)
            common = plan.planner_data.read_common()
            shapes[shape] = plan, common, plan.planner_data.read_own(common)
            sent.append(text)
            continue
        plan, common, own = shapes[shape]
        of = {f"optim.state.{s.fqn}": s for s in segments}
        intervals = array("q")
        for entry in common.entries:
            if isinstance(entry, Run):
                segment = of[entry.key.rpartition(".")[0]]
                intervals.extend((segment.start, segment.stop))
        reports = [each._replace(signature=layout.signature) for each in own.reports]
        data: Sent = plan.planner_data.with_own(
            common, own._replace(intervals=intervals, reports=reports)
        )
        text = pickle.dumps(SentPlan(plan.items, None, data, True))
        if number % max(world // 4, 1) == 1:
            _check(text, Rank(layout, number).plan(1, False))
        sent.append(text)
    return first, sent


def _check(made: bytes, planned: bytes) -> None:
    left, right = (pickle.loads(each).planner_data.plan() for each in (made, planned))
    if left.items != right.items or left.planner_data != right.planner_data:
        raise AssertionError("a plan that was made of another rank's is not the planner's")


def _stock(plans: Sequence[SavePlan]) -> float:
    """Seconds of stock's coordinator for the same items."""
    sent = []
    for plan in plans:
        whole = plan.planner_data.plan()
        sent.append(pickle.dumps(SavePlan(whole.items, None, whole.planner_data.mappings)))
    gc.collect()
    start = time.process_time()
    answers, _ = DefaultSavePlanner().create_global_plan([pickle.loads(each) for each in sent])
    for answer in answers:
        pickle.dumps(answer)
    return time.process_time() - start


def _loads(metadata: Metadata, world: int, flat: bool) -> dict[str, float]:
    metadata.storage_meta = StorageMeta(checkpoint_id="memory", save_id="one")
    planners, sent = [], []
    for number in range(0, world, max(1, world // _SAMPLED)):
        planner = _load_planner(simulate(llama(flat), world_size=world, rank=number))
        planner.set_up_planner({"optim": {}}, metadata, number == 0)
        planners.append(planner)
        sent.append(pickle.dumps(planner.create_local_plan()))
    start = time.process_time()
    answers = planners[0].create_global_plan([pickle.loads(each) for each in sent])
    down = [pickle.dumps(answer) for answer in answers]
    seconds = (time.process_time() - start) * world / len(sent)
    return {"load": seconds, "load up": max(map(len, sent)), "load down": max(map(len, down))}


def _load_planner(layout: FlatLayout) -> FlatOptimLoadPlanner:
    params = [torch.nn.Parameter(torch.zeros(param.numel)) for param in layout.params]
    optim = torch.optim.AdamW(params)
    target = Target(layout, tuple(params), tuple(param.device for param in params))
    return FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})


def measure(world: int, flat: bool, stock: bool) -> dict[str, float]:
    """One world, in this process."""
    torch.set_num_threads(1)
    first, sent = messages(world, flat)
    gc.collect()
    gc.freeze()  # what other ranks hold is not the coordinator's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plans = [pickle.loads(each) for each in sent]
    answers, metadata = first.planner.create_global_plan(plans)
    down = [pickle.dumps(answer) for answer in answers]
    found: dict[str, float] = {"ranks": world, "save": time.process_time() - start}
    found["memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found["boxes"] = sum(
        len(getattr(each, "chunks", ())) for each in metadata.state_dict_metadata.values()
    )
    found |= {"up": max(map(len, sent)), "down": max(map(len, down))}
    found |= _loads(metadata, world, flat)
    if stock:
        found["stock"] = _stock(plans)
    return found


def exponent(rows: Sequence[dict[str, float]], name: str) -> float:
    """Of ``seconds = c * ranks ** exponent``, by least squares of the logarithms."""
    points = [(math.log(row["ranks"]), math.log(row[name])) for row in rows if name in row]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _plot(rows: Sequence[dict[str, float]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for name in ("save", "stock", "load"):
        points = [(row["ranks"], row[name]) for row in rows if name in row]
        if points:
            axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU seconds of the coordinator")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--stock", type=int, default=1024, help="the largest world for stock")
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--one", action="store_true", help="in this process, and print JSON")
    parser.add_argument("--json")
    parser.add_argument("--plot", help="a file for the plot; needs matplotlib")
    args = parser.parse_args(argv)
    if args.one:
        (world,) = args.ranks
        print(json.dumps(measure(world, args.flat, world <= args.stock)))
        return
    rows: list[dict[str, float]] = []
    for world in args.ranks:
        command = [sys.executable, "-m", "benchmarks.scale", "--one", "--ranks", str(world)]
        command += ["--stock", str(args.stock), *(["--flat"] if args.flat else [])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    names = list(rows[0])
    print(table([[row.get(name, math.nan) for name in names] for row in rows], header=names))
    exponents = {}
    for name in ("save", "load", "memory", "stock"):
        if sum(row.get(name, 0) > 0 for row in rows) > 1:
            exponents[name] = exponent([row for row in rows if row.get(name, 0) > 0], name)
    print("exponents:", {name: round(value, 3) for name, value in exponents.items()})
    write_json(args.json, {"torch": torch.__version__, "rows": rows, "exponents": exponents})
    if args.plot:
        _plot(rows, args.plot)


if __name__ == "__main__":
    main()
