"""What one rank does with the metadata of a large checkpoint: read them, and plan its load.

    python -m benchmarks.metadata_index [--boxes 50000 200000 500000] [--json out.json]

Llama-3-8B (70B for 500,000 boxes) under FSDP1, wrapped per block, with AdamW state, at the world
size at which its boxes are about that many.  The boxes are laid out by
``layout.simulate``, no data file is written.  Each variant runs in a process of its own: rank 1 of
the same world reads the metadata from a local file and plans (``read_metadata``,
``set_up_planner``, ``create_local_plan``, ``prepare_local_plan``).

- ``index``: this package's ``.metadata`` as ``StreamingReader`` reads it;
- ``whole``: the same file read whole, as those of older versions are;
- ``stock``: stock's ``.metadata`` of the same boxes, ``FileSystemReader`` (reading alone: its
  planner cannot plan flat state).

Columns: ``file``, MB of ``.metadata``; ``of it``, MB of the index; ``write``, CPU seconds in which
the coordinator fills and dumps it (stock: ``pickle.dumps``); ``read`` and ``plan``, CPU seconds of
the rank, on one thread, the best of three; ``traced``, MB that both allocate at most at a time
(``tracemalloc``, in a run of its own); ``resident``, MB that the process grows by in the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.llama import MODELS, llama_units
from benchmarks.measure import rss_bytes, table, write_json
from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader
from dcp_fsdp_osd.checkpoint import INFO_KEY, SavedInfo
from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout import FlatLayout, Unit, simulate
from dcp_fsdp_osd.storage.metadata import (
    FOOT_BYTES,
    KIND_BYTES,
    KIND_TENSOR,
    EntryInfo,
    dump_metadata,
    fill_metadata,
    index_start,
    load_metadata,
)
from dcp_fsdp_osd.storage.places import ATTRIBUTE

__all__ = ["entries_of", "layouts", "main", "metadata_of", "of_variant", "stock_pickle"]

_VARIANTS = ("index", "whole", "stock")


def layouts(units: Sequence[Unit], world_size: int) -> list[FlatLayout]:
    """Of all ranks."""
    return [simulate(units, world_size=world_size, rank=rank) for rank in range(world_size)]


def units_of_model(model: str) -> list[Unit]:
    width, blocks, keys = MODELS[model]
    return llama_units(width, blocks, keys=keys)


def entries_of(
    layout: FlatLayout, number: int
) -> Iterator[tuple[tuple[Any, ...], tuple[int, ...], ChunkStorageMetadata, EntryInfo]]:
    """What rank `number` writes of its tensors: path and shape of the tensor, box, and entry."""
    end = 0
    name = f"__{number}_0_{'0123456789abcdef' * 2}.distcp"
    for state in ("exp_avg", "exp_avg_sq", "step"):
        for segment in (each for param in layout.params for each in param.segments):
            boxes = [(piece.box.offsets, piece.box.sizes) for piece in segment.pieces()]
            shape = segment.shape
            if state == "step":
                boxes, shape = [((), ())] if segment.stop > segment.start == 0 else [], ()
            for offsets, sizes in boxes:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                nbytes = 4 * chunk.sizes.numel()
                blocks = 1 + -(-nbytes // (1 << 20))
                length = 704 + nbytes + 841 + 4 * blocks
                crc = zlib.crc32(f"optim.state.{segment.fqn}.{state}{offsets}".encode())
                entry = EntryInfo(name, end, length, KIND_TENSOR, crc, 704, nbytes, "float32")
                yield ("optim", "state", segment.fqn, state), shape, chunk, entry
                end += length + -length % 64


def metadata_of(ranks: Sequence[FlatLayout]) -> tuple[Metadata, list[tuple[MetadataIndex, Any]]]:
    """What the coordinator has when all ranks have written: metadata, and the entries."""
    stored: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    entries: list[tuple[MetadataIndex, EntryInfo]] = []
    properties = TensorProperties(dtype=torch.float32)

    def tensor(path: tuple[Any, ...], shape: Sequence[int]) -> str:
        key = ".".join(map(str, path))
        if key not in stored:
            stored[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
            paths[key] = path
        return key

    for number, layout in enumerate(ranks):
        end, name = 0, ""
        for path, shape, chunk, entry in entries_of(layout, number):
            key = tensor(path, shape)
            entries.append((MetadataIndex(key, chunk.offsets, len(stored[key].chunks)), entry))
            stored[key].chunks.append(chunk)
            end, name = entry.offset + entry.length, entry.name
            end += -end % 64
        if not number:
            for option in ("lr", "betas", "eps", "weight_decay", "params"):
                path = ("optim", "param_groups", 0, option)
                key = ".".join(map(str, path))
                stored[key], paths[key] = BytesStorageMetadata(), path
                entries.append((MetadataIndex(key), EntryInfo(name, end, 500, KIND_BYTES, 7)))
                end += 500
    fqns = list(dict.fromkeys(path[2] for path in paths.values() if path[1] == "state"))
    info = SavedInfo.pack({"optim": SavedInfo(groups=[fqns], containers=())})
    metadata = Metadata(stored, planner_data={**paths, INFO_KEY: info}, storage_data=None)
    metadata.storage_meta = StorageMeta(checkpoint_id="/checkpoint", save_id="f" * 32)
    metadata.version = "1.0.0"
    return metadata, entries


_SHAPES = {50_000: ("8b", 256), 200_000: ("8b", 1024), 500_000: ("70b", 1024)}


def stock_pickle(metadata: Metadata, entries: Iterable[tuple[MetadataIndex, EntryInfo]]) -> bytes:
    """What stock writes of the same boxes; `metadata` are stock's then."""
    vars(metadata).pop(ATTRIBUTE, None)
    metadata.storage_data = {
        index: _StorageInfo(entry.name, entry.offset, entry.length) for index, entry in entries
    }
    return pickle.dumps(metadata)


def _written(folder: Path, model: str, world_size: int) -> dict[str, dict[str, Any]]:
    """Writes the files that the variants read; and what that took."""
    clock = time.process_time
    with no_collections():
        metadata, entries = metadata_of(layouts(units_of_model(model), world_size))
        begin = clock()
        fill_metadata(metadata, entries, "crc32c")
        ours = dump_metadata(metadata)
        written = clock() - begin
        begin = clock()
        stock = stock_pickle(metadata, entries)
        pickled = clock() - begin
    start = index_start(ours[-FOOT_BYTES:], len(ours), "written") or len(ours)
    told = {"boxes": len(entries), "file": len(ours) / 1e6, "of it": 0.0, "write": written}
    for variant in _VARIANTS:
        (folder / variant).mkdir()
        data = stock if variant == "stock" else ours
        (folder / variant / ".metadata").write_bytes(data)
    return {
        "index": {**told, "of it": (len(ours) - start) / 1e6},
        "whole": told,
        "stock": {**told, "file": len(stock) / 1e6, "write": pickled},
    }


def of_variant(folder: str, variant: str, model: str, world_size: int) -> dict[str, float]:
    """What rank 1 of a world does with the file in `folder`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.metadata_index", "--rank"]
    command += [folder, variant, model, str(world_size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _rank(folder: Path, variant: str, model: str, world_size: int) -> dict[str, float]:
    torch.set_num_threads(1)
    layout = simulate(units_of_model(model), world_size=world_size, rank=1)
    params = tuple(torch.nn.Parameter(torch.empty(p.numel, device="meta")) for p in layout.params)
    optim = torch.optim.AdamW(params)
    target = Target(layout, params, (torch.device("cpu"),) * len(params))
    place, clock = folder / variant, time.process_time

    def run() -> tuple[float, float]:
        begin = clock()
        if variant == "stock":
            FileSystemReader(place).read_metadata()
            return clock() - begin, 0.0
        reader = StreamingReader(place)
        if variant == "index":
            metadata = reader.read_metadata()
        else:
            metadata = load_metadata((place / ".metadata").read_bytes(), "benchmark")
        read = clock()
        planner = FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})
        planner.set_up_planner({"optim": {}}, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.prepare_local_plan(planner.create_local_plan())
        return read - begin, clock() - read

    gc.collect()
    before = rss_bytes()
    run()
    grown = rss_bytes() - before
    times = [run() for _ in range(3)]
    gc.collect()
    tracemalloc.start()
    run()
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    read, plan = (min(column) for column in zip(*times, strict=True))
    return {"read": read, "plan": plan, "traced": traced / 1e6, "resident": grown / 1e6}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boxes", type=int, nargs="+", choices=_SHAPES, default=[*_SHAPES])
    parser.add_argument("--json")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        folder, variant, model, world_size = options.rank
        print(json.dumps(_rank(Path(folder), variant, model, int(world_size))))
        return
    rows: list[dict[str, Any]] = []
    for boxes in options.boxes:
        with tempfile.TemporaryDirectory() as folder:
            shape = _SHAPES[boxes]
            written = _written(Path(folder), *shape)
            for variant in _VARIANTS:
                figures = of_variant(folder, variant, *shape)
                rows.append({"": variant, **written[variant], **figures})
            print(table([list(row.values()) for row in rows], header=list(rows[0])), flush=True)
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
