"""One optimizer's load on one rank: allocation, destinations, and the finished state dict."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.checkpoint import index_checkpoint, is_flattened
from dcp_fsdp_osd.containers import Containers, containers_of, key_clashes, remade
from dcp_fsdp_osd.errors import CheckpointMismatchError, listed
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import FlatLayout, param_id, without_wrappers
from dcp_fsdp_osd.layout.geometry import narrowed_view
from dcp_fsdp_osd.load.groups import SavedGroups, match_groups
from dcp_fsdp_osd.load.plan import plan_load
from dcp_fsdp_osd.load.schedule import Leaf, LoadSchedule
from dcp_fsdp_osd.lowbit.load import QuantizedLoad
from dcp_fsdp_osd.misuse.flat_form import flat_states
from dcp_fsdp_osd.optim_class import OptimClass
from dcp_fsdp_osd.stateful.guard import is_guarded, mark_loaded, without_guard
from dcp_fsdp_osd.tree import Path, digest, dotted, leaves, set_leaf, text_keys

__all__ = ["OptimLoad"]


_OR_OWN_STATE = (
    "; if it is state of the user's own, give the optimizer that name first: optim.state[name] = {}"
)


class OptimLoad:
    """Loads one optimizer's state dict.  Call order: ``plan``, ``allocate``, ``destination`` and
    ``objects`` for each read, ``finish``.

    Args:
        target: the live optimizer's layout and parameters.
        path: of the optimizer in state dict and checkpoint.
        value: the dict that is loaded; changed by ``finish`` alone (its tensors by the reads).
        optim: the optimizer; read for options that were not saved, never changed.
        metadata: of the checkpoint.
        strict: whether what does not match is an error.

    ``applies`` is False where DCP's default way is the right one (FQN-keyed values).
    """

    what = "optimizer has no such parameter"

    def __init__(
        self,
        target: Target,
        path: tuple[str, ...],
        value: dict[str, Any],
        *,
        optim: torch.optim.Optimizer,
        metadata: Metadata,
        strict: bool,
    ) -> None:
        self.target = target
        self.layout = target.layout
        self.path = path
        self.key = ".".join(path)
        self.value = value
        self.live: dict[str, Any] = without_guard(value)
        self.with_own_keys: Mapping[str, Any] = self.live
        self.applies = self._is_flat_form()
        self.optim = optim
        self.groups: Sequence[Mapping[str, Any]] = optim.param_groups
        self.group_names = _group_names(optim, self.layout)
        self.optim_state: Mapping[torch.Tensor, Any] = optim.state
        self.strict = strict
        # The optimizer's own names in ``state``, in the dict that is loaded or in the optimizer.
        own = [*self.live.get("state", {}), *(n for n in optim.state if isinstance(n, str))]
        self.own_names = {str(name) for name in own if param_id(name, self.layout) is None}
        names = [n for fqn in self.layout.ids for n in self.layout.names_of(fqn)]
        self.index = index_checkpoint(metadata, path, names)
        self.quantized = QuantizedLoad(target, self.index, metadata, path, optim)
        saved_by = self.index.info.optimizers if self.index.info is not None else ()
        if self.index.info is None:
            self.what += _OR_OWN_STATE
        self.optim_class = OptimClass(optim, saved_by, self.index.options())
        if self.applies:
            self.live = self.quantized.split(self.live)
        self.schedule = LoadSchedule()
        self.objects: dict[str, Any] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        self.late: list[str] = []
        self._result: dict[str, Any] = {}
        self._scalars_in_place: list[tuple[torch.Tensor, torch.Tensor]] = []

    def plan(self) -> LoadSchedule:
        lost = self._take_own()
        self.schedule = plan_load(
            self.target,
            self.index,
            self.live,
            key=self.key,
            user=self.own_names,
            quantized=self.quantized,
            optim_class=self.optim_class,
        )
        self.schedule.problems += lost
        if self.index.knows_containers:
            self._check_keys()
        return self.schedule

    def _take_own(self) -> list[str]:
        """Find what this rank saved of no parameter as its own; a line for each that it cannot."""
        lost: list[str] = []
        user = set(self.index.info.user if self.index.info is not None else ())
        for name, found in self.index.opaque.items():
            if name and (self.layout.resolve(name) is not None or name not in user):
                continue  # of a parameter
            own = found.get(self.layout.signature)
            if own is None:
                for path in dict.fromkeys(p for paths in found.values() for p in paths):
                    label = dotted((name, *path) if name else path)
                    lost.append(
                        f"{label}: saved per rank, as it differed between ranks; this rank held "
                        f"something else of the model, or did not take part. Load at the world "
                        f"size and wrapping of the save"
                    )
            for path, key in (own or {}).items():
                if name:
                    self.index.state.setdefault(name, {})[path] = key
                elif path[0] == "param_groups":
                    self.index.groups.setdefault(path[1], {})[path[2:]] = key
                else:
                    self.index.extra[path] = key
        return lost

    def _check_keys(self) -> None:
        """An optimizer does not find what is loaded under another key than its own."""
        paths: dict[int | None, list[Path]] = {}
        for leaf in self.schedule.leaves:
            paths.setdefault(leaf.param, []).append(leaf.path)
        for name, state in self.with_own_keys.get("state", {}).items():
            number = param_id(name, self.layout)
            if number is None:
                continue
            live = _containers_here(state)
            fqn = self.layout.params[number].fqns[0]
            lines = key_clashes(self.saved_containers(number), live, paths.get(number, ()))
            self.schedule.problems += [f"{fqn}.{line}" for line in lines]

    def saved_containers(self, number: int) -> Containers:
        """Of one parameter's state."""
        found = Containers()
        for fqn in reversed(self.layout.params[number].fqns):
            for name in reversed(self.layout.names_of(fqn)):
                found.update(self.index.containers.below(("state", name)))
        return found

    def _containers(self, saved: Containers, live: Any, paths: Sequence[Path]) -> Containers:
        """``saved``, and those of ``live`` where the checkpoint does not tell.

        Args:
            paths: of the values that were loaded.
        """
        found = _containers_here(live)
        if self.index.knows_containers:
            told = {path[:n] for path in paths for n in range(len(path))}
            found = Containers((p, each) for p, each in found.items() if p not in told)
        found.update(saved)
        return found

    def _is_flat_form(self) -> bool:
        """Empty, or keyed by parameter ids (or by names, with flat values)."""
        if not self.live or is_guarded(self.value):
            return True
        if is_flattened(self.live) or "param_groups" not in self.live:
            return False
        ids = [n for group in self.live["param_groups"] for n in group["params"]]
        text = [n for n in ids if not isinstance(n, int)]
        if not text or any(self._fqn(n) != n for n in text):
            return True  # numbers, or names as the wrapped model has them
        flat = False
        for name, state in self.live["state"].items():
            number = param_id(name, self.layout)
            if number is None:
                continue
            param = self.layout.params[number]
            for _, leaf in leaves(state):
                plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
                if not plain or not param.sharded or not leaf.dim():
                    continue
                whole = tuple(leaf.shape) in param.shapes
                if whole and not param.is_flat_shape(leaf.shape):
                    return False
                flat = flat or (not whole and param.is_flat_shape(leaf.shape))
        return flat

    def _fqn(self, name: str) -> str | None:
        """``name`` without the names of wrappers; None for a flat parameter's own name."""
        number = param_id(name, self.layout)
        if number is None or self.layout.resolve(name) is not None:
            return name
        clean = (n for n in without_wrappers(name) if self.layout.resolve(n) is not None)
        return next(clean, None)

    def names(self) -> list[str]:
        """What this rank has a use for, under any of its names."""
        live = [*self.own_names]
        user = list(self.index.info.user) if self.index.info is not None else []
        own = [n for fqn in self.layout.ids for n in self.layout.names_of(fqn)]
        return own + list(self.index.renamed) + live + user

    def saved_names(self) -> list[str]:
        """Names that the checkpoint has state of."""
        if self.index.by_number:  # no names at all, which is a problem of its own
            return []
        raw = {fqn: name for name, fqn in self.index.renamed.items()}
        return [raw.get(name, name) for name in self.index.state]

    # ------------------------------------------------------------ allocate, read

    def allocate(self) -> None:
        """Make the tensors that are not there yet, each with memory of its own."""
        for leaf in self.schedule.leaves:
            if leaf.kind in ("object", "scalar", "skipped") or leaf.tensor is not None:
                continue
            if leaf.like is not None:
                leaf.tensor = leaf.like.empty(leaf.dtype)
                continue
            leaf.tensor = self._empty(leaf)
            if leaf.kind == "local" and leaf.filled < leaf.tensor.numel():
                _zero_gaps(leaf, leaf.tensor)

    def _empty(self, leaf: Leaf) -> torch.Tensor:
        """Like the parameter in memory order, which fused optimizers rely on."""
        device = self._device(leaf)
        if leaf.kind == "whole" and leaf.param is not None:
            like = self.target.params[leaf.param]
            if tuple(like.shape) == leaf.shape and not like.is_contiguous():
                return torch.empty_like(like, dtype=leaf.dtype, device=device, requires_grad=False)
        return empty_for_reading(leaf.shape, leaf.dtype, device)

    def _device(self, leaf: Leaf) -> torch.device:
        if leaf.kind == "group" or leaf.param is None:
            return torch.device("cpu")
        return self.target.devices[leaf.param]

    def place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        """Dtype and device of :meth:`destination`, which need not be allocated yet."""
        found = self.schedule.destinations.get(item.dest_index)
        if found is None:  # an object
            return None, torch.device("cpu")
        leaf, _ = found
        if leaf.tensor is not None and leaf.kind != "scalar":
            return leaf.dtype, leaf.tensor.device
        return leaf.dtype, self._place(leaf)

    def _place(self, leaf: Leaf) -> torch.device:
        return torch.device("cpu") if leaf.kind == "scalar" else self._device(leaf)

    def destination(self, item: ReadItem) -> torch.Tensor:
        leaf, piece = self.schedule.destinations[item.dest_index]
        if leaf.kind == "scalar":
            key = item.dest_index.fqn
            if key not in self.scalars:
                self.scalars[key] = torch.empty((), dtype=leaf.dtype)
            return self.scalars[key]
        tensor = leaf.tensor
        if tensor is None:
            raise CheckpointMismatchError(f"{item.dest_index.fqn}: read before it was allocated")
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        view = piece.view(local) if piece is not None else local
        return narrowed_view(view, item.dest_offsets, item.lengths)

    # ------------------------------------------------------------ finish

    def finish(self) -> None:
        """Put the state dict together, all reads being done; :meth:`hand_over` then gives it.

        Raises:
            CheckpointMismatchError: what was read cannot be one optimizer's state.
        """
        clashes: list[str] = []
        missing: list[str] = []
        groups = self._saved_groups()
        known = {name for members in groups.members.values() for name in members}
        for number, param in enumerate(self.layout.params):
            lacking = [fqn for fqn in param.fqns if self._lacks(fqn, known)]
            self.schedule.skip.update(lacking)
            if len(lacking) == len(param.fqns):
                self.schedule.keep.add(number)
            if self.index.known_groups() is None:  # else they were problems of the plan
                missing += [f"{fqn}: not in the checkpoint" for fqn in lacking]
        new_groups = match_groups(groups, self.layout, self._now(), self.key)
        if not self.index.knows_containers:
            new_groups = [
                remade(group, _containers_here(now))
                for group, now in zip(new_groups, self._now(), strict=True)
            ]
        state = self._state(new_groups, clashes)
        self._refuse(clashes, missing)
        for tensor, value in self._scalars_in_place:
            tensor.copy_(value)
        self._zero_stateless(known)
        result_groups = []
        for group, ids in zip(new_groups, self._group_ids(), strict=True):
            result_groups.append({**group, "params": ids})
        self._result = {"state": flat_states(state, self.layout), "param_groups": result_groups}
        extras: dict[Any, Any] = {}
        paths = [leaf.path for leaf in self.schedule.leaves if leaf.extra]
        for leaf in self.schedule.leaves:
            if leaf.extra:
                set_leaf(extras, leaf.path, self._value(leaf, False, []))
        live = {k: v for k, v in self.live.items() if k not in ("state", "param_groups")}
        self._result |= remade(extras, self._containers(self.index.containers, live, paths))

    def _refuse(self, clashes: list[str], missing: list[str]) -> None:
        """Raise for what was found after reading; what is ``missing`` may be so if not strict."""
        if clashes or (missing and self.strict):
            raise CheckpointMismatchError(
                f"{self.key}: the checkpoint is not of this model and optimizer; the state that "
                f"was loaded in place is not to be used:\n  " + listed(clashes + missing)
            )
        self.late = missing

    def _lacks(self, fqn: str, known: set[str]) -> bool:
        """Whether a parameter is neither in ``known`` groups of the checkpoint nor has state."""
        names = self.layout.names_of(fqn)
        return not known.intersection(names) and not any(n in self.index.state for n in names)

    def hand_over(self) -> None:
        """Fill the dict that is loaded; after :meth:`finish` of all that are loaded together."""
        self.value.update(self._result)
        mark_loaded(self.value)

    def _zero_stateless(self, known: set[str]) -> None:
        """In tensors loaded in place, zero the parts of FQNs that were saved without state.

        Fresh tensors have zeros there already; FQNs that are skipped (which ``strict=False``
        admits) keep what they have.
        """
        for leaf in self.schedule.leaves:
            if leaf.kind != "local" or not leaf.live or leaf.param is None or leaf.tensor is None:
                continue
            for segment in self.layout.params[leaf.param].segments:
                if segment.fqn in self.schedule.skip or segment.fqn in leaf.sources:
                    continue
                if known.intersection(self.layout.names_of(segment.fqn)):
                    leaf.tensor[segment.offset : segment.offset + segment.numel].zero_()

    def release(self) -> None:
        """Let go of what was loaded; the state dict owns it now."""
        self.schedule.leaves.clear()
        self.schedule.destinations.clear()
        self.objects.clear()
        self.scalars.clear()
        self._scalars_in_place.clear()
        self.quantized.release()
        self.value, self.live, self.with_own_keys, self._result = {}, {}, {}, {}

    def _now(self) -> Sequence[Mapping[str, Any]]:
        groups: Sequence[Mapping[str, Any]] = self.live.get("param_groups") or self.groups
        return groups

    def _group_ids(self) -> list[list[Any]]:
        if self.live.get("param_groups"):
            return [list(group["params"]) for group in self.live["param_groups"]]
        if self.group_names is not None:
            return self.group_names
        return [list(ids) for ids in self.layout.groups]

    def _saved_groups(self) -> SavedGroups:
        saved = SavedGroups()
        tensors = {leaf.name: leaf.tensor for leaf in self.schedule.leaves if leaf.kind == "group"}
        found: dict[int | str, dict[str, Any]] = {}
        if self.index.one_list is not None:
            found.update(enumerate(map(dict, self.objects[self.index.one_list])))
        for group, options in self.index.groups.items():
            values: dict[str, Any] = {}
            for path, key in options.items():
                value: Any = self.objects[key] if key in self.objects else tensors[key]
                _put(values, path, value)
            found[group] = remade(values, self.index.containers.below(("param_groups", group)))
        for group, values in found.items():
            members = values.pop("params", None)
            values.pop("param_names", None)  # of the wrapping then; the current ones stay
            names = [group] if members is None else members
            saved.members[group] = [self._fqn(str(name)) or str(name) for name in names]
            saved.options[group] = values
        return saved

    def _state(self, groups: Sequence[Mapping[str, Any]], problems: list[str]) -> dict[Any, Any]:
        """The new ``state``; a value that must not be used adds to ``problems``."""
        old = self.live.get("state", {})
        ids = {param_id(key, self.layout): key for key in old}
        names = {param_id(n, self.layout): n for group in self._group_ids() for n in group}
        leaves_of: dict[int | None, list[Leaf]] = {}
        for leaf in self.schedule.leaves:
            if leaf.kind not in ("group", "skipped") and not leaf.extra:
                leaves_of.setdefault(leaf.param, []).append(leaf)
        capturable = {
            number
            for group, numbers in zip(groups, self.layout.groups, strict=True)
            if group.get("fused") or group.get("capturable")
            for number in numbers
        }
        plain: Mapping[str, Any] = self.objects.get(self.index.one_state or "", {})
        without_tensors = {param_id(name, self.layout): value for name, value in plain.items()}
        state: dict[Any, Any] = {}
        for number, param in enumerate(self.layout.params):
            kept = old.get(ids.get(number))
            if number in self.schedule.keep:
                values = kept
            elif param.empty and number not in leaves_of:
                values = self._initial(number, kept)
            else:
                values = {} if kept is None or self.strict else text_keys(kept)
                values.update(without_tensors.get(number) or {})
                for leaf in leaves_of.get(number, ()):
                    _put(values, leaf.path, self._value(leaf, number in capturable, problems))
            if values:
                self.quantized.join(number, values)
                state[names[number]] = values
                if values is not kept:
                    saved = self.saved_containers(number)
                    live = self.with_own_keys.get("state", {}).get(ids.get(number), {})
                    paths = [leaf.path for leaf in leaves_of.get(number, ())]
                    containers = self._containers(saved, live, paths)
                    state[names[number]] = remade(values, containers)
        return {**state, **self._user_state(leaves_of.get(None, ()), problems)}

    def _user_state(self, own: Sequence[Leaf], problems: list[str]) -> dict[Any, Any]:
        """State that is no parameter's."""
        live = self.with_own_keys.get("state", {})
        old = {k: v for k, v in live.items() if param_id(k, self.layout) is None}
        state: dict[Any, Any] = {}
        for leaf in own:
            set_leaf(state, (leaf.name, *leaf.path), self._value(leaf, False, problems))
        saved = self.index.containers.below(("state",))
        paths = [(leaf.name, *leaf.path) for leaf in own]
        kept = {key: value for key, value in old.items() if str(key) not in state}
        return {**remade(state, self._containers(saved, old, paths)), **kept}

    def _initial(self, number: int, kept: Any) -> Any:
        """What an optimizer that makes its state early has for a parameter without elements."""
        if kept is not None:
            return kept
        return copy.deepcopy(self.optim_state.get(self.target.params[number], None))

    def _value(self, leaf: Leaf, capturable: bool, problems: list[str]) -> Any:
        if leaf.kind not in ("object", "scalar"):
            return leaf.tensor
        found = {
            fqn: self.objects[key] if leaf.kind == "object" else self.scalars[key]
            for fqn, key in leaf.sources.items()
        }
        if len({digest(v) for v in found.values()}) > 1:
            problems.append(
                f"{dotted(leaf.path)}: expected one value for parameters that are one flat "
                f"parameter here, found "
                + ", ".join(f"{fqn}: {_plain(v)}" for fqn, v in found.items())
            )
        value = next(iter(found.values()))
        if leaf.tensor is not None:
            self._scalars_in_place.append((leaf.tensor, value))
            return leaf.tensor
        if isinstance(value, torch.Tensor) and leaf.param is not None and capturable:
            value = value.to(self.target.devices[leaf.param])
        return value


def _containers_here(value: Any) -> Containers:
    """Of what is live: what could not be saved is passed over."""
    return containers_of(value, (), strict=False)


def _group_names(optim: torch.optim.Optimizer, layout: FlatLayout) -> list[list[Any]] | None:
    """The parameters of each group as the optimizer's state dict names them, if by names.

    Optimizers that key their state by names pass over what they are given under numbers.
    """
    keys: Sequence[str] | None = getattr(optim, "ordered_param_keys", None)
    if keys is not None:  # `_NamedOptimizer`
        return [[keys[number] for number in ids] for ids in layout.groups]
    if type(optim).state_dict is torch.optim.Optimizer.state_dict:
        return None
    try:
        names = [list(group["params"]) for group in optim.state_dict()["param_groups"]]
    except Exception:  # one that has no state dict yet (ZeroRedundancyOptimizer): as any other
        return None
    numbers = ([param_id(name, layout) for name in group] for group in names)
    found = [sorted(number for number in group if number is not None) for group in numbers]
    text = all(isinstance(name, str) for group in names for name in group)
    return names if text and found == [sorted(ids) for ids in layout.groups] else None


def _put(values: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path``; torch before 2.4 saved what holds no tensor as one object."""
    if path:
        set_leaf(values, path, value)
    else:
        values.update(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _zero_gaps(leaf: Leaf, tensor: torch.Tensor) -> None:
    """Padding, and parameters without state, are zeros, as FSDP makes them."""
    at = 0
    spans = sorted(
        (piece.offset, piece.offset + piece.box.numel)
        for piece in leaf.pieces.values()
        if piece is not None
    )
    for low, high in [*spans, (tensor.numel(), tensor.numel())]:
        tensor[at:low].zero_()
        at = max(at, high)
