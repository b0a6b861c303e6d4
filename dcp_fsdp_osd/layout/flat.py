"""Which elements of which parameter this rank's optimizer holds.  Pure: no model, no tensor.

A :class:`FlatLayout` is a plain value: it can be pickled, printed and compared, and it can be
made for any rank of any world from a description alone (:func:`simulate`), which is how many
ranks are planned in one process.  ``dcp_fsdp_osd.fsdp`` makes the same value from a current model.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_fsdp_osd.errors import LayoutError, several
from dcp_fsdp_osd.layout.geometry import Box, box_view, boxes_of_interval

__all__ = [
    "FlatLayout",
    "ParamKind",
    "ParamLayout",
    "Piece",
    "Segment",
    "Unit",
    "param_id",
    "simulate",
    "units_of",
    "without_wrappers",
]

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Piece:
    """One box of a parameter and the flat memory it lies in.

    Attributes:
        box: where it lies in the parameter's N-D tensor.
        offset: its first element in the rank's local flat tensor.
        order: order of dimensions in memory, slowest first (``None``: row-major).
    """

    box: Box
    offset: int
    order: tuple[int, ...] | None = None

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The box as a view of the local flat tensor (1-D, contiguous), of shape ``box.sizes``.

        Contiguous unless the parameter itself is not row-major (``channels_last``).
        """
        if self.order is None:
            return box_view(flat, self.offset, self.box.sizes)
        stored = box_view(flat, self.offset, [self.box.sizes[d] for d in self.order])
        return stored.permute(tuple(self.order.index(d) for d in range(len(self.order))))


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, stop)`` of one parameter, and where this rank keeps them.

    Attributes:
        fqn: the parameter's fully qualified name in the unwrapped model.
        shape: the whole parameter's shape.
        start, stop: half-open interval of elements, in the parameter's memory order.
        offset: position of element ``start`` in the rank's local flat tensor.
        order: the memory order, if it is not row-major; dimensions, slowest first.
        within: the box of the parameter whose elements are counted, if that is not all of it:
            tensor parallelism cut the box out, then FSDP an interval of its elements.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    order: tuple[int, ...] | None = None
    within: Box | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[Piece]:
        """At most ``2 N - 1`` boxes that together are this segment, in memory order."""
        shape = self.shape if self.within is None else self.within.sizes
        offset = self.offset
        if self.order is None:
            for box in boxes_of_interval(shape, self.start, self.stop):
                yield Piece(self._in_whole(box), offset)
                offset += box.numel
            return
        rank_of = [self.order.index(d) for d in range(len(self.order))]
        stored_shape = [shape[d] for d in self.order]
        for stored in boxes_of_interval(stored_shape, self.start, self.stop):
            box = Box(
                tuple(stored.offsets[i] for i in rank_of), tuple(stored.sizes[i] for i in rank_of)
            )
            yield Piece(self._in_whole(box), offset, self.order)
            offset += box.numel

    def signed(self) -> str:
        """Its part of :attr:`ParamLayout.signature`."""
        box = self.within and f"Box(offsets={self.within.offsets}, sizes={self.within.sizes})"
        return (
            f"Segment(fqn={self.fqn!r}, shape={self.shape}, start={self.start}, stop={self.stop}, "
            f"offset={self.offset}, order={self.order}, part={box})"
        )

    def _in_whole(self, box: Box) -> Box:
        return box if self.within is None else box.shifted(self.within.offsets)


class ParamKind(str, enum.Enum):
    """What the state of a parameter is on this rank.

    ``FLAT``: a 1-D piece of FSDP1's flat tensor. ``WHOLE``: of the parameter's own shape.
    ``DTENSOR``: a DTensor, as the parameter is. ``NAMED``: under one FQN of a flat parameter, of
    whatever shape it was given.
    """

    FLAT = "flat"
    WHOLE = "whole"
    DTENSOR = "dtensor"
    NAMED = "named"


@dataclass(frozen=True)
class ParamLayout:
    """One parameter of the optimizer: what FSDP made of one or several parameters.

    Attributes:
        fqns: the parameters it stands for: one, or with ``use_orig_params=False`` all of
            an FSDP unit.
        shapes: the whole shape of each.
        kind: what its state is on this rank.
        segments: of kind ``FLAT``: what this rank holds of each (none of some).
        numel: of kind ``FLAT``: elements of the local flat tensor, padding included.
        sharded: other ranks hold other parts.
        shard_group: of kind ``FLAT``: the lowest global rank of the group that the flat tensor is
            sharded over. Groups that hold replicas may cut them at different places.
        box: of kind ``DTENSOR``: this rank's box, if it is not the whole.
        replicated: of kind ``FLAT``: there may be other groups that it is sharded over alike.
        problem: why its state cannot be saved or loaded, of which other ranks may not know.
        placed: of kind ``DTENSOR``: how it lies on its mesh (``placement_text``).
    """

    fqns: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kind: ParamKind
    segments: tuple[Segment, ...] = ()
    numel: int = 0
    sharded: bool = False
    box: Box | None = None
    shard_group: int = 0
    problem: str = ""
    placed: str = ""
    replicated: bool = False

    @property
    def empty(self) -> bool:
        """This rank's local tensor has no element, while the parameter has some.

        Most optimizers keep no state for it then; what others keep (Adagrad's ``step``) is no more
        than other ranks have, or is this rank's alone (all of LBFGS's). A local tensor of nothing
        but padding is not empty: the optimizer steps on it.
        """
        return (
            self.kind is ParamKind.FLAT
            and not self.numel
            and any(math.prod(shape) for shape in self.shapes)
        )

    def is_flat_shape(self, shape: Sequence[int]) -> bool:
        """Whether a state tensor of ``shape`` is a piece of the flat tensor, element by element."""
        return self.kind is ParamKind.FLAT and tuple(shape) == (self.numel,)

    @property
    def signature(self) -> str:
        """Names exactly this rank's part: state that cannot be resharded loads only where
        the signature is the same."""
        # Checkpoints hold it: the text is the one that the first version wrote, names and all.
        segments = "".join(f"{segment.signed()}, " for segment in self.segments)
        segments = segments[:-1] if len(self.segments) == 1 else segments[:-2]
        box = self.box and (self.box.offsets, self.box.sizes)
        text = (
            f"({self.fqns}, {self.shapes}, {self.kind.value!r}, ({segments}), {self.numel}, {box})"
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """What this rank holds, for error messages."""
        if self.box is not None:
            return f"{self.fqns[0]} at {self.box.offsets} size {self.box.sizes}"
        if self.kind is not ParamKind.FLAT:
            return ", ".join(self.fqns)
        parts = [f"{s.fqn}[{s.start}:{s.stop}]{_of(s.within)}" for s in self.segments if s.numel]
        return several(parts, 4) or "nothing"


def without_wrappers(name: str) -> list[str]:
    """What ``name`` may mean in the unwrapped model, the likeliest first.

    ``module`` is DDP's name for what it wraps, and may be the user's own.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    found = [parts]
    while parts[:1] == ["module"]:
        parts = parts[1:]
        found.append(parts)
    found.append([part for part in parts if part != "module"])
    names = dict.fromkeys(".".join(parts) for parts in found if parts)
    return [each for each in names if each != name]


def _of(box: Box | None) -> str:
    return "" if box is None else f" of the box at {box.offsets} size {box.sizes}"


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one optimizer on one rank.

    Attributes:
        params: in the optimizer's order, so that the position is the parameter's id in
            ``optim.state_dict()``.
        aliases: other names of tied parameters -> the name they are stored under.
        flat_names: names of flat parameters in the wrapped model -> parameter ids.
        groups: for each param group, the ids of its parameters.
    """

    params: tuple[ParamLayout, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    flat_names: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for i, param in enumerate(self.params):
            for fqn in param.fqns:
                if fqn in seen:
                    raise LayoutError(
                        f"expected each parameter once in the optimizer, found {fqn!r} as "
                        f"parameters {seen[fqn]} and {i}"
                    )
                seen[fqn] = i
        tied: dict[str, list[str]] = {}
        for alias, target in self.aliases.items():
            tied.setdefault(target, []).append(alias)
        object.__setattr__(self, "_ids", seen)
        object.__setattr__(self, "_tied", tied)
        signatures = "".join(param.signature for param in self.params)
        text = hashlib.sha256(signatures.encode()).hexdigest()[:16]
        object.__setattr__(self, "_signature", text)

    def __repr__(self) -> str:
        kinds = collections.Counter(param.kind.value for param in self.params)
        text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        here = sum(s.numel for param in self.params for s in param.segments)
        of = sum(math.prod(s.shape) for param in self.params for s in param.segments)
        flat = f"; {here} of {of} flat elements here" if of else ""
        return f"<{type(self).__name__} of {len(self.params)} parameters: {text or 'none'}{flat}>"

    @property
    def ids(self) -> Mapping[str, int]:
        """Parameter id of each FQN."""
        ids: Mapping[str, int] = self.__dict__["_ids"]
        return ids

    @property
    def signature(self) -> str:
        """Names exactly what this rank holds of all parameters: state that may depend on all of
        it loads only where the signature is the same."""
        found: str = self.__dict__["_signature"]
        return found

    def check(self) -> None:
        """To be called where all ranks learn of one's error, before anything is saved or loaded.

        Raises:
            LayoutError: parameters of this rank have a :attr:`ParamLayout.problem`.
        """
        problems = [param.problem for param in self.params if param.problem]
        if problems:
            raise LayoutError("\n".join(problems))

    def resolve(self, name: str) -> str | None:
        """The FQN that ``name`` is stored under: itself, or what it is tied to; else None."""
        if name in self.ids:
            return name
        target = self.aliases.get(name)
        return target if target in self.ids else None

    def id_of(self, name: str) -> int | None:
        """The parameter that ``name`` means, with or without the names of wrappers."""
        for each in (name, *without_wrappers(name)):
            fqn = self.resolve(each)
            if fqn is not None:
                return self.ids[fqn]
            if each in self.flat_names:
                return self.flat_names[each]
        return None

    def names_of(self, fqn: str) -> tuple[str, ...]:
        """``fqn`` and the names that are tied to it."""
        return (fqn, *self.__dict__["_tied"].get(fqn, ()))

    def shape_of(self, fqn: str) -> tuple[int, ...]:
        param = self.params[self.ids[fqn]]
        return param.shapes[param.fqns.index(fqn)]


# ---------------------------------------------------------------- simulated ranks


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: the parameters that it flattens, in order.

    Attributes:
        params: (FQN, shape) in the order of ``named_parameters()``.
        use_orig_params: the FSDP argument; True aligns each parameter to 16 bytes.
        sharded: False for NO_SHARD (and a shard group of one rank).
        itemsize: bytes of an element, for the alignment.
    """

    params: tuple[tuple[str, tuple[int, ...]], ...]
    use_orig_params: bool = True
    sharded: bool = True
    itemsize: int = 4

    def local_params(self, world_size: int, rank: int) -> list[ParamLayout]:
        """What rank ``rank`` of a shard group of ``world_size`` holds of this unit.

        Follows ``FlatParamHandle``: parameters in order, with ``use_orig_params`` each on a
        multiple of 16 bytes and the whole on a multiple of the world size, then one chunk of
        equal size per rank, the last ones short or empty and padded.
        """
        align = 16 // self.itemsize if self.use_orig_params else 1
        starts, total = [], 0
        for _, shape in self.params:
            total = -(-total // align) * align
            starts.append(total)
            total += math.prod(shape)
        sharded = self.sharded and world_size > 1
        if self.use_orig_params:
            total = -(-total // world_size) * world_size
        size = -(-total // world_size) if sharded else total
        low = size * rank if sharded else 0
        high = low + size
        segments = []
        for (fqn, shape), begin in zip(self.params, starts, strict=True):
            end = begin + math.prod(shape)
            a, b = max(begin, low), min(end, high)
            if a >= b:
                segments.append(Segment(fqn, shape, 0, 0, 0))
            else:
                segments.append(Segment(fqn, shape, a - begin, b - begin, a - low))
        if not self.use_orig_params:
            fqns = tuple(fqn for fqn, _ in self.params)
            shapes = tuple(shape for _, shape in self.params)
            return [ParamLayout(fqns, shapes, ParamKind.FLAT, tuple(segments), size, sharded)]
        if not sharded:
            return [ParamLayout((s.fqn,), (s.shape,), ParamKind.WHOLE) for s in segments]
        return [
            ParamLayout(
                (s.fqn,),
                (s.shape,),
                ParamKind.FLAT,
                (Segment(s.fqn, s.shape, s.start, s.stop, 0),),
                s.numel,
                True,
            )
            for s in segments
        ]


def units_of(
    shapes: Mapping[str, Sequence[int]],
    wrapped: Iterable[str] = ("",),
    *,
    ignored: Iterable[str] = (),
    use_orig_params: bool = True,
    sharded: bool = True,
    itemsize: int = 4,
) -> tuple[list[Unit], list[tuple[str, tuple[int, ...]]]]:
    """Divide parameters into FSDP units by the modules that are wrapped.

    Args:
        shapes: FQN -> shape, in the order of ``named_parameters()``.
        wrapped: FQNs of the wrapped modules (``""``: the root). A parameter belongs to the
            innermost wrapped module around it.
        ignored: FQNs of modules whose parameters FSDP leaves alone.

    Returns:
        The units, root first then by name as given, and the parameters outside of FSDP.
    """
    prefixes = list(dict.fromkeys(wrapped))
    members: dict[str, list[tuple[str, tuple[int, ...]]]] = {p: [] for p in prefixes}
    outside = []
    for fqn, shape in shapes.items():
        around = [p for p in prefixes if _within(fqn, p)]
        if any(_within(fqn, p) for p in ignored) or not around:
            outside.append((fqn, tuple(shape)))
        else:
            members[max(around, key=len)].append((fqn, tuple(shape)))
    units = [
        Unit(tuple(params), use_orig_params, sharded, itemsize)
        for params in members.values()
        if params
    ]
    return units, outside


def _within(fqn: str, module: str) -> bool:
    return module in ("", fqn) or fqn.startswith(module + ".")


def simulate(
    units: Iterable[Unit],
    outside: Iterable[tuple[str, tuple[int, ...]]] = (),
    *,
    world_size: int,
    rank: int,
) -> FlatLayout:
    """The layout of one rank of a world that need not exist.

    Args:
        units: the FSDP units, in the order in which the optimizer has their parameters.
        outside: (FQN, shape) of parameters outside of FSDP, which come last.
        world_size, rank: of the shard group.
    """
    if not 0 <= rank < world_size:
        raise LayoutError(f"expected a rank in [0, {world_size}), found {rank}")
    params = [param for unit in units for param in unit.local_params(world_size, rank)]
    params += [ParamLayout((fqn,), (shape,), ParamKind.WHOLE) for fqn, shape in outside]
    return FlatLayout(tuple(params), {}, (tuple(range(len(params))),))


def param_id(name: Any, layout: FlatLayout) -> int | None:
    """The parameter that a key of ``state`` or an element of ``params`` means, if any."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name if 0 <= name < len(layout.params) else None
    return layout.id_of(name) if isinstance(name, str) else None
