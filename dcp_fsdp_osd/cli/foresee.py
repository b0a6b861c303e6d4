"""The commands that ask before a run: ``plan`` and ``doctor``."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from dcp_fsdp_osd.cli.output import (
    EXITS,
    BackendOption,
    CheckpointArgument,
    FolderArgument,
    JsonOption,
    StorageOptions,
    errors_as_lines,
    parse_options,
    print_json,
    print_table,
    progress_bar,
    say,
    size_text,
)
from dcp_fsdp_osd.tools.forecast import forecast
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.probe import diagnose

__all__ = ["add_commands"]

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_AMOUNT = re.compile(r"([\d.]+)\s*([kmgt]?i?)(?:b(?:/s)?)?", re.IGNORECASE)
_SPANS = {"ms": 1e-3, "s": 1.0, "": 1.0}


def add_commands(app: typer.Typer) -> None:
    """Add them to the application."""
    app.command("plan", epilog=EXITS)(plan_command)
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


def plan_command(
    url: CheckpointArgument,
    *,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the shard group.")],
    wrap: Annotated[
        list[str] | None,
        typer.Option(
            help="A module that is an FSDP unit, or a pattern: 'layers.*' (repeat it for more). "
            "By default the outermost modules with a number for a name; '' for the root alone."
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help="fsdp1 (flat pieces) or fsdp2 (rows).")] = "fsdp1",
    bandwidth: Annotated[str, typer.Option(help="What one rank gets, a second.")] = "1GB",
    latency: Annotated[str, typer.Option(help="Of one request.")] = "20ms",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests of a rank at a time.")] = 16,
    every_rank: Annotated[
        bool, typer.Option("--every-rank", help="Plan each one, not 128 evenly spaced ones.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Tell what each rank of a world would read: bytes, requests, files, estimated time.

    From the checkpoint's metadata alone.  A rank's time is latency * (1 + requests / concurrency)
    + (metadata + bytes) / bandwidth; what all ranks want alike is read once, and not in it.
    """
    if layout not in ("fsdp1", "fsdp2"):
        raise typer.BadParameter(
            f"expected fsdp1 or fsdp2, found {layout!r}", param_hint="--layout"
        )
    options = parse_options(option, backend)
    with (
        errors_as_lines(options),
        Checkpoint(url, **options) as checkpoint,
        progress_bar("plan", unit="ranks") as progress,
    ):
        found = forecast(
            checkpoint,
            world_size,
            layout="fsdp1" if layout == "fsdp1" else "fsdp2",
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
    say(
        f"all ranks: {size_text(found.total_nbytes)} in {found.total_requests} requests; metadata "
        f"{size_text(found.metadata_nbytes)} on each; read once for all: {found.shared_entries} "
        f"entries, {size_text(found.shared_nbytes)}"
    )
    say(f"estimated time of the slowest rank: {found.seconds:.2f} s")


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
