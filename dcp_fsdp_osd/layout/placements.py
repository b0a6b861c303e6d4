"""Which box of a tensor the placements of a DTensor give to each rank of a mesh.  No collective."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.layout.geometry import Box

__all__ = [
    "Placed",
    "dtensor_problem",
    "like_param",
    "local_box",
    "lost_turns",
    "placement_text",
    "same_but_turns",
    "wrong_rows",
]

_Rows = tuple[range, ...]


class _Cut(NamedTuple):
    """One mesh dimension that shards a tensor dimension over ``ranks`` ranks, which get rows in
    ``turns`` (a plain ``Shard``: one)."""

    ranks: int
    turns: int


class _Odd(NamedTuple):
    """A rank whose rows are not what DCP takes them for."""

    coordinate: tuple[int, ...]  # in the mesh dimensions that cut
    said: _Rows
    held: _Rows | None


def local_box(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> Box:
    """This rank's box of a DTensor; without elements where it has none."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Placed:
    """How a DTensor lies on a mesh: what is needed to make one, and to know what a rank has of it.

    Attributes:
        shape: of the whole tensor.
        stride: of the whole tensor; None for row-major order.
        device: of the local part (an offloaded parameter's is not its mesh's).
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    device: torch.device
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: DTensor) -> Placed:
        return cls(
            value.device_mesh, value.placements, value.shape, value.device, tuple(value.stride())
        )

    @classmethod
    def read(cls, text: str, shape: Sequence[int], param: DTensor) -> Placed | None:
        """From what :func:`placement_text` wrote, on the mesh of ``param``; None if it says not.

        On a mesh of other dimensions a replicated tensor is replicated, and one that is cut along
        one dimension is so over the mesh dimension that cuts the parameter.
        """
        names, *codes = json.loads(text)
        mesh = param.device_mesh
        found = [_placement(code) for code in codes]
        placements = tuple(placement for placement in found if placement is not None)
        if len(placements) < len(found):
            return None
        if names and set(names) < set(mesh.mesh_dim_names or ()):
            mesh = mesh[tuple(names)]
        if len(placements) != mesh.ndim:
            mesh = param.device_mesh
            cuts = [placement for placement in placements if not placement.is_replicate()]
            here = [n for n, p in enumerate(param.placements) if not p.is_replicate()]
            if len(cuts) > 1 or (cuts and (len(here) != 1 or hasattr(cuts[0], "split_factor"))):
                return None
            cut = cuts[0] if cuts else Replicate()
            at = here[0] if cuts else None
            placements = tuple(cut if n == at else Replicate() for n in range(mesh.ndim))
        return cls(mesh, placements, torch.Size(shape), param.device)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """This rank's box, if it has one with elements."""
        if self.mesh.get_coordinate() is None:
            return []
        box = local_box(self.mesh, self.placements, self.shape)
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        return [chunk] if all(box.sizes) else []

    def empty(self, dtype: torch.dtype | None) -> torch.Tensor:
        """A DTensor whose local part is fresh memory."""
        sizes = local_box(self.mesh, self.placements, self.shape).sizes
        stride = self.stride or torch.empty(self.shape, device="meta").stride()
        value = DTensor.from_local(
            empty_for_reading(sizes, dtype, self.device),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=stride,
        )
        return value.to(self.device)

    def alike(self, value: torch.Tensor) -> bool:
        """Whether ``value`` is a DTensor that lies so."""
        return (
            isinstance(value, DTensor)
            and value.placements == self.placements
            and value.device_mesh == self.mesh
        )


def placement_text(value: DTensor) -> str:
    """Names of the mesh dimensions, and the placement in each: JSON, the same on all ranks."""
    names = value.device_mesh.mesh_dim_names
    return json.dumps([list(names or ()), *map(_code, value.placements)])


def lost_turns(text: str, param_text: str) -> str:
    """Why a tensor of a parameter's shape does not lie where its own placements say; else empty.

    Before torch 2.10 (2.9 was not tried) a ``_StridedShard`` equals a ``Shard``: what arithmetic
    makes of a parameter says ``Shard``, and its rows lie where the parameter's do.

    Args:
        text, param_text: of :func:`placement_text`.
    """
    if text == param_text or Shard(0) != _StridedShard(0, split_factor=2):
        return ""
    if not same_but_turns(text, param_text):
        return ""
    return (
        f"expected the parameter's placements {param_text}, found {text}, which torch "
        f"{torch.__version__} writes where it computes with the parameter, and which stand for "
        f"other rows. Make the state from zeros_like or clone and in place, or use torch 2.10"
    )


def same_but_turns(text: str, param_text: str) -> bool:
    """Whether two of :func:`placement_text` are one, but for turns that the first does not have."""
    pairs = itertools.zip_longest(json.loads(text), json.loads(param_text))
    return all(a == b or (a and b and [*a, *b[2:]] == ["shard", *b[1:]]) for a, b in pairs)


def _code(placement: Placement) -> list[str | int]:
    if placement.is_replicate():
        return ["replicate"]
    if isinstance(placement, Shard) and type(placement) is Shard:
        return ["shard", placement.dim]
    if hasattr(placement, "split_factor") and hasattr(placement, "dim"):
        return ["strided", placement.dim, placement.split_factor]
    return ["other", str(placement)]


def _placement(code: Sequence[Any]) -> Placement | None:
    kind, *numbers = code
    if kind == "replicate":
        return Replicate()
    if kind == "shard":
        return Shard(*numbers)
    if kind == "strided":
        return _StridedShard(numbers[0], split_factor=numbers[1])
    return None


def like_param(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``local`` itself, or for a DTensor parameter the DTensor of its placements."""
    if not isinstance(param, DTensor):
        return local
    value = DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return value.to(param.device)  # an offloaded parameter's device is not its mesh's


def dtensor_problem(fqn: str, value: DTensor) -> str:
    """Why DCP cannot save or load a DTensor as it is; other ranks may find nothing. Else empty."""
    mesh, shape = value.device_mesh, value.shape
    problem = wrong_rows(fqn, mesh.shape, value.placements, shape)
    if problem or mesh.get_coordinate() is None:
        return problem
    held, said = tuple(value.to_local().shape), local_box(mesh, value.placements, shape)
    if not (math.prod(held) or said.numel):
        return ""
    where = f"{tuple(value.placements)} over a mesh of {tuple(mesh.shape)}"
    if held != said.sizes:
        return (
            f"{fqn}: expected a local shard of shape {said.sizes}, as DTensor cuts {tuple(shape)} "
            f"with {where}, found {held}"
        )
    strided = any(hasattr(placement, "split_factor") for placement in value.placements)
    dealt = _dealt_box(mesh, value.placements, shape) if strided else said
    if dealt != said:
        return (
            f"{fqn}: expected the box at {dealt.offsets} for this rank, as {where} deal out "
            f"{tuple(shape)}, found that torch {torch.__version__} takes it for the one at "
            f"{said.offsets}. Choose sizes that the mesh divides evenly, or use torch 2.8"
        )
    return ""


def wrong_rows(
    fqn: str, mesh: Sequence[int], placements: Sequence[Placement], shape: Sequence[int]
) -> str:
    """Why DCP would silently save or load other rows of a DTensor than its shards hold, if so.

    ``_StridedShard`` on its own deals rows out in turns; where tensor parallelism cuts them
    afterwards, as under FSDP2, what a rank has is one box again. FSDP2 itself cuts the other way
    round, the shard of tensor parallelism, which is not the same where that is uneven.

    Args:
        mesh: ranks in each dimension of the mesh.
        shape: of the whole tensor.

    Returns:
        The same on every rank of the mesh, whichever of them has the rows in question; else empty.
    """
    if not any(hasattr(placement, "split_factor") for placement in placements):
        return ""
    for dim, size in enumerate(shape):
        cuts = tuple(
            _Cut(count, getattr(placement, "split_factor", 1))
            for count, placement in zip(mesh, placements, strict=True)
            if getattr(placement, "dim", None) == dim
        )
        odd = _odd_one(size, cuts)
        if odd is None:
            continue
        where = f"{tuple(placements)} over a mesh of {tuple(mesh)}"
        if odd.held is None:
            return (
                f"{fqn}: expected each rank to hold one box, found that {where} give some rank "
                f"rows {_text(odd.said)} of dimension {dim}"
            )
        return (
            f"{fqn}: expected FSDP2 to hold the rows that its DTensor stands for, found that with "
            f"{where} some rank holds rows {_text(odd.held)} of dimension {dim}, which torch takes "
            f"for rows {_text(odd.said)}. Choose a size of that dimension, now {size}, that tensor "
            f"parallelism divides evenly, or another mesh"
        )
    return ""


@functools.lru_cache(maxsize=4096)
def _odd_one(size: int, cuts: tuple[_Cut, ...]) -> _Odd | None:
    """The first rank, if any, whose rows are no interval or not those that FSDP2 gives it."""
    after = [math.prod(cut.ranks for cut in cuts[n + 1 :]) for n in range(len(cuts))]
    plain = sum(1 for _ in itertools.takewhile(lambda cut: cut.turns == 1, cuts))
    if plain == len(cuts):
        return None
    nested = all(cut.turns == rest for cut, rest in zip(cuts[plain:], after[plain:], strict=True))
    if nested and not plain and size % after[0] == 0:
        return None  # all turns are alike
    said: dict[tuple[int, ...], _Rows] = {(): (range(size),)}
    for cut in cuts:
        said = {
            (*at, n): rows for at, above in said.items() for n, rows in enumerate(_deal(above, cut))
        }
    # FSDP2 cuts the local shard, that is, after what is to its right
    order = [*range(plain), *reversed(range(plain, len(cuts)))]
    for at, rows in said.items():
        held: _Rows | None = None
        if nested:
            held = (range(size),)
            for n in order:
                held = _chunk(held, cuts[n].ranks, at[n])
        if len(rows) > 1 or (held is not None and rows != held):
            return _Odd(at, rows, held)
    return None


def _dealt_box(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> Box:
    """This rank's box, by our own count: some versions of torch misplace strided shards."""
    rows: list[_Rows] = [(range(size),) for size in shape]
    at = mesh.get_coordinate() or ()
    for count, placement, n in zip(mesh.shape, placements, at, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            cut = _Cut(count, getattr(placement, "split_factor", 1))
            rows[dim] = _deal(rows[dim], cut)[n]
    return Box(
        tuple(part[0].start if part else 0 for part in rows),
        tuple(sum(map(len, part)) for part in rows),
    )


def _deal(rows: _Rows, cut: _Cut) -> list[_Rows]:
    """The rows of each of ``cut.ranks`` ranks."""
    turns = [_chunk(rows, cut.turns, n) for n in range(cut.turns)]
    return [
        _joined(part for turn in turns for part in _chunk(turn, cut.ranks, n))
        for n in range(cut.ranks)
    ]


def _chunk(rows: _Rows, count: int, number: int) -> _Rows:
    """As ``torch.chunk`` cuts; no ranges where nothing is left."""
    total = sum(map(len, rows))
    step = -(-total // count)
    low, high = step * number, step * (number + 1)
    found = []
    for part in rows:
        found.append(part[max(low, 0) : max(high, 0)])
        low, high = low - len(part), high - len(part)
    return tuple(part for part in found if part)


def _joined(parts: Iterable[range]) -> _Rows:
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return tuple(joined)


def _text(rows: _Rows) -> str:
    return " and ".join(f"[{part.start}:{part.stop}]" for part in rows[:4]) or "none"
