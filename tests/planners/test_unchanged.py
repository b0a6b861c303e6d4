"""A planner that knows a state dict from before plans as one that has never seen any.

The oracle of each case is a new planner: what is sent, and what is written of each item, are the
same bytes, or the error is the same.  Planning sends nothing, so that ranks do this by themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_fsdp_osd import FlatModelState, FlatOptimSavePlanner, FlatOptimState
from tests.models import Mlp, train_steps, two_groups, wrap_fsdp1
from tests.ranks import run_ranks

State = dict[str, Any]


class Own:
    """Makes items of its own."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(f"{fqn}.own"), WriteItemType.BYTE_IO)]


class Number(int):
    pass


class Level(enum.IntEnum):
    LOW = 1


class Kept:
    """An object of some class of the user's."""

    def __init__(self, text: str) -> None:
        self.text = text


class Subclass(torch.Tensor):
    pass


class Job:
    def __init__(self, flat: bool, policy: str = "blocks", kind: Any = torch.optim.AdamW) -> None:
        self.model = wrap_fsdp1(
            Mlp(width=3, hidden=5, depth=1), policy=policy, use_orig_params=not flat
        )
        self.model.register_buffer("seen", torch.arange(4))
        params: Any = self.model.parameters() if flat else two_groups(self.model)
        self.optim = kind(params, lr=0.01)
        train_steps(self.model, self.optim, 1)

    def state(self) -> State:
        optim = FlatOptimState(self.model, self.optim).state_dict()
        extra = {
            "count": 5,
            "again": 5,
            "flag": True,
            "list": [1, 2],
            "pair": (1, 2.0),
            "nested": {"a": {"b": None}, "c": [{"d": 1}, torch.ones(2)]},
            "numbers": {0: "x", 1: "y"},
            "kept": Kept("a"),
            "tensor": torch.arange(6.0).view(2, 3),
            "same": (shared := torch.zeros(3)),
            "tied": shared,
            "params": [1, 2],
        }
        found: State = copied({"optim": optim, "extra": extra})
        return {"model": copied(FlatModelState(self.model).state_dict()), **found, "step": 7}


def copied(value: Any) -> Any:
    """Other containers of the same values."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if type(value) is list else value


def planned(planner: FlatOptimSavePlanner, state: State, coordinator: bool = False) -> Any:
    """What is sent, and what is written, in bytes; or the error."""
    try:
        planner.set_up_planner(state, None, coordinator)
        plan = planner.create_local_plan()
        sent = pickle.loads(pickle.dumps(plan)).planner_data
        written = [(item, _written(planner, item)) for item in plan.items]
    except Exception as error:
        return type(error), str(error)
    return dataclasses.astuple(sent), written, planner.mappings


def _written(planner: FlatOptimSavePlanner, item: WriteItem) -> Any:
    if item.type == WriteItemType.BYTE_IO:
        value = planner.lookup_object(item.index)  # as bytes they are a third of the test's time
        return type(value), vars(value) if isinstance(value, Kept) else repr(value)
    tensor = planner.resolve_data(item).detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    data = dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return type(tensor), tensor.dtype, tuple(tensor.shape), data


def items_are_kept(planner: FlatOptimSavePlanner, state: State) -> bool:
    before = planner.plan.items
    planned(planner, state)
    return len(planner.plan.items) == len(before) and all(
        new is old for new, old in zip(planner.plan.items, before, strict=True)
    )


def _optim(state: State) -> Any:
    return state["optim"]["state"]


def _first(state: State) -> Any:
    """The state of the first parameter of which this rank has any."""
    return next(each for each in _optim(state).values() if each["exp_avg"].numel() > 1)


def _put(value: Any, *path: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        *above, last = path
        here: Any = state
        for step in above:
            here = here[step]
        here[last] = value

    return change


def _avg(make: Callable[[torch.Tensor], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        _first(state)["exp_avg"] = make(_first(state)["exp_avg"])

    return change


def _step(value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        for each in _optim(state).values():
            each["step"] = value

    return change


def _of_group(change: Callable[[dict[str, Any]], Any]) -> Callable[[State], None]:
    return lambda state: [change(group) for group in state["optim"]["param_groups"]] and None


def _reordered(value: dict[Any, Any]) -> None:
    value[next(iter(value))] = value.pop(next(iter(value)))


def _swapped(state: State) -> None:
    first = state["optim"]["param_groups"][0]["params"]
    first[0], first[-1] = first[-1], first[0]


def _guard(state: State, kind: str) -> Any:
    key = next(key for key in state[kind] if key.startswith("__needs"))
    state[kind][key] = copy.copy(state[kind][key])
    return state[kind][key]


def _problem(kind: str) -> Callable[[State], None]:
    return lambda state: setattr(_guard(state, kind), "problem", "cannot be saved now")


def _other_defaults(state: State) -> None:
    guard = _guard(state, "optim")
    was = guard.optimizer["defaults"]
    guard.optimizer = {**guard.optimizer, "defaults": {**was, "amsgrad": 0}}  # False == 0


VALUES: dict[str, Callable[[State], Any]] = {
    "nothing": lambda state: None,
    "in place": lambda state: [each["exp_avg"].mul_(1.5) for each in _optim(state).values()],
    "another tensor": _avg(lambda tensor: torch.full_like(tensor, 3.0)),
    "a tensor elsewhere in its memory": _avg(
        lambda t: torch.arange(t.numel() + 3, dtype=t.dtype)[3:].view(t.shape)
    ),
    "steps": _step(torch.tensor(9.0)),
    "a step of one": lambda state: _first(state).update(step=torch.tensor(11.0)),
    "lr": _of_group(lambda group: group.update(lr=0.5)),
    "betas": _of_group(lambda group: group.update(betas=(0.5, 0.6))),
    "a number": _put(6, "extra", "count"),
    "one of two equal numbers": _put(6, "extra", "again"),
    "a longer list": _put([1, 2, 3, 4], "extra", "list"),
    "a list of other kinds": _put(["x", None], "extra", "list"),
    "a pair": _put((3, 4.0), "extra", "pair"),
    "an object": _put(Kept("b"), "extra", "kept"),
    "one of two tied tensors": _put(torch.ones(3), "extra", "tied"),
    "a weight": lambda state: next(v for k, v in state["model"].items() if "weight" in k).add_(1),
    "a buffer": lambda state: state["model"]["seen"].add_(1),
}
"""After these a plan is as before."""

OTHERS: dict[str, Callable[[State], Any]] = {
    "dtype": _avg(lambda tensor: tensor.half()),
    "dtype of equal size": _avg(lambda tensor: tensor.view(torch.int32)),
    "shape": _avg(lambda tensor: tensor[:-1]),
    "dims": _avg(lambda tensor: tensor.view(1, -1)),
    "strides": _avg(lambda tensor: torch.stack([tensor, tensor], 1)[:, 0]),
    "an expanded scalar": _avg(lambda tensor: torch.ones(()).expand(tensor.shape)),
    "a gradient": _avg(lambda tensor: tensor.clone().requires_grad_()),
    "a parameter": _avg(lambda tensor: nn.Parameter(tensor.clone())),
    "a subclass": _avg(lambda tensor: tensor.clone().as_subclass(Subclass)),
    "no values": _avg(lambda tensor: tensor.to("meta")),
    "a scalar": _avg(lambda tensor: 3.0),
    "a list of a tensor": _avg(lambda tensor: [tensor]),
    "a number for a tensor": _step(7.0),
    "one dimension": _step(torch.tensor([7.0])),
    "a step of double": _step(torch.tensor(7.0, dtype=torch.float64)),
    "state more": lambda state: _first(state).update(more=torch.tensor(1.0)),
    "state less": lambda state: _first(state).pop("exp_avg_sq"),
    "state renamed": lambda state: _first(state).update(other=_first(state).pop("exp_avg")),
    "state in another order": lambda state: _reordered(_first(state)),
    "parameters in another order": lambda state: _reordered(_optim(state)),
    "no state of one": lambda state: _optim(state).pop(next(iter(_optim(state)))),
    "state of the user's": lambda state: _optim(state).update(own={"a": 1}),
    "a number beyond": lambda state: _optim(state).update({99: {"a": 1}}),
    "option more": _of_group(lambda group: group.update(note="x")),
    "option less": _of_group(lambda group: group.pop("amsgrad")),
    "option of lists": _of_group(lambda group: group.update(betas=[0.5, 0.6])),
    "option of a dict": _of_group(lambda group: group.update(betas={"a": 0.5})),
    "ids swapped": _swapped,
    "an id twice": lambda state: state["optim"]["param_groups"][0]["params"].append(0),
    "an id less": lambda state: state["optim"]["param_groups"][0]["params"].pop(),
    "an id that is true": _put([True], "optim", "param_groups", 0, "params"),
    "group more": lambda state: state["optim"]["param_groups"].append({"params": []}),
    "extra of the optimizer": _put(1, "optim", "wrapper"),
    "a number for a flag": _put(1, "extra", "flag"),
    "a kind of number": _put(Number(5), "extra", "count"),
    "a number of an enum": _put(Level.LOW, "extra", "count"),
    "a tensor for a number": _put(torch.tensor(5), "extra", "count"),
    "a list with a tensor": _put([1, torch.ones(2)], "extra", "list"),
    "a tuple with a tensor": _put((1, torch.ones(2)), "extra", "pair"),
    "a tuple with nothing": _put((1, torch.ones(2, device="meta")), "extra", "pair"),
    "a tuple for a list": _put((1, 2), "extra", "list"),
    "a list with a dict": _put([{"d": 1}], "extra", "list"),
    "an empty dict": _put({}, "extra", "nested", "a", "b"),
    "text keys": _put({"0": "x", 1: "y"}, "extra", "numbers"),
    "keys that are true": _put({0: "x", True: "y"}, "extra", "numbers"),
    "keys of floats": _put({0.0: "x", 1: "y"}, "extra", "numbers"),
    "ordered": _put(OrderedDict({0: "x", 1: "y"}), "extra", "numbers"),
    "with default": _put(defaultdict(int, {0: "x", 1: "y"}), "extra", "numbers"),
    "own items": _put(Own(), "extra", "kept"),
    "no list of ids": _put([2, 1], "extra", "params"),
    "transposed": _put(torch.arange(6.0).view(3, 2).t(), "extra", "tensor"),
    "sparse": _put(torch.eye(3).to_sparse(), "extra", "tensor"),
    "a key more": _put(1, "epoch"),
    "a key less": lambda state: state.pop("step"),
    "another optimizer's dict": lambda state: state.update(other=copied(state["optim"])),
    "no guard": lambda state: state["optim"].pop(next(iter(state["optim"]))),
    "a problem of the optimizer": _problem("optim"),
    "a problem of the model": _problem("model"),
    "other defaults": _other_defaults,
    "a buffer of floats": _put(torch.arange(4.0), "model", "seen"),
    "a buffer more": _put(torch.ones(1), "model", "later"),
    "a buffer less": lambda state: state["model"].pop("seen"),
}
"""After these it may not be."""
OF_FLAT = ("dtype", "shape", "strides", "ids swapped", "no state of one", "other defaults")
"""Those of them that flat parameters have otherwise."""


def _all_cases(rank: int, world: int, flat: bool) -> int:
    job = Job(flat)
    cases = {**VALUES, **OTHERS}
    names = [name for name in cases if not flat or name in VALUES or name in OF_FLAT]
    for name in names[rank::world]:
        change = cases[name]
        planner = FlatOptimSavePlanner()
        state = copy.deepcopy(job.state()) if name in VALUES else job.state()
        before = planned(planner, state)
        assert isinstance(before[0], tuple), before
        assert planned(planner, state) == before
        change(state)
        if name in VALUES:
            assert items_are_kept(planner, state), name
        found = planned(planner, state)
        assert found == planned(FlatOptimSavePlanner(), state), name
        assert planned(planner, state) == found, name
        if name in OTHERS:  # and back, with other containers and Statefuls
            assert planned(planner, job.state()) == before, name
    return len(names[rank::world])


@pytest.mark.parametrize("flat", [False, True])
def test_whatever_changes(flat: bool) -> None:
    of = len(OF_FLAT) if flat else len(OTHERS)
    assert sum(run_ranks(_all_cases, 2, flat)) == len(VALUES) + of


def _other_jobs(rank: int, world: int) -> None:
    """The same keys, of models and optimizers that are others; to and fro."""
    jobs = [
        Job(False),
        Job(False, "root"),
        Job(True),
        Job(False, kind=torch.optim.Adam),
        Job(False, kind=torch.optim.Adagrad),
        Job(False),
    ]
    planner = FlatOptimSavePlanner()
    for number in (0, 1, 0, 2, 1, 3, 0, 4, 5, 0):
        for coordinator in (False, rank == 0, False):
            state = jobs[number].state()
            found = planned(planner, state, coordinator)
            assert isinstance(found[0], tuple), found
            assert found == planned(FlatOptimSavePlanner(), state, coordinator), number
    state = jobs[0].state()
    assert items_are_kept(planner, state)
    # A step later: made anew by the optimizer, and by the Statefuls.
    train_steps(jobs[0].model, jobs[0].optim, 1)
    assert items_are_kept(planner, jobs[0].state())
    plain = FlatOptimSavePlanner(jobs[0].model, jobs[0].optim)
    for _ in range(3):
        train_steps(jobs[0].model, jobs[0].optim, 1)
        state = {"optim": jobs[0].optim.state_dict()}
        fresh = FlatOptimSavePlanner(jobs[0].model, jobs[0].optim)
        assert planned(plain, state) == planned(fresh, state)
    assert items_are_kept(plain, state)


def test_other_models_and_optimizers() -> None:
    run_ranks(_other_jobs, 2)


class Doubling(FlatOptimSavePlanner):
    """Puts something in when it is set up, and takes away what it has planned."""

    def set_up_planner(self, state_dict: State, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        self.state_dict["saved at"] = self.count = getattr(self, "count", 0) + 1
        if self.count > 1:
            del self.state_dict["step"]


def test_a_subclass_may_do_what_it_likes() -> None:
    planner = Doubling()
    keys = []
    for _ in range(3):
        planner.set_up_planner({"step": 1, "tensor": torch.ones(2)}, None, True)
        keys.append({item.index.fqn for item in planner.create_local_plan().items})
    assert keys == [{"step", "tensor", "saved at"}, *[{"tensor", "saved at"}] * 2]
