"""What planning costs in the first save and in those after it, for many simulated ranks.

    python -m benchmarks.repeated_saves [--ranks 256 1024] [--real 4] [--flat] [--json out.json]

One process plays all ranks of Llama-3-8B under FSDP1, wrapped per block, with AdamW: names and
numbers of tensors are that model's, their sizes 1/4096 of it, as planning moves no element.  Each
rank makes its local plan; what DCP sends is pickled, the coordinator unpickles all plans, makes the
global plan and pickles the answers; then each rank's results of writing, which nobody writes here,
go to the coordinator, which makes the bytes of ``.metadata``.  Between saves the step and the
learning rate change.

Columns: ``coordinator``, CPU seconds in which all ranks wait for its planning (unpickle, plan,
pickle); ``unpack``, likewise for the results, which are new in each save; ``rank``, CPU seconds of
one rank for its local plan and its answer, mean; ``up`` and ``down``, KB of one rank's plan and
answer as sent, ``results``, KB of what it has written, mean; ``of first``, coordinator and rank
together as a share of the first save's; ``metadata``, CPU seconds for filling and pickling
``.metadata``, which is new in each save.  ``floor`` is what the coordinator and a rank need for the
collectives of plans that are empty: pickling and unpickling alone.

``--real`` saves the same model with gloo ranks to local disk: ``whole``, seconds of the slowest
rank; ``plan``, the part of them that is neither writing (the slowest rank's) nor ``.metadata`` and
its commit: planning and collectives; ``of first`` of that.  ``floor`` is a ``dcp.save`` of nothing
before each save, with a planner that plans nothing and a writer that writes nothing: DCP's own
collectives, below which no backend comes.  ``above`` is ``plan`` without the smallest floor of the
run (the first has connections to make), and ``of first`` behind it that of it.  Ranks that share
cores wait for one another and for whatever else runs there, so that below are CPU milliseconds of
rank 0, which coordinates, and of the busiest other rank: of each step, of ``all`` planning and
collectives, of the ``floor`` before it, and as a share of the first save's, with and without that.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.launch import run_ranks
from benchmarks.llama import llama_units
from benchmarks.measure import table, write_json
from dcp_fsdp_osd import FlatOptimSavePlanner
from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.layout import FlatLayout, Unit, simulate
from dcp_fsdp_osd.storage.metadata import (
    KIND_TENSOR,
    EntryInfo,
    dump_metadata,
    fill_metadata,
)
from dcp_fsdp_osd.storage.results import pack_results, unpack_results

__all__ = ["Rank", "llama", "main"]

_SAVES = 3


def llama(flat: bool) -> list[Unit]:
    return llama_units(64, 32, 2004, use_orig_params=not flat)  # 1/64 of the widths of 8B


class Rank:
    def __init__(self, layout: FlatLayout, number: int = 0) -> None:
        self.number = number
        self.planner = FlatOptimSavePlanner.from_layouts({"optim": layout})
        self.tensors = [torch.empty(param.numel) for param in layout.params]

    def state(self, step: int) -> dict[str, Any]:
        state = {
            number: {"step": torch.tensor(float(step)), "exp_avg": tensor, "exp_avg_sq": tensor}
            for number, tensor in enumerate(self.tensors)
            if tensor.numel()
        }
        group = {"lr": 1 / step, "betas": (0.9, 0.95), "params": list(range(len(self.tensors)))}
        return {"optim": {"state": state, "param_groups": [group]}}

    def plan(self, step: int, coordinator: bool) -> bytes:
        return self.plan_of(self.state(step), coordinator)

    def plan_of(self, state: dict[str, Any], coordinator: bool) -> bytes:
        self.planner.set_up_planner(state, None, coordinator)
        return pickle.dumps(self.planner.create_local_plan())

    def finish(self, answer: bytes) -> bytes:
        return self.results(self.finish_plan(answer))

    def finish_plan(self, answer: bytes) -> SavePlan:
        return self.planner.finish_plan(pickle.loads(answer))

    def results(self, plan: SavePlan) -> bytes:
        """The results of writing, as sent."""
        name = f"__{self.number}_0_{'a' * 32}.distcp"
        entries, position = [], 0
        for item in plan.items:
            nbytes = item.tensor_data.chunk.sizes.numel() * 4 if item.tensor_data else 100
            crc = zlib.crc32(repr(item.index).encode())
            info = EntryInfo(
                name, position, nbytes + 2048, KIND_TENSOR, crc, 704, nbytes, "float32"
            )
            entries.append((item.index, info))
            position += info.length
        return pickle.dumps(pack_results(entries, "crc32c"))


def _save(ranks: list[Rank], step: int) -> dict[str, float]:
    clock = time.process_time
    states = [rank.state(step) for rank in ranks]
    start = clock()
    sent = [
        rank.plan_of(state, rank is ranks[0]) for rank, state in zip(ranks, states, strict=True)
    ]
    own = clock() - start
    gc.collect()
    gc.freeze()  # what the other ranks hold, which no coordinator's collector has to look through
    planned = clock()
    plans, metadata = ranks[0].planner.create_global_plan([pickle.loads(each) for each in sent])
    answers = [pickle.dumps(plan) for plan in plans]
    answered = clock()
    finished = [rank.finish_plan(answer) for rank, answer in zip(ranks, answers, strict=True)]
    own += clock() - answered
    results = [rank.results(plan) for rank, plan in zip(ranks, finished, strict=True)]
    written = clock()
    with no_collections():
        places, _ = unpack_results([pickle.loads(each) for each in results])
        unpacked = clock()
        fill_metadata(metadata, places, "crc32c")
        dump_metadata(metadata)
    filled = clock()
    return {
        "coordinator": answered - planned,
        "unpack": unpacked - written,
        "rank": own / len(ranks),
        "up": sum(map(len, sent)) / len(sent) / 1e3,
        "down": sum(map(len, answers)) / len(answers) / 1e3,
        "results": sum(map(len, results)) / len(results) / 1e3,
        "metadata": filled - unpacked,
        "floor": _floor(len(ranks)),
    }


def _floor(ranks: int) -> float:
    """CPU seconds of a coordinator and a rank for empty plans, there and back."""
    start = time.process_time()
    for _ in range(2):  # up, and down
        for each in [pickle.dumps(SavePlan([])) for _ in range(ranks)]:
            pickle.loads(each)
    return (time.process_time() - start) / 2 * (1 + 1 / ranks)


def _simulated(worlds: list[int], units: list[Unit]) -> dict[str, list[dict[str, float]]]:
    rows, found = [], {}
    for world in worlds:
        ranks = [Rank(simulate(units, world_size=world, rank=rank), rank) for rank in range(world)]
        saves = [_save(ranks, step) for step in range(1, _SAVES + 1)]
        found[str(world)] = saves
        first = saves[0]["coordinator"] + saves[0]["rank"]
        for number, save in enumerate(saves, 1):
            save["of first"] = (save["coordinator"] + save["rank"]) / first
            rows.append([f"{world} ranks, save {number}", *save.values()])
    print(table(rows, header=["", *saves[0]]))
    return found


def _real(world: int, flat: bool) -> list[dict[str, float]]:
    from benchmarks.repeated_saves_ranks import Job

    with tempfile.TemporaryDirectory(prefix="repeated-saves-") as folder:
        job = Job(folder, 2 * _SAVES, flat)
        ranks = run_ranks("benchmarks.repeated_saves_ranks", job, world, timeout=300)
    found: list[dict[str, Any]] = []
    for of_ranks in zip(*ranks, strict=True):
        whole = max(each["whole"] for each in of_ranks)
        # Of rank 0, which coordinates: what others do meanwhile does not add up with it.
        own = of_ranks[0]
        write = max(each["write"] for each in of_ranks)
        plan = own["whole"] - write - own["metadata"] - own["commit"]
        found.append({"whole": whole, "plan": plan, "floor": own["floor"]})
    floor = min(save["floor"] for save in found)
    for save in found:
        save["of first"] = save["plan"] / found[0]["plan"]
        save["above"] = save["plan"] - floor
        save["above, of first"] = save["above"] / found[0]["above"]
    rows = [[f"save {number}", *save.values()] for number, save in enumerate(found, 1)]
    print(table(rows, header=[f"{world} real ranks", *found[0]]))
    rows = []
    first: list[dict[str, float]] = []
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        mine, *others = [_cpu(each) for each in of_ranks]
        both = [mine, max(others, key=lambda each: each["all"])]
        first = first or both
        for name, spent, before in zip(("rank 0", "another"), both, first, strict=True):
            above = (spent["all"] - spent["floor"]) / (before["all"] - before["floor"])
            share = {"of first": spent["all"] / before["all"], "above, of first": above}
            found[number][f"cpu of {name}"] = {**spent, **share}
            rows.append([f"save {number + 1}, {name}", *found[number][f"cpu of {name}"].values()])
    print(table(rows, header=["CPU ms", *found[0]["cpu of rank 0"]]))
    return found


def _cpu(saved: dict[str, float]) -> dict[str, float]:
    """CPU milliseconds of one rank in planning and collectives, by step."""
    of = {name[4:]: 1e3 * value for name, value in saved.items() if name.startswith("cpu ")}
    apart = of.pop("write_data") + of.pop("finish")  # and what is called from within
    whole, floor = of.pop("whole") - apart, of.pop("floor")
    steps = {
        "set up": of.get("set_up_planner", 0.0),
        "local plan": of.get("create_local_plan", 0.0),
        "global plan": of.get("create_global_plan", 0.0),
        "finish plan": of.get("finish_plan", 0.0),
        "writer": sum(value for name, value in of.items() if name.startswith("prepare")),
    }
    return {**steps, "collectives": whole - sum(steps.values()), "all": whole, "floor": floor}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--real", type=int, help="save with so many real ranks too")
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"saves": _simulated(args.ranks, llama(args.flat))}
    if args.real:
        results["real"] = _real(args.real, args.flat)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
