"""FQNs: the names that modules and parameters have in the unwrapped model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_fsdp_osd.errors import LayoutError

__all__ = ["COMPILE_WRAPPER", "fqns_of", "join_name", "module_names"]


_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"


_FSDP_WRAPPER = "_fsdp_wrapped_module"


COMPILE_WRAPPER = "_orig_mod"


def module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module of the tree with its names in the unwrapped model, in traversal order.

    A module that is used in several places has several names, the first of which counts.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in _walk(model, ""):
        names.setdefault(module, []).append(name)
    return names


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            inner = name if _is_wrapper(module, child_name) else join_name(name, child_name)
            yield from _walk(child, inner)


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether ``child`` names what a wrapper wraps (a user's own ``module`` does not)."""
    if child == "module":
        return isinstance(module, DistributedDataParallel | DataParallel)
    return child in (_FSDP_WRAPPER, COMPILE_WRAPPER, _CHECKPOINT_WRAPPER)


def fqns_of(place: tuple[nn.Module, str], names: dict[nn.Module, list[str]]) -> list[str]:
    """All names of the parameter at ``place`` (a module, and an attribute's name)."""
    module, name = place
    if module not in names:
        raise LayoutError(
            f"expected the module that holds parameter {name!r} ({type(module).__name__}) in the "
            f"model, found that it was replaced or removed after FSDP wrapped it"
        )
    return [join_name(prefix, name) for prefix in names[module]]


def join_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
