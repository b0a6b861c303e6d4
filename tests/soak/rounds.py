"""What one round of the soak does: drawn from its seed, so that each can be made again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.random_jobs import Job, draw

__all__ = ["CLIENTS", "KINDS", "PROXIED", "Round", "Strike", "Wire", "draw_round"]

_LOCAL = ("local", "fsspec local")
_S3 = ("s3 obstore", "s3 fsspec")
_ANY = (*_LOCAL, *_S3, "local")
_STALL = 3.0
"""Seconds after which what stalls is given up (in a commit, ten times as many); a busy machine is
silent for two now and then."""
_PATIENCE = 20.0
_CONCURRENCY = (None, 1, 3)
CLIENTS = tuple((stall, many) for stall in (_PATIENCE, _STALL) for many in _CONCURRENCY)
"""Stall limits and concurrencies that are drawn: fsspec keeps a client for each, with 14 MiB of
botocore's."""
_COSTLY = "killed process of async_save"

KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "no fault": (6, _ANY),
    "kill a save": (3, _ANY),
    "kill an overwrite": (3, _ANY),
    "kill a load": (2, _ANY),
    "store error in a save": (2, _ANY),
    "store error in a load": (2, _ANY),
    "transient error in a save": (1, ("local",)),
    "transient error in a load": (1, ("local",)),
    "disk full": (2, _LOCAL),
    "short file": (1, ("local",)),
    "stall in a save": (1, ("local",)),
    "stall in a load": (1, ("local",)),
    "damaged file": (2, ("local",)),
    "replaced while read": (2, _ANY),
    "retention": (2, _ANY),
    "retention, store error": (1, _ANY),
    "retention, kill": (2, _ANY),
    _COSTLY: (0, ("local",)),
    "wire status": (2, _S3),
    "wire reset": (1, _S3),
    "wire reset of an upload": (1, _S3),
    "wire truncation": (1, _S3),
    "wire delay": (1, _S3),
    "wire stall": (1, _S3),
    "wire lost answer": (2, _S3),
}
"""Kinds of rounds by what goes wrong: how often, in shares, and on which stores.

A process of async_save costs as much as ten other rounds: one in four decks, for a round without
a fault.
"""
_DECK = tuple(name for name, (share, _) in KINDS.items() for _ in range(share))
PROXIED = tuple(kind for kind in KINDS if kind.startswith("wire"))


@dataclass(frozen=True)
class Strike:
    """What happens to one rank.

    Attributes:
        what: ``"kill"``, ``"error"`` (EIO), ``"full"`` (ENOSPC, from then on), ``"transient"``,
            ``"stall"`` (a call that does not return), ``"short"`` (a file loses its last byte when
            it is complete), ``"slow"`` (each call).
        victim: the rank; where that one makes no call, the next one that does.
        at: the share of an undisturbed run that is over by then.
        clock: by the time that an undisturbed run takes, wherever the rank is; else by its calls.
        call: the store's call before which it happens, counted from 0; less: calls are counted,
            on all ranks, and nothing happens.
        after: seconds after which it happens instead; 0: by `call`.
        note: a path; what ranks have to say of it is written to files that begin so.
    """

    what: str
    victim: int
    at: float = 0.0
    clock: bool = False
    call: int = -1
    after: float = 0.0
    note: str = ""

    @property
    def counts(self) -> bool:
        return self.call < 0 and not self.after


@dataclass(frozen=True)
class Wire:
    """A fault of the proxy before the S3 server: arguments of ``Fault`` and ``inject``.

    It comes when the share `at` of an undisturbed run's requests is over.
    """

    fault: str
    arguments: tuple[Any, ...]
    method: str
    at: float
    times: int


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        place: the store.
        statefuls: weights and optimizer as Statefuls, else the optimizer's dict.
        broadcast: of the load planner.
        strike: of a rank of the save or of the load.
        wire: of all requests.
        options: of writer and reader.
    """

    seed: int
    kind: str
    job: Job
    place: str
    statefuls: bool
    broadcast: Any
    strike: Strike
    wire: tuple[Wire, ...]
    options: dict[str, Any]

    @property
    def world(self) -> int:
        """Of the ranks that are struck."""
        side = self.job.target if self.kind.endswith("load") else self.job.source
        return side.world


def draw_round(seed: int, world: int, kind: str | None = None) -> Round:
    """The round of a seed, of up to `world` ranks; of a `kind`, if one is given.

    Kinds are dealt from a shuffled deck, so that each of them comes within any two decks.
    """
    rng = random.Random(f"soak {seed}")
    kind = kind or _dealt(seed)
    worlds = tuple(n for n in (1, 2, 3, 4, 5, 6, 8) if n <= world)
    job = draw(seed, worlds)
    if kind != "no fault":
        ours = {"by": "ours"}
        job = replace(
            job,
            source=replace(job.source, **ours),
            target=replace(job.target, **ours),
            streaming=True,
        )
    if kind == _COSTLY:
        job = replace(job, source=replace(job.source, world=2, strategy="FULL_SHARD", mesh=False))
    both_ours = job.source.by == job.target.by == "ours"
    place = "local" if not job.streaming else rng.choice(KINDS[kind][1])
    stalls = "stall" in kind or kind == "wire lost answer"
    found = Round(
        seed=seed,
        kind=kind,
        job=job,
        place=place,
        statefuls=both_ours and job.streaming and rng.random() < 0.5,
        broadcast=rng.choice(("auto", "auto", True, False)),
        strike=Strike("", 0),
        wire=tuple(_wire(rng, kind) for _ in range(rng.randint(1, 3) if kind in PROXIED else 0)),
        options={
            "stall_seconds": _STALL if stalls else _PATIENCE,
            "concurrency": rng.choice(_CONCURRENCY),
            "max_inflight_bytes": rng.choice((4 << 20, 64 << 20)) if place in _LOCAL else 32 << 20,
        },
    )
    return replace(found, strike=_strike(rng, found))


def _dealt(seed: int) -> str:
    number, card = divmod(seed, len(_DECK))
    cards = list(_DECK)
    random.Random(f"deck {number}").shuffle(cards)
    if cards[card] == "no fault" and "no fault" not in cards[:card] and number % 4 == 0:
        return _COSTLY
    return cards[card]


def _strike(rng: random.Random, found: Round) -> Strike:
    # The first rank has the most to do: it commits.
    victim = 0 if rng.random() < 0.4 else rng.randrange(found.world)
    at = rng.random()
    kind = found.kind
    if "kill" in kind:
        return Strike("kill", victim, at, clock=rng.random() < 0.5)
    for word, what in (
        ("transient", "transient"),
        ("store error", "error"),
        ("full", "full"),
        ("short", "short"),
        ("stall in", "stall"),
        ("replaced", "slow"),
    ):
        if word in kind:
            return Strike(what, victim, at)
    return Strike("", 0)


def _wire(rng: random.Random, kind: str) -> Wire:
    fault, arguments, methods = {
        "wire status": ("status", (rng.choice((429, 500, 502, 503)),), ("", "GET", "PUT")),
        "wire reset": ("reset", (rng.choice((0, 10, 1000)),), ("GET",)),
        "wire reset of an upload": ("reset_upload", (rng.choice((0, 100, 3000)),), ("PUT",)),
        "wire truncation": ("truncate", (rng.choice((0, 10, 1000)),), ("GET",)),
        "wire delay": ("delay", (rng.uniform(0.01, 0.3),), ("", "GET", "PUT")),
        "wire stall": ("stall", (rng.choice((-1, 0, 10)),), ("GET",)),
        "wire lost answer": ("lose_answer", (), ("PUT", "POST")),
    }[kind]
    method = rng.choice(methods)
    return Wire(fault, arguments, method, at=rng.random(), times=rng.randint(1, 3))
