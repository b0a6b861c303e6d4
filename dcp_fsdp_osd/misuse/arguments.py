"""What an argument has to be, and what is said where another thing was passed.

DCP checks no types: a reader that is passed as a writer, or a model as an optimizer, ends in an
``AttributeError`` of some method that the user never called.  Here the mistake is named.  Nothing
in here changes what is done with arguments that are right.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

__all__ = [
    "HasRole",
    "check_bool",
    "check_key",
    "check_model",
    "check_optim",
    "check_options",
    "check_path",
    "check_positive",
    "describe_kind",
    "is_path",
]

_ROLES = {
    **dict.fromkeys(("storage_meta", "set_up_storage_writer", "write_data"), "storage_writer"),
    **dict.fromkeys(("read_metadata", "set_up_storage_reader", "read_data"), "storage_reader"),
    **dict.fromkeys(("set_up_planner", "create_local_plan", "create_global_plan"), "planner"),
    **dict.fromkeys(("reset", "prepare_local_plan"), "storage_writer or storage_reader"),
}


class HasRole:
    """An object that DCP takes in one place; asked for what another does, it says so.

    ``role`` is where it belongs, as in ``"dcp.save(storage_writer=...)"``.
    """

    role = ""

    if not TYPE_CHECKING:  # a type checker should go on finding misspelt attributes

        def __getattr__(self, name: str) -> NoReturn:
            wanted = _ROLES.get(name)
            kind = type(self).__name__
            if wanted is None:
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(
                f"expected something that can {name!r} as {wanted}=, found a {kind}, which belongs "
                f"to {self.role}"
            )


def describe_kind(value: Any) -> str:
    """What ``value`` is, for the end of an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, Mapping) and ("param_groups" in value or "state" in value):
        return f"{type(value).__name__} (an optimizer's state dict: pass the optimizer itself)"
    if isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values()):
        return f"{type(value).__name__} (a state dict: pass the nn.Module itself)"
    return type(value).__name__


def check_model(model: Any, whose: str) -> None:
    """Raise TypeError if ``model`` is none. ``whose``: the call, in error messages."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{whose}: expected model to be an nn.Module, found {describe_kind(model)}")


def check_optim(model: Any, optim: Any, whose: str, *, several: bool = False) -> None:
    """Raise TypeError unless these are a model and its optimizer.

    ``several``: or a mapping from key to optimizer, or nothing at all.
    """
    if several and model is None and optim is None:
        return
    if isinstance(model, torch.optim.Optimizer) and isinstance(optim, nn.Module):
        raise TypeError(
            f"{whose}: expected (model, optim), found ({type(model).__name__}, "
            f"{type(optim).__name__}): they are swapped"
        )
    if is_path(model):
        raise TypeError(
            f"{whose}: expected (model, optim, ...), found a path first: it comes third"
        )
    check_model(model, whose)
    wanted = "a torch.optim.Optimizer" + (" or a mapping {key: optimizer}" if several else "")
    optims = [optim]
    if several and isinstance(optim, Mapping) and "param_groups" not in optim:
        optims = list(optim.values())
        for key in optim:
            check_key(key, whose)
    for each in optims:
        if not isinstance(each, torch.optim.Optimizer):
            of = "" if each is optim else "each optimizer of the mapping to be "
            raise TypeError(
                f"{whose}: expected {of or 'optim to be '}{wanted}, found {describe_kind(each)}"
            )


def check_key(key: Any, whose: str) -> None:
    """Raise TypeError unless ``key`` can name a place in a state dict."""
    if not isinstance(key, str) or not key:
        raise TypeError(
            f"{whose}: expected key= to be a key of the state dict such as 'optim', found {key!r}"
        )


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError for ``"False"``, which is true."""
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be True or False, found {value!r}")


def check_positive(**numbers: float | None) -> None:
    """Raise ValueError if one is not positive; None is the default's."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"expected {name} to be positive, found {number!r}")


def check_options(options: Mapping[str, Any], base: type, whose: type) -> None:
    """Raise TypeError for options that neither ``whose`` nor DCP's planner ``base`` has."""
    own = [n for n, p in inspect.signature(whose).parameters.items() if p.kind != p.VAR_KEYWORD]
    known = list(inspect.signature(base).parameters)
    for name in options:
        if name not in known:
            raise TypeError(
                f"{whose.__name__} has no option {name!r}: expected one of its own "
                f"({', '.join(own)}) or of {base.__name__} ({', '.join(known)})"
            )


def is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def check_path(value: Any) -> None:
    """Raise TypeError if ``value`` is no path or URL; None is one to come."""
    if value is not None and not is_path(value):
        raise TypeError(f"expected path_or_url to be a path or URL, found {describe_kind(value)}")
