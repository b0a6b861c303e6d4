"""What lies in a Stateful's state dict beside the state: for our planners, and against others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dcp_fsdp_osd.errors import CheckpointMismatchError, LayoutError
from dcp_fsdp_osd.tree import dicts

__all__ = [
    "GUARD_KEY",
    "Guard",
    "NotADict",
    "guarded",
    "is_guarded",
    "mark_loaded",
    "without_guard",
]


G = TypeVar("G", bound="Guard")


GUARD_KEY = "__needs_FlatOptimSavePlanner_or_FlatOptimLoadPlanner__"


class Guard:
    """Lies in a :class:`FlatOptimState`'s state dict, and stops a planner that is not ours.

    Stock planners ask each value for its write items or chunks; this one answers with an error.
    """

    loaded = False
    problem = ""
    owner, pieces = "FlatOptimState", "flat tensors"

    def check(self) -> None:
        """Raise LayoutError if there is a problem, where all ranks learn of it."""
        if self.problem:
            raise LayoutError(self.problem)

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        self._refuse("dcp.save", "FlatOptimSavePlanner")

    def __create_chunk_list__(self) -> NoReturn:
        self._refuse("dcp.load", "FlatOptimLoadPlanner")

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        self._refuse("dcp.load", "FlatOptimLoadPlanner")

    def _refuse(self, call: str, planner: str) -> NoReturn:
        raise LayoutError(
            f"a {self.owner} holds one rank's pieces of {self.pieces}, which another planner "
            f"would take for whole tensors: pass planner={planner}() to {call}"
        )

    @classmethod
    def check_loaded(cls, state_dict: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatchError unless our planner has loaded ``state_dict``."""
        guard = state_dict.get(GUARD_KEY)
        if not isinstance(guard, cls) or not guard.loaded:
            raise CheckpointMismatchError(
                f"expected a state dict that FlatOptimLoadPlanner has loaded, found one that it "
                f"has not seen: pass planner=FlatOptimLoadPlanner() to dcp.load with the "
                f"{cls.owner} itself"
            )


class NotADict:
    """A ``Stateful`` that is no state dict itself; says so where it is used as one, or nested."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("copy", "items", "keys", "values", "get", "pop", "setdefault", "update"):
                raise AttributeError(self._not_a_dict())
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(self._not_a_dict())

    def __contains__(self, key: Any) -> NoReturn:
        raise TypeError(self._not_a_dict())

    def _not_a_dict(self) -> str:
        return (
            f"expected a state dict, found a {type(self).__name__}, which dcp.save and dcp.load "
            f"take as it is, and which dcp.load has loaded when it returns; its state dict is "
            f"that of its state_dict()"
        )

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        raise LayoutError(
            f"expected a {type(self).__name__} at the top of the state dict, where DCP calls its "
            f"methods, found one at {fqn!r}: move it to the top, or put its state_dict() there"
        )


def guarded(
    state_dict: Mapping[str, Any], kind: type[G]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], G]]:
    """The state dicts of Statefuls that have a guard of ``kind``, with their paths."""
    for path, value in dicts(state_dict):
        guard = value.get(GUARD_KEY)
        if isinstance(guard, kind) and isinstance(value, dict):
            yield path, value, guard


def is_guarded(state_dict: Mapping[str, Any]) -> bool:
    return GUARD_KEY in state_dict


def without_guard(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state_dict.items() if k != GUARD_KEY}


def mark_loaded(state_dict: Mapping[str, Any]) -> None:
    guard = state_dict.get(GUARD_KEY)
    if isinstance(guard, Guard):
        guard.loaded = True
