"""What the planner, and ``verify``, ask of whatever loads one optimizer or one model on a rank.

To load another kind of thing: a class with these methods, begun in
``FlatOptimLoadPlanner.set_up_planner``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.errors import Mismatch
from dcp_fsdp_osd.load.schedule import LoadSchedule
from dcp_fsdp_osd.tree import Path

__all__ = ["Form", "LoadReport", "StateCodec", "StateLoad"]

Form = Literal["flat", "sharded", "full"]
"""What an empty dict is filled with."""


@dataclass(frozen=True)
class LoadReport:
    """What one rank knows of one load; travels with its local plan.

    Attributes:
        mismatches: of this rank; one that others have too is printed once.
        names: of parameters and entries that this rank has a use for, under any of their names.
        saved_names: that the checkpoint has. What no rank has a use for does not match either.
        unused: what is said of those: ``"optimizer has no such parameter"``.
    """

    mismatches: tuple[Mismatch, ...]
    names: tuple[str, ...]
    saved_names: tuple[str, ...]
    unused: str


class StateLoad(Protocol):
    """One optimizer's, or one model's, load on one rank.

    Call order: ``plan``, ``report``; ``place`` of any read, while nothing is allocated yet;
    ``allocate``; then for each read ``destination`` or ``take_object``, from any thread; when all
    reads are done ``finish``, when all loads have finished ``hand_over``, and ``release``. A load
    that is given up is let go of at any point.

    Ownership: the dict that is loaded is the caller's and is changed by ``hand_over`` alone, so
    that it stays empty where any load fails. Tensors in it that are loaded in place are
    written by the reads. What ``allocate`` makes is the dict's after ``hand_over``.
    """

    path: tuple[str, ...]
    """Of the optimizer or model, in state dict and checkpoint."""
    late: list[Mismatch]
    """What was found after reading, and is skipped."""

    def plan(self) -> LoadSchedule:
        """What is to be read. Allocates nothing, touches no tensor, runs no collective.

        Raises:
            CorruptCheckpointError: a saved tensor lacks elements that this rank needs.
        """

    def report(self) -> LoadReport:
        """What the other ranks have to know of the plan."""

    def allocate(self) -> None:
        """Make the tensors that are not there yet, each with memory of its own."""

    def place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        """Dtype and device of :meth:`destination`; dtype None, CPU for an object."""

    def destination(self, item: ReadItem) -> torch.Tensor:
        """The memory that ``item`` is read to, of shape ``item.lengths``: a view."""

    def take_object(self, key: str, value: Any) -> None:
        """``value`` was read of an entry that is no tensor."""

    def finish(self) -> None:
        """Put what was read together, and look for what cannot be one state.

        Raises:
            CheckpointMismatchError: what was read cannot be loaded here.
        """

    def hand_over(self) -> None:
        """Fill the dict that is loaded."""

    def release(self) -> None:
        """Let go of what was loaded; the state dict owns it now."""


class StateCodec(Protocol):
    """State that is saved in a plainer form than optimizers keep it in (:mod:`..lowbit`).

    A value at ``path`` of a parameter's state is saved as 1-D tensors at ``(*path, name)``. Call
    order: ``encode``; the questions, while reads are planned; ``decode`` of each parameter's state.
    ``number`` is the parameter's.
    """

    def encode(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of an optimizer's state dict in the form that is saved; tensors are shared."""

    def check(self, number: int, keys: Mapping[str, Path], *, whole: bool) -> list[Mismatch]:
        """What keeps this rank from loading what is encoded, or should have been.

        Args:
            keys: key -> path of all that the checkpoint has of the parameter.
            whole: it is to be loaded as tensors of the parameter's whole shape.

        Raises:
            CorruptCheckpointError: a tensor of an encoded value is not there.
        """

    def owns(self, number: int, path: Path) -> bool:
        """Whether the entry at ``path`` is a tensor of an encoded value."""

    def interval(self, number: int, path: Path) -> tuple[int, int]:
        """The elements that this rank reads of an entry that :meth:`owns`, with nothing wrong."""

    def decode(self, number: int, state: dict[Any, Any]) -> None:
        """Put encoded values of a parameter's ``state`` together again, in place."""

    def release(self) -> None:
        """Let go of all tensors."""
