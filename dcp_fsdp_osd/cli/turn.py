"""The commands that compare checkpoints and turn them: ``diff``, ``export``, ``import``,
``rechunk``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

import typer

from dcp_fsdp_osd.cli.output import (
    EXITS,
    BackendOption,
    CheckpointArgument,
    JsonOption,
    StorageOptions,
    errors_as_lines,
    parse_options,
    print_json,
    progress_bar,
    say,
)
from dcp_fsdp_osd.storage.location import is_local
from dcp_fsdp_osd.tools.convert import CHUNK, Written, import_file, rechunk
from dcp_fsdp_osd.tools.difference import compare
from dcp_fsdp_osd.tools.export import export_safetensors, export_torch
from dcp_fsdp_osd.tools.looks import size_text
from dcp_fsdp_osd.tools.opened import Checkpoint

__all__ = ["add_commands"]

_OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--other-option",
        metavar="KEY=VALUE",
        help="As --storage-option, for the second place; by default it gets those of the first.",
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
_ChunkMib = Annotated[
    int, typer.Option("--chunk-mib", min=1, help="Largest box that tensors are cut into, in MiB.")
]
_Key = Annotated[
    str | None, typer.Option("--key", help="Only what lies there in the state dict: model.")
]


def _second(
    url: str, option: list[str] | None, other: list[str] | None, backend: str
) -> dict[str, Any]:
    """The options of the second place; a local path has none of a URL's."""
    if other is not None:
        return parse_options(other, backend, hint="--other-option")
    return parse_options(None, "auto") if is_local(url) else parse_options(option, backend)


def _first(url: str, option: list[str] | None, backend: str) -> dict[str, Any]:
    return parse_options(None, "auto") if is_local(url) else parse_options(option, backend)


def _secrets(*options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "storage_options": {k: v for each in options for k, v in each["storage_options"].items()}
    }


def add_commands(app: typer.Typer) -> None:
    """Add them to the application."""
    app.command("diff", epilog=EXITS)(diff_command)
    app.command("export", epilog=EXITS)(export_command)
    app.command("import", epilog=EXITS)(import_command)
    app.command("rechunk", epilog=EXITS)(rechunk_command)


def diff_command(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint's path or URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one's.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these keys, or globs.")
    ] = None,
    *,
    atol: Annotated[
        float | None,
        typer.Option(min=0, help="Elements this close count as equal; by default bit for bit."),
    ] = None,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    other_option: _OtherOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Tell which entries of two checkpoints differ, and by how much, however each is cut.

    Exit status 1: they differ.
    """
    one, two = _first(first, option, backend), _second(second, option, other_option, backend)
    with (
        errors_as_lines(_secrets(one, two)),
        Checkpoint(first, **one) as left,
        Checkpoint(second, **two) as right,
        progress_bar("diff") as progress,
    ):
        found = compare(left, right, names or (), atol=atol, progress=progress)
    if as_json:
        print_json({**vars(found), "equal": found.equal})
    else:
        for each in found.differences:
            say(f"{each.key}: {each.what}")
        total = found.same + len(found.differences)
        how = "bit for bit" if atol is None else f"within {atol:g}"
        say(f"{found.same} of {total} entries are the same {how}")
    raise typer.Exit(0 if found.equal else 1)


def export_command(
    url: CheckpointArgument,
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="out.pt (torch.load) or out.safetensors.")
    ],
    *,
    key: _Key = None,
    overwrite: _Overwrite = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Write a checkpoint, or what is at --key in it, as one file: streamed, whole or not at all.

    out.pt is read by torch.load(weights_only=True).  out.safetensors holds tensors alone: objects
    are left out, and named.
    """
    exporters = {
        ".pt": export_torch,
        ".pth": export_torch,
        ".bin": export_torch,
        ".safetensors": export_safetensors,
    }
    exporter = exporters.get(PurePath(target).suffix)
    if exporter is None:
        raise typer.BadParameter(
            f"expected a name that ends with {', '.join(exporters)} (to write another checkpoint: "
            "dcp-osd rechunk)",
            param_hint="FILE",
        )
    options = parse_options(option, backend)
    with (
        errors_as_lines(options),
        Checkpoint(url, **options) as checkpoint,
        progress_bar("export") as progress,
    ):
        found = exporter(checkpoint, target, key=key, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(found)
        return
    say(
        f"{found.path}: {found.tensors} tensors, {found.objects} objects, {size_text(found.nbytes)}"
    )
    if found.left_out:
        say(
            f"left out, because safetensors holds tensors alone: {len(found.left_out)} objects "
            f"({', '.join(found.left_out[:5])}{', ...' if len(found.left_out) > 5 else ''})",
            error=True,
        )


def import_command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of torch.save or safetensors.")
    ],
    url: Annotated[str, typer.Argument(metavar="CKPT", help="The checkpoint to write.")],
    *,
    key: Annotated[
        str | None, typer.Option("--key", help="Where in the state dict it goes: model.")
    ] = None,
    chunk_mib: _ChunkMib = CHUNK >> 20,
    overwrite: _Overwrite = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Write a checkpoint of what is in FILE, which is mapped and not read into memory."""
    options = parse_options(option, backend)
    with errors_as_lines(options), progress_bar("import") as progress:
        found = import_file(
            file,
            url,
            key=key,
            chunk_bytes=chunk_mib << 20,
            overwrite=overwrite,
            progress=progress,
            **options,
        )
    _tell(found, as_json=as_json)


def rechunk_command(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A checkpoint's path or URL.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Where to write the other one.")],
    *,
    chunk_mib: _ChunkMib = CHUNK >> 20,
    overwrite: _Overwrite = False,
    as_json: JsonOption = False,
    option: StorageOptions = None,
    other_option: _OtherOptions = None,
    backend: BackendOption = "auto",
) -> None:
    """Copy a checkpoint, cut into other chunks: streamed, verified, and with checksums.

    A checkpoint needs it for no layout: any of them loads under any. It helps where many thousand
    small chunks are slow to plan or to read.
    """
    one, two = _first(source, option, backend), _second(target, option, other_option, backend)
    with (
        errors_as_lines(_secrets(one, two)),
        Checkpoint(source, **one) as checkpoint,
        progress_bar("rechunk") as progress,
    ):
        found = rechunk(
            checkpoint,
            target,
            chunk_bytes=chunk_mib << 20,
            overwrite=overwrite,
            progress=progress,
            **two,
        )
    _tell(found, as_json=as_json)


def _tell(found: Written, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    say(
        f"{found.url}: {found.tensors} tensors in {found.chunks} chunks, {found.objects} objects, "
        f"{size_text(found.nbytes)}"
    )
