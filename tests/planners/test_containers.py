"""Keys and mappings of any kind come back as what they were; what cannot is refused by its key."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FullStateReader,
    verify_model_state,
    verify_optim_state,
)
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.ranks import run_ranks


def unlike(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two values differ in type, key, order of an OrderedDict, or any bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [path]
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} {left!r} != {type(right).__name__} {right!r}"]
    if isinstance(left, Mapping):
        mine, theirs = ({(type(k), repr(k)): k for k in each} for each in (left, right))
        if mine.keys() != theirs.keys() or (
            isinstance(left, OrderedDict) and list(mine) != list(theirs)
        ):
            return [f"{path}: keys {list(left)} != {list(right)}"]
        if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
            return [f"{path}: factory"]
        return [d for k in mine for d in unlike(left[mine[k]], right[theirs[k]], f"{path}.{k[1]}")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{path}: {len(left)} != {len(right)} items"]
        return [
            d
            for i, p in enumerate(zip(left, right, strict=True))
            for d in unlike(*p, f"{path}[{i}]")
        ]
    return [] if repr(left) == repr(right) else [f"{path}: {left!r} != {right!r}"]


def mixed(like: torch.Tensor | None = None) -> dict[Any, Any]:
    """Mappings with keys of every type, and of every kind; with tensors like ``like``."""
    fresh = torch.arange(4.0) if like is None else torch.randn_like(like)
    return {
        0: fresh.clone(),
        11: {"deep": {7: fresh + 1, -3: "minus"}},
        "2": 2,
        None: "nothing",
        True: "yes",
        0.5: "half",
        (1, ("a", None)): "tuple",
        b"raw": 1,
        "ordered": OrderedDict([("z", 1), (5, fresh + 2), ("a", 2)]),
        "defaulted": defaultdict(list, {3: [1], "x": []}),
        "nothing yet": defaultdict(dict),
        "none": OrderedDict(),
        "counted": Counter({"a": 2, 9: 1}),
        "listed": [{4: fresh + 3}, OrderedDict([(6, 1)])],
    }


class Heavy(torch.optim.SGD):
    """All state of a parameter under the key 0, as in heavyball; state of all kinds beside it."""

    everything = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["table"] = {1: "one", "two": {2: OrderedDict([(3, 0.5)])}}
            for i, p in enumerate(group["params"]):
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                if 0 not in state:
                    state[0] = {"exp_avg": torch.zeros_like(p), "step": 0}
                    if self.everything and i % 2:
                        kinds = mixed(p)
                        state.update({k: v for k, v in kinds.items() if k not in (0, 11)})
                        state["one"] = kinds[11]
                state[0]["exp_avg"].mul_(0.9).add_(p.grad)
                state[0]["step"] += 1
                p -= 0.1 * state[0]["exp_avg"]

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        torch.manual_seed(0)
        return {**found, "own": mixed(), "plain": OrderedDict([(1, {"x": 1})])}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


def _model(seed: int, use_orig_params: bool) -> tuple[nn.Module, Heavy]:
    model = wrap_fsdp1(Mlp(seed=seed), use_orig_params=use_orig_params)
    optim = Heavy(model.parameters(), lr=0.1)
    train_steps(model, optim, 2)
    return model, optim


def _come_back(rank: int, world: int, path: str, use_orig_params: bool) -> list[str]:
    torch.manual_seed(0)
    model, optim = _model(0, use_orig_params)
    optim.state["user"] = mixed()  # type: ignore[index]
    optim.state[(1, "b")] = {2: torch.ones(3)}  # type: ignore[index]
    optim.state[None] = {"x": OrderedDict([(1, 2)])}  # type: ignore[index]
    expected = optim.state_dict()
    weights = [p.detach().clone() for p in model.parameters()]
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=path, planner=planner)
    assert verify_optim_state(model, optim, path).ok

    def loaded(into: dict[str, Any], strict: bool = True) -> Any:
        state = {"optim": into}
        planner = FlatOptimLoadPlanner(again, fresh, strict=strict)
        dcp.load(state, checkpoint_id=path, planner=planner)
        return {**state["optim"], "state": dict(state["optim"]["state"])}

    again, fresh = _model(1, use_orig_params)
    found = [f"empty {d}" for d in unlike(loaded({}), expected)]
    fresh.state["user"] = mixed()  # type: ignore[index]
    fresh.state[(1, "b")] = {2: torch.zeros(3)}  # type: ignore[index]
    found += [f"in place {d}" for d in unlike(loaded(fresh.state_dict()), expected)]
    again, fresh = _model(1, use_orig_params)
    found += [f"loose {d}" for d in unlike(loaded(fresh.state_dict(), strict=False), expected)]
    found += [
        f"step {line}" for line in _next_step(again, fresh, loaded({}), weights, model, optim)
    ]
    return found


def _next_step(
    again: Any, fresh: Any, state: Any, weights: Any, model: Any, optim: Any
) -> list[str]:
    """The next step must not make a fresh key 0."""
    with torch.no_grad():
        for p, w in zip(again.parameters(), weights, strict=True):
            p.copy_(w)
    fresh.load_state_dict(state)
    train_steps(again, fresh, 1, first=2)
    train_steps(model, optim, 1, first=2)
    pairs = zip(again.parameters(), model.parameters(), strict=True)
    return [f"parameter {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_keys_and_mappings_of_every_kind(tmp_path: Path, use_orig_params: bool) -> None:
    for found in run_ranks(_come_back, 2, str(tmp_path), use_orig_params):
        assert not found, "\n".join(found[:20])


def _forms(rank: int, world: int, path: str) -> list[str]:
    """Into an empty dict in the sharded and the full form, and from one rank's full state."""
    model, optim = _model(0, True)
    optim.state[(1, "b")] = {2: OrderedDict([(1, torch.ones(3))])}  # type: ignore[index]
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=path, planner=planner)
    expected = optim.state_dict()
    found = []
    for form in ("sharded", "full"):
        state: dict[str, Any] = {"optim": {}}
        dcp.load(state, checkpoint_id=path, planner=FlatOptimLoadPlanner(model, optim, form=form))
        got = state["optim"]
        found += [
            f"{form} {d}"
            for d in unlike(
                _keys(got["state"]["first.weight"][0]), {"exp_avg": "tensor", "step": 2}
            )
        ]
        found += [
            f"{form} {d}" for d in unlike(got["state"][(1, "b")], expected["state"][(1, "b")])
        ]
        for name in ("own", "plain"):
            found += [f"{form} {d}" for d in unlike(got[name], expected[name])]
        options = got["param_groups"][0]
        found += [
            f"{form} {d}" for d in unlike(options["table"], expected["param_groups"][0]["table"])
        ]
    state["optim"]["state"].pop((1, "b"))  # a full state does not tell whose it is
    full = state["optim"] if rank == 0 else None
    again, fresh = _model(1, False)
    state = {"optim": {}}
    planner = FlatOptimLoadPlanner(again, fresh)
    dcp.load(state, storage_reader=FullStateReader(full), planner=planner)
    for name in ("own", "plain"):
        found += [f"full state {d}" for d in unlike(state["optim"][name], expected[name])]
    for each in state["optim"]["state"].values():
        found += [] if 0 in each else [f"full state: {list(each)}"]
    return found


def _keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return type(value)([(k, _keys(v)) for k, v in value.items()])
    return "tensor" if isinstance(value, torch.Tensor) else value


def test_other_forms(tmp_path: Path) -> None:
    for found in run_ranks(_forms, 2, str(tmp_path)):
        assert not found, "\n".join(found[:20])


# ---------------------------------------------------------------- in one process: what is refused


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _plain(options: dict[str, Any] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    optim.param_groups[0].update(options or {})
    return model, optim


class _Own(dict[Any, Any]):
    pass


class _OwnList(list[Any]):
    pass


class _OwnKey(str):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({torch.float32: 1}, "torch.float32 of torch.dtype"),
        ({_OwnKey("a"): 1}, "_OwnKey"),
        ({(1, torch.float32): 1}, "torch.dtype"),
        ({0: 1, "0": 2}, "expected keys that differ as text, found 0 and '0'"),
        (_Own(a=1), "_Own"),
        (_Own(), "_Own"),
        (MappingProxyType({"a": 1}), "mappingproxy"),
        (defaultdict(lambda: 0, {"a": 1}), "defaultdict of a built-in type"),
        (_OwnList([torch.ones(2)]), "_OwnList"),
        ({"below": [{"x": {torch.float32: 1}}]}, "table.below.0.x"),
    ],
)
@pytest.mark.parametrize("where", ["state", "user", "group", "extra"])
def test_what_cannot_come_back_is_refused(
    tmp_path: Path, value: Any, text: str, where: str
) -> None:
    model, optim = _plain({"table": value} if where == "group" else None)
    state = optim.state_dict()
    if where == "state":
        state["state"][0]["table"] = value
    if where == "user":
        state["state"]["mine"] = {"table": value}
    if where == "extra":
        state["table"] = value
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(
            {"optim": state}, checkpoint_id=tmp_path, planner=FlatOptimSavePlanner(model, optim)
        )
    assert text in str(caught.value)
    assert "table" in str(caught.value)
    assert not Path(tmp_path, ".metadata").exists()


def test_a_number_that_is_no_parameter_is_refused(tmp_path: Path) -> None:
    model, optim = _plain()
    for number in (7, 2.0):
        state = optim.state_dict()
        state["state"][number] = {"x": 1}
        with pytest.raises(dcp.api.CheckpointException, match="a number is a parameter's"):
            planner = FlatOptimSavePlanner(model, optim)
            dcp.save({"optim": state}, checkpoint_id=tmp_path, planner=planner)


def test_verify_tells_of_keys_and_mappings(tmp_path: Path) -> None:
    model, optim = _plain({"table": {1: 2}})
    state = optim.state[model.weight]
    state[0] = {"x": torch.ones(2, 2)}
    state["odd"] = OrderedDict([("a", 1)])
    optim.state["mine"] = {3: "x"}  # type: ignore[index]
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=tmp_path, planner=planner)
    assert verify_optim_state(model, optim, tmp_path).ok
    state["0"] = state.pop(0)
    state["odd"] = {"a": 1}
    optim.state["mine"] = {"3": "x"}  # type: ignore[index]
    optim.param_groups[0]["table"] = {"1": 2}
    told = "\n".join(map(str, verify_optim_state(model, optim, tmp_path).differences))
    assert "weight.0: key 0 in the checkpoint, '0' here" in told
    assert "weight.odd: a OrderedDict in the checkpoint, a dict here" in told
    assert "mine.3: key 3 in the checkpoint, '3' here" in told
    assert "param_groups.0.table: {1: 2} in the checkpoint, {'1': 2} here" in told
    assert len(told.splitlines()) == 4
    with pytest.raises(
        dcp.api.CheckpointException, match=r"weight\.0: key 0 in the checkpoint, .0."
    ):
        dcp.load(
            {"optim": optim.state_dict()},
            checkpoint_id=tmp_path,
            planner=FlatOptimLoadPlanner(model, optim),
        )


def test_in_place_from_a_stock_checkpoint(tmp_path: Path) -> None:
    """Stock PyTorch does not record what keys were; those that are there tell."""
    model, optim = _plain({"table": {1: 2}})
    optim.state[model.weight][0] = {"x": torch.ones(2, 2), 5: OrderedDict([("a", 1)])}
    state = optim.state_dict()
    named = dict(enumerate(["weight", "bias"]))
    by_name = {
        "state": {named[k]: v for k, v in state["state"].items()},
        "param_groups": [{**g, "params": ["weight", "bias"]} for g in state["param_groups"]],
    }
    dcp.save({"optim": by_name}, checkpoint_id=tmp_path)
    again, fresh = _plain({"table": {1: 3}})
    fresh.state[again.weight][0] = {"x": torch.zeros(2, 2), 5: OrderedDict([("a", 0)])}
    loaded = {"optim": fresh.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path, planner=FlatOptimLoadPlanner(again, fresh))
    assert not unlike(loaded["optim"], state)


class _WithExtra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_states_of_models(tmp_path: Path) -> None:
    model, other = _WithExtra(2, 2), _WithExtra(2, 2)
    model.extra, other.extra = mixed(), mixed()
    other.extra[0] += 1
    other.extra["ordered"][5] += 1
    planner = FlatOptimSavePlanner(model, {})
    dcp.save({"model": FlatModelState(model)}, checkpoint_id=tmp_path, planner=planner)
    assert verify_model_state(model, tmp_path).ok
    expected = {**mixed(), 0: torch.arange(4.0)}
    planner = FlatOptimLoadPlanner(other, {})
    dcp.load({"model": FlatModelState(other)}, checkpoint_id=tmp_path, planner=planner)
    assert not unlike(other.extra, expected)


def test_other_values_of_the_state_dict_load_under_their_keys(tmp_path: Path) -> None:
    model, optim = _plain()
    rest = {"loader": {0: 5, "b": {(1, 2): "x"}}, "list": [{3: "y"}, torch.ones(1)]}
    state = {"optim": FlatOptimState(model, optim), **rest}
    dcp.save(state, checkpoint_id=tmp_path, planner=FlatOptimSavePlanner(model, optim))
    into: dict[str, Any] = {
        "optim": FlatOptimState(model, optim),
        "loader": {0: 0, "b": {(1, 2): ""}},
        "list": [{3: ""}, torch.zeros(1)],
    }
    dcp.load(into, checkpoint_id=tmp_path, planner=FlatOptimLoadPlanner(model, optim))
    assert not unlike({k: into[k] for k in rest}, rest)
