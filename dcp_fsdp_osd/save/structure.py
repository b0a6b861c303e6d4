"""How a state dict is made, but for its values: what is compared to know one that is as before.

What a rank would write follows from mappings and their keys, from the kinds of values, and from
dtype, shape, strides and device of tensors. These are put down here in one list, so that a state
dict whose list is equal to that of another is taken apart as that one was. What is of a kind that
is not known here may say more than its kind does: then there is no list.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dcp_fsdp_osd.stateful.guard import Guard

__all__ = ["structure_of"]

_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
_ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device})
_KEYS = frozenset({float, bool, bytes, type(None)})
_IDS = frozenset({int, str})
_OWN_ITEMS = "__create_write_items__"  # as DCP asks for them
_MANY = (Mapping, list, tuple, set, frozenset, torch.Tensor)


class _Unknown(Exception):
    """A value of which more may count than is looked at."""


def structure_of(state_dict: Mapping[str, Any]) -> tuple[list[Any], list[Guard]] | None:
    """How ``state_dict`` is made, to be compared with ``==``; and the guards in it, in order.

    None if it holds what may be written otherwise though it looks alike: subclasses of tensors
    (DTensors among them) and of containers, or what makes items of its own.
    """
    found: list[Any] = []
    guards: list[Guard] = []
    try:
        _walk(state_dict, found, guards)
    except _Unknown:
        return None
    return found, guards


def _walk(value: Any, found: list[Any], guards: list[Guard]) -> None:
    kind = type(value)
    if kind in _TENSORS:
        found.append(_tensor(value))
    elif kind in _DICTS:
        found.append((kind, len(value), getattr(value, "default_factory", None)))
        for key, item in value.items():
            found.append(key if type(key) is str else _key(key))
            if key == "params" and type(item) is list and _IDS.issuperset(map(type, item)):
                # Which parameters a group has.
                found.append((list, "of", tuple(item), tuple(map(type, item))))
            else:
                _walk(item, found, guards)
    elif kind is list or kind is tuple:
        if _ATOMS.issuperset(map(type, value)):  # one value, whatever is in it
            found.append((kind, "of atoms"))
        else:
            found.append((kind, len(value)))
            for item in value:
                _walk(item, found, guards)
    else:
        found.append(kind)
        if isinstance(value, Guard):
            guards.append(value)
        elif kind not in _ATOMS and (isinstance(value, _MANY) or hasattr(value, _OWN_ITEMS)):
            raise _Unknown


def _tensor(value: torch.Tensor) -> tuple[Any, ...]:
    if value.layout is not torch.strided or hasattr(value, _OWN_ITEMS):
        raise _Unknown
    return (
        type(value),
        value.dtype,
        value.shape,
        value.stride(),
        value.device,
        value.requires_grad,
        value.is_pinned(),
    )


def _key(key: Any) -> tuple[type, Any]:
    """A key that is no text, so that 0, False and 0.0 differ, and 0.0 and -0.0."""
    kind = type(key)
    if kind is int:
        return kind, key
    if kind in _KEYS:
        return kind, repr(key)
    raise _Unknown
