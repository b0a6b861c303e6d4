"""One rank's live state against a checkpoint's: what is read, and what is found to differ.

A comparison is made from a load that is planned and never finished: its destinations are the
live tensors, which are compared with what was read elsewhere.
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
from dcp_fsdp_osd.layout.flat import param_id
from dcp_fsdp_osd.load.model import ModelLoad
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.schedule import Leaf
from dcp_fsdp_osd.tree import Path, digest, dotted, leaves
from dcp_fsdp_osd.verify.elements import Ranges, differing

_UNSAVED = "not in the checkpoint"

__all__ = ["Comparison", "Difference", "ModelComparison", "OptimComparison"]


@dataclasses.dataclass(frozen=True, order=True)
class Difference:
    """One entry that is not the same in the checkpoint and live.

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
    """What a planner needs to compare one thing; subclasses know whose it is."""

    def __init__(self, load: OptimLoad | ModelLoad, metadata: Metadata, max_ranges: int) -> None:
        self.load = load
        self._storage: Mapping[str, Any] = metadata.state_dict_metadata
        self._max_ranges = max_ranges
        self._ranges: dict[str, Ranges] = {}  # by key
        self._labels: dict[str, tuple[str, str]] = {}  # key -> FQN and state
        self._found: list[Difference] = []
        self._lock = threading.Lock()
        self._schedule = load.plan()

    def tell(self, fqn: str, state: str, what: str) -> None:
        self._found.append(Difference(fqn, state, (), what))

    def items(self) -> list[ReadItem]:
        """This rank's reads, of what is there on both sides."""
        raise NotImplementedError

    def live(self, item: ReadItem, like: torch.Tensor) -> torch.Tensor:
        """The live elements that ``like`` was read of."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compare what is compared as a whole; all reads are done."""
        raise NotImplementedError

    def dtype_of(self, item: ReadItem) -> torch.dtype:
        storage = self._storage[item.dest_index.fqn]
        dtype = storage.properties.dtype if isinstance(storage, TensorStorageMetadata) else None
        return dtype if dtype is not None else torch.uint8

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        """Compare ``saved``, which ``item`` was read to, with the live elements."""
        key = item.dest_index.fqn
        at = item.dest_index.offset or torch.Size([0] * saved.dim())
        offsets = [a + b for a, b in zip(at, item.dest_offsets, strict=True)]
        ranges = self._ranges.setdefault(key, Ranges(self._max_ranges))
        live = self.live(item, saved)
        shape = self._storage[key].size
        for start, stop, count in differing(saved, live, offsets, shape, self._max_ranges):
            with self._lock:
                ranges.add(start, stop, count)

    def result(self) -> list[Difference]:
        for key, ranges in self._ranges.items():
            if ranges.count:
                fqn, state = self._labels[key]
                what = f"{ranges.count} elements differ:"
                spans = tuple(ranges.spans())
                self._found.append(Difference(fqn, state, (), what, ranges.count, spans))
        return list(dict.fromkeys(self._found))

    def _compare_values(self, fqn: str, state: str, saved: Any, live: Any) -> None:
        if digest(saved) != digest(live):
            self.tell(fqn, state, f"{_short(saved)} in the checkpoint, {_short(live)} here")


class ModelComparison(Comparison):
    load: ModelLoad

    def items(self) -> list[ReadItem]:
        for line in self._schedule.problems:
            name, _, what = line.partition(": ")
            self.tell(name, "", what)
        wanted = []
        for leaf in self._schedule.leaves:
            if leaf.kind != "model":
                continue
            (key,) = leaf.sources.values()
            self._labels[key] = (leaf.name, "")
            saved = self.load.guard.dtypes.get(leaf.name, self.load.dtype_of(leaf.name))
            if saved != leaf.dtype:
                self.tell(leaf.name, "", f"{leaf.dtype} in the checkpoint, {saved} here")
                wanted.append(key)
        self.load.allocate()
        return [i for i in self._schedule.items if i.dest_index.fqn not in wanted]

    def live(self, item: ReadItem, like: torch.Tensor) -> torch.Tensor:
        return self.load.destination(item).to(like.dtype)

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        if item.dest_index.fqn in self._labels:
            super().compare(item, saved)
        else:  # of an extra state
            self.load.destination(item).copy_(saved)

    def finish(self) -> None:
        for name, saved in self.load.extra_states().items():
            self._compare_values(name, "", saved, self.load.live[name])


class OptimComparison(Comparison):
    load: OptimLoad

    def items(self) -> list[ReadItem]:
        for line in self._schedule.problems:
            label, _, what = line.partition(": ")
            self.tell(*self._split(label), what)
        unwanted: set[MetadataIndex] = set()
        self._small: list[Leaf] = []
        self._values = self._live_values()
        for leaf in self._schedule.leaves:
            if leaf.kind in ("group", "skipped"):
                continue
            for fqn, key in leaf.sources.items():
                self._labels[key] = (fqn, dotted(leaf.path))
            live: Any = self._values.get(_place(leaf))
            if live is None and _place(leaf) not in self._values:
                for fqn, state in (self._labels[key] for key in leaf.sources.values()):
                    self.tell(fqn, state, "in the checkpoint, but not here")
            elif leaf.kind in ("object", "scalar"):
                self._small.append(leaf)
                continue
            elif leaf.live or _alike(live, leaf):
                leaf.tensor = live.detach()
                continue
            else:
                saved = f"{leaf.dtype} {leaf.shape}"
                found = f"{saved} in the checkpoint, {_short(live)} here"
                self.tell(leaf.name, dotted(leaf.path), found)
            unwanted.update(leaf.pieces)
            unwanted.update(MetadataIndex(key) for key in leaf.sources.values())
        self._tell_unsaved()
        self._tell_containers()
        self.load.allocate()
        return [i for i in self._schedule.items if i.dest_index not in unwanted]

    def _tell_unsaved(self) -> None:
        """Of live state that nothing in the checkpoint is to be loaded into."""
        wanted = {_place(leaf) for leaf in self._schedule.leaves}
        for owner, path in self._values.keys() - wanted:
            if not isinstance(owner, int):
                fqn, state = (owner, dotted(path)) if owner else (dotted(path), "")
                self.tell(fqn, state, _UNSAVED)
                continue
            param = self.load.layout.params[owner]
            if owner not in self._schedule.keep and not param.empty:
                self.tell(param.fqns[0], dotted(path), _UNSAVED)

    def _tell_containers(self) -> None:
        """Of mappings that are of another kind, or have other keys of the same text."""
        if not self.load.index.knows_containers:
            return
        paths: dict[Any, list[Path]] = {}
        for leaf in self._schedule.leaves:
            paths.setdefault("" if leaf.extra else _place(leaf)[0], []).append(leaf.path)
        live = self.load.with_own_keys
        for name, state in live.get("state", {}).items():
            number = param_id(name, self.load.layout)
            owner = str(name) if number is None else number
            saved = self.load.index.containers.below(("state", str(name)))
            fqn = str(name)
            if number is not None:
                saved = self.load.saved_containers(number)
                fqn = self.load.layout.params[number].fqns[0]
            self._tell_unlike(fqn, saved, state, paths.get(owner, ()))
        rest = {k: v for k, v in live.items() if k not in ("state", "param_groups")}
        saved = Containers(
            (p, c)
            for p, c in self.load.index.containers.items()
            if p[:1] not in (("state",), ("param_groups",))
        )
        self._tell_unlike("", saved, rest, paths.get("", ()))

    def _tell_unlike(self, fqn: str, saved: Containers, live: Any, paths: Sequence[Path]) -> None:
        for line in unlike(saved, containers_of(live, (), strict=False), paths):
            where, _, what = line.partition(": ")
            self.tell(fqn or where, where if fqn else "", what)

    def _live_values(self) -> dict[tuple[Any, Path], Any]:
        values: dict[tuple[Any, Path], Any] = {}
        for name, state in self.load.live.get("state", {}).items():
            number = param_id(name, self.load.layout)
            for path, value in leaves(state):
                values[number if number is not None else str(name), path] = value
        for name, value in self.load.live.items():
            if name not in ("state", "param_groups"):
                values.update(((None, p), v) for p, v in leaves(value, (str(name),)))
        return values

    def _split(self, label: str) -> tuple[str, str]:
        """``"a.weight.exp_avg"`` as FQN and state."""
        known = [n for n in self.load.names() if label.startswith(n + ".")]
        fqn = max(known, key=len, default=label)
        return fqn, label[len(fqn) + 1 :]

    def live(self, item: ReadItem, like: torch.Tensor) -> torch.Tensor:
        return self.load.destination(item)

    def compare(self, item: ReadItem, saved: torch.Tensor) -> None:
        leaf, _ = self._schedule.destinations[item.dest_index]
        if leaf.kind in ("scalar", "group"):
            self.load.destination(item).copy_(saved)
        else:
            super().compare(item, saved)

    def finish(self) -> None:
        for leaf in self._small:
            live = self._values[_place(leaf)]
            for fqn, key in leaf.sources.items():
                saved = self.load.objects.get(key, self.load.scalars.get(key))
                self._compare_values(fqn, dotted(leaf.path), saved, live)
        self._compare_groups()

    def _compare_groups(self) -> None:
        """Options by FQN, as a load matches them; ``params`` and ``param_names`` are no options."""
        saved = self.load._saved_groups()
        layout = self.load.layout
        home: dict[str, Any] = {}
        for group, members in saved.members.items():
            home.update((layout.resolve(name) or name, group) for name in members)
        for number, (ids, now) in enumerate(
            zip(layout.groups, self.load.live["param_groups"], strict=True)
        ):
            fqns = [fqn for i in ids for fqn in layout.params[i].fqns]
            for fqn in fqns:
                absent = fqn not in home and fqn not in self.load.index.state
                if absent and self.load.index.known_groups() is None:  # else it was told before
                    self.tell(fqn, "", _UNSAVED)
            for group in dict.fromkeys(home[fqn] for fqn in fqns if fqn in home):
                theirs = saved.options.get(group, {})
                mine = {k: v for k, v in now.items() if k not in ("params", "param_names")}
                for name in sorted(theirs.keys() | mine.keys()):
                    where = f"param_groups.{number}"
                    if name not in theirs:
                        self.tell(where, name, _UNSAVED)
                    elif name not in mine:
                        self.tell(where, name, "in the checkpoint, but not here")
                    else:
                        self._compare_values(where, name, theirs[name], mine[name])


def _place(leaf: Leaf) -> tuple[Any, Path]:
    """Where a leaf lies in the live state dict, as ``_live_values`` has it."""
    if leaf.extra:
        return None, leaf.path
    return (leaf.param if leaf.param is not None else leaf.name), leaf.path


def _alike(live: Any, leaf: Leaf) -> bool:
    tensor = isinstance(live, torch.Tensor)
    return tensor and tuple(live.shape) == leaf.shape and live.dtype == leaf.dtype


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return f"{value.item()!r} ({value.dtype})"
        return f"{value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
