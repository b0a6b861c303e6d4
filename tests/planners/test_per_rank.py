"""State that differs between ranks: kept for each where it may, refused where it may not."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    verify_optim_state,
)
from dcp_fsdp_osd.tree import digest
from tests.models import Mlp, Odd, train_steps, wrap_fsdp1
from tests.planners.checks import differences, load, save
from tests.planners.test_silent_save import error_of
from tests.ranks import run_ranks


@dataclasses.dataclass(eq=False)
class Preconditioner:
    """As ScalableShampoo keeps: an object with tensors inside, new at every step."""

    matrix: torch.Tensor
    names: set[str] = dataclasses.field(default_factory=lambda: {"a", "b", "c"})
    owner: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preconditioner) and torch.equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return 0


def test_digests_of_equal_objects() -> None:
    def make(**changes: Any) -> Preconditioner:
        return dataclasses.replace(Preconditioner(torch.arange(6.0).view(2, 3)), **changes)

    assert digest(make()) == digest(make())
    assert digest([make(), make()]) == digest([make()] * 2)
    assert digest(make()) != digest(make(matrix=torch.arange(6.0).view(3, 2)))
    assert digest(make()) != digest(make(matrix=-torch.arange(6.0).view(2, 3)))
    assert digest(make()) != digest(make(names={"a"}))
    left, right = make(), make()
    left.owner, right.owner = left, right
    assert digest(left) == digest(right) != digest(make())
    right.matrix = right.matrix + 1
    assert digest(left) != digest(right)


def test_digests_of_deep_shared_and_cyclic_objects() -> None:
    """Each part is walked once, however many ways lead to it."""

    def linked(last: float) -> Any:
        nodes = [Preconditioner(torch.full((2,), float(n))) for n in range(40)]
        for number, node in enumerate(nodes):
            near = nodes[max(0, number - 3) : number + 4]
            node.near = {f"{k}": other for k, other in enumerate(near)}
        nodes[-1].matrix = torch.full((2,), last)
        return {"first": nodes[0], 1: nodes}

    shared: Any = {"leaf": torch.ones(2)}
    for _ in range(100):
        shared = {"a": shared, "b": shared}
    assert digest(shared) == digest(dict(shared)) != digest({"a": shared})
    assert digest(linked(1.0)) == digest(linked(1.0)) != digest(linked(2.0))
    assert digest([threading.Lock()]) == digest([threading.Lock()])


class PerPiece(torch.optim.SGD):
    """RMS of the local piece, an equal object on all ranks, a table at the top, an option."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            seen = 0.0
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                state["RMS"] = p.grad.norm()
                state["local"] = Preconditioner(p.grad.clone().flatten()[:3])
                state["same"] = Preconditioner(torch.ones(2))
                seen += float(p.grad.norm())
                p -= 0.1 * state["exp_avg"]
            group["d"] = seen

    ema: Any = None

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        if self.ema is not None:
            found["own"] = {"ema": self.ema, "same": torch.ones(2), 3: [1, 2]}
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        self.ema = state_dict.get("own", {}).get("ema", self.ema)
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


def _trained(use_orig_params: bool, steps: int = 2, seed: int = 0) -> Any:
    model = wrap_fsdp1(Mlp(seed=seed), use_orig_params=use_orig_params)
    optim = PerPiece(model.parameters(), lr=0.1)
    train_steps(model, optim, steps)
    optim.ema = [p.detach().clone() + seed for p in model.parameters()]
    return model, optim


def _same_layout(rank: int, world: int, path: str, use_orig_params: bool) -> list[str]:
    model, optim = _trained(use_orig_params)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save(model, optim, path)
    found = []
    text = " ".join(str(w.message) for w in told)
    if rank == 0 and not all(
        name in text for name in ("kept for each", "own.ema.0", "param_groups.0.d")
    ):
        found.append(f"no warning: {text}")
    expected = optim.state_dict()
    again, fresh = _trained(use_orig_params, seed=1)
    found += [f"empty: {d}" for d in differences(load(again, fresh, path), expected)]
    found += [
        f"in place: {d}"
        for d in differences(load(again, fresh, path, into=fresh.state_dict()), expected)
    ]
    reader = StreamingReader(path, allow_pickle=True)
    found += [f"verify: {d}" for d in verify_optim_state(model, optim, reader).differences]
    return found


def _other_layout(rank: int, world: int, path: str, use_orig_params: bool) -> list[str]:
    model, optim = _trained(use_orig_params, steps=0)
    optim.ema = None
    texts = [error_of(load, model, optim, path)]
    state: dict[str, Any] = {"optim": {}}
    planner = FlatOptimLoadPlanner(model, optim, strict=False)
    dcp.load(state, checkpoint_id=path, planner=planner)
    assert state["optim"]["param_groups"][0]["lr"] == 0.1
    assert "d" not in state["optim"]["param_groups"][0]
    skipped = "\n".join(planner.skipped)
    assert all(name in skipped for name in ("RMS", "param_groups.0.d", "own.ema.0"))
    for form in ("full", "sharded"):
        texts.append(error_of(load, model, optim, path, form=form))
    return texts


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_kept_per_rank_and_loaded_at_the_same_layout_only(
    tmp_path: Path, use_orig_params: bool
) -> None:
    for found in run_ranks(_same_layout, 2, str(tmp_path), use_orig_params):
        assert not found, "\n".join(found[:10])
    for texts in run_ranks(_other_layout, 3, str(tmp_path), use_orig_params):
        for text in texts:
            assert "saved per rank" in text


def _ddp(rank: int, world: int, path: str) -> list[str]:
    """Ranks that hold the same part cannot be told apart: refused."""
    model = DistributedDataParallel(Mlp())
    texts = []
    for change in ("scalar", "option", "extra", "user", "whole"):
        optim = PerPiece(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step()
        optim.ema = [torch.full((3,), float(rank if change == "extra" else 0))]
        first = optim.state[next(model.parameters())]
        if change == "scalar":
            first["RMS"] = torch.tensor(float(rank))
        if change == "option":
            optim.param_groups[0]["d"] = rank
        if change == "user":
            optim.state["mine"] = {"x": torch.full((3,), float(rank))}  # type: ignore[index]
        text = error_of(save, model, optim, f"{path}/{change}")
        texts.append(text if change != "whole" else "")
    return texts


def test_ranks_of_one_layout_that_differ_are_refused(tmp_path: Path) -> None:
    names = ["RMS: ranks [0] / [1]", "option 'd' differs", "own.ema.0: ranks", "mine.x: ranks", ""]
    for texts in run_ranks(_ddp, 2, str(tmp_path)):
        for text, name in zip(texts, names, strict=True):
            assert name in text


class Coincident(torch.optim.SGD):
    """Per-rank tensors whose shape is that of the whole parameter, or of the piece, somewhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.state[p]["scales"] = p.grad.flatten().repeat(20)[: p.numel() // 2 + 7]
                    self.state[p]["six"] = p.grad.flatten().repeat(20)[:6]


def _coincident(rank: int, world: int, path: str) -> list[str]:
    found = []
    for kind in (Mlp, Odd):
        model = wrap_fsdp1(kind())
        optim = Coincident(model.parameters(), lr=0.1)
        train_steps(model, optim, 1)
        there = f"{path}/{kind.__name__}"
        save(model, optim, there)
        again = wrap_fsdp1(kind())
        fresh = Coincident(again.parameters(), lr=0.1)
        found += differences(load(again, fresh, there), optim.state_dict())
    return found


def test_shapes_that_are_alike_by_accident(tmp_path: Path) -> None:
    for world in (2, 3):
        for found in run_ranks(_coincident, world, str(tmp_path / str(world))):
            assert not found, "\n".join(found[:10])


def _lbfgs(rank: int, world: int, path: str) -> list[str]:
    """Keeps the state of all parameters with the first, of which most ranks have nothing."""
    found = []
    for policy in ("root", "blocks"):
        model = wrap_fsdp1(Mlp(), policy=policy)
        optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        for step in range(2):
            generator = torch.Generator().manual_seed(step * 100 + rank)
            data = model.module.batch(generator)

            def closure(model: Any = model, optim: Any = optim, data: Any = data) -> Any:
                optim.zero_grad()
                loss = model(data).pow(2).mean()
                loss.backward()
                for p in model.parameters():
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                return loss

            optim.step(closure)
        there = f"{path}/{policy}"
        save(model, optim, there)
        again = wrap_fsdp1(Mlp(seed=1), policy=policy)
        fresh = torch.optim.LBFGS(again.parameters(), lr=0.1, max_iter=2)
        expected = optim.state_dict()
        found += [f"{policy}: {d}" for d in differences(load(again, fresh, there), expected)]
        live = load(model, optim, there, into=optim.state_dict())
        found += [f"{policy} in place: {d}" for d in differences(live, expected)]
        found += [
            f"{policy} verify: {d}" for d in verify_optim_state(model, optim, there).differences
        ]
    return found


def _lbfgs_elsewhere(rank: int, world: int, path: str) -> list[str]:
    """Another world; or the first parameter cut as it was, but others not."""
    plain = Mlp(seed=1)
    within = {id(linear) for block in plain.blocks for linear in block.children()}
    inner = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: id(m) in within)
    texts = []
    for saved, policy in (("root", "root"), ("blocks", inner)):
        model = wrap_fsdp1(plain if policy is inner else Mlp(seed=1), policy=policy)
        optim = torch.optim.LBFGS(model.parameters(), lr=0.1)
        texts.append(error_of(load, model, optim, f"{path}/{saved}"))
    return texts


def test_state_of_a_parameter_that_is_empty_here(tmp_path: Path) -> None:
    for found in run_ranks(_lbfgs, 3, str(tmp_path)):
        assert not found, "\n".join(found[:10])
    for world, which in ((2, slice(2)), (3, slice(1, 2))):
        for texts in run_ranks(_lbfgs_elsewhere, world, str(tmp_path)):
            assert all("saved per rank" in text for text in texts[which])


# ---------------------------------------------------------------- what is no optimizer's


def _others(rank: int, world: int, path: str) -> tuple[str, list[str]]:
    model = DistributedDataParallel(Mlp())
    model.register_buffer("seen", torch.tensor(rank))  # as batch statistics are each rank's own
    large = torch.zeros(1 << 19)
    large[-1] = rank
    state: dict[str, Any] = {
        "same": {"a": torch.ones(3), "b": [1, 2], "large": torch.ones(1 << 19)},
        "model": model.state_dict(),
        "net": {"a": torch.tensor([rank])},
        f"own_{rank}": rank,
    }
    differing = {"rng": torch.full((4,), rank), "loader": {"at": rank}, "large": large}
    planner = FlatOptimSavePlanner(model, {}, model_key=["model", "net"])
    text = error_of(dcp.save, {**state, **differing}, checkpoint_id=f"{path}/1", planner=planner)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dcp.save(state, checkpoint_id=f"{path}/2", planner=planner)
    return text, [str(w.message) for w in told if "differ between ranks" in str(w.message)]


def test_values_that_differ_under_one_key(tmp_path: Path) -> None:
    """Refused on all ranks; but for what a model keeps for each, of which all are told."""
    (text, (told,)), (other, none) = run_ranks(_others, 2, str(tmp_path))
    assert "found that large, loader.at, rng differ" in text and "model_key" in text
    assert "found that large, loader.at, rng differ" in other
    assert told.startswith("2 values of models differ between ranks and are saved from one")
    assert told.endswith("model.seen, net.a") and none == []
