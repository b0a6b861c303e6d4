"""A mistake as data, what it may use, and what came of it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import FlatModelState, FlatOptimSavePlanner, FlatOptimState, StreamingWriter
from tests.planners.checks import make
from tests.ranks import type_names

__all__ = ["SECONDS", "Bench", "Mistake", "Outcome", "all_mistakes", "heard", "mistake", "run_all"]

SECONDS = 30.0
"""No mistake may take longer to be told; also the time limit of a collective in the rank pool."""


@dataclass(frozen=True)
class Bench:
    """What a mistake is made with: this rank, and a folder of its own that all ranks share.

    ``good`` is a checkpoint of ``make()``: the keys ``model``, ``optim`` and ``step``.
    """

    rank: int
    world: int
    folder: Path
    good: str

    @property
    def path(self) -> str:
        """Where there is nothing yet."""
        return str(self.folder / "new")

    def once(self, make_it: Callable[[], Any]) -> None:
        """Let rank 0 alone do something to the shared folder, before all go on."""
        if self.rank == 0:
            make_it()
        dist.barrier()


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        what: what the user does.
        do: does it.
        raises: name of the error's class, or of one that it holds or comes from; ``""`` if the call
            goes through, with a warning or log line, or (`says` is ``""`` too) because it is no
            mistake after all, which `do` checks.
        says: a pattern (``re.search``) that the text matches on every rank in `ranks`.
        ranks: the ranks that must be told; None: all.
    """

    what: str
    do: Callable[[Bench], Any]
    raises: str
    says: str
    ranks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.do.__name__


@dataclass
class Outcome:
    """What one rank was told."""

    types: frozenset[str] = frozenset()
    error: str = ""
    told: list[str] = field(default_factory=list)  # warnings and log lines
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return "\n".join([self.error, *self.told])


_MISTAKES: dict[str, Mistake] = {}
_ROOMS = ("arguments", "saving", "loading", "storage", "alone")


def all_mistakes() -> dict[str, Mistake]:
    """The mistakes of every room, by name."""
    for room in _ROOMS:
        importlib.import_module(f"tests.mistakes.{room}")
    return _MISTAKES


def mistake(
    what: str, *, raises: str, says: str, ranks: tuple[int, ...] | None = None
) -> Callable[[Callable[[Bench], Any]], Callable[[Bench], Any]]:
    """Register what the decorated function does."""

    def register(do: Callable[[Bench], Any]) -> Callable[[Bench], Any]:
        if do.__name__ in _MISTAKES:
            raise ValueError(f"two mistakes are named {do.__name__}")
        _MISTAKES[do.__name__] = Mistake(what, do, raises, says, ranks)
        return do

    return register


def run_all(rank: int, world: int, root: str, names: list[str]) -> dict[str, Outcome]:
    """Make every mistake, one after the other, on this rank."""
    good = str(Path(root) / "good")
    model, optim = make()
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 2}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save(state, storage_writer=StreamingWriter(good), planner=planner)
    outcomes = {}
    for name in names:
        folder = Path(root) / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        outcomes[name] = _run(all_mistakes()[name], Bench(rank, world, folder, good))
    return outcomes


def _run(mistake: Mistake, bench: Bench) -> Outcome:
    outcome = Outcome()
    begin = time.monotonic()
    with heard(outcome.told):
        try:
            mistake.do(bench)
        except BaseException as error:
            outcome.types = type_names(error)
            outcome.error = _text(error)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _text(error: BaseException) -> str:
    """The message that the user reads: of what the ranks raised, where DCP has gathered that."""
    held = getattr(error, "failures", None)
    if isinstance(held, dict):
        return "\n".join(f"{rank}: {_text(error)}" for rank, (error, _) in sorted(held.items()))
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def heard(told: list[str]) -> Iterator[None]:
    """Collects warnings, and what is logged where logging was not set up (WARNING and above)."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(f"log: {record.getMessage()}")

    handler = Lines(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.6's own use
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        told += [f"{w.category.__name__}: {w.message}" for w in caught]
