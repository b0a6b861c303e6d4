"""What commands have in common: options, tables and JSON, progress, errors as one line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsdp_osd.errors import CorruptCheckpointError, FlatOptimError
from dcp_fsdp_osd.storage.redact import redact
from dcp_fsdp_osd.tools.looks import drawable
from dcp_fsdp_osd.tools.opened import Progress, no_progress

__all__ = [
    "EXITS",
    "BackendOption",
    "CheckpointArgument",
    "FolderArgument",
    "JsonOption",
    "LongStorageOptions",
    "StorageOptions",
    "errors_as_lines",
    "parse_options",
    "print_json",
    "print_table",
    "progress_bar",
    "say",
]

EXITS = (
    "Exit status of every command: 0 fine; 1 it found a difference, damage, or nothing; "
    "2 wrong usage, no such checkpoint, or storage that fails."
)
_WIDE = 400  # columns where the output is no terminal: nothing is cut there

_ABOUT_OPTIONS = (
    "An option of the storage client (endpoint_url, region, key, secret, token, anon, "
    "allow_http, or its own); repeat it for more. Secrets are better left to the environment."
)
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", "-o", metavar="KEY=VALUE", help=_ABOUT_OPTIONS),
]
LongStorageOptions = Annotated[  # where -o is the output
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help=_ABOUT_OPTIONS),
]
BackendOption = Annotated[
    str, typer.Option("--backend", help="auto, local, obstore or fsspec.", metavar="NAME")
]
FolderArgument = Annotated[str, typer.Argument(metavar="URL", help="A folder of checkpoints.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint's path or URL.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def parse_options(
    pairs: Sequence[str] | None, backend: str, *, hint: str = "--storage-option"
) -> dict[str, Any]:
    """``backend`` and ``storage_options`` for the library.

    Values are texts, but for ``true``, ``false``, ``null`` and JSON objects and lists.
    """
    options: dict[str, Any] = {}
    for pair in pairs or ():
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise typer.BadParameter("expected KEY=VALUE, found no '=' in it", param_hint=hint)
        if name in options:
            raise typer.BadParameter(f"{name} is given twice", param_hint=hint)
        options[name] = value
        if value in ("true", "false", "null") or value[:1] in ("{", "["):
            try:
                options[name] = json.loads(value)
            except ValueError:  # the value may be a secret
                raise typer.BadParameter(
                    f"{name}: expected JSON after '{value[:1]}'", param_hint=hint
                ) from None
    return {"backend": backend, "storage_options": options}


def _console() -> Console:
    """Made anew each time, because a test may have put another stream in place."""
    return Console(
        highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE, markup=False
    )


def say(text: str, *, error: bool = False) -> None:
    """A line of text; to stderr with `error`."""
    # Names in a checkpoint are anybody's: none moves the cursor, or fails to be encoded.
    text = "\n".join(map(drawable, text.split("\n")))
    if error:
        print(text, file=sys.stderr)
    else:
        _console().print(text)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Rows of texts below a line of names; those named in `right` end at one column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=name in right,
        )
    for row in rows:
        table.add_row(*map(drawable, row))
    console = _console()
    console.soft_wrap = False
    console.print(table)


def print_json(value: Any) -> None:
    """A value of the library's as JSON."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:  # noqa: PLR0911 (a table of kinds)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has none of these
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


@contextlib.contextmanager
def progress_bar(what: str, unit: str = "bytes") -> Iterator[Progress]:
    """A bar on stderr while a block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    amounts = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    columns = (
        "{task.description}",
        BarColumn(),
        *(amounts if unit == "bytes" else [MofNCompleteColumn()]),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def errors_as_lines(options: Mapping[str, Any]) -> Iterator[None]:
    """Errors as one line on stderr: exit status 1 for damage, 130 after Ctrl-C, 2 for all else.

    What nobody foresaw keeps its traceback, and is no 1 either, which would mean a difference.
    """
    failure: BaseException
    secrets = options.get("storage_options") or {}
    try:
        yield
        return
    except CheckpointException as error:
        failure = next(
            (each[0] if isinstance(each, tuple) else each for each in error.failures.values()),
            error,
        )
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except (FlatOptimError, OSError, ValueError, NotImplementedError) as error:
        failure = error
    except KeyboardInterrupt:
        say("dcp-osd: interrupted", error=True)
        raise typer.Exit(130) from None
    except Exception:
        say(redact(traceback.format_exc(), secrets), error=True)
        raise typer.Exit(2) from None
    text = redact(str(failure) or type(failure).__name__, secrets)
    if "credentials" in text.lower():
        text += " (dcp-osd doctor URL tells where they are looked for)"
    say(f"dcp-osd: {text}", error=True)
    raise typer.Exit(1 if isinstance(failure, CorruptCheckpointError) else 2)
