"""Five kinds of faults at six points of a load: all ranks raise, none hangs, and the state of the
optimizer is what it was, or the error says that it is not to be used.

What is promised, and how long it takes:

- A rank that can still speak (an error, an interrupt) makes all raise its error at once; where a
  stock reader fails, which tells nobody, by ``stall_seconds``.
- A rank that is killed or hangs makes the others log an :class:`ExchangeError`, at once or by
  ``stall_seconds``.  DCP's own collective then waits for that rank as well, and what ``dcp.load``
  raises is the process group's error, by its time limit.
- An error of a *stock reader* that cannot be pickled is DCP's to hand on, and it cannot: it shows
  on its own rank as a pickling error, and on the others like a rank that hangs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exchange.faults import (
    CAUSE,
    JOB_TIMEOUT,
    KINDS,
    POINTS,
    READERS,
    STALL,
    VICTIM,
    WORLD,
    Report,
    run_case,
    save,
)
from tests.ranks import run_ranks

SLACK = 8.0  # seconds, for a machine that does much else


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("faults") / "checkpoint")
    run_ranks(save, WORLD, path)
    return path


NORMAL = {
    ("planning", "unpicklable", "stock"),
    ("opening", "error", "stock"),
    ("opening", "unpicklable", "streaming"),
    ("reading", "interrupt", "streaming"),
    ("reading", "kill", "stock"),
    ("reading", "hang", "streaming"),
    ("allocating", "unpicklable", "stock"),
    ("allocating", "hang", "stock"),
    ("agreeing", "error", "stock"),
    ("sending", "error", "streaming"),
    ("sending", "kill", "streaming"),
    ("sending", "stop", "stock"),
}
ALL = [
    (point, kind, reader)
    for point in POINTS
    for kind in [*KINDS, *(["stop"] if point in ("reading", "sending") else [])]
    for reader in READERS
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("point", "kind", "reader"),
    [
        pytest.param(*case, marks=() if case in NORMAL else pytest.mark.slow, id="-".join(case))
        for case in ALL
    ],
)
def test_all_raise_and_none_hangs(
    tmp_path: Path, checkpoint: str, point: str, kind: str, reader: str
) -> None:
    reports = run_case(tmp_path, checkpoint, point, kind, reader)
    for rank, report in sorted(reports.items()):
        print(
            f"{point} {kind} {reader} | rank {rank} | {report.error} | {report.seconds:.1f} s | "
            f"untouched={report.untouched} | {report.text.splitlines()[0][:200]} | {report.log}"
        )
    check(reports, point, kind, reader)


def check(reports: dict[int, Report], point: str, kind: str, reader: str) -> None:
    silent = kind in ("kill", "hang", "stop")
    dcp_cannot = kind == "unpicklable" and reader == "stock" and point in ("opening", "reading")
    spoken = not silent and not dcp_cannot
    if kind == "hang" and point in ("opening", "reading") and reader == "streaming":
        spoken = True  # the reader notices
    survivors = {rank: r for rank, r in reports.items() if rank != VICTIM}
    assert sorted(survivors) == [n for n in range(WORLD) if n != VICTIM]
    assert (VICTIM in reports) == (not silent or spoken)
    waits = reader == "stock" and point in ("opening", "reading")  # nobody is told
    for rank, report in reports.items():
        assert report.error, f"rank {rank} did not raise"
        assert not report.threads, f"rank {rank} left {report.threads}"
        said = report.text + report.log
        if point == "planning":
            assert report.untouched
        else:
            assert report.untouched or "do not use it" in said, rank
        if spoken:
            limit = SLACK + (STALL if waits or kind == "hang" else 0)
            assert report.seconds < limit, (rank, report.seconds)
            assert report.error == "CheckpointException"
            assert kind == "hang" or CAUSE in report.text, (rank, report.text)
            if point != "planning" and rank != VICTIM:
                assert f"rank {VICTIM}" in report.text
        else:
            assert report.seconds < JOB_TIMEOUT + STALL + SLACK, (rank, report.seconds)
            if point != "planning" and rank != VICTIM:
                assert "ExchangeError" in report.text or report.log, (rank, report.text)
            if point != "planning" and rank != VICTIM and not dcp_cannot:
                named = f"rank {VICTIM} failed" in said or f"cut off: rank {VICTIM};" in said
                assert named, (rank, said)
