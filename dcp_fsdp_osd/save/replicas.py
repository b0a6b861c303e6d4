"""State of which several ranks hold the same elements: one rank's is saved, so all should be equal.

Each rank reports digests of what it holds alike with others, and the coordinator compares them.
State that is cut or shaped as its parameter may drift apart by a bit, as the weights may:
that is a warning, which ends no run of weeks. State of another shape that differs (preconditioners
drawn from unequal seeds, say) is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import listed
from dcp_fsdp_osd.layout.flat import FlatLayout
from dcp_fsdp_osd.layout.placements import local_box
from dcp_fsdp_osd.save.entries import SaveEntries
from dcp_fsdp_osd.tree import Path, digest_scalars, dotted, fingerprint

__all__ = ["EQUAL", "Compared", "compared_of", "differing_replicas", "warn_of_replicas"]

EQUAL = (
    "A checkpoint has one rank's, and a load gives it to all. Let all ranks make the same (draw "
    "from generators of the same seed), or take one rank's over before the save (dist.broadcast)"
)


@dataclass(frozen=True)
class Compared:
    """Which values of an optimizer ranks compare, by their keys; it has no values.

    Attributes:
        small: what belongs to no rank, and so is to be the same everywhere: numbers and objects.
        tensors: likewise; tensors of another shape than their parameter's are among them where that
            is whole: under DDP, NO_SHARD, and outside of FSDP.
        replicas: name of a part that other ranks may hold as well -> key. Tensors like their
            parameter: whole ones, of hybrid sharding, of replicated DTensors. The name is of the
            key and the part, so that the same part has the same name on all.
    """

    small: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    replicas: Mapping[str, str] = field(default_factory=dict)

    def shared(self, value_of: Callable[[str], Any]) -> dict[str, str]:
        """Digests of what is to be the same everywhere, by key."""
        digests = digest_scalars({name: value_of(name) for name in self.small})
        digests.update((name, fingerprint(value_of(name))) for name in self.tensors)
        return digests

    def replicated(self, value_of: Callable[[str], Any]) -> dict[str, str]:
        """Digests of replicas, by name."""
        known: dict[int, tuple[Any, str]] = {}  # a flat tensor is one of several keys
        digests = {}
        for name, key in self.replicas.items():
            value = value_of(key)
            if id(value) not in known:
                local = value.to_local() if isinstance(value, DTensor) else value
                known[id(value)] = value, fingerprint(local)
            digests[name] = known[id(value)][1]
        return digests


def compared_of(entries: SaveEntries, layout: FlatLayout, *, replicas: bool) -> Compared:
    """What ranks compare of ``entries``; ``replicas``: also what several of them hold."""
    depth, info = entries.report.depth, entries.report.info
    users, whole, odd = set(info.user), set(entries.whole), set(info.odd)
    small, tensors = [], []
    for path, value in entries.plain.items():
        if entries.is_per_rank(path):
            continue
        section = path[depth]
        if isinstance(value, DTensor | ShardedTensor):
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if section != "param_groups" and (not is_tensor or not value.dim()):
            small.append(dotted(path))
        if is_tensor:
            of_state = section == "state"
            extra = not of_state and section != "param_groups"
            user = of_state and path[depth + 1] in users
            if extra or user or path in whole or (value.dim() and dotted(path) in odd):
                tensors.append(dotted(path))
    names: dict[str, str] = {}
    if replicas:
        names.update(_whole(entries, {*small, *tensors, *odd}))
        names.update(_pieces(entries, layout, depth))
        names.update(_dtensors(entries.plain))
    return Compared(tuple(small), tuple(tensors), names)


def _whole(entries: SaveEntries, known: set[str]) -> Iterator[tuple[str, str]]:
    depth = entries.report.depth
    quantized = entries.report.quantized
    for path, value in entries.plain.items():
        if (
            path[depth] == "state"
            and isinstance(value, torch.Tensor)
            and value.dim()
            and not isinstance(value, DTensor | ShardedTensor)
            and dotted(path) not in known
            and dotted(path[:-1]) not in quantized
            and not entries.is_per_rank(path)
        ):
            yield dotted(path), dotted(path)


def _pieces(entries: SaveEntries, layout: FlatLayout, depth: int) -> Iterator[tuple[str, str]]:
    for path, (_, local, _) in entries.pieces.items():
        param = layout.params[layout.ids[str(path[depth + 1])]]
        if param.replicated and local.numel():
            part = f"{path[depth + 1]} in {param.describe()}"
            yield f"{dotted(path)} ({part}) {param.signature}", dotted(path)


def _dtensors(plain: Mapping[Path, object]) -> Iterator[tuple[str, str]]:
    for path, value in plain.items():
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None:
            mesh, placements = value.device_mesh, value.placements
            several = any(p.is_replicate() and mesh.size(i) > 1 for i, p in enumerate(placements))
            if several and value.to_local().numel():
                box = local_box(mesh, placements, value.shape)
                part = "" if box.sizes == tuple(value.shape) else f" ({box})"
                yield f"{dotted(path)}{part}", dotted(path)


def warn_of_replicas(key: str, of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Warn of parts of state that differ between the ranks that hold them.

    Args:
        of_ranks: of :meth:`Compared.replicated`, by rank.
    """
    apart = differing_replicas(of_ranks)
    by_part: dict[str, dict[str, list[int]]] = {name: {} for name in apart}
    for rank, digests in enumerate(of_ranks):
        for name in apart:
            if name in digests:
                by_part[name].setdefault(digests[name], []).append(rank)
    differ = [
        f"{name}: ranks " + " / ".join(map(str, by_value.values()))
        for name, by_value in by_part.items()
    ]
    if differ:
        warnings.warn(
            f"{key}: expected replicas of state to be equal, found {len(differ)} that differ:\n  "
            + listed(differ)
            + f"\n{EQUAL}",
            stacklevel=2,
        )


def differing_replicas(of_ranks: Iterable[Mapping[str, str]]) -> list[str]:
    """The names, in order, whose digests are not the same on all ranks that have them."""
    first: dict[str, str] = {}
    apart: set[str] = set()
    for digests in of_ranks:
        for name, value in digests.items():
            if first.setdefault(name, value) != value:
                apart.add(name)
    return sorted(apart)
