"""A picture of a checkpoint as PNG or SVG, by matplotlib: no display, no state of ``pyplot``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_fsdp_osd.errors import FlatOptimError
from dcp_fsdp_osd.tools.chart import Chart
from dcp_fsdp_osd.tools.describe import rank_of_file
from dcp_fsdp_osd.tools.looks import DAMAGED, UNKNOWN, colour_of, drawable, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["picture"]

_WIDTH, _ROW = 12.0, 0.26  # inches
_SLIVER = 0.004  # of a tensor's width: boxes thinner than that are outlined
_NAME = 44  # characters of a key
_NOTE = 150


def picture(chart: Chart, path: Path, kind: str) -> None:
    """Write it to `path`.

    Args:
        kind: ``"png"`` or ``"svg"``.

    Raises:
        FlatOptimError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlatOptimError(
            "a picture needs matplotlib, which is not installed: run `pip install "
            "'dcp-fsdp-osd[plot]'`, or write a page (.html), which needs nothing"
        ) from error
    tall = max(len(chart.rows), 2) * _ROW
    notes = "\n".join(drawable(note, _NOTE) for note in chart.notes)
    foot = 0.25 + 0.2 * len(chart.notes)
    heights = [tall, 1.5, 2.2 if chart.load is not None else 0.3]
    gaps = 0.95 + 0.75 + 1.05 + 0.45
    height = sum(heights) + gaps + foot
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    axes = []
    top = height - 0.95
    for each, gap in zip(heights, (0.75, 1.05, 0.0), strict=True):
        place = (0.315, (top - each) / height, 0.665, each / height)
        axes.append(figure.add_axes(place))
        top -= each + gap
    _tensors(axes[0], chart)
    _files(axes[1], chart)
    _load(axes[2], chart)
    _legend(figure, chart, height)
    some = f" ({len(chart.rows)} drawn)" if len(chart.rows) < chart.tensors else ""
    counts = (
        f"{chart.tensors} tensors{some} in {chart.boxes} boxes, "
        f"{sum(bar.files for bar in chart.files)} files, {size_text(chart.nbytes)}"
    )
    texts = [
        figure.text(0.012, 1 - 0.3 / height, drawable(chart.title, 110), size=12, weight="bold"),
        figure.text(0.012, 1 - 0.53 / height, counts, fontsize=9),
        figure.text(0.012, 0.1 / height, notes, fontsize=8, color="#8a5a00", va="bottom"),
    ]
    for text in [*texts, *(each for one in axes for each in _texts(one))]:
        text.set_parse_math(False)  # names are no formulas, whatever signs are in them
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for it
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(path, format=kind, dpi=110, metadata=metadata)


def _texts(axes: Axes) -> list[Any]:
    return [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.title, axes.xaxis.label,
            axes.yaxis.label, axes._left_title]  # type: ignore[attr-defined]  # fmt: skip


def _title(axes: Axes, text: str) -> None:
    axes.text(0, 1.0, text, transform=axes.transAxes, fontsize=9.5, va="bottom", weight="bold",
              parse_math=False)  # fmt: skip


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, length=0)


def _tensors(axes: Axes, chart: Chart) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches, colours, edges = [], [], []
    marks = []
    for number, row in enumerate(chart.rows):
        for each in row.drawn:
            x, y, width, height = each.place(row.shape)
            place = (x, number + 0.08 + 0.84 * y, width, 0.84 * height)
            marks.append((place, colour_of(each.ranks, chart.ranks or 1)))
    marks.sort(key=lambda mark: -mark[0][2])  # what is thin comes last, and on top
    for (x, y, width, height), colour in marks:
        patches.append(Rectangle((x, y), width, height))
        colours.append(colour)
        edges.append(colour if width < _SLIVER else "white")
    axes.add_collection(
        PatchCollection(patches, facecolors=colours, edgecolors=edges, linewidths=0.6)
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(chart.rows), 1), 0)
    names = [
        f"{drawable(row.key, _NAME)}  {'x'.join(map(str, row.shape)) or 'scalar'}"
        for row in chart.rows
    ]
    axes.set_yticks([n + 0.5 for n in range(len(names))], names, fontfamily="monospace")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["first", "¼", "½", "¾", "last"])
    _plain(axes)
    axes.tick_params(axis="y", labelsize=6.5)
    _title(axes, "Which rank's boxes cover which tensor (to the right: its first dimension)")


def _files(axes: Axes, chart: Chart) -> None:
    most = max((bar.nbytes for bar in chart.files), default=0) or 1
    wide = 0.8 if len(chart.files) <= 60 else 1.0
    axes.bar(
        range(len(chart.files)),
        [bar.nbytes for bar in chart.files],
        width=wide,
        color=[DAMAGED if bar.problem else _colour(bar.name, chart) for bar in chart.files],
    )
    several = [(at, bar.least) for at, bar in enumerate(chart.files) if bar.files > 1]
    if several:
        axes.bar([at for at, _ in several], [n for _, n in several], width=0.4, color="#222222")
    axes.set_xlim(-0.6, max(len(chart.files), 1) - 0.4)
    axes.set_ylim(0, most * 1.05)
    axes.set_yticks([0, most / 2, most], ["0", size_text(most / 2), size_text(most)])
    few = len(chart.files) <= 6
    shown = list(range(len(chart.files))) if few else [0, len(chart.files) - 1]
    axes.set_xticks(shown, [drawable(chart.files[at].name, 24 if few else 48) for at in shown])
    _plain(axes)
    if not few:
        first, last = axes.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    red = "; red: missing, or of another size" if any(bar.problem for bar in chart.files) else ""
    _title(axes, f"Sizes of files{red}")


def _load(axes: Axes, chart: Chart) -> None:
    _plain(axes)
    if chart.load is None:
        axes.set_xticks([])
        axes.set_yticks([])
        _title(axes, "Requests of a load over time: none, see below")
        return
    load = chart.load
    lanes = 1 + max(each.lane for each in load.requests)
    axes.barh(
        [each.lane + 0.5 for each in load.requests],
        [each.end - each.start for each in load.requests],
        left=[each.start for each in load.requests],
        height=0.84,
        color=[_colour(each.file, chart) for each in load.requests],
        edgecolor="white",
        linewidth=0.4,
    )
    axes.set_xlim(0, load.seconds or 1)
    axes.set_ylim(lanes, 0)
    axes.set_yticks([0.5, lanes - 0.5] if lanes > 1 else [0.5], ["1", str(lanes)][: min(lanes, 2)])
    axes.set_ylabel("at a time", fontsize=8)
    axes.set_xlabel("seconds from the start of the load", fontsize=8)
    about = f"{load.title}\ngrey: the metadata; colours: the ranks that wrote the files"
    axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=8, va="bottom", parse_math=False)
    axes.text(0, 1.25, "Requests of a load over time", transform=axes.transAxes, fontsize=9.5,
              va="bottom", weight="bold")  # fmt: skip


def _colour(file: str, chart: Chart) -> str:
    rank = rank_of_file(file)
    return colour_of(None if rank is None else (rank, rank), chart.ranks or 1)


def _legend(figure: Any, chart: Chart, height: float) -> None:
    ranks, at, y = chart.ranks, 0.315, 1 - 0.71 / height
    if not ranks:
        entries = [(UNKNOWN, "names of files do not tell which rank wrote them")]
    else:
        shown = range(ranks) if ranks <= 8 else [n * (ranks - 1) // 5 for n in range(6)]
        entries = [(colour_of((n, n), ranks), f"rank {n}") for n in shown]
    for colour, text in entries:
        figure.text(at, y, "■", color=colour, fontsize=10)
        figure.text(at + 0.014, y, text, fontsize=8.5)
        at += 0.08
