"""One rank's current state against a checkpoint's: what is read, and what is found to differ.

A comparison is made from a load that is planned and never finished: its destinations are the
current tensors, which are compared with what was read elsewhere.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.containers import Containers, containers_of, unlike
from dcp_fsdp_osd.errors import Mismatch
from dcp_fsdp_osd.layout.flat import param_id
from dcp_fsdp_osd.load.assemble import saved_containers
from dcp_fsdp_osd.load.model import ModelLoad
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.protocol import StateLoad
from dcp_fsdp_osd.load.schedule import Kind, Leaf
from dcp_fsdp_osd.tree import Path, digest, dotted
from dcp_fsdp_osd.verify.elements import Ranges, differing

_UNMET = "in the checkpoint, but not here"

__all__ = ["Comparison", "Difference", "ModelComparison", "OptimComparison"]


@dataclasses.dataclass(frozen=True, order=True)
class Difference:
    """One entry that is not the same in the checkpoint and now.

    Attributes:
        fqn: the parameter, buffer or name in ``state``; ``"param_groups.<i>"`` for options.
        state: the state or option (``"exp_avg"``, ``"lr"``); ``""`` for a model's own.
        ranks: global ranks that hold these elements, or found this.
        what: in words, expected and found.
        elements: how many elements differ.
        ranges: half-open intervals that hold them all, of row-major element numbers of the whole
            tensor, in order. Of more than `max_ranges` the closest are joined.
    """

    fqn: str
    state: str
    ranks: tuple[int, ...]
    what: str
    elements: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        spans = "".join(f" [{start}:{stop}]" for start, stop in self.ranges)
        name = f"{self.fqn}.{self.state}" if self.state else self.fqn
        return f"{name}: {self.what}{spans} (ranks {', '.join(map(str, self.ranks))})"


class Comparison:
    """What a planner needs to compare one thing; subclasses know whose it is.

    Args:
        load: is planned here, and never finished.
    """

    def __init__(self, load: StateLoad, metadata: Metadata, max_ranges: int) -> None:
        self.load = load
        self._storage: Mapping[str, Any] = metadata.state_dict_metadata
        self._max_ranges = max_ranges
        self._ranges: dict[str, Ranges] = {}  # by key
        self._labels: dict[str, tuple[str, str]] = {}  # key -> FQN and state
        self._differences: list[Difference] = []
        self._lock = threading.Lock()
        self._schedule = load.plan()
        for mismatch in self._schedule.mismatches:
            self._report(mismatch)

    def _report(self, mismatch: Mismatch) -> None:
        difference = Difference(mismatch.fqn, mismatch.state, (), mismatch.what)
        self._differences.append(difference)

    def items(self) -> list[ReadItem]:
        """This rank's reads, of what is there on both sides."""
        raise NotImplementedError

    def current(self, item: ReadItem, like: torch.Tensor) -> torch.Tensor:
        """The current elements that ``like`` was read of."""
        return self.load.destination(item).to(like.dtype)

    def finish(self) -> None:
        """Compare what is compared as a whole; all reads are done."""
        raise NotImplementedError

    def dtype_of(self, item: ReadItem) -> torch.dtype:
        storage = self._storage[item.dest_index.fqn]
        dtype = storage.properties.dtype if isinstance(storage, TensorStorageMetadata) else None
        return dtype if dtype is not None else torch.uint8

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        """Compare ``saved``, which ``item`` was read to, with the current elements."""
        key = item.dest_index.fqn
        at = item.dest_index.offset or torch.Size([0] * saved.dim())
        offsets = [a + b for a, b in zip(at, item.dest_offsets, strict=True)]
        ranges = self._ranges.setdefault(key, Ranges(self._max_ranges))
        current = self.current(item, saved)
        shape = self._storage[key].size
        for start, stop, count in differing(saved, current, offsets, shape, self._max_ranges):
            with self._lock:
                ranges.add(start, stop, count)

    def result(self) -> list[Difference]:
        for key, ranges in self._ranges.items():
            if ranges.count:
                what = f"{ranges.count} elements differ:"
                spans = tuple(ranges.spans())
                difference = Difference(*self._labels[key], (), what, ranges.count, spans)
                self._differences.append(difference)
        return list(dict.fromkeys(self._differences))

    def _compare_values(self, fqn: str, state: str, saved: Any, current: Any) -> None:
        if digest(saved) != digest(current):
            self._report(Mismatch(fqn, state, _short(saved), f"{_short(current)} here"))


class ModelComparison(Comparison):
    load: ModelLoad

    def items(self) -> list[ReadItem]:
        unwanted = set()
        for leaf in self._schedule.leaves:
            if leaf.kind is not Kind.MODEL:
                continue
            (key,) = leaf.sources.values()
            self._labels[key] = (leaf.name, "")
            own: torch.Tensor = self.load.current[leaf.name]
            dtype = self.load.guard.dtypes.get(leaf.name, own.dtype)
            if dtype != leaf.dtype:
                self._report(Mismatch(leaf.name, "", str(leaf.dtype), f"{dtype} here"))
                unwanted.add(key)
        self.load.allocate()
        return [item for item in self._schedule.items if item.dest_index.fqn not in unwanted]

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        if item.dest_index.fqn in self._labels:
            super().compare(item, saved)
        else:  # of an extra state
            self.load.destination(item).copy_(saved)

    def finish(self) -> None:
        for name, saved in self.load.extra_states().items():
            self._compare_values(name, "", saved, self.load.current[name])


class OptimComparison(Comparison):
    """Args: as of ``Comparison``, and

    prefix: of the names of param groups, where there are several optimizers.
    """

    load: OptimLoad

    def __init__(
        self, load: OptimLoad, metadata: Metadata, max_ranges: int, *, prefix: str = ""
    ) -> None:
        super().__init__(load, metadata, max_ranges)
        self._prefix = prefix

    def items(self) -> list[ReadItem]:
        unwanted: set[MetadataIndex] = set()
        self._small: list[Leaf] = []
        self._values = self.load.current.values()
        for leaf in self._schedule.leaves:
            if leaf.kind in (Kind.OPTION, Kind.SKIPPED):
                continue
            for fqn, key in leaf.sources.items():
                self._labels[key] = (fqn, dotted(leaf.path))
            current: Any = self._values.get(_place(leaf))
            if _place(leaf) not in self._values:
                for key in leaf.sources.values():
                    self._report(Mismatch(*self._labels[key], found=_UNMET))
            elif leaf.kind in (Kind.OBJECT, Kind.SCALAR):
                self._small.append(leaf)
                continue
            elif leaf.in_place or _alike(current, leaf):
                leaf.tensor = current.detach()
                continue
            else:
                saved, here = f"{leaf.dtype} {leaf.shape}", f"{_short(current)} here"
                self._report(Mismatch(leaf.name, dotted(leaf.path), saved, here))
            unwanted.update(leaf.pieces)
            unwanted.update(MetadataIndex(key) for key in leaf.sources.values())
        self._find_unsaved()
        self._compare_containers()
        self.load.allocate()
        return [item for item in self._schedule.items if item.dest_index not in unwanted]

    def _find_unsaved(self) -> None:
        """Current state that nothing in the checkpoint is to be loaded into."""
        wanted = {_place(leaf) for leaf in self._schedule.leaves}
        for owner, path in self._values.keys() - wanted:
            if not isinstance(owner, int):
                fqn, state = (owner, dotted(path)) if owner else (dotted(path), "")
                self._report(Mismatch(fqn, state))
                continue
            param = self.load.layout.params[owner]
            if owner not in self._schedule.keep and not param.empty:
                self._report(Mismatch(param.fqns[0], dotted(path)))

    def _compare_containers(self) -> None:
        """Of mappings that are of another kind, or have other keys of the same text."""
        load = self.load
        if not load.index.knows_containers:
            return
        paths: dict[Any, list[Path]] = {}
        for leaf in self._schedule.leaves:
            paths.setdefault("" if leaf.extra else _place(leaf)[0], []).append(leaf.path)
        for name, state in load.current.states.items():
            number = param_id(name, load.layout)
            if number is not None:
                saved = saved_containers(load.index, load.layout, number)
                fqn = load.layout.params[number].fqns[0]
                self._compare_mappings(fqn, saved, state, paths.get(number, ()))
            else:
                saved = load.index.containers.below(("state", str(name)))
                self._compare_mappings(str(name), saved, state, paths.get(str(name), ()))
        sections = ("state",), ("param_groups",)
        saved = Containers(
            (path, each) for path, each in load.index.containers.items() if path[:1] not in sections
        )
        self._compare_mappings("", saved, load.current.extras, paths.get("", ()))

    def _compare_mappings(
        self, fqn: str, saved: Containers, current: Any, paths: Sequence[Path]
    ) -> None:
        mine = containers_of(current, (), strict=False)
        for path, found, here in unlike(saved, mine, paths):
            where = (fqn, dotted(path)) if fqn else (dotted(path), "")
            self._report(Mismatch(*where, found, here))

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        if self._schedule.destinations[item.dest_index].kind in (Kind.SCALAR, Kind.OPTION):
            self.load.destination(item).copy_(saved)
        else:
            super().compare(item, saved)

    def finish(self) -> None:
        read = {**self.load.objects, **self.load.scalars}
        for leaf in self._small:
            current = self._values[_place(leaf)]
            for fqn, key in leaf.sources.items():
                self._compare_values(fqn, dotted(leaf.path), read.get(key), current)
        self._compare_groups()

    def _compare_groups(self) -> None:
        """Options by FQN, as a load matches them; ``params`` and ``param_names`` are no options."""
        saved = self.load.saved_groups()
        layout, index = self.load.layout, self.load.index
        home: dict[str, Any] = {}
        for group, members in saved.members.items():
            home.update((layout.resolve(name) or name, group) for name in members)
        for number, (ids, now) in enumerate(
            zip(layout.groups, self.load.current.groups, strict=True)
        ):
            fqns = [fqn for i in ids for fqn in layout.params[i].fqns]
            if index.known_groups() is None:  # else they were mismatches of the plan
                for fqn in fqns:
                    if fqn not in home and fqn not in index.state:
                        self._report(Mismatch(fqn))
            for group in dict.fromkeys(home[fqn] for fqn in fqns if fqn in home):
                self._compare_options(number, saved.options.get(group, {}), now)

    def _compare_options(
        self, number: int, saved: Mapping[str, Any], current: Mapping[str, Any]
    ) -> None:
        mine = {k: v for k, v in current.items() if k not in ("params", "param_names")}
        for name in sorted(saved.keys() | mine.keys()):
            where = f"{self._prefix}param_groups.{number}"
            if name not in saved:
                self._report(Mismatch(where, name))
            elif name not in mine:
                self._report(Mismatch(where, name, _UNMET))
            else:
                self._compare_values(where, name, saved[name], mine[name])


def _place(leaf: Leaf) -> tuple[Any, Path]:
    """Where a leaf lies in the current state dict, as ``Current.values`` has it."""
    if leaf.extra:
        return None, leaf.path
    return (leaf.param if leaf.param is not None else leaf.name), leaf.path


def _alike(current: Any, leaf: Leaf) -> bool:
    tensor = isinstance(current, torch.Tensor)
    return tensor and tuple(current.shape) == leaf.shape and current.dtype == leaf.dtype


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return f"{value.item()!r} ({value.dtype})"
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
