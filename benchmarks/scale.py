"""What saves and loads cost the coordinator as the world grows: ours and stock's.

    python -m benchmarks.scale [--model 8b 70b] [--ranks 64 256 1024 4096 16384] [--stock 1024]
                               [--flat] [--json out.json] [--plot out.svg]

One process plays all ranks of Llama 3 in its own size under FSDP1, wrapped per block, with AdamW;
no tensor's memory is touched.  Each world has a process of its own.  Seconds are CPU seconds of one
thread, the cycle collector left on where DCP leaves it on.  Worlds beside one another, rows:

- ``save``: all ranks wait for the coordinator in their first save: it unpickles what it is sent,
  plans, and pickles the answers (``unpickle``, ``plan``, ``pickle``).  ``stock``: the same of
  ``DefaultSavePlanner`` and the same boxes, up to ``--stock`` ranks; ``stock validation`` is of its
  plan, measured once more alone;
- ``results``, ``metadata``: it unpacks what all have written, and fills and dumps ``.metadata``;
- ``memory``: what the coordinator's process grew by at its peak while planning; ``memory, all``:
  its whole peak until ``.metadata`` are written, with torch and what it plays; MiB;
- ``up`` and ``down``: bytes of one rank's plan and of its answer, the most of any rank;
- ``file``, ``stock file``: MB of ``.metadata``; ``read`` and ``read and plan``, CPU seconds in
  which one rank reads it, and plans its load; ``read, memory``: MB that this takes at most
  (``tracemalloc``); ``stock read`` of stock's, by stock's reader;
- ``load``: as ``save``; the checkpoint is that of the save.  Of larger worlds 128 ranks plan,
  the best of five, and what another rank adds by the difference to half as many.

Ranks of one shape differ in their intervals and signatures alone: one of each shape makes its plan
with the planner, the others' are made of it, and sampled ones are compared with the planner's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _validate_global_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.llama import MODELS, llama_units
from benchmarks.measure import PeakMemory, table, write_json
from benchmarks.metadata_index import entries_of, of_variant, stock_pickle
from benchmarks.repeated_saves import Rank
from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader
from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout import FlatLayout, Unit, simulate
from dcp_fsdp_osd.save.wire import Run, Sent, SentPlan
from dcp_fsdp_osd.storage.metadata import KIND_BYTES, EntryInfo, dump_metadata, fill_metadata
from dcp_fsdp_osd.storage.results import Entry, pack_results, unpack_results

__all__ = ["exponent", "main", "measure", "messages"]

_SAMPLED = 128


def _units(model: str, flat: bool) -> list[Unit]:
    width, blocks, keys = MODELS[model]
    return llama_units(width, blocks, keys=keys, use_orig_params=not flat)


def messages(units: Sequence[Unit], world: int) -> tuple[Rank, list[bytes]]:
    """The coordinator, and what each rank sends it."""
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


def _stock(plans: Sequence[SavePlan]) -> dict[str, float]:
    """Seconds of stock's coordinator for the same items."""
    sent = []
    for plan in plans:
        whole = plan.planner_data.plan()
        sent.append(pickle.dumps(SavePlan(whole.items, None, whole.planner_data.mappings)))
    gc.collect()
    gc.freeze()
    clock = time.process_time
    start = clock()
    unpickled = [pickle.loads(each) for each in sent]
    begin = clock()
    answers, metadata = DefaultSavePlanner().create_global_plan(unpickled)
    planned = clock()
    for answer in answers:
        pickle.dumps(answer)
    end = clock()
    if _validate_global_plan(answers, metadata):
        raise AssertionError("stock refuses the plan")
    return {
        "stock": end - start,
        "stock unpickle": begin - start,
        "stock plan": planned - begin,
        "stock validation": clock() - end,
    }


def _loads(metadata: Metadata, units: Sequence[Unit], world: int) -> dict[str, float]:
    planners, sent = [], []
    for number in range(0, world, max(1, world // _SAMPLED)):
        planner = _load_planner(simulate(units, world_size=world, rank=number))
        planner.set_up_planner({"optim": {}}, metadata, number == 0)
        planners.append(planner)
        sent.append(pickle.dumps(planner.create_local_plan()))
    gc.collect()
    gc.freeze()

    def seconds(some: Sequence[bytes]) -> float:
        start = time.process_time()
        answers = planners[0].create_global_plan([pickle.loads(each) for each in some])
        down.extend(len(pickle.dumps(answer)) for answer in answers)
        return time.process_time() - start

    down: list[int] = []
    half = len(sent) // 2
    few, all_ = (min(seconds(sent[:count]) for _ in range(5)) for count in (half, len(sent)))
    more = (all_ - few) / (len(sent) - half) * (world - len(sent))
    return {"load": all_ + more, "load up": max(map(len, sent)), "load down": max(down)}


def _load_planner(layout: FlatLayout) -> FlatOptimLoadPlanner:
    params = [torch.nn.Parameter(torch.empty(p.numel, device="meta")) for p in layout.params]
    optim = torch.optim.AdamW(params)
    target = Target(layout, tuple(params), (torch.device("cpu"),) * len(params))
    return FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})


def _results(units: Sequence[Unit], world: int, metadata: Metadata) -> list[bytes]:
    """What each rank sends when it has written."""
    stored = metadata.state_dict_metadata
    hints: Counter[str] = Counter()
    sent = []
    for number in range(world):
        entries: list[Entry] = []
        for path, _, chunk, entry in entries_of(
            simulate(units, world_size=world, rank=number), number
        ):
            key = ".".join(path)
            entries.append((MetadataIndex(key, chunk.offsets, hints[key]), entry))
            hints[key] += 1
        if not number:
            entries += [
                (MetadataIndex(key), EntryInfo(entry.name, 1 << 32, 500, KIND_BYTES, 7))
                for key, value in stored.items()
                if isinstance(value, BytesStorageMetadata)
            ]
        sent.append(pickle.dumps(pack_results(entries, "crc32c")))
    return sent


def measure(model: str, world: int, flat: bool, stock: bool, folder: str) -> dict[str, Any]:
    """One world, in this process."""
    torch.set_num_threads(1)
    clock = time.process_time
    units = _units(model, flat)
    first, sent = messages(units, world)
    gc.collect()
    gc.freeze()  # what other ranks hold is not the coordinator's
    with PeakMemory() as peak:
        start = clock()
        plans = [pickle.loads(each) for each in sent]
        unpickled = clock()
        answers, metadata = first.planner.create_global_plan(plans)
        planned = clock()
        down = [pickle.dumps(answer) for answer in answers]
        end = clock()
    found: dict[str, Any] = {"model": model, "ranks": world}
    found["boxes"] = sum(
        len(getattr(each, "chunks", ())) for each in metadata.state_dict_metadata.values()
    )
    found |= {"save": end - start, "unpickle": unpickled - start, "plan": planned - unpickled}
    found |= {"pickle": end - planned, "memory": peak.extra / 2**20}
    found |= {"up": max(map(len, sent)), "down": max(map(len, down))}
    if stock:
        found |= _stock(plans)
    results = _results(units, world, metadata)
    del plans
    with PeakMemory() as later, no_collections():
        start = clock()
        written, _ = unpack_results([pickle.loads(each) for each in results])
        unpacked = clock()
        metadata.storage_meta = StorageMeta(checkpoint_id="memory", save_id="one")
        fill_metadata(metadata, written, "crc32c")
        data = dump_metadata(metadata)
        end = clock()
    found |= {"results": unpacked - start, "metadata": end - unpacked, "file": len(data) / 1e6}
    found["memory, all"] = (later.start + later.extra) / 2**20
    place = Path(folder, "index")
    place.mkdir()
    Path(place, ".metadata").write_bytes(data)
    found |= _loads(StreamingReader(place).read_metadata(), units, world)
    rank = of_variant(folder, "index", model, world)
    found |= {"read": rank["read"], "read and plan": rank["read"] + rank["plan"]}
    found["read, memory"] = rank["traced"]
    if stock:
        with no_collections():
            entries = [(MetadataIndex(*row[:2], row[2]), row[3]) for row in written.rows()]
            data = stock_pickle(metadata, entries)
        found["stock file"] = len(data) / 1e6
        Path(folder, "stock").mkdir()
        Path(folder, "stock", ".metadata").write_bytes(data)
        rank = of_variant(folder, "stock", model, world)
        found |= {"stock read": rank["read"], "stock read, memory": rank["traced"]}
    return found


def exponent(rows: Sequence[dict[str, float]], name: str) -> float:
    """Of ``seconds = c * ranks ** exponent``, by least squares of the logarithms."""
    points = [(math.log(row["ranks"]), math.log(row[name])) for row in rows if name in row]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def exponents_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the figures that two worlds or more have."""
    found = {}
    for name in ("save", "load", "results", "metadata", "memory", "memory, all", "stock"):
        some = [row for row in rows if row.get(name, 0) > 0]
        if len(some) > 1:
            found[name] = exponent(some, name)
    return found


_DRAWN = {
    "stock": "a save's plans, stock",
    "save": "a save's plans, ours",
    "load": "a load's plans, ours",
    "results": "results of a save, ours",
    "metadata": ".metadata, ours",
}


def _plot(rows: Sequence[dict[str, float]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "dcp-fsdp-osd"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for name, label in _DRAWN.items():
        points = [(row["ranks"], row[name]) for row in rows if name in row]
        if points:
            axes.loglog(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU seconds of the coordinator")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["8b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--stock", type=int, default=1024, help="the largest world for stock")
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--one", action="store_true", help="in this process, and print JSON")
    parser.add_argument("--json")
    parser.add_argument("--plot", help="a file for the plot; needs matplotlib")
    args = parser.parse_args(argv)
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            (model,), (world,) = args.model, args.ranks
            print(json.dumps(measure(model, world, args.flat, world <= args.stock, folder)))
        return
    rows: list[dict[str, Any]] = []
    for model in args.model:
        for world in args.ranks:
            command = [sys.executable, "-m", "benchmarks.scale", "--one", "--ranks", str(world)]
            command += ["--stock", str(args.stock), *(["--flat"] if args.flat else [])]
            command += ["--model", model]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    names = dict.fromkeys(name for row in rows for name in row)
    lines = [[name, *(row.get(name, "-") for row in rows)] for name in names]
    print(table(lines[1:], header=[str(cell) for cell in lines[0]]))
    exponents = {
        model: exponents_of([r for r in rows if r["model"] == model]) for model in args.model
    }
    for model, found in exponents.items():
        print(f"exponents, {model}:", {name: round(value, 3) for name, value in found.items()})
    write_json(args.json, {"torch": torch.__version__, "rows": rows, "exponents": exponents})
    if args.plot:
        _plot([row for row in rows if row["model"] == args.model[0]], args.plot)


if __name__ == "__main__":
    main()
