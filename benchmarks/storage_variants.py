"""The savers and loaders that ``benchmarks.storage`` compares, each behind one call.

A :class:`Place` is where a checkpoint goes: a folder, or a prefix in a bucket of an S3 server.
``savers(place)`` and ``loaders(place)`` give a function per variant:

- ``ours ...``: StreamingWriter and StreamingReader of this package;
- ``stock``: torch's own writer and reader (FsspecWriter/Reader, FileSystemWriter/Reader);
- ``s3torchconnector``: its DCP writer and reader, where it is installed;
- ``raw ...``: the same number of bytes by the client or the system alone, with no checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.s3_server import S3Endpoint
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter

__all__ = [
    "Place",
    "Variant",
    "connector_missing",
    "loaders",
    "local_bytes",
    "prepare",
    "raw_prepare",
    "savers",
]

PART = 8 << 20
RAW_THREADS = 16
State = dict[str, Any]
#: Saves the state to, or loads it from, the checkpoint of this name.
Variant = Callable[[State, str], None]


@dataclass(frozen=True)
class Place:
    """``endpoint`` is None for a local folder; ``root`` a folder or a prefix in the bucket."""

    label: str
    root: str
    endpoint: S3Endpoint | None = None

    def url(self, name: str) -> str:
        if self.endpoint is None:
            return str(Path(self.root) / name)
        return self.endpoint.url(f"{self.root}/{name}")

    def remove(self, name: str) -> None:
        """Delete a checkpoint or a raw file, if it is there."""
        if self.endpoint is None:
            import shutil

            shutil.rmtree(self.url(name), ignore_errors=True)
            return
        import boto3

        bucket = boto3.resource("s3", **self.endpoint.boto3_options).Bucket(self.endpoint.bucket)
        bucket.objects.filter(Prefix=f"{self.root}/{name}/").delete()


def connector_missing() -> str | None:
    """Why s3torchconnector cannot be measured; None where it can."""
    missing = [
        name
        for name in ("s3torchconnector", "s3torchconnectorclient", "tenacity")
        if importlib.util.find_spec(name) is None
    ]
    if not missing:
        return None
    return (
        f"s3torchconnector is not measured: no module {', '.join(missing)}; "
        "pip install --no-deps s3torchconnector==1.5.0 s3torchconnectorclient==1.5.0 tenacity"
    )


def _locals(state: State) -> list[torch.Tensor]:
    return [
        value.to_local() if hasattr(value, "to_local") else value
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]


def local_bytes(state: State) -> int:
    """Bytes of this rank's part of the state."""
    return sum(tensor.nbytes for tensor in _locals(state))


def _views(state: State) -> list[memoryview]:
    """This rank's large tensors as bytes, in pieces of at most PART."""
    pieces = []
    for tensor in _locals(state):
        if tensor.nbytes >= PART // 8:
            view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            pieces += [view[i : i + PART] for i in range(0, len(view), PART)]
    return pieces


# ------------------------------------------------------------------ checkpoints


def _stock_writer(place: Place, name: str) -> Any:
    if place.endpoint is None:
        return dcp.FileSystemWriter(place.url(name), sync_files=False)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    # sync_files=True would run os.sync() over the whole machine.
    options = place.endpoint.storage_options
    return FsspecWriter(place.url(name), sync_files=False, **options)


def _stock_reader(place: Place, name: str) -> Any:
    if place.endpoint is None:
        return dcp.FileSystemReader(place.url(name))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(place.url(name), **place.endpoint.storage_options)


def _connector(place: Place, storage: Any) -> Any:
    """Point s3torchconnector's reader or writer at our endpoint (it has no option for that)."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    assert place.endpoint is not None
    storage.fs._client = S3Client(
        place.endpoint.region,
        endpoint=place.endpoint.endpoint_url,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return storage


def _connector_credentials(place: Place) -> None:
    # The connector takes credentials from AWS's own chain alone.
    assert place.endpoint is not None
    os.environ["AWS_ACCESS_KEY_ID"] = place.endpoint.access_key
    os.environ["AWS_SECRET_ACCESS_KEY"] = place.endpoint.secret_key


def _ours_options(place: Place, backend: str) -> dict[str, Any]:
    if place.endpoint is None:
        return {"fsync": backend == "fsync"}
    options = place.endpoint.obstore_options if backend == "obstore" else None
    return {"backend": backend, "storage_options": options or place.endpoint.storage_options}


def savers(place: Place) -> dict[str, Variant]:
    """Variant by name; ``stock`` first."""

    def stock(state: State, name: str) -> None:
        dcp.save(state, storage_writer=_stock_writer(place, name))

    def connector(state: State, name: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        assert place.endpoint is not None
        writer = S3StorageWriter(place.endpoint.region, place.url(name))
        dcp.save(state, storage_writer=_connector(place, writer))

    def ours(backend: str) -> Variant:
        def run(state: State, name: str) -> None:
            writer = StreamingWriter(place.url(name), **_ours_options(place, backend))
            dcp.save(state, storage_writer=writer)

        return run

    found: dict[str, Variant] = {"stock": stock}
    if place.endpoint is None:
        for backend in ("nosync", "fsync"):
            found[f"ours {backend}"] = ours(backend)
            found[f"raw write {backend}"] = _raw_write(place, backend == "fsync")
        return found
    if connector_missing() is None:
        _connector_credentials(place)
        found["s3torchconnector"] = connector
    found["ours obstore"] = ours("obstore")
    found["ours s3fs"] = ours("fsspec")
    found["raw obstore"] = _raw_obstore_put(place)
    found["raw s3fs"] = _raw_s3fs_put(place)
    return found


def loaders(place: Place) -> dict[str, Variant]:
    """Variant by name; ``stock`` first.

    ``name`` is of the pair of checkpoints that :func:`prepare` wrote: stock and the connector
    load the one that stock wrote, ours the one that ours wrote.
    """

    def stock(state: State, name: str) -> None:
        dcp.load(state, storage_reader=_stock_reader(place, f"{name}-stock"))

    def connector(state: State, name: str) -> None:
        from s3torchconnector.dcp import S3StorageReader

        assert place.endpoint is not None
        reader = S3StorageReader(place.endpoint.region, place.url(f"{name}-stock"))
        dcp.load(state, storage_reader=_connector(place, reader))

    def ours(backend: str, *, verify: bool = True) -> Variant:
        def run(state: State, name: str) -> None:
            options = _ours_options(place, backend)
            options.pop("fsync", None)
            reader = StreamingReader(place.url(f"{name}-ours"), verify=verify, **options)
            dcp.load(state, storage_reader=reader)

        return run

    found: dict[str, Variant] = {"stock": stock}
    if place.endpoint is None:
        found["ours"] = ours("local")
        found["ours, verify off"] = ours("local", verify=False)
        found["raw readinto"] = _raw_readinto(place)
        return found
    if connector_missing() is None:
        _connector_credentials(place)
        found["s3torchconnector"] = connector
    found["ours obstore"] = ours("obstore")
    found["ours obstore, verify off"] = ours("obstore", verify=False)
    found["ours s3fs"] = ours("fsspec")
    found["raw obstore"] = _raw_obstore_get(place)
    found["raw s3fs"] = _raw_s3fs_get(place)
    return found


# ------------------------------------------------------------------ raw limits


def _rank() -> int:
    return torch.distributed.get_rank()


def prepare(place: Place, state: State, name: str) -> None:
    """Write the pair of checkpoints that the loaders read."""
    saving = savers(place)
    saving["stock"](state, f"{name}-stock")
    saving["ours nosync" if place.endpoint is None else "ours obstore"](state, f"{name}-ours")


def raw_prepare(place: Place, state: State) -> None:
    """Write what the raw loaders read: this rank's bytes as one object or file."""
    if place.endpoint is None:
        _raw_write(place, False)(state, "raw-source")
    else:
        _raw_obstore_put(place)(state, "raw-source")


def _obstore(place: Place) -> Any:
    from obstore.store import S3Store

    assert place.endpoint is not None
    return S3Store(place.endpoint.bucket, **place.endpoint.obstore_options)


def _s3fs(place: Place) -> Any:
    import s3fs

    assert place.endpoint is not None
    return s3fs.S3FileSystem(**place.endpoint.storage_options)


def _offsets(pieces: Sequence[memoryview]) -> list[int]:
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    return offsets


def _raw_obstore_put(place: Place) -> Variant:
    store = _obstore(place)

    def run(state: State, name: str) -> None:
        import obstore

        # An iterable of parts, so that nothing is put together first.
        obstore.put(
            store,
            f"{place.root}/{name}/{_rank()}",
            iter(_views(state)),
            chunk_size=PART,
            max_concurrency=RAW_THREADS,
        )

    return run


def _raw_obstore_get(place: Place) -> Variant:
    store = _obstore(place)

    def run(state: State, name: str) -> None:
        import obstore

        path = f"{place.root}/raw-source/{_rank()}"
        pieces = _views(state)

        def get(piece: memoryview, offset: int) -> None:
            piece[:] = memoryview(obstore.get_range(store, path, start=offset, length=len(piece)))

        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(get, pieces, _offsets(pieces)))

    return run


def _raw_s3fs_put(place: Place) -> Variant:
    fs = _s3fs(place)
    whole: dict[int, bytes] = {}

    def run(state: State, name: str) -> None:
        if not whole:  # put together in the warm-up, which is not measured
            whole[0] = b"".join(_views(state))
        fs.pipe_file(
            f"{place.endpoint.bucket}/{place.root}/{name}/{_rank()}",  # type: ignore[union-attr]
            whole[0],
            chunksize=PART,
            max_concurrency=RAW_THREADS,
        )

    return run


def _raw_s3fs_get(place: Place) -> Variant:
    fs = _s3fs(place)

    def run(state: State, name: str) -> None:
        assert place.endpoint is not None
        path = f"{place.endpoint.bucket}/{place.root}/raw-source/{_rank()}"
        pieces = _views(state)
        offsets = _offsets(pieces)
        found = fs.cat_ranges([path] * len(pieces), offsets[:-1], offsets[1:])
        for piece, data in zip(pieces, found, strict=True):
            piece[:] = data

    return run


def _raw_write(place: Place, sync: bool) -> Variant:
    def run(state: State, name: str) -> None:
        folder = Path(place.url(name))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / str(_rank())).open("wb", buffering=0) as file:
            for piece in _views(state):
                file.write(piece)
            if sync:
                os.fsync(file.fileno())

    return run


def _raw_readinto(place: Place) -> Variant:
    def run(state: State, name: str) -> None:
        with (Path(place.url("raw-source")) / str(_rank())).open("rb", buffering=0) as file:
            for piece in _views(state):
                file.readinto(piece)

    return run
