"""A few rounds of the soak in every run of the tests; ``make soak`` makes them for hours.

What the soak itself would notice is planted here: a leak of each kind, and a loss.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.breadth import always
from tests.soak.driver import Soak, soak
from tests.soak.growth import Used, grown
from tests.soak.rounds import KINDS, draw_round

WORLD = 4
_SEEDS = {
    "no fault": (32, 35),
    "kill an overwrite": (13,),
    "kill a load": (25,),
    "store error in a save": (13,),
    "disk full": (4,),
    "damaged file": (5,),
    "replaced while read": (6,),
    "retention, kill": (55,),
    "wire truncation": (13,),
    "wire lost answer": (23,),
}
"""Rounds that always run: of small worlds, as starting a rank is most of what a round costs."""
_STRUCK = {*_SEEDS} - {"no fault"}
_AGAIN = 3
_FEW = [(kind, str(seed)) for kind, seeds in _SEEDS.items() for seed in seeds]
_ALL = [*_FEW, *((kind, str(seed)) for kind in KINDS for seed in range(20, 23))]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    with soak(tmp_path_factory.mktemp("soak"), world=WORLD) as running:
        yield running


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", always(_FEW, _ALL), ids=" ".join)
def test_a_round(running: Soak, case: tuple[str, str]) -> None:
    kind, seed = case[0], int(case[1])
    account = running.account
    before = len(account.losses + account.errors + account.hangs)
    struck = account.struck[kind]
    # On a busy machine a kill may come when all is done: then once more, with other seeds.
    for attempt in range(1 + _AGAIN * (kind in _STRUCK)):
        running.run(seed + 1000 * attempt, kind)
        assert len(account.losses + account.errors + account.hangs) == before, account.problems()
        if account.struck[kind] > struck:
            break
    assert account.struck[kind] > struck or kind not in _STRUCK


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_at_the_end(running: Soak) -> None:
    running.run(55, "no fault")
    compared = running.account.compared
    running.check_all()
    assert running.account.compared > compared
    assert not running.account.losses


@pytest.mark.filterwarnings("ignore")
def test_a_loss_shows(tmp_path: Path, running: Soak) -> None:
    with running.apart(tmp_path) as other:
        drawn = (draw_round(seed, WORLD, "disk full") for seed in range(12, 80))
        found = next(each for each in drawn if each.place == "local" and each.statefuls)
        other.run(found.seed, found.kind)
        files = [path for path in tmp_path.rglob("*.distcp") if path.stat().st_size > 4000]
        for path in files:
            data = bytearray(path.read_bytes())
            data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
            path.write_bytes(data)
        other.check_all()
        assert files and other.account.losses
        assert not other.account.hangs


_LEAKED: list[object] = []


def _leak(rank: int, world: int) -> None:
    if rank == 1:
        _LEAKED.append(bytearray(b"x") * (32 << 20))
        _LEAKED.append(Path("/dev/null").open())  # noqa: SIM115
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()


def test_a_leak_shows(tmp_path: Path, running: Soak) -> None:
    with running.apart(tmp_path) as other:
        for _ in range(3):
            other.sample()
        assert not other.account.grown()
        other.account.samples.clear()
        for _ in range(3):
            other.on_each_rank(_leak)
            other.sample()
    found = other.account.grown()
    assert [text.split(" grew")[0] for text in found] == [
        "rank 1: resident",
        "rank 1: files",
        "rank 1: threads",
    ]


def test_growth_is_of_what_stays() -> None:
    flat = [Used(1, 10 << 20, 20, 8)] * 4
    peak = [Used(1, 90 << 20, 60, 40)]
    assert not grown([*flat, *peak, *flat, *peak, *flat, *peak])
    assert grown([Used(1, n << 23, 20, 8) for n in range(12)]) == [
        f"resident grew from {4 << 23} to {8 << 23} (samples: 12)"
    ]
    assert not grown([Used(1, n << 20, 20, 8) for n in range(12)])


def test_each_kind_is_drawn() -> None:
    drawn = [draw_round(seed, 8) for seed in range(600)]
    assert {each.kind for each in drawn} == set(KINDS)
    often = {kind for kind, (share, _) in KINDS.items() if share}
    assert {each.kind for each in drawn[17:97]} >= often  # within two decks, wherever one begins
    assert draw_round(7, 8) == draw_round(7, 8)
    assert {each.job.source.world for each in drawn} == {1, 2, 3, 4, 5, 6, 8}
    assert {each.place for each in drawn} == {
        place for _, places in KINDS.values() for place in places
    }
