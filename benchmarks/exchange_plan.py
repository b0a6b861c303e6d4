"""What it costs the coordinator to plan who reads what for whom, at thousands of ranks.

    python -m benchmarks.exchange_plan [--shards 1024] [--replicas 2] [--blocks 32] [--json file]

One process plays all ranks of Llama-3-8B under HSDP with AdamW, that load what a job of as many
shards has saved: ``shards`` ranks hold each element once, and each of ``replicas`` such groups all
of it.  One rank of each shard plans its load, its replicas' plans are copies.  No data file is
written, no element is moved.

Seconds are CPU seconds of one thread: ``plan``, from the reads as they arrive, as columns, to all
ranks' schedules; ``pickle``, of the answers.  ``down``: bytes of a rank's answer, the most and the
mean.  Stock's planner has nothing alike: each of its ranks reads all that it wants.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama import llama_units
from benchmarks.measure import table, write_json
from benchmarks.metadata_index import layouts, metadata_of
from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader
from dcp_fsdp_osd.compact import Lazy, no_collections
from dcp_fsdp_osd.exchange.decide import SharedReads
from dcp_fsdp_osd.exchange.reads import SentItems, in_order
from dcp_fsdp_osd.exchange.regions import Participant
from dcp_fsdp_osd.exchange.schedule import plan_exchange
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout import FlatLayout
from dcp_fsdp_osd.load.agree import Agreed
from dcp_fsdp_osd.load.wire import AnswerLoadPlan
from dcp_fsdp_osd.storage.metadata import dump_metadata, fill_metadata

__all__ = ["main", "measure"]

_HOST = 8  # ranks


def _reads(layout: FlatLayout, metadata: Any) -> tuple[Any, ...]:
    """Of one shard, as they arrive: items, dtypes, whether on a GPU, and their digest."""
    params = tuple(torch.nn.Parameter(torch.empty(p.numel, device="meta")) for p in layout.params)
    target = Target(layout, params, (torch.device("cpu"),) * len(params))
    planner = FlatOptimLoadPlanner.from_targets(
        {"optim": torch.optim.AdamW(params)}, {"optim": target}
    )
    planner.set_up_planner({"optim": {}}, metadata, True)
    items = in_order(planner.create_local_plan().items)
    stored = metadata.state_dict_metadata
    kept = (getattr(stored[item.storage_index.fqn], "properties", None) for item in items)
    dtypes = tuple(each and each.dtype for each in kept)
    cuda = (False,) * len(items)
    digest = Participant.digest_of(items, dtypes, cuda)
    return SentItems(SentItems.pack(items), len(items), True), dtypes, cuda, digest


def measure(shards: int, replicas: int, blocks: int) -> dict[str, float]:
    torch.set_num_threads(1)
    ranks = layouts(llama_units(4096, blocks), shards)
    with tempfile.TemporaryDirectory() as folder, no_collections():
        saved, entries = metadata_of(ranks)
        fill_metadata(saved, entries, "crc32c")
        Path(folder, ".metadata").write_bytes(dump_metadata(saved))
        metadata = StreamingReader(folder).read_metadata()
        reads = [_reads(layout, metadata) for layout in ranks]
    participants = [
        Participant(number, f"host{number // _HOST}", True, *reads[number % shards])
        for number in range(shards * replicas)
    ]
    gc.collect()
    gc.freeze()
    clock = time.process_time
    begin = clock()
    with no_collections():
        plan = plan_exchange(participants, metadata, reads_parts=True)
    planned = clock()
    if plan is None:
        raise SystemExit("expected at least 2 replicas")
    down = []
    for schedule in plan.ranks:
        answer = AnswerLoadPlan(Lazy(list), None, Agreed([], SharedReads(schedule, "f" * 32)))
        down.append(len(pickle.dumps(answer)))
    return {
        "ranks": len(participants),
        "shards": shards,
        "boxes": len(entries),
        "plan": planned - begin,
        "pickle": clock() - planned,
        "down, most": max(down),
        "down, mean": sum(down) / len(down),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=32, help="of the model; 32: Llama-3-8B")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    row = measure(options.shards, options.replicas, options.blocks)
    print(table([list(row.values())], header=list(row)))
    write_json(options.json, {"options": vars(options), "rows": [row]})


if __name__ == "__main__":
    main()
