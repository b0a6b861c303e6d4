"""Pictures of what benchmarks wrote with ``--json``; nothing is measured here.

    python -m benchmarks.plots benchmarks/results/stock_vs_ours.json -o docs/img/stock_vs_ours.svg

It takes the JSON of ``stock_vs_ours``, ``storage``, ``async_save``, ``latency``, ``export`` and
``metadata_index``, and draws figures of one run, ratios of them where others are in it: bars to the
right are better, but where the title says less is.  Needs matplotlib (the extra ``plot``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Panel", "draw", "main", "panels_of"]

_MIB = 1 << 20
_COLORS = {"stock": "#9aa5b1", "raw": "#d8dde3", "ours": "#2f6fdb"}


@dataclass(frozen=True)
class Panel:
    """A group of bars: label -> value, all of one run."""

    title: str
    bars: Mapping[str, float]
    unit: str = ""


def panels_of(document: Mapping[str, Any]) -> list[Panel]:
    """What is drawn of the JSON of a benchmark, by the keys that it has.  Pure.

    Raises:
        ValueError: it is of none that is drawn.
    """
    if "runs" in document:
        return [panel for run in document["runs"] for panel in _stock_vs_ours(run)]
    if "results" in document and "state_bytes" in document:
        return [_storage(one) for one in document["results"] if "stock" in one["variants"]]
    if "figures" in document:
        raw = document["figures"]["raw copy"]["stall"]
        bars = {name: each["stall"] / raw for name, each in document["figures"].items()}
        return [Panel("training stops for, times a raw copy (less is better)", bars, "x")]
    if "exports" in document:
        return [
            Panel(
                f"export of {document['mib']} MiB from {one['place']}: speed, raw copy's = 1",
                {name: each["of_raw"] for name, each in one["variants"].items()},
                "x",
            )
            for one in document["exports"]
        ]
    if "options" in document and "rows" in document:
        return [_latency(row) for row in document["rows"]]
    if "rows" in document and "traced" in document["rows"][0]:
        return _metadata(document["rows"])
    raise ValueError(f"expected the JSON of a benchmark that is drawn, found {sorted(document)}")


def _stock_vs_ours(run: Mapping[str, Any]) -> list[Panel]:
    about = f"{run['world']} ranks, use_orig_params={run['use_orig_params']}"
    found = []
    for phase in ("save", "load"):
        figures = run[phase]
        stock = min(each["wall"] for name, each in figures.items() if name.startswith("stock"))
        speed = {name: stock / each["wall"] for name, each in figures.items()}
        found.append(Panel(f"{phase}, {about}: speed, (faster) stock's = 1", speed, "x"))
    for phase in ("save", "load"):
        extra = {
            name: each["extra"] / _MIB
            for name, each in run[phase].items()
            if not name.startswith("raw")
        }
        title = f"{phase}, {about}: extra MiB (less is better)"
        found.append(Panel(title, extra, " MiB"))
    return found


def _storage(one: Mapping[str, Any]) -> Panel:
    way = f"world {one['world']}"
    if one["source"]:
        way = f"{one['source']} -> {one['world']} ranks"
    bars = {name: each["x_stock"] for name, each in one["variants"].items()}
    return Panel(f"{one['kind']}, {one['place']}, {way}: speed, stock's = 1", bars, "x")


def _latency(row: Mapping[str, Any]) -> Panel:
    speeds = {
        name.removesuffix(" MB/s"): value for name, value in row.items() if name.endswith(" MB/s")
    }
    best = max(value for name, value in speeds.items() if name != "ours")
    bars = {
        name if name == "ours" else f"concurrency={name}": value / best
        for name, value in speeds.items()
    }
    return Panel(f"{row['what']}, {row['path']}: speed, best setting's = 1", bars, "x")


def _metadata(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    names = {"index": "ours, by its index", "whole": "ours, read whole", "stock": "stock, no plan"}
    found = []
    for boxes in dict.fromkeys(row["boxes"] for row in rows):
        of = {names[row[""]]: row for row in rows if row["boxes"] == boxes}
        about = f"one rank reads {boxes:,} boxes"
        seconds = {name: row["read"] + row["plan"] for name, row in of.items()}
        found.append(Panel(f"{about} and plans: CPU seconds (less is better)", seconds, " s"))
        memory = {name: row["traced"] for name, row in of.items()}
        found.append(Panel(f"{about} and plans: MB (less is better)", memory, " MB"))
    return found


def draw(panels: Sequence[Panel], path: Path, note: str = "") -> None:
    """Write the panels, in two columns, as what the suffix of `path` says."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "dcp-fsdp-osd", "font.size": 8})
    import matplotlib.pyplot as plt

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    most = max(len(panel.bars) for panel in panels)
    figure, all_axes = plt.subplots(
        rows, columns, figsize=(5 * columns, rows * (0.24 * most + 0.75)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    every = [axes for row in all_axes for axes in row]
    for axes in every[len(panels) :]:
        axes.remove()
    for axes, panel in zip(every, panels, strict=False):
        labels, values = list(panel.bars), list(panel.bars.values())
        colors = [_COLORS.get(label.split()[0].strip(","), "#c9b458") for label in labels]
        drawn = axes.barh(range(len(labels)), values, color=colors)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.bar_label(drawn, [f"{value:.3g}{panel.unit}" for value in values], padding=2)
        axes.margins(x=0.15)
        axes.set_title(panel.title, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    if note:
        figure.supxlabel(note, fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _note(document: Mapping[str, Any]) -> str:
    """Where and when it was measured, as far as the JSON says."""
    of = document.get("machine", {})
    return ", ".join(
        f"{name} {of[name]}" if name != "date" else str(of[name])
        for name in ("cores", "torch", "date")
        if name in of
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="what a benchmark wrote with --json")
    parser.add_argument("-o", "--output", type=Path, help="default: the same name with .svg")
    options = parser.parse_args(argv)
    document = json.loads(options.results.read_text())
    output = options.output or options.results.with_suffix(".svg")
    draw(panels_of(document), output, _note(document))
    print(output)


if __name__ == "__main__":
    main()
