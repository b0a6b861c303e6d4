"""State that is quantized in blocks, as plain tensors and back.  Pure: no planner, no IO.

torchao's low-bit optimizers keep a state tensor as a tensor subclass that stands for ``codes``
(the quantized elements in row-major order, a byte each or packed), ``scale`` (one for each
``block_size`` of them) and tables that are the same everywhere (``qmap``).  What a checkpoint has
under the name of such a state, ``exp_avg``, are these tensors, each 1-D:

    exp_avg.codes, exp_avg.scale   of the first elements of the parameter, in whole blocks
    exp_avg.qmap                   as it is
    exp_avg.plain                  of the elements after them that a rank keeps unquantized, if any

An element's place in ``codes`` follows from its row-major number, and that of its block's scale
from that over ``block_size``: so a rank whose part is an interval of whole blocks reads and
writes intervals of both.  Nothing of the subclass is pickled: :class:`Quantized` says how to make
it again, as JSON beside the metadata (``SavedInfo.quantized``).

No quantizing library is imported: a value is known by ``__tensor_flatten__``, ``block_size`` and
the tensors named above.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.layout.flat import ParamLayout
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.layout.placements import like_param
from dcp_fsdp_osd.tree import Path, digest

__all__ = [
    "Quantized",
    "interval",
    "is_wrapper",
    "join",
    "local_part",
    "split",
]

CODES, SCALE, PLAIN = "codes", "scale", "plain"


@dataclass(frozen=True)
class Quantized:
    """How a quantized state tensor was saved, and what it takes to make it again.

    Attributes:
        fqn, path: the parameter, and the state's place below it.
        type: module and name of the subclass.
        dtype: that the value appears to have.
        block_size: elements that share a scale.
        packed: elements of ``codes`` for a block.
        shaped: ``codes`` has the value's shape (else it is 1-D).
        attributes: the second half of ``__tensor_flatten__()``, encoded for JSON.
        tables: digests of the tensors other than ``codes`` and ``scale``, by name.
        shape: of the whole parameter.
        signature: of the only part that this can be loaded for, where that is not an interval of
            whole blocks (``ParamLayout.signature``); ``""`` if it can be loaded for others.
    """

    fqn: str
    path: Path
    type: tuple[str, str]
    dtype: str
    block_size: int
    packed: int
    shaped: bool
    attributes: tuple[Any, ...]
    tables: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    signature: str = ""

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Quantized:
        """The inverse of ``vars``, after JSON has made lists of tuples."""
        return cls(**{name: _frozen(value) for name, value in packed.items()})

    def describe(self) -> str:
        return f"{self.type[1]} in blocks of {self.block_size}"

    def same_kind(self, other: Quantized) -> bool:
        return (self.type, self.block_size) == (other.type, other.block_size)

    def find_type(self) -> Any:
        """The subclass, if it is imported; None if it is not.  Nothing is imported for it."""
        found = getattr(sys.modules.get(self.type[0]), self.type[1], None)
        is_type = isinstance(found, type) and issubclass(found, torch.Tensor)
        return found if is_type and hasattr(found, "__tensor_unflatten__") else None

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else torch.float32


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def is_wrapper(local: Any) -> bool:
    """Whether a tensor (not a DTensor) stands for other tensors."""
    return isinstance(local, torch.Tensor) and hasattr(local, "__tensor_flatten__")


def local_part(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor itself (with gradients on it would be a view, which torchao's
    subclasses make without their dtype); any other tensor as it is."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def split(
    value: torch.Tensor, param: ParamLayout, path: Path
) -> tuple[Quantized, dict[str, torch.Tensor]] | None:
    """Take a quantized value of ``param`` apart: how to make it again, and its tensors.

    ``codes`` and ``scale`` come as 1-D views, the tables as they are.  None if the value is not of
    the kind that this module knows.
    """
    local = local_part(value)
    names, attributes = local.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: dict[str, torch.Tensor] = {name: getattr(local, name) for name in names}
    block_size = getattr(local, "block_size", None)
    codes, scale = inner.get(CODES), inner.get(SCALE)
    if codes is None or scale is None or not isinstance(block_size, int) or PLAIN in inner:
        return None
    encoded = _encode(attributes, tuple(local.shape))
    sizes = scale.numel() * block_size, codes.numel() % max(1, scale.numel()), scale.dim()
    dense = codes.is_contiguous() and scale.is_contiguous()
    plain = not any(is_wrapper(tensor) for tensor in inner.values())
    if encoded is None or sizes != (local.numel(), 0, 1) or not (dense and plain):
        return None
    tables = {name: inner[name] for name in names if name not in (CODES, SCALE)}
    how = Quantized(
        fqn=param.fqns[0],
        path=path,
        type=(type(local).__module__, type(local).__qualname__),
        dtype=str(value.dtype).removeprefix("torch."),
        block_size=block_size,
        packed=codes.numel() // scale.numel(),
        shaped=codes.shape == local.shape,
        attributes=encoded,
        tables=tuple((name, digest(tensor)) for name, tensor in tables.items()),
        shape=param.shapes[0],
    )
    flat = {CODES: codes.detach().view(-1), SCALE: scale.detach()}
    return how, {**flat, **{name: tensor.detach() for name, tensor in tables.items()}}


def join(how: Quantized, inner: Mapping[str, torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    """The value of which :func:`split` gave ``inner``; it takes their memory over.

    Args:
        how: its subclass must be imported.
        inner: of this rank's part; without ``codes``, ``plain`` is all there is, and the
            value no quantized one.
        param: the parameter, for its shape and placements.
    """
    shape = local_part(param).shape
    if CODES not in inner:
        return like_param(inner[PLAIN].view(shape), param)
    tensors = dict(inner)
    if how.shaped:
        tensors[CODES] = tensors[CODES].view(shape)
    stride = torch.empty(shape, device="meta").stride()
    attributes = _decode(how.attributes, shape, how.torch_dtype)
    return like_param(
        how.find_type().__tensor_unflatten__(tensors, attributes, shape, stride), param
    )


def interval(param: ParamLayout) -> tuple[int, int] | None:
    """This rank's elements of a parameter that is no flat piece, as row-major numbers.

    None if its part is no one interval (columns, say); ``(0, 0)`` if it has no element.
    """
    (shape,) = param.shapes
    box = param.box or Box((0,) * len(shape), shape)
    if 0 in box.sizes:
        return 0, 0
    start, numel, cut = 0, 1, False
    for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True):
        if cut and size != whole:
            return None
        cut = cut or size > 1
        start = start * whole + offset
        numel *= size
    return start, start + numel


def _encode(attributes: Any, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Attributes as JSON values; None where one of them has no such form."""
    if not isinstance(attributes, list | tuple):
        return None
    encoded: list[Any] = []
    for value in attributes:
        if isinstance(value, torch.dtype):
            encoded.append(("dtype",))
        elif isinstance(value, Sequence) and tuple(value) == shape:
            encoded.append(("shape",))
        elif value is None or isinstance(value, bool | int | float | str):
            encoded.append(value)
        else:
            return None
    return tuple(encoded)


def _decode(attributes: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> list[Any]:
    marks = {("dtype",): dtype, ("shape",): shape}
    return [marks[value] if isinstance(value, tuple) else value for value in attributes]
