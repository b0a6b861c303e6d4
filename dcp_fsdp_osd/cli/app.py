"""The commands.  Each is one call into ``dcp_fsdp_osd.tools``, and a table of what it says."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import torch
import typer

from dcp_fsdp_osd.cli import foresee, turn
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
)
from dcp_fsdp_osd.storage.latest import latest as find_latest
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.tools.check import check_checkpoint
from dcp_fsdp_osd.tools.describe import Description, describe
from dcp_fsdp_osd.tools.listing import list_checkpoints
from dcp_fsdp_osd.tools.looks import size_text
from dcp_fsdp_osd.tools.opened import Checkpoint, missing_key
from dcp_fsdp_osd.tools.pruning import prune as prune_checkpoints
from dcp_fsdp_osd.tools.values import figures, parse_slice, slice_box

__all__ = ["app"]

_MOST = 1000  # elements that are printed
_SHOWN_GROUPS = 8

app = typer.Typer(
    name="dcp-osd",
    help="Look into checkpoints of torch.distributed.checkpoint, check them, turn them, plan their "
    "loading: ours and stock PyTorch's, on local paths and URLs (s3://bucket/run/step-100). "
    "No process group, no GPU, bounded memory.\n\n" + EXITS,
    epilog=EXITS,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        try:
            say(f"dcp-osd {importlib.metadata.version('dcp-fsdp-osd')}")
        except importlib.metadata.PackageNotFoundError:
            say("dcp-osd of a source tree that is not installed")
        raise typer.Exit()


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("ls", epilog=EXITS)
def list_command(
    url: FolderArgument,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """List the checkpoints below URL: whole and half-written, step, size, when saved (UTC)."""
    options = parse_options(option, backend)
    with errors_as_lines(options):
        found = list_checkpoints(url, **options)
    if as_json:
        print_json(found)
    elif found:
        print_table(
            ("name", "step", "saved", "files", "size", "state"),
            [
                (
                    each.name,
                    "" if each.step is None else str(each.step),
                    each.when,
                    str(each.files),
                    size_text(each.nbytes),
                    "committed" if each.committed else "not committed",
                )
                for each in found
            ],
            right=("step", "files", "size"),
        )
    else:
        say(f"no checkpoint below {display_url(url)}", error=True)
    raise typer.Exit(0 if any(each.committed for each in found) else 1)


@app.command("latest", epilog=EXITS)
def latest_command(
    url: FolderArgument,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Print the path or URL of the newest committed checkpoint below URL."""
    options = parse_options(option, backend)
    with errors_as_lines(options):
        found = find_latest(url, **options)
    if as_json:
        print_json({"latest": None if found is None else display_url(found)})
    elif found is None:
        say(f"no checkpoint below {display_url(url)}", error=True)
    else:
        say(display_url(found))
    raise typer.Exit(1 if found is None else 0)


@app.command("show", epilog=EXITS)
def show_command(
    url: CheckpointArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys, or globs of keys: 'optim.state.*.exp_avg'."),
    ] = None,
    *,
    cut: Annotated[
        str | None,
        typer.Option("--slice", help="Print these values of one tensor: 0:4 or 0:2,3,: ."),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Print figures (min, max, mean, NaNs) of each tensor.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Show what a checkpoint holds; with --slice or --values, also values, which are streamed."""
    options = parse_options(option, backend)
    with errors_as_lines(options), Checkpoint(url, **options) as checkpoint:
        if cut is not None and (not names or len(names) != 1):
            raise typer.BadParameter("expected one KEY with it", param_hint="--slice")
        if names and len(names) == 1 and names[0] in checkpoint.entries:
            _show_entry(checkpoint, names[0], cut, as_json=as_json)
            return
        if cut is not None and names:
            raise missing_key(checkpoint, names[0])
        found = describe(checkpoint, names or ())
        if not values:
            if as_json:
                print_json(found)
            else:
                _print_description(found)
            return
        _show_values(checkpoint, found, as_json=as_json)


def _show_entry(checkpoint: Checkpoint, key: str, cut: str | None, *, as_json: bool) -> None:
    row = describe(checkpoint, [key]).rows[0]
    told = {"row": row}
    if key not in checkpoint.tensors:
        if cut is not None:
            raise ValueError(f"{key} is an object, not a tensor: --slice cuts none")
        value = checkpoint.read_objects([key])[key]
        if as_json:
            print_json({**told, "value": value})
        else:
            say(f"{key}  object, {size_text(row.nbytes)}, in {', '.join(row.files)}")
            say(repr(value))
        return
    part: torch.Tensor | None = None
    if cut is not None:
        box, shape = slice_box(row.shape, parse_slice(cut))
        if box.numel > _MOST and not as_json:
            raise ValueError(f"{box.numel} elements are too many to print; cut {_MOST} or fewer")
        part = checkpoint.read_box(key, box).view(shape)
    with progress_bar(key) as progress:
        found = figures(checkpoint, key, progress)
    if as_json:
        print_json({**told, "figures": found, **({} if part is None else {"values": part})})
        return
    say(
        f"{key}  {row.dtype} {list(row.shape)}, {size_text(row.nbytes)}, "
        f"{_counted(row.chunks, 'chunk')}"
    )
    say(
        f"min {found.least}  max {found.most}  mean {found.mean}  NaN {found.nans}  "
        f"inf {found.infs}  zeros {found.zeros} of {found.numel}"
    )
    if part is not None:
        say(str(part.tolist() if part.dim() == 0 else part))


def _show_values(checkpoint: Checkpoint, found: Description, *, as_json: bool) -> None:
    rows = [row for row in found.rows if row.kind == "tensor"]
    with progress_bar("values") as progress:
        done = 0
        total = sum(row.nbytes for row in rows)
        told = []
        for row in rows:
            told.append(figures(checkpoint, row.key))
            done += row.nbytes
            progress(done, total)
    if as_json:
        print_json([{"key": row.key, "figures": f} for row, f in zip(rows, told, strict=True)])
        return
    numbers = ("elements", "min", "max", "mean", "NaN", "inf", "zeros")
    print_table(
        ("key", *numbers),
        [
            (
                row.key,
                str(f.numel),
                *(("" if n is None else f"{n:.6g}") for n in (f.least, f.most, f.mean)),
                str(f.nans),
                str(f.infs),
                str(f.zeros),
            )
            for row, f in zip(rows, told, strict=True)
        ],
        right=numbers,
    )


def _print_description(found: Description) -> None:
    say(found.url)
    world = f" by {_counted(found.ranks, 'rank')}" if found.ranks else ""
    say(f"written by {found.writer}{world}; save {found.save[:12]}")
    if found.saved_at and found.saved_at != found.url:
        say(f"saved at {display_url(found.saved_at)}")
    say(f"checksums: {found.checksum or 'none'}")
    for optim in found.optimizers:
        parts = [f"optimizer {optim.key}: {' and '.join(optim.classes) or 'of unknown class'}"]
        if optim.groups is not None:
            shown = ", ".join(map(str, optim.groups[:_SHOWN_GROUPS]))
            more = ", ..." if len(optim.groups) > _SHOWN_GROUPS else ""
            parts.append(
                f"{_counted(len(optim.groups), 'param group')} of {shown}{more} parameters"
            )
        if optim.layouts is not None:
            parts.append(f"{_counted(optim.layouts, 'layout')} of it on its ranks")
        if optim.per_rank:
            parts.append(f"{optim.per_rank} entries of single ranks")
        if optim.absent:
            parts.append(f"{optim.absent} entries with elements that had no state")
        say("; ".join(parts))
    for note in found.notes:
        say(note)
    say(
        f"{_counted(found.entries, 'entry')} in {_counted(len(found.files), 'file')}, "
        + size_text(found.nbytes)
        + (f"; {len(found.rows)} shown" if len(found.rows) < found.entries else "")
    )
    say("")
    print_table(
        ("key", "dtype", "shape", "size", "chunks", "files"),
        [
            (
                row.key,
                row.dtype or "object",
                "x".join(map(str, row.shape)) if row.kind == "tensor" else "",
                size_text(row.nbytes),
                str(row.chunks),
                str(len(row.files)),
            )
            for row in found.rows
        ],
        right=("size", "chunks", "files"),
    )


def _counted(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


@app.command("verify", epilog=EXITS)
def verify_command(
    url: CheckpointArgument,
    ignore_orphans: Annotated[
        bool, typer.Option("--ignore-orphans", help="Files that belong to no entry are no damage.")
    ] = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Check a checkpoint: every checksum, every byte of each file, cover of each tensor, orphans.

    All of it is read.  Exit status 1: it is damaged, or (unless --ignore-orphans) has orphans.
    """
    options = parse_options(option, backend)
    with errors_as_lines(options), progress_bar("verify") as progress:
        found = check_checkpoint(url, progress=progress, **options)
    bad = not found.whole or (bool(found.orphans) and not ignore_orphans)
    if as_json:
        print_json({**vars(found), "whole": found.whole})
        raise typer.Exit(int(bad))
    for problem in found.problems:
        say(f"damaged: {problem}")
    for name, size in found.orphans.items():
        say(f"orphan: {name}: {size_text(size)} that belong to no entry")
    how = [
        f"{count} {text}"
        for count, text in (
            (found.checked, f"by {found.checksum}"),
            (found.zipped, "by the CRC-32 in their zip alone (no checksums of stock DCP's)"),
            (found.unchecked, "read, but they have no checksum to compare with"),
        )
        if count
    ]
    say(
        f"{found.url}: {'damaged' if found.problems else 'whole'}: "
        f"{_counted(found.entries, 'entry')}, {_counted(found.tensors, 'tensor')}, "
        f"{_counted(found.files, 'file')}, {size_text(found.nbytes)} read"
    )
    if how:
        say(f"checked: {'; '.join(how)}")
    raise typer.Exit(int(bad))


@app.command("prune", epilog=EXITS)
def prune_command(
    url: FolderArgument,
    *,
    keep: Annotated[int, typer.Option(min=1, help="Keep this many of the newest good ones.")],
    every: Annotated[
        int | None, typer.Option(min=1, help="Also keep steps that this number divides.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what.")] = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Delete checkpoints step-<n> below URL, but the newest good ones and those of --every.

    Never the only good one; of each the .metadata goes first.  Exit status 1: there is none.
    """
    options = parse_options(option, backend)
    with errors_as_lines(options):
        found = prune_checkpoints(url, keep=keep, every=every, dry_run=dry_run, **options)
    if as_json:
        print_json(found)
    else:
        verb = "would delete" if dry_run else "deleted"
        for step in found.deleted:
            say(f"{verb} step-{step}")
        for step, why in found.damaged.items():
            fate = verb if step in found.deleted else "left alone"
            say(f"step-{step} is damaged ({fate}): {why}")
        say(f"{len(found.kept)} kept, {len(found.deleted)} {'to delete' if dry_run else 'deleted'}")
    raise typer.Exit(0 if found.kept or found.deleted else 1)


turn.add_commands(app)
foresee.add_commands(app)
