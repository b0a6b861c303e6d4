"""What a rank does for the table of optimizers: train, save, load, and say what became of it.

Every element of a state tensor that is shaped like this rank's part of its parameter is set to a
function of the element's number (``zoo``) and the state's name before the save.  Wherever the
checkpoint is loaded, each such element must be the one that its own number says.  Everything
else is compared with what the rank itself had, bit for bit, under the layout of the save.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner, FlatOptimState
from tests.optimizers.zoo import STRIDE, ZOO, Entry, build, local, train
from tests.planners.checks import differences, raw

__all__ = ["Saved", "load_elsewhere", "save_and_resume"]

REFUSALS = ("CheckpointMismatchError", "LayoutError")
Plain = dict[int, dict[tuple[Any, ...], Any]]  # number of a parameter -> path -> value


@dataclass
class Saved:
    """What became of one optimizer under one layout.

    Attributes:
        died: the optimizer's own error, where it cannot be made or stepped there.
        problems: by writer (``"ours"``, ``"stock"``), what went wrong in words: with the save or
            the load into an empty dict; with that in place under ``"ours, in place"``.
            ``refused: ...``, and ``cannot: ...`` and ``loses: ...`` of stock's own doing, are no
            faults of ours.
        path: writer -> the checkpoint.
        plain: what does not belong to single elements, by parameter; of all of this rank's.
    """

    died: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    path: dict[str, str] = field(default_factory=dict)
    plain: Plain = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- values


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _elementwise(
    state: Any, numbers: torch.Tensor
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]]:
    """Path, local tensor and expected values of each state that is shaped like the parameter."""
    for path, value in _leaves(state):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        part = local(value)
        if part.dim() and part.shape == numbers.shape:
            salt = sum(map(ord, str(path))) % 64
            yield path, part, ((numbers + STRIDE * 32 * salt) * 2.0**-21).to(part.dtype)


def _named(optim: torch.optim.Optimizer, state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Parameters and their states in a state dict."""
    params = [param for group in optim.param_groups for param in group["params"]]
    for key, value in state.items():
        if isinstance(key, int):
            yield params[key], value


def _of(numbers: torch.Tensor) -> list[int]:
    """Which parameters the elements are of."""
    return [int(n) for n in (numbers.flatten() // STRIDE).unique() if n >= 1]


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(
    optim: torch.optim.Optimizer, sd: Mapping[str, Any], numbers: Mapping[Any, torch.Tensor]
) -> Iterator[tuple[list[int], dict[tuple[Any, ...], Any]]]:
    """By parameter: scalars and options, and which states it has element by element."""
    params = [param for group in optim.param_groups for param in group["params"]]
    states = dict(_named(optim, sd["state"]))
    for group in sd["param_groups"]:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for param in (params[index] for index in group["params"]):
            if not (ids := _of(numbers[param])):
                continue
            state = states.get(param, {})
            every = [*_leaves(state), *_leaves(options, ("group",))]
            values = {path: copy.deepcopy(value) for path, value in every if _is_plain(value)}
            values.update((path, "elements") for path, *_ in _elementwise(state, numbers[param]))
            yield ids, values


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return raw(local(one).float()) == raw(local(two).float())
    return type(one) is type(two) and one == two


# ---------------------------------------------------------------- saving and loading


def _save(model: nn.Module, optims: Mapping[str, Any], path: str) -> None:
    state = {name: optim.state_dict() for name, optim in optims.items()}
    planner = FlatOptimSavePlanner(model, optims)
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)


def _load(
    model: nn.Module, optims: Mapping[str, Any], path: str, *, in_place: bool = False
) -> dict[str, Any]:
    """State dicts that were empty, and are full; in place, the optimizers have them already."""
    state = {name: FlatOptimState(model, o) if in_place else {} for name, o in optims.items()}
    planner = FlatOptimLoadPlanner(model, optims)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    return state


def _agreed(text: str) -> str:
    """What is wrong on any rank; a rank that alone stopped here would leave the others waiting."""
    if not dist.is_initialized():
        return text
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return next(filter(None, texts), "")


def _text(error: BaseException) -> str:
    """What an error says; DCP's, that of the first rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    kind = type(error).__name__
    return f"{'refused: ' if kind in REFUSALS else ''}{kind}: {error}"


def _attempt(
    action: Callable[[list[str]], Mapping[str, Any]], groups: Iterable[Sequence[str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Do ``action`` for each group of names at once; where that fails, for each name by itself.

    Returns results and errors by name.
    """
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for names in map(list, filter(None, groups)):
        text, got = "", {}
        try:
            got = dict(action(names))
        except (Exception, CheckpointException) as error:  # the second is no Exception
            text = _text(error)
        if not (text := _agreed(text)):
            results.update(got)
        elif len(names) == 1:
            errors[names[0]] = text
        else:
            got, failed = _attempt(action, [[name] for name in names])
            results.update(got)
            errors.update(failed)
    return results, errors


def save_and_resume(
    rank: int, world: int, layout: str, kind: str, groups: list[list[str]], folder: str
) -> dict[str, Saved]:
    """Train each optimizer, save it, go on, and go on once more from the checkpoint.

    ``groups`` are names that are expected to fare alike: they share checkpoints.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Source(layout, kind, groups, folder).run()


class _Source:
    def __init__(self, layout: str, kind: str, groups: list[list[str]], folder: str) -> None:
        self.layout, self.groups, self.folder = layout, groups, folder
        self.model, self.numbers = build(layout, kind)
        self.start = self.weights()
        self.saved = {name: Saved() for group in groups for name in group}
        self.optims: dict[str, Any] = {}
        self.at_save: dict[str, Any] = {}  # state dict and weights
        self.after: dict[str, Any] = {}  # losses and weights of the next steps
        self.count = 0

    def weights(self) -> list[torch.Tensor]:
        return [local(p).detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def set_weights(self, values: Iterable[torch.Tensor]) -> None:
        for param, value in zip(self.model.parameters(), values, strict=True):
            local(param).copy_(value)

    def run(self) -> dict[str, Saved]:
        for name, saved in self.saved.items():
            self._train(name, saved)
        groups = [[n for n in group if n in self.optims] for group in self.groups]
        self._write("ours", self._ours, groups)
        for name, optim in self.optims.items():
            found = differences(optim.state_dict(), self.at_save[name][0])
            text = f"the save changed {found[0]}" if found and not _holds_objects(found) else ""
            if text := _agreed(text):
                self.saved[name].problems["ours"] = text
        self._write("stock", self._stock, groups)  # may step an optimizer without state
        for name, optim in self.optims.items():
            self.after[name] = self._next(name, optim)
        for writer in ("ours", "stock"):
            for in_place in (False, True):
                self._resume(writer, groups, in_place)
        return self.saved

    def _write(self, writer: str, write: Any, groups: list[list[str]]) -> None:
        for name, text in _attempt(write, groups)[1].items():
            self.saved[name].problems[writer] = text

    def _train(self, name: str, saved: Saved) -> None:
        self.set_weights(self.start)
        try:
            optim = ZOO[name].make(self.model)
            train(name, self.model, optim, 2)
        except Exception as error:
            saved.died = _text(error)
        saved.died = _agreed(saved.died)
        if saved.died:
            return
        for param, state in _named(optim, optim.state_dict()["state"]):
            for _, part, values in _elementwise(state, self.numbers[param]):
                part.copy_(values)
        state = optim.state_dict()
        for ids, values in _plain(optim, state, self.numbers):
            saved.plain.update(dict.fromkeys(ids, values))
        self.optims[name] = optim
        self.at_save[name] = copy.deepcopy(state), self.weights()

    def _next(self, name: str, optim: Any) -> Any:
        self.set_weights(self.at_save[name][1])
        losses = train(name, self.model, optim, 2, first=2)
        return losses, self.weights()

    def _path(self, names: list[str], writer: str) -> str:
        self.count += 1
        path = f"{self.folder}/{writer}-{self.count}"
        for name in names:
            self.saved[name].path[writer] = path
        return path

    def _ours(self, names: list[str]) -> dict[str, None]:
        try:
            _save(self.model, {n: self.optims[n] for n in names}, self._path(names, "ours"))
        except BaseException:
            for name in names:
                del self.saved[name].path["ours"]
            raise
        return dict.fromkeys(names)

    def _stock(self, names: list[str]) -> dict[str, None]:
        state = {}
        for name in names:
            text = self._lost(name)
            try:
                state[name] = get_optimizer_state_dict(self.model, self.optims[name])
            except Exception as error:
                text = f"cannot: {_text(error)}"
            if text := _agreed(text):
                self.saved[name].problems["stock"] = text
                state.pop(name, None)
        if state:
            path = self._path(list(state), "stock")
            dcp.save(state, storage_writer=FileSystemWriter(path))
            self._find_lost_keys(state, path)
        return dict.fromkeys(names)

    def _lost(self, name: str) -> str:
        """What ranks have of one parameter that differs; stock keeps one rank's of it."""
        found: dict[tuple[int, Any], str] = {}
        for ids, values in _plain(self.optims[name], self.at_save[name][0], self.numbers):
            for path, value in values.items():
                text = repr(local(value) if isinstance(value, torch.Tensor) else value)
                found.update(((number, path), text) for number in ids)
        every = [found]
        if dist.is_initialized():
            every = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, found)
        for key in found:
            values = {each[key] for each in every if key in each}
            if len(values) > 1:
                return f"loses: {key} is {values}, one of which it keeps"
        return ""

    def _find_lost_keys(self, state: Mapping[str, Any], path: str) -> None:
        """Stock writes the key 0 of a mapping as "0", and says so nowhere."""
        written = FileSystemReader(path).read_metadata().planner_data.values()
        for name, sd in state.items():
            keys = {key for state in sd["state"].values() for key in state if isinstance(key, int)}
            known = {place[3] for place in written if place[0] == name and len(place) > 3}
            lost = sorted(keys - known)
            if text := _agreed(f"loses: keys {lost} of state are text in it" if lost else ""):
                self.saved[name].problems["stock"] = text
                del self.saved[name].path["stock"]

    def _resume(self, writer: str, groups: list[list[str]], in_place: bool) -> None:
        def act(names: list[str]) -> Mapping[str, Any]:
            fresh = {}
            for name in names:
                fresh[name] = self._fresh(name, with_state=in_place)
            path = self.saved[names[0]].path[writer]
            loaded = _load(self.model, fresh, path, in_place=in_place)
            return {name: (fresh[name], loaded[name]) for name in names}

        by_path: dict[str, list[str]] = {}
        for name in (name for group in groups for name in group):
            if writer in self.saved[name].path:
                by_path.setdefault(self.saved[name].path[writer], []).append(name)
        results, errors = _attempt(act, by_path.values())
        problems = {
            name: _agreed(
                self._compare(name, optim, loaded, exact=in_place or not ZOO[name].rounds)
            )
            for name, (optim, loaded) in results.items()
        }
        how = f"{writer}, in place" if in_place else writer
        for name, text in [*errors.items(), *problems.items()]:
            if text:
                self.saved[name].problems.setdefault(how, text)

    def _fresh(self, name: str, *, with_state: bool) -> Any:
        """An optimizer of its own; with state of the same kind as the saved one's, zeroed."""
        self.set_weights(self.start if with_state else self.at_save[name][1])
        optim = ZOO[name].make(self.model)
        if with_state:
            train(name, self.model, optim, 2)
            for _, value in _leaves(optim.state_dict()["state"]):
                if isinstance(value, torch.Tensor) and value.dim():
                    local(value).zero_()
        return optim

    def _compare(self, name: str, optim: Any, loaded: Any, *, exact: bool) -> str:
        """What differs from the run that never stopped: the state, and the next steps."""
        wrong = ""
        before = _with_elements(self.at_save[name][0])
        try:
            if isinstance(loaded, dict):
                found = differences(_with_elements(loaded)["state"], before["state"])
                optim.load_state_dict(loaded)
                cast = differences(optim.state_dict()["state"], loaded["state"])
                exact = exact and not cast  # by the optimizer, to its parameters' dtype
                found += differences(optim.state_dict()["param_groups"], before["param_groups"])
            else:
                found = differences(_with_elements(optim.state_dict()), before)
            if ZOO[name].counts_with_first:
                found = [line for line in found if not line.endswith(".step: only in one")]
            if found and not _holds_objects(found):
                wrong = f"{len(found)} differences, {found[0]}"
        except Exception as error:
            wrong = f"optim.load_state_dict raises {_text(error)}"
        if wrong := _agreed(wrong):
            return wrong
        try:
            losses, weights = self._next(name, optim)
        except Exception as error:
            return f"the next step raises {_text(error)}"
        expected, expected_weights = self.after[name]
        now, then = [torch.tensor(losses), *weights], [torch.tensor(expected), *expected_weights]
        for one, two in zip(now, then, strict=True):
            same = raw(one) == raw(two) if exact else torch.allclose(one, two, rtol=1e-4, atol=1e-5)
            if not same:
                return f"the next steps differ: {losses}, not {expected}"
        return ""


def _holds_objects(found: list[str]) -> bool:
    """Whether all that differs are objects without ``==``, told apart by the next steps."""
    return all(" object at 0x" in line for line in found)


def _with_elements(sd: Mapping[str, Any]) -> dict[str, Any]:
    """Without states of parameters that hold nothing at all here."""

    def anything(state: Any) -> bool:
        return any(
            not isinstance(value, torch.Tensor) or local(value).numel()
            for _, value in _leaves(state)
        )

    return {**sd, "state": {key: value for key, value in sd["state"].items() if anything(value)}}


# ---------------------------------------------------------------- elsewhere


def load_elsewhere(
    rank: int,
    world: int,
    layout: str,
    kind: str,
    checkpoints: list[tuple[str, list[str]]],
    plain: dict[str, Plain],
) -> dict[tuple[str, str], str]:
    """Load ``checkpoints`` (path, names) under another layout or world size.

    Returns what is wrong by (path, name); "" where each element and each scalar is the one that it
    ought to be, and a step can be made.
    """
    result: dict[tuple[str, str], str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, numbers = build(layout, kind)
        for path, names in checkpoints:

            def act(names: list[str], path: str = path) -> Mapping[str, Any]:
                fresh = {name: ZOO[name].make(model) for name in names}
                loaded = _load(model, fresh, path)
                return {name: (fresh[name], loaded[name]) for name in names}

            results, errors = _attempt(act, [names])
            result.update(((path, name), text) for name, text in errors.items())
            for name, (optim, loaded) in results.items():
                result[path, name] = _check(name, model, optim, loaded, numbers, plain[name])
    return result


def _check(
    name: str,
    model: nn.Module,
    optim: Any,
    loaded: dict[str, Any],
    numbers: Mapping[Any, torch.Tensor],
    plain: Plain,
) -> str:
    wrong = _first_wrong(ZOO[name], optim, loaded, numbers, plain)
    try:
        optim.load_state_dict(loaded)
    except Exception as error:
        wrong = wrong or f"optim.load_state_dict raises {_text(error)}"
    if wrong := _agreed(wrong):
        return wrong
    try:
        train(name, model, optim, 1, first=5)
    except Exception as error:
        return f"the next step raises {_text(error)}"
    return ""


def _first_wrong(
    entry: Entry,
    optim: Any,
    loaded: dict[str, Any],
    numbers: Mapping[Any, torch.Tensor],
    plain: Plain,
) -> str:
    for param, state in _named(optim, loaded["state"]):
        real = numbers[param] >= STRIDE
        for path, part, values in _elementwise(state, numbers[param]):
            if raw(part[real]) != raw(values[real]):
                return f"elements of {path} are not the parameter's"
    for ids, values in _plain(optim, loaded, numbers):
        expected = [plain.get(number, {}) for number in ids]  # a flat parameter has them of all
        for path in {path for each in expected for path in each}:
            known = [each[path] for each in expected if path in each]
            if path not in values or not any(_same(values[path], one) for one in known):
                return f"{path} of parameters {ids}: {values.get(path)!r}, not {known}"
        for path in values.keys() - {path for each in expected for path in each}:
            counted = entry.counts_with_first and path[-1] == "step"
            if path[0] != "group" and not counted:  # an option left out of its state dict
                return f"{path} of parameters {ids}: not in the state that was saved"
    return ""
