"""What each rank of a world would hold of the parameters of a checkpoint: from its metadata alone,
by simulated layouts (``layout.Unit``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, units_of
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval
from dcp_fsdp_osd.storage.unpack import Index
from dcp_fsdp_osd.tools.describe import fqn_and_state
from dcp_fsdp_osd.tools.opened import Checkpoint

__all__ = ["Layout", "Sharding", "wrapped_modules"]

Layout: TypeAlias = Literal["fsdp1", "fsdp2"]


class Sharding:
    """The sharded parameters of a checkpoint in a world that need not exist.

    Args:
        world_size: of the shard group.
        layout: FSDP1's flat pieces, or FSDP2's (``fully_shard``) rows.
        wrapped: modules that are FSDP units, or patterns of such (``layers.*``: a ``*`` is one
            name); by default the outermost modules with a number for a name. The root always is.

    Attributes:
        keys: of tensors that are sharded as their parameter is, by FQN.
        shared: bytes of what is read once for all ranks, by key.
        units: how many FSDP units the parameters are divided into.

    Raises:
        ValueError: an argument is out of its range, or a pattern matches nothing.
        StorageError: the checkpoint has no tensor that is sharded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        world_size: int,
        *,
        layout: Layout = "fsdp1",
        wrapped: Iterable[str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"expected a world_size of 1 at least, found {world_size}")
        if layout not in ("fsdp1", "fsdp2"):
            raise ValueError(f"expected layout 'fsdp1' or 'fsdp2', found {layout!r}")
        self.world_size, self.layout = world_size, layout
        self._shapes, self.keys, self.shared = _parameters(checkpoint)
        if not self._shapes:
            raise StorageError(f"{checkpoint.url} has no tensor that would be sharded")
        modules = wrapped_modules(self._shapes, wrapped)
        self._units, _ = units_of(self._shapes, ("", *modules))  # none is outside of the root

    @property
    def units(self) -> int:
        return len(self._units)

    def boxes(self, rank: int) -> list[tuple[str, Box]]:
        """What a rank holds, by FQN."""
        if self.layout == "fsdp2":
            return list(_rows(self._shapes, self.world_size, rank))
        held = (each for unit in self._units for each in unit.local_params(self.world_size, rank))
        return [each for param in held for each in _flat(param)]


def wrapped_modules(fqns: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """The modules that `patterns` mean; by default the outermost ones with a number for a name.

    Raises:
        ValueError: a pattern matches no module.
    """
    modules = dict.fromkeys(
        ".".join(parts[:n])
        for parts in (fqn.split(".") for fqn in fqns)
        for n in range(1, len(parts))
    )
    if patterns is None:
        numbered = [name for name in modules if name.rpartition(".")[2].isdecimal()]
        return [
            name for name in numbered if not any(name.startswith(f"{other}.") for other in numbered)
        ]
    found: dict[str, None] = {}
    for pattern in patterns:
        form = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for name in modules if form.fullmatch(name)]
        if not matched and pattern:
            raise ValueError(
                f"no module of the checkpoint's parameters is named {pattern!r}; they are named "
                f"like {', '.join(list(modules)[:5]) or 'nothing: there are none'}"
            )
        found.update(dict.fromkeys(matched))
    return list(found)


def _parameters(
    checkpoint: Checkpoint,
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]], dict[str, int]]:
    """Shapes by FQN; the keys of tensors that are sharded as their parameter is, by FQN; and what
    is read once, with its bytes.
    """
    names = {key: fqn_and_state(checkpoint.path(key)) for key in checkpoint.tensors}
    shapes: dict[str, tuple[int, ...]] = {}
    weights: set[str] = set()
    for of_state in (False, True):  # a weight says its shape best; else its largest state does
        for key, (fqn, state) in names.items():  # in the order in which they were saved
            shape = checkpoint.shape(key)
            if bool(state) is not of_state or fqn in weights or not shape:
                continue
            if math.prod(shape) > math.prod(shapes.get(fqn, (0,))):
                shapes[fqn] = shape
        weights = set(shapes)
    keys: dict[str, list[str]] = {}
    shared: dict[str, int] = {}
    for key, (fqn, _) in names.items():
        if shapes.get(fqn) == checkpoint.shape(key):
            keys.setdefault(fqn, []).append(key)
        else:
            shared[key] = checkpoint.nbytes(key)
    index = Index(checkpoint.metadata)
    for key in checkpoint.objects():
        shared[key] = index.entry(MetadataIndex(key)).length
    return shapes, keys, shared


def _flat(param: ParamLayout) -> Iterator[tuple[str, Box]]:
    """What a rank holds of FSDP1's flat tensors; a world of one holds whole tensors."""
    if param.kind is ParamKind.WHOLE:
        for fqn, shape in zip(param.fqns, param.shapes, strict=True):
            yield fqn, Box((0,) * len(shape), tuple(shape))
    for segment in param.segments:
        if segment.stop > segment.start:
            for box in boxes_of_interval(segment.shape, segment.start, segment.stop):
                yield segment.fqn, box


def _rows(
    shapes: Mapping[str, Sequence[int]], world_size: int, rank: int
) -> Iterator[tuple[str, Box]]:
    """What ``fully_shard`` leaves a rank: a chunk of the rows, as ``torch.chunk`` cuts."""
    for fqn, shape in shapes.items():
        size = -(-shape[0] // world_size)
        first, last = min(size * rank, shape[0]), min(size * (rank + 1), shape[0])
        if first < last:
            yield fqn, Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
