"""The benchmark against stock runs, and what it counts is what the issue claims."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import exchange, repeated_saves, stock_vs_ours
from benchmarks.io_shape import Layout, Saved, rows_of, shape_of
from benchmarks.model import Machine, Work, load_seconds, save_seconds


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_stock_vs_ours_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    path = tmp_path / "figures.json"
    more = ["--whole"] if whole else []
    stock_vs_ours.main(["--quick", "--json", str(path), "--folder", str(tmp_path), *more])
    output = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert [run["use_orig_params"] for run in document["runs"]] == [True, False]
    for run in document["runs"]:
        for phase in ("save", "load"):
            for name, figure in run[phase].items():
                assert f"{phase}: {name}" in output
                assert figure["wall"] > 0
                if name.startswith("stock"):  # it gathers: the counter must see it
                    assert figure["tensor_bytes_sent"] > run["state_bytes"] / 2
                else:
                    assert figure["tensor_bytes_sent"] < 4096, name
    assert not [left for left in tmp_path.iterdir() if left != path]


def test_the_figures_of_ranks_are_combined() -> None:
    def rank(walls: list[float], peak: int, sent: int) -> dict:
        runs = [{"wall": w, "cpu": 1.0, "peak_extra": peak, "extra": {"read": w}} for w in walls]
        one = {"runs": runs, "tensor_bytes_sent": sent, "object_bytes_sent": 1}
        return {"optim_bytes": 100, "load": {"stock A": one, "ours, in place": one}}

    figures = stock_vs_ours._figures([rank([1, 5, 3], 150, 7), rank([2, 1, 4], 120, 8)], "load")
    fresh, live = figures["stock A"], figures["ours, in place"]
    assert fresh["wall"] == 4 and (fresh["wall_min"], fresh["wall_max"]) == (2, 5)
    assert fresh["parts"] == {"read": 4}
    assert fresh["peak_extra"] == 150 and fresh["extra"] == 50  # it had to allocate the state
    assert live["extra"] == 150
    assert fresh["tensor_bytes_sent"] == 15 and fresh["object_bytes_sent"] == 2


@pytest.mark.slow
def test_exchange_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    options = ["--quick", "--kinds", "no_shard", "--bandwidths", "100", "--worlds", "2"]
    exchange.main([*options, "--json", str(path), "--folder", str(tmp_path)])
    output = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert [one["setting"] for one in document["compare"]] == ["disk", "S3 30 ms 100 MB/s"]
    for one in document["compare"]:
        assert f"no_shard, 4 ranks want the same, 16 MiB of state, {one['setting']}" in output
        variants = one["variants"]
        assert variants["broadcast=True"]["read_ratio"] <= 1.02
        for name in ("stock", "broadcast=False"):  # every rank reads all: the counter must see it
            assert variants[name]["read_ratio"] >= 4
            assert variants[name]["received"] == 0
        assert variants["broadcast=True"]["received"] >= one["unique"] / 2
        assert one["auto"] == (one["setting"] != "disk")
    limited = document["compare"][1]["variants"]["broadcast=False"]
    assert limited["wall_min"] >= 4 * document["compare"][1]["unique"] / 100e6
    assert {one["mib"] for one in document["sweep"]} == {1}
    assert not any(one["auto"] for one in document["sweep"])
    assert document["setup"][0]["agree"] > 0
    assert not [left for left in tmp_path.iterdir() if left != path]


@pytest.mark.parametrize(
    "options", [["--ranks", "16"], pytest.param(["--real", "4"], marks=pytest.mark.slow)], ids=str
)
def test_repeated_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = tmp_path / "figures.json"
    repeated_saves.main(["--ranks", "16", *options, "--json", str(path)])
    document = json.loads(path.read_text())
    first, *later = document["saves"]["16"]
    assert len(later) == 2
    assert first["up"] < 8 and first["down"] < 5, "KB; 60 and 34 as plain pickles"
    for save in later:
        assert save["up"] < first["up"] / 5 and save["down"] < first["down"] / 2
        assert 0 < save["results"] < 8
    if "--real" in options:
        assert [save["whole"] > save["plan"] > 0 for save in document["real"]] == [True] * 6
    assert "16 ranks, save 3" in capsys.readouterr().out


_MACHINE = Machine(
    write=100.0, read=200.0, rank_link=40.0, request=0.5, parallel=4, commit=3,
    hashing=50.0, cores=2, network=1000.0, nothing=1.0, each=0.1, hop=0.01,
)  # fmt: skip
_WORK = Work(
    ranks=8, state=800.0, own=0.25, load_own=0.5, coordinator=2.0, load_coordinator=3.0,
    results=0.5, metadata=0.75, up=30.0, down=20.0, told=75.0, load_up=100.0, load_down=25.0,
    file=80.0, index=40.0, requests=2, load_requests=9, replicas=2,
)  # fmt: skip


def test_the_model_adds_up_what_ranks_wait_for() -> None:
    collectives = 1.0 + 8 * 0.1 + 3 * 0.01
    assert save_seconds(_MACHINE, _WORK) == pytest.approx(
        {
            "collectives": collectives,
            "messages": 8 * 125 / 1000,
            "own": 0.25 * 8 / 2,
            "coordinator": 2.5,
            "metadata": 0.75 + 3 * 0.5 + 80 / 40,
            "data": 800 / 100 + 800 / 50 / 2,
        }
    )
    assert load_seconds(_MACHINE, _WORK) == pytest.approx(
        {
            "collectives": collectives,
            "messages": 8 * 125 / 1000,
            "own": 0.5 * 8 / 2,
            "coordinator": 3.0,
            "metadata": 2 * 0.5 + 40 / 40 + 3 * 40 / 1000,
            "data": 800 / 200 + 800 / 50 / 2,
            "exchange": 100 / 1000,
        }
    )


@pytest.mark.parametrize(
    ("machine", "work", "seconds"),
    [
        ({}, {}, 800 / 200),
        ({"rank_link": 10.0}, {}, 100 / 10),  # its own link
        ({}, {"load_requests": 41}, 11 * 0.5),  # four at a time
        ({"cores": 0, "hashing": 10.0}, {}, 4 + 10),  # each rank hashes its own
    ],
)
def test_data_are_as_slow_as_what_is_slowest(machine: dict, work: dict, seconds: float) -> None:
    machine = {"hashing": float("inf"), **machine}
    found = load_seconds(replace(_MACHINE, **machine), replace(_WORK, **work))
    assert found["data"] == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-whole", "fsdp2"])
def test_who_holds_a_piece_is_who_has_it(kind: str) -> None:
    for world in (3, 8):
        layout = Layout(kind, "tiny", world)
        held = [(piece, rank) for rank in range(world) for piece in layout.pieces(rank)]
        for fqn, shape in layout.shapes.items():
            numel = math.prod(shape)
            for start, stop in ((0, numel), (numel // 3, numel // 3 + 1)):
                holders = {
                    rank
                    for (name, begin, end), rank in held
                    if name == fqn and max(begin, start) < min(end, stop)
                }
                assert set(layout.holders((fqn, start, stop))) == holders


def test_io_shape_of_a_tiny_model() -> None:
    block, rows = Layout("fsdp1", "tiny", 8), Layout("fsdp2", "tiny", 8)
    same = shape_of(block, block, gap=1 << 17)
    assert (same["files"], same["opened"], same["readers"], same["all"]) == (8, 1, 1, 8)
    assert same["requests"] == same["worst"] == same["least"] == 1
    other = shape_of(block, rows, gap=0)
    assert other["worst"] > other["opened"] > 1 and other["readers"] == 8
    numel = sum(map(math.prod, block.shapes.values()))
    saved = Saved(block)
    assert sum(saved.reads(rows, rank, 0)[3] for rank in range(8)) == 3 * 4 * numel
    assert [row["loaded by"] for row in rows_of("tiny", 8, 0)][:3] == [
        "8 fsdp1",
        "4 fsdp1",
        "16 fsdp1",
    ]
