"""The commands that ask before a run, and draw: ``plan``, ``plot`` and ``doctor``."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated

import typer

from dcp_fsdp_osd.cli.output import (
    EXITS,
    BackendOption,
    CheckpointArgument,
    FolderArgument,
    JsonOption,
    LongStorageOptions,
    StorageOptions,
    errors_as_lines,
    parse_options,
    print_json,
    print_table,
    progress_bar,
    say,
)
from dcp_fsdp_osd.tools.forecast import forecast
from dcp_fsdp_osd.tools.looks import size_text
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.plot import PLOT_KINDS, plot
from dcp_fsdp_osd.tools.probe import diagnose
from dcp_fsdp_osd.tools.sharding import Layout

__all__ = ["add_commands"]

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_AMOUNT = re.compile(r"([\d.]+)\s*([kmgt]?i?)(?:b(?:/s)?)?", re.IGNORECASE)
_SPANS = {"ms": 1e-3, "s": 1.0, "": 1.0}


_Wrap = Annotated[
    list[str] | None,
    typer.Option(
        help="A module that is an FSDP unit, or a pattern: 'layers.*' (repeat it for more). "
        "By default the outermost modules with a number for a name; '' for the root alone."
    ),
]
_Layout = Annotated[str, typer.Option(help="fsdp1 (flat pieces) or fsdp2 (rows).")]
_Bandwidth = Annotated[str, typer.Option(help="What one rank gets, a second.")]
_Latency = Annotated[str, typer.Option(help="Of one request.")]
_Concurrency = Annotated[int, typer.Option(min=1, help="Requests of a rank at a time.")]


def add_commands(app: typer.Typer) -> None:
    """Add them to the application."""
    app.command("plan", epilog=EXITS)(plan_command)
    app.command("plot", epilog=EXITS)(plot_command)
    app.command("doctor", epilog=EXITS)(doctor_command)


def _bytes_a_second(text: str) -> float:
    found = _AMOUNT.fullmatch(text.strip())
    try:
        if found:
            return float(found[1]) * _UNITS[found[2].lower()]
    except (ValueError, KeyError):
        pass
    raise typer.BadParameter(f"expected bytes a second, such as 500MB or 2GB, found {text!r}")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*(ms|s|)", text.strip())
    try:
        if found:
            return float(found[1]) * _SPANS[found[2]]
    except ValueError:
        pass
    raise typer.BadParameter(f"expected a time such as 30ms or 0.03, found {text!r}")


def _layout(text: str) -> Layout:
    if text == "fsdp1":
        return "fsdp1"
    if text == "fsdp2":
        return "fsdp2"
    raise typer.BadParameter(f"expected fsdp1 or fsdp2, found {text!r}", param_hint="--layout")


def plan_command(
    url: CheckpointArgument,
    *,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the shard group.")],
    wrap: _Wrap = None,
    layout: _Layout = "fsdp1",
    bandwidth: _Bandwidth = "1GB",
    latency: _Latency = "20ms",
    concurrency: _Concurrency = 16,
    every_rank: Annotated[
        bool, typer.Option("--every-rank", help="Plan each one, not 64 evenly spaced ones.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Tell what each rank of a world would read: bytes, requests, files, estimated time.

    From the checkpoint's metadata alone.  A rank's time is latency * (1 + requests / concurrency)
    + (metadata + bytes) / bandwidth; what all ranks want alike is read once, and not in it.
    """
    of_world = _layout(layout)
    options = parse_options(option, backend)
    with (
        errors_as_lines(options),
        Checkpoint(url, **options) as checkpoint,
        progress_bar("plan", unit="ranks") as progress,
    ):
        found = forecast(
            checkpoint,
            world_size,
            layout=of_world,
            wrapped=wrap,
            bandwidth=_bytes_a_second(bandwidth),
            latency=_seconds(latency),
            concurrency=concurrency,
            all_ranks=every_rank,
            progress=progress,
        )
    if as_json:
        print_json(found)
        return
    some = "" if len(found.ranks) == world_size else f" ({len(found.ranks)} of them planned)"
    say(
        f"{found.url}: load by {world_size} ranks{some}, {found.layout}, "
        f"{found.units} unit{'' if found.units == 1 else 's'}"
    )
    rows = []
    for name, title, shown in (
        ("nbytes", "bytes read", size_text),
        ("needed", "bytes held", size_text),
        ("requests", "requests", "{:.0f}".format),
        ("files", "files", "{:.0f}".format),
        ("seconds", "seconds", "{:.2f}".format),
    ):
        rows.append((title, *map(shown, found.spread(name))))
    print_table(("a rank", "least", "median", "most"), rows, right=("least", "median", "most"))
    metadata = size_text(found.metadata_nbytes)
    if found.metadata_nbytes < found.metadata_file_nbytes:
        whole = size_text(found.metadata_file_nbytes)
        metadata += f" of {whole} (stock's readers: all of it)"
    say(
        f"all ranks: {size_text(found.total_nbytes)} in {found.total_requests} requests; metadata "
        f"{metadata} on each; read once for all: {found.shared_entries} "
        f"entries, {size_text(found.shared_nbytes)}"
    )
    say(f"estimated time of the slowest rank: {found.seconds:.2f} s")


def plot_command(
    url: CheckpointArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these tensors, or globs.")
    ] = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="out.png, out.svg or out.html.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Of the load; by default as many as have saved.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose requests of the load are drawn.")] = 0,
    wrap: _Wrap = None,
    layout: _Layout = "fsdp1",
    bandwidth: _Bandwidth = "1GB",
    latency: _Latency = "20ms",
    concurrency: _Concurrency = 16,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: JsonOption = False,
    option: LongStorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Draw which rank's boxes cover which tensor, sizes of files, and requests of a load over time.

    From the metadata and the list of files.  out.html is one page that needs nothing else, and
    tells of the box that is pointed at; the others need matplotlib.  The load is a forecast.
    """
    if PurePath(output).suffix not in PLOT_KINDS:
        raise typer.BadParameter(
            f"expected a name that ends with {', '.join(PLOT_KINDS)}, found {output!r} (here -o is "
            "the picture; options of the storage client are --storage-option)",
            param_hint="--output",
        )
    options = parse_options(option, backend)
    of_world = _layout(layout)
    with errors_as_lines(options), Checkpoint(url, **options) as checkpoint:
        found = plot(
            checkpoint,
            output,
            names or (),
            world_size=world_size,
            rank=rank,
            layout=of_world,
            wrapped=wrap,
            bandwidth=_bytes_a_second(bandwidth),
            latency=_seconds(latency),
            concurrency=concurrency,
            overwrite=overwrite,
        )
    if as_json:
        print_json(found)
        return
    say(
        f"{found.path}: {found.tensors[1]} tensors, {found.boxes[1]} boxes, {found.files[1]} "
        f"file{'' if found.files[1] == 1 else 's'}, {found.requests} requests; "
        + size_text(found.nbytes)
    )
    for note in found.notes:
        say(note, error=True)


def doctor_command(
    url: FolderArgument,
    *,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Try what saves and loads need of a place: list, write, conditional put, range, delete.

    Says which client serves it and why, and where credentials were found; never a secret. What it
    writes it removes.  Exit status 1: something failed.
    """
    options = parse_options(option, backend)
    with errors_as_lines(options):
        found = diagnose(url, **options)
    if as_json:
        print_json({**vars(found), "ok": found.ok})
        raise typer.Exit(0 if found.ok else 1)
    say(found.url)
    versions = " ".join(f"{name} {version}" for name, version in found.packages.items())
    say(f"backend: {found.backend} ({found.why}){' ' if versions else ''}{versions}")
    say(f"options: {', '.join(found.options) or 'none'}")
    if found.environment:
        say(f"environment: {', '.join(found.environment)}")
    say(f"credentials: {found.credentials}")
    say("")
    words = {True: "ok", False: "FAILED", None: "note"}
    print_table(
        ("probe", "result", "ms", ""),
        [
            (each.name, words[each.ok], f"{1000 * each.seconds:.0f}", each.said)
            for each in found.probes
        ],
        right=("ms",),
    )
    raise typer.Exit(0 if found.ok else 1)
