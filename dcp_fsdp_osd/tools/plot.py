"""A picture of a checkpoint, as a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from dcp_fsdp_osd.tools.chart import Limits, draw
from dcp_fsdp_osd.tools.export import new_file
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.page import page
from dcp_fsdp_osd.tools.picture import picture
from dcp_fsdp_osd.tools.sharding import Layout

__all__ = ["PLOT_KINDS", "Plotted", "plot"]

_LIMITS = {
    ".png": Limits(tensors=48, boxes=6000),
    ".svg": Limits(tensors=48, boxes=3000),
    ".html": Limits(tensors=1000, boxes=8000),
}
PLOT_KINDS = tuple(_LIMITS)
"""How names of pictures end."""


@dataclass(frozen=True)
class Plotted:
    """What was drawn.

    Attributes:
        path: the file.
        nbytes: its length.
        tensors, boxes, files: how many the picture has, and how many there are.
        requests: of the load that is drawn; 0 where none is.
        seconds: that this load is forecast to take.
        notes: what was left out or merged, or is damaged; the picture says so too.
    """

    path: str
    nbytes: int
    tensors: tuple[int, int]
    boxes: tuple[int, int]
    files: tuple[int, int]
    requests: int
    seconds: float
    notes: tuple[str, ...]


def plot(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    keys: Iterable[str] = (),
    *,
    world_size: int | None = None,
    rank: int = 0,
    layout: Layout = "fsdp1",
    wrapped: Iterable[str] | None = None,
    bandwidth: float = 1e9,
    latency: float = 0.02,
    concurrency: int = 16,
    limits: Limits | None = None,
    overwrite: bool = False,
) -> Plotted:
    """Draw which rank's boxes cover which tensor, sizes of files, and requests of a load over time.

    From the metadata and the list of files alone.  The requests are those of one rank as
    :func:`forecast` has them: a forecast at `bandwidth` and `latency`, not a measurement, and the
    picture says so.

    Args:
        path: ``.png`` and ``.svg`` are made by matplotlib (extra ``plot``); ``.html`` is one page
            that needs nothing else and tells of the box that is pointed at.
        keys: which tensors: their names, what those begin with, or globs; all, by default.
        world_size, rank: of the load; by default rank 0 of as many as have saved.
        layout, wrapped, bandwidth, latency, concurrency: as for :func:`forecast`.
        limits: how much is drawn at most; more is merged or left out, and the picture says so.

    Raises:
        ValueError: the name ends otherwise, or an argument is out of its range.
        StorageError: the file exists, or its folder does not; no entry matches `keys`.
        FlatOptimError: matplotlib is not installed.
    """
    kind = PurePath(path).suffix
    if kind not in _LIMITS:
        raise ValueError(
            f"expected a name that ends with {', '.join(PLOT_KINDS)}, found {os.fspath(path)!r}"
        )
    with new_file(path, overwrite=overwrite) as temporary:
        chart = draw(
            checkpoint,
            limits or _LIMITS[kind],
            keys,
            world_size=world_size,
            rank=rank,
            layout=layout,
            wrapped=wrapped,
            bandwidth=bandwidth,
            latency=latency,
            concurrency=concurrency,
        )
        if kind == ".html":
            temporary.write_text(page(chart), encoding="utf-8")
        else:
            picture(chart, temporary, kind[1:])
        nbytes = temporary.stat().st_size
    return Plotted(
        os.fspath(path),
        nbytes,
        (len(chart.rows), chart.tensors),
        (sum(len(row.drawn) for row in chart.rows), chart.boxes),
        (len(chart.files), sum(bar.files for bar in chart.files)),
        0 if chart.load is None else chart.load.count,
        0.0 if chart.load is None else chart.load.seconds,
        chart.notes,
    )
