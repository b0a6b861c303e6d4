"""How long a save and a load take: a model, checked against real ones, and what it says of others.

    python -m benchmarks.model [--worlds 1 2 4 8] [--mib 256] [--rounds 5]
                               [--json out.json] [--plot out.svg]

The model adds up what ranks wait for, one after the other (:func:`save_seconds`,
:func:`load_seconds`):

- ``collectives``: DCP's own, of nothing (a save and a load of nothing by a planner and a storage
  that do nothing);
- ``messages``: plans, answers and results through the one link of the coordinator;
- ``own``: what each rank computes for itself, by the item: planning, laying out, handing to and
  taking from the threads that write and read; where ranks share cores, as many at a time;
- ``coordinator``: unpickling all plans, planning, pickling; and unpickling all results;
- ``metadata``: filling, pickling and writing them, and the requests of the commit one after the
  other; in a load reading the index, which is sent on to all ranks;
- ``data``: bytes by the bandwidth of all ranks together, or of a rank's own link, or its requests
  by their latency, whichever is more; and checksums, where they compete with it for the cores;
- ``exchange``: what replicas read for one another.

Assumed: ranks have equally much to write; nobody else uses the storage, which neither throttles
nor fails; data are in memory (a GPU copies faster than it writes); waiting overlaps with nothing.

**The check.**  Gloo ranks save and load ``--mib`` MiB of optimizer state on a local disk, with the
layout of a Llama of eight blocks, sharded as FSDP1 does it.  In the same run, in turn with those:
raw writes, and reads by way of a chunk of 512 KiB, as the reader makes them, of as many bytes by as
many processes; saves and loads of nothing.  Before them, by one process, planning of the same
ranks, and a save and a load of as many tensors of next to no bytes, for the seconds in which an
item is handed to the threads that write and read.  Of each, the round that others disturbed least
(the least of rounds; of ranks the slowest).  Nothing is fitted.

**The predictions.**  Llama-3 8B and 70B, weights and AdamW's moments in float32, FSDP1 wrapped per
block, saved and loaded by the same layout.  What ranks plan and send comes from
``benchmarks/results/scale.json`` (of 70B: as many times as it has parameters),
requests from ``benchmarks.io_shape``, seconds for a box in results and metadata from this run,
links and storage from :data:`CLUSTERS`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.io_shape import ITEM, STATES, Layout, Saved
from benchmarks.launch import run_ranks
from benchmarks.measure import table, write_json
from benchmarks.model_ranks import Job, Played, Work, play

__all__ = ["CLUSTERS", "Machine", "Work", "load_seconds", "main", "save_seconds"]

SCALE = Path(__file__).parent / "results" / "scale.json"
_GAP = 1 << 17
_PLAYED = 32  # ranks whose planning is played for the seconds of a box


@dataclass(frozen=True)
class Machine:
    """Links, storage and cores; bytes a second, seconds.

    Attributes:
        write, read: of all ranks together; ``rank_link``: of one rank.
        request: latency of one request to the storage; ``parallel``: how many a rank has under way.
        commit: requests of the commit, one after the other.
        hashing: bytes a second of one core, where checksums take cores from writing and reading.
        cores: that all ranks share; 0: each rank has its own.
        network: of the coordinator's link; of a rank's, in exchanges.
        nothing: of DCP's collectives of a save or load of nothing, for no rank at all, and
            ``each``: more for each rank; ``hop``: for each doubling of the ranks.
    """

    write: float
    read: float
    rank_link: float = math.inf
    request: float = 0.0
    parallel: int = 16
    commit: int = 0
    hashing: float = math.inf
    cores: int = 0
    network: float = math.inf
    nothing: float = 0.0
    each: float = 0.0
    hop: float = 0.0

    def collectives(self, ranks: int) -> float:
        return self.nothing + self.each * ranks + self.hop * math.ceil(math.log2(ranks))

    def own(self, seconds: float, ranks: int) -> float:
        """Wall seconds of what each rank computes for itself."""
        return seconds * max(1.0, ranks / self.cores) if self.cores else seconds


def _data(machine: Machine, work: Work, bandwidth: float, nbytes: float, requests: float) -> float:
    """Seconds in which all ranks move `nbytes` together, each with so many requests."""
    waiting = math.ceil(requests / machine.parallel) * machine.request
    hashed = nbytes / machine.hashing / min(machine.cores or work.ranks, work.ranks)
    return max(nbytes / bandwidth, nbytes / work.ranks / machine.rank_link, waiting) + hashed


def save_seconds(machine: Machine, work: Work) -> dict[str, float]:
    """Parts of a save; see the module."""
    sent = work.ranks * (work.up + work.down + work.told)
    alone = min(machine.write, machine.rank_link)
    return {
        "collectives": machine.collectives(work.ranks),
        "messages": sent / machine.network,
        "own": machine.own(work.own, work.ranks),
        "coordinator": work.coordinator + work.results,
        "metadata": work.metadata + machine.commit * machine.request + work.file / alone,
        "data": _data(machine, work, machine.write, work.state, work.requests),
    }


def load_seconds(machine: Machine, work: Work) -> dict[str, float]:
    """Parts of a load; see the module."""
    sent = work.ranks * (work.load_up + work.load_down)
    alone = min(machine.read, machine.rank_link)
    hops = math.ceil(math.log2(work.ranks)) if machine.network < math.inf else 0
    handed_on = work.state / work.ranks * (work.replicas - 1)
    return {
        "collectives": machine.collectives(work.ranks),
        "messages": sent / machine.network,
        "own": machine.own(work.load_own, work.ranks),
        "coordinator": work.load_coordinator,
        "metadata": 2 * machine.request + work.index / alone + hops * work.index / machine.network,
        "data": _data(machine, work, machine.read, work.state, work.load_requests),
        "exchange": handed_on / machine.network,
    }


CLUSTERS = {
    "object storage": Machine(
        write=400e9, read=400e9, rank_link=1e9, request=0.03, commit=6,
        network=5e9, nothing=0.02, each=20e-6, hop=0.001,
    ),
    "parallel file system": Machine(
        write=200e9, read=200e9, rank_link=2e9, request=0.002, commit=12,
        network=5e9, nothing=0.02, each=20e-6, hop=0.001,
    ),
}  # fmt: skip
"""What predictions assume: 8 ranks share a node's link; storage grows no faster than `write` and
`read`; a gather costs its coordinator 20 us for each rank, a broadcast 1 ms for each level of a
tree; ranks have cores enough for checksums beside the transfer."""


# ------------------------------------------------------------------- the check


def check(world: int, mib: int, rounds: int, folder: str) -> dict[str, Any]:
    """What was measured at one world, and what the model makes of it."""
    job = Job(folder, mib, rounds)
    played = play(job, world, Path(folder))
    ranks = run_ranks("benchmarks.model_ranks", job, world, timeout=540)
    found = {
        name: min(max(each) for each in zip(*(r[name] for r in ranks), strict=True))
        for name in ranks[0]
    }
    nbytes = played.work.state
    machine = Machine(
        write=nbytes / found["raw write"],
        read=nbytes / found["read by chunk"],
        hashing=nbytes / world / found["hash"],
        cores=min(os.cpu_count() or 1, world),
        nothing=found["nothing"],
        request=found["small file"],
        commit=2,
    )
    # The latency of a small file is that of a commit's; data are written and read without it.
    work = played.work
    load = replace(machine, nothing=found["load nothing"], request=0.0)
    return {
        "ranks": world,
        "machine": asdict(machine),
        "work": asdict(work),
        "save": {"measured": found["save"], **save_seconds(machine, work)},
        "load": {"measured": found["load"], **load_seconds(load, work)},
    }


# -------------------------------------------------------------- the predictions


def predictions(played: Played, rows: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Seconds of a save and a load, by model, cluster and ranks.

    Args:
        played: gives the seconds and bytes of a box.
        rows: of ``benchmarks.scale``.
    """
    found = []
    known = played.work
    base = len(Layout("fsdp1", "8B", 1).shapes)
    for model in ("8B", "70B"):
        for row in rows:
            ranks = int(row["ranks"])
            layout = Layout("fsdp1", model, ranks)
            more = len(layout.shapes) / base
            of_rank = len(layout.pieces(ranks // 2)) * len(STATES)
            boxes = of_rank * ranks
            state = sum(map(math.prod, layout.shapes.values())) * ITEM * len(STATES)
            reads = Saved(layout).reads(layout, ranks // 2, _GAP)[0]
            work = Work(
                ranks=ranks,
                state=state,
                own=played.plan * more + played.item * of_rank,
                load_own=played.load_plan * more + played.load_item * of_rank,
                coordinator=row["save"] * more,
                load_coordinator=row["load"] * more,
                results=known.results * boxes / played.boxes,
                metadata=known.metadata * boxes / played.boxes,
                up=row["up"] * more,
                down=row["down"] * more,
                told=known.told * of_rank * known.ranks / played.boxes,
                load_up=row["load up"] * more,
                load_down=row["load down"],
                file=known.file * boxes / played.boxes,
                index=known.index * boxes / played.boxes,
                requests=state / ranks / (8 << 20),
                load_requests=reads,
            )
            for name, machine in CLUSTERS.items():
                save, load = save_seconds(machine, work), load_seconds(machine, work)
                found.append(
                    {"model": model, "cluster": name, "ranks": ranks, "boxes": boxes}
                    | {"save": save, "load": load}
                )
    return found


def _plot(found: Sequence[dict[str, Any]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, what in zip(axes, ("save", "load"), strict=True):
        for model in ("8B", "70B"):
            for cluster in CLUSTERS:
                some = [e for e in found if (e["model"], e["cluster"]) == (model, cluster)]
                worlds = [each["ranks"] for each in some]
                whole = [sum(each[what].values()) for each in some]
                (line,) = axis.loglog(worlds, whole, marker="o", label=f"{model}, {cluster}")
                data = [each[what]["data"] for each in some]
                axis.loglog(worlds, data, ":", color=line.get_color())
        axis.set(title=f"{what}; dotted: its data alone", xlabel="ranks")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("seconds, predicted")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--mib", type=int, default=256, help="of state, of all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--plot", help="a file for the plot of the predictions; needs matplotlib")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        checked = [check(world, args.mib, args.rounds, folder) for world in args.worlds]
        played = play(Job(folder, 64, 1, blocks=32), _PLAYED, Path(folder))
    for what in ("save", "load"):
        lines = []
        for each in checked:
            measured, *parts = each[what].values()
            lines.append([each["ranks"], measured, sum(parts), sum(parts) / measured, *parts])
        names = [name for name in checked[0][what] if name != "measured"] if checked else []
        print(table(lines, header=[what, "measured", "predicted", "ratio", *names]), flush=True)
    found = predictions(played, json.loads(SCALE.read_text())["rows"])
    lines = [
        [f"{e['model']}, {e['cluster']}", e["ranks"], what, sum(e[what].values())]
        + [e[what].get(name, 0.0) for name in _PARTS]
        for e in found
        for what in ("save", "load")
    ]
    print(table(lines, header=["", "ranks", "", "seconds", *_PARTS]))
    write_json(args.json, {"check": checked, "played": asdict(played), "predictions": found})
    if args.plot:
        _plot(found, args.plot)


_PARTS = ("collectives", "messages", "own", "coordinator", "metadata", "data")


if __name__ == "__main__":
    main()
