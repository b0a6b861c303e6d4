"""Exports of a checkpoint to one file, against a raw copy of the same bytes.

    python -m benchmarks.export [--mib 2048] [--s3] [--json out.json]

A checkpoint of float32 matrices, written by ``StreamingWriter``, becomes ``out.pt`` and
``out.safetensors`` (``export_torch``, ``export_safetensors``: with checksums, in this process).
``raw copy`` reads the same files in pieces of 8 MiB into a buffer that is there and writes them to
one file; with ``--s3`` it gets them from the embedded S3 server with obstore, 16 ranges at a time.
Each ends with an fsync of the file, and runs in turn with the others after a warm-up.

Columns: seconds, and ``of raw`` the raw copy's by them, medians; ``extra``, the most MiB by which
resident memory rose in any run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measure import interleave, median, table, write_json
from benchmarks.s3_server import S3Endpoint, s3_server
from dcp_fsdp_osd import StreamingWriter
from dcp_fsdp_osd.tools import Checkpoint, export_safetensors, export_torch

__all__ = ["main"]

_PIECE, _AT_ONCE = 8 << 20, 16
_MATRIX = 16  # MiB


def _copied(source: Path, target: Path) -> None:
    """All files of a folder, one after the other, in one file."""
    room = memoryview(bytearray(_PIECE))
    with target.open("wb", buffering=0) as out:
        for path in sorted(source.glob("*.distcp")):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(room):
                    out.write(room[:count])
        os.fsync(out.fileno())


def _fetched(server: S3Endpoint, prefix: str, target: Path) -> None:
    """All objects below a prefix, in one file."""
    import obstore

    store = obstore.store.S3Store(server.bucket, **server.obstore_options)
    pieces: list[tuple[str, int, int, int]] = []
    end = 0
    for each in obstore.list(store, prefix).collect():
        for start in range(0, each["size"], _PIECE):
            count = min(_PIECE, each["size"] - start)
            pieces.append((each["path"], start, count, end))
            end += count
    with target.open("wb", buffering=0) as out, ThreadPoolExecutor(_AT_ONCE) as pool:

        def get(piece: tuple[str, int, int, int]) -> None:
            path, start, count, to = piece
            os.pwrite(out.fileno(), obstore.get_range(store, path, start=start, length=count), to)

        list(pool.map(get, pieces))
        os.fsync(out.fileno())


def _exports(
    url: str, options: dict[str, Any], raw: Callable[[Path], None], folder: Path, rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds and extra bytes of a raw copy and both exports of a checkpoint, by name."""

    def export(how: Callable[..., object], name: str) -> None:
        with Checkpoint(url, storage_options=options) as checkpoint:
            how(checkpoint, folder / name)

    runs = interleave(
        {
            "raw copy": lambda: raw(folder / "raw copy"),
            "ours, out.pt": lambda: export(export_torch, "ours, out.pt"),
            "ours, out.safetensors": lambda: export(export_safetensors, "ours, out.safetensors"),
        },
        rounds=rounds + 1,
        warmup=0,  # the first round is one, but memory that it took is there afterwards
        after=lambda name: (folder / name).unlink(),
    )
    raw_wall = median(each.wall for each in runs["raw copy"][1:])
    found = {}
    for name, of in runs.items():
        wall = median(each.wall for each in of[1:])
        extra = max(each.peak_extra for each in of)
        found[name] = {"wall": wall, "of_raw": raw_wall / wall, "extra": extra}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--s3", action="store_true", help="from the embedded S3 server as well")
    parser.add_argument("--folder", help="where files go; default: the temporary folder")
    parser.add_argument("--json", help="write all figures there")
    options = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        where = tempfile.TemporaryDirectory(prefix="export-", dir=options.folder)
        folder = Path(stack.enter_context(where))
        source = folder / "checkpoint"
        places: list[tuple[str, str, dict[str, Any], Callable[[Path], None]]] = [
            ("disk", str(source), {}, lambda to: _copied(source, to))
        ]
        if options.s3:
            server = stack.enter_context(s3_server(prewarm=(options.mib + 64) << 20))
            place = "s3", server.url("export"), server.storage_options
            places.append((*place, lambda to: _fetched(server, "export", to)))
        state = {f"w{n}": torch.rand(_MATRIX << 8, 1 << 10) for n in range(options.mib // _MATRIX)}
        for _, url, storage, _ in places:
            writer = StreamingWriter(url, storage_options=storage)
            dcp.save(state, storage_writer=writer, no_dist=True)
        del state
        for place_name, url, storage, raw in places:
            figures = _exports(url, storage, raw, folder, options.rounds)
            found.append({"place": place_name, "variants": figures})
            rows = [
                (name, each["wall"], each["of_raw"], each["extra"] / (1 << 20))
                for name, each in figures.items()
            ]
            print(f"\n{options.mib} MiB from {place_name}, {options.rounds} rounds")
            print(table(rows, header=("", "s", "of raw", "extra")), flush=True)
    write_json(options.json, {"mib": options.mib, "rounds": options.rounds, "exports": found})


if __name__ == "__main__":
    main()
