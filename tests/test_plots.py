"""Pictures of benchmarks: of stored JSON, and of each kind; nothing is measured."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots
from tests.pages import ROOT

_DRAW_THEIR_OWN = {"io_shape", "model", "scale"}
STORED = sorted((ROOT / "benchmarks/results").glob("*.json"))


def _figure(wall: float, extra: int = 0) -> dict[str, Any]:
    return {"wall": wall, "extra": extra << 20}


KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, float]]]] = {
    "stock_vs_ours": (
        {
            "runs": [
                {
                    "world": 4,
                    "use_orig_params": True,
                    "save": {
                        "stock": _figure(6, 380), "ours": _figure(2, 1), "raw write": _figure(1),
                    },
                    "load": {
                        "stock A": _figure(12), "stock B": _figure(24), "ours": _figure(0.5, 7),
                    },
                }
            ]
        },
        {
            "save, 4 ranks, use_orig_params=True: speed": {"stock": 1, "ours": 3, "raw write": 6},
            "load, 4 ranks, use_orig_params=True: speed": {
                "stock A": 1, "stock B": 0.5, "ours": 24,
            },
            "save, 4 ranks, use_orig_params=True: extra MiB": {"stock": 380, "ours": 1},
            "load, 4 ranks, use_orig_params=True: extra MiB": {
                "stock A": 0, "stock B": 0, "ours": 7,
            },
        },
    ),
    "storage": (
        {
            "state_bytes": 1,
            "results": [
                {
                    "kind": "load", "place": "s3 30 ms", "world": 2, "source": 4,
                    "variants": {"stock": {"x_stock": 1}, "ours obstore": {"x_stock": 9.8}},
                },
                {"kind": "small", "place": "disk", "world": 1, "variants": {"ours": {}}},
            ],
        },
        {"load, s3 30 ms, 4 -> 2 ranks": {"stock": 1, "ours obstore": 9.8}},
    ),
    "async_save": (
        {"figures": {"raw copy": {"stall": 0.5}, "stock": {"stall": 10}, "ours": {"stall": 0.6}}},
        {"training stops": {"raw copy": 1, "stock": 20, "ours": 1.2}},
    ),
    "latency": (
        {
            "options": {},
            "rows": [
                {
                    "path": "network", "what": "load", "1 MB/s": 500, "32 MB/s": 5000,
                    "ours MB/s": 4500, "of the best": 0.9,
                }
            ],
        },
        {"load, network": {"concurrency=1": 0.1, "concurrency=32": 1, "ours": 0.9}},
    ),
    "export": (
        {
            "mib": 64,
            "exports": [
                {
                    "place": "disk",
                    "variants": {"raw copy": {"of_raw": 1}, "ours, out.pt": {"of_raw": 0.8}},
                }
            ],
        },
        {"export of 64 MiB from disk": {"raw copy": 1, "ours, out.pt": 0.8}},
    ),
    "metadata_index": (
        {
            "rows": [
                {"": "index", "boxes": 5000, "read": 0.1, "plan": 0.02, "traced": 6},
                {"": "stock", "boxes": 5000, "read": 3, "plan": 0, "traced": 250},
            ]
        },
        {
            "one rank reads 5,000 boxes and plans: CPU": {
                "ours, by its index": 0.12, "stock, no plan": 3,
            },
            "one rank reads 5,000 boxes and plans: MB": {
                "ours, by its index": 6, "stock, no plan": 250,
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn(kind: str, tmp_path: Path) -> None:
    document, expected = KINDS[kind]
    panels = plots.panels_of(document)
    assert len(panels) == len(expected)
    for panel, (title, bars) in zip(panels, expected.items(), strict=True):
        assert panel.title.startswith(title)
        assert dict(panel.bars) == pytest.approx(bars)
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    (tmp_path / "a.json").write_text(json.dumps(document))
    plots.main([str(tmp_path / "a.json")])
    text = " ".join(ET.parse(tmp_path / "a.svg").getroot().itertext())
    drawn = (tmp_path / "a.svg").read_bytes()
    plots.main([str(tmp_path / "a.json"), "-o", str(tmp_path / "b.svg")])
    assert (tmp_path / "b.svg").read_bytes() == drawn  # the same JSON, the same picture
    for panel in panels:
        for label, value in panel.bars.items():
            assert label in drawn.decode() or label in text
            assert f"{value:.3g}{panel.unit}" in drawn.decode()


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_is_stored_is_what_is_shown(path: Path, tmp_path: Path) -> None:
    """By a page, and with the figures of that JSON."""
    document = json.loads(path.read_text())
    pages = "".join(each.read_text() for each in (ROOT / "docs").glob("*.md"))
    assert f"benchmarks/results/{path.name}" in pages
    shown = ROOT / "docs/img" / f"{path.stem}.svg"
    assert f"img/{shown.name}" in pages and shown.exists()
    if path.stem in _DRAW_THEIR_OWN:
        return
    text = shown.read_text()
    for panel in plots.panels_of(document):
        for value in panel.bars.values():
            assert f"{value:.3g}{panel.unit}" in text


def test_other_json_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the JSON of a benchmark"):
        plots.panels_of({"machine": {}})
