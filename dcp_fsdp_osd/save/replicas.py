"""State of which several ranks hold the same elements: one rank's is saved, so all should be equal.

Each rank reports digests of what it holds alike with others, and the coordinator compares them.
State that is cut or shaped as its parameter may drift apart by a bit, as the weights may:
that is a warning, which ends no run of weeks. State of another shape that differs (preconditioners
drawn from unequal seeds, say) is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import listed
from dcp_fsdp_osd.layout.flat import FlatLayout
from dcp_fsdp_osd.layout.placements import local_box
from dcp_fsdp_osd.save.entries import SaveEntries
from dcp_fsdp_osd.tree import Path, digest_scalars, dotted, fingerprint

__all__ = ["EQUAL", "differing_replicas", "replica_digests", "shared_digests", "warn_of_replicas"]

EQUAL = (
    "A checkpoint has one rank's, and a load gives it to all. Let all ranks make the same (draw "
    "from generators of the same seed), or take one rank's over before the save (dist.broadcast)"
)


def shared_digests(entries: SaveEntries) -> dict[str, str]:
    """Digests of values that belong to no rank, and so are to be the same everywhere; by key.

    Tensors of another shape than their parameter's are among them where that is whole: under DDP,
    NO_SHARD, and outside of FSDP.
    """
    depth, info = entries.report.depth, entries.report.info
    users, whole, odd = set(info.user), set(entries.whole), set(info.odd)
    own = {path: v for path, v in entries.plain.items() if not entries.is_per_rank(path)}
    digests = digest_scalars({p: v for p, v in own.items() if p[depth] != "param_groups"})
    for path, value in own.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor | ShardedTensor):
            of_state = path[depth] == "state"
            extra = not of_state and path[depth] != "param_groups"
            user = of_state and path[depth + 1] in users
            if extra or user or path in whole or (value.dim() and dotted(path) in odd):
                digests[dotted(path)] = fingerprint(value)
    return digests


def replica_digests(entries: SaveEntries, layout: FlatLayout) -> dict[str, str]:
    """Digests of tensors like their parameter of which other ranks have the same part: whole ones,
    of hybrid sharding, of replicated DTensors.

    By key and the part that this rank holds, so that the same part has the same name on all.
    """
    depth = entries.report.depth
    return {
        **dict(_whole(entries)),
        **dict(_pieces(entries, layout, depth)),
        **dict(_dtensors(entries.plain)),
    }


def _whole(entries: SaveEntries) -> Iterator[tuple[str, str]]:
    depth, info = entries.report.depth, entries.report.info
    known = {*entries.report.scalars, *info.odd}
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
            yield dotted(path), fingerprint(value)


def _pieces(entries: SaveEntries, layout: FlatLayout, depth: int) -> Iterator[tuple[str, str]]:
    known: dict[int, str] = {}  # the tensors live as long as `entries`
    for path, (_, local, _) in entries.pieces.items():
        param = layout.params[layout.ids[str(path[depth + 1])]]
        if param.replicated and local.numel():
            if id(local) not in known:
                known[id(local)] = fingerprint(local)
            part = f"{path[depth + 1]} in {param.describe()}"
            yield f"{dotted(path)} ({part}) {param.signature}", known[id(local)]


def _dtensors(plain: Mapping[Path, object]) -> Iterator[tuple[str, str]]:
    for path, value in plain.items():
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None:
            mesh = value.device_mesh
            if any(p.is_replicate() and mesh.size(i) > 1 for i, p in enumerate(value.placements)):
                local = value.to_local()
                if local.numel():
                    box = local_box(mesh, value.placements, value.shape)
                    part = "" if box.sizes == tuple(value.shape) else f" ({box})"
                    yield f"{dotted(path)}{part}", fingerprint(local)


def warn_of_replicas(key: str, of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Warn of parts of state that differ between the ranks that hold them.

    Args:
        of_ranks: of :func:`replica_digests`, by rank.
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
