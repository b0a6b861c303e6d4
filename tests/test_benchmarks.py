"""The benchmark against stock runs, and what it counts is what the issue claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import exchange, repeated_saves, stock_vs_ours


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
