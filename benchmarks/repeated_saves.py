"""What planning costs in the first save and in those after it, for many simulated ranks.

    python -m benchmarks.repeated_saves [--ranks 256 1024] [--flat] [--json out.json]

One process plays all ranks of Llama-3-8B under FSDP1, wrapped per block, with AdamW: names and
numbers of tensors are that model's, their sizes 1/4096 of it, as planning moves no element.  Each
rank makes its local plan; what DCP sends is pickled, the coordinator unpickles all plans, makes the
global plan and pickles the answers.  Between saves the step and the learning rate change.

Columns: ``coordinator``, seconds in which all ranks wait for it (unpickle, plan, pickle); ``rank``,
seconds of one rank for its local plan and its answer, mean; ``up`` and ``down``, KB of one rank's
plan and answer as sent, mean; ``of first``, coordinator and rank together as a share of the first
save's.
"""

from __future__ import annotations

import argparse
import pickle
import time
from typing import Any

import torch

from benchmarks.measure import table, write_json
from dcp_fsdp_osd import FlatOptimSavePlanner
from dcp_fsdp_osd.layout import FlatLayout, Unit, simulate

__all__ = ["main"]

_SAVES = 3


def _llama(flat: bool) -> list[Unit]:
    width, hidden, vocabulary, keys = 64, 224, 2004, 16  # 1/64 of 4096, 14336, 128256, 1024
    block = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    root = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    named = [root] + [
        {f"model.layers.{number}.{name}": shape for name, shape in block.items()}
        for number in range(32)
    ]
    return [Unit(tuple(each.items()), use_orig_params=not flat) for each in named]


class _Rank:
    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        self.planner = FlatOptimSavePlanner.from_layouts({"optim": layout})
        self.tensors = [torch.zeros(param.numel) for param in layout.params]

    def state(self, step: int) -> dict[str, Any]:
        state = {
            number: {"step": torch.tensor(float(step)), "exp_avg": tensor, "exp_avg_sq": tensor}
            for number, tensor in enumerate(self.tensors)
            if tensor.numel()
        }
        group = {"lr": 1 / step, "betas": (0.9, 0.95), "params": list(range(len(self.tensors)))}
        return {"optim": {"state": state, "param_groups": [group]}}

    def plan(self, step: int, coordinator: bool) -> bytes:
        self.planner.set_up_planner(self.state(step), None, coordinator)
        return pickle.dumps(self.planner.create_local_plan())

    def finish(self, answer: bytes) -> None:
        self.planner.finish_plan(pickle.loads(answer))


def _save(ranks: list[_Rank], step: int) -> dict[str, float]:
    start = time.perf_counter()
    sent = [rank.plan(step, rank is ranks[0]) for rank in ranks]
    planned = time.perf_counter()
    plans, _ = ranks[0].planner.create_global_plan([pickle.loads(each) for each in sent])
    answers = [pickle.dumps(plan) for plan in plans]
    answered = time.perf_counter()
    for rank, answer in zip(ranks, answers, strict=True):
        rank.finish(answer)
    own = (planned - start + time.perf_counter() - answered) / len(ranks)
    return {
        "coordinator": answered - planned,
        "rank": own,
        "up": sum(map(len, sent)) / len(sent) / 1e3,
        "down": sum(map(len, answers)) / len(answers) / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    units = _llama(args.flat)
    rows, results = [], {}
    for world in args.ranks:
        ranks = [_Rank(simulate(units, world_size=world, rank=rank)) for rank in range(world)]
        saves = [_save(ranks, step) for step in range(1, _SAVES + 1)]
        results[str(world)] = saves
        first = saves[0]["coordinator"] + saves[0]["rank"]
        for number, save in enumerate(saves, 1):
            share = (save["coordinator"] + save["rank"]) / first
            rows.append([f"{world} ranks, save {number}", *save.values(), share])
    print(table(rows, header=["", "coordinator", "rank", "up", "down", "of first"]))
    write_json(args.json, {"saves": results})


if __name__ == "__main__":
    main()
