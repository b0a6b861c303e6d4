"""Names that clients read differently, and paths that were meant as URLs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.errors import FlatOptimError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place

ODD = (
    "exp#1", "exp#2", "exp", "exp?a=1", "exp?versionId=1", "a%20b", "a b", "a+b", "%2e%2e", "a%2Fb",
    "100%", "a*b", "[0]", "{a}", "a|b", "a::b", "a:1", 'x"y', "x'y", "<a>", "a&b;c=d", "~a",
    "a@b", "..x", " blank ", "ä", "é\u0301", "日本",
)  # fmt: skip


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((7, 5), float(number))}


def save(place: Place, number: int, **options: Any) -> None:
    dcp.save(state(number), storage_writer=place.writer(**options))


def load(place: Place) -> float:
    found = state(-1)
    dcp.load(found, storage_reader=place.reader())
    assert (found["weight"] == found["weight"][0, 0]).all()
    return float(found["weight"][0, 0])


def folders(place: Place) -> set[str]:
    """The names directly below a place, by a client that is not ours."""
    if place.endpoint is None:
        return {path.name for path in Path(place.url).iterdir()}
    client = boto3.client("s3", **place.endpoint.boto3_options)
    prefix = place.url.partition(f"{place.endpoint.bucket}/")[2] + "/"
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=place.endpoint.bucket, Prefix=prefix
    )
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return {key[len(prefix) :].partition("/")[0] for key in keys}


def odd_names(place: Place) -> Any:
    for number, name in enumerate(ODD):
        save(place.below(name), number)
    save(place.below("exp#2"), 100, overwrite=True)
    found = [load(place.below(name)) for name in ODD]
    newest = latest(place.url, **place.arguments)
    assert newest is not None and newest.removeprefix(place.url + "/") in ODD
    return found, folders(place) == set(ODD)


FOREIGN = (
    "", "sub/", "/x", "//y", "./z", "../z", "a//b/.metadata", "/.metadata", "./.metadata",
    "../.metadata", "a/./b", "x//", "b\x07c", "b\x07/.metadata", "c\x7f/.metadata",
)  # fmt: skip


def foreign_keys(place: Place) -> Any:
    """What another program left, by kinds and all at once: in nobody's way, and never touched."""
    assert place.endpoint is not None
    client = boto3.client("s3", **place.endpoint.boto3_options)
    bucket, went_wrong = place.endpoint.bucket, []
    for number, keys in enumerate([("/x",), ("./z",), ("b\x07c",), FOREIGN]):
        run = place.below(f"run-{number}")
        root = run.url.partition(f"{bucket}/")[2]
        left = [f"{at}/{key}" for at in (root, f"{root}/step-1") for key in keys]
        for key in left:
            client.put_object(Bucket=bucket, Key=key, Body=b"theirs")
        step = run.below("step-1")
        try:
            save(step, 1)
            save(step, 2, overwrite=True)
            assert load(step) == 2.0
            assert latest(run.url, **run.arguments) == step.url
            text = str(_missing(run.below("step-2")))
            assert "Checkpoints beside it: step-1." in text, text
            for key in left:
                assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"theirs"
        except (Exception, CheckpointException) as error:
            went_wrong.append((keys, f"{type(error).__name__}: {str(error)[:300]}"))
    return went_wrong


def _missing(place: Place) -> BaseException:
    try:
        load(place)
    except CheckpointException as error:
        return error
    raise AssertionError("it loads")


def the_other_client(place: Place) -> Any:
    """What one client saved, the other one loads."""
    assert place.endpoint is not None
    if place.kind == "s3fs":
        options, backend = place.endpoint.obstore_options, "obstore"
    else:
        options, backend = place.endpoint.storage_options, "fsspec"
    found = []
    for number, name in enumerate(ODD):
        save(place.below(name), number)
        found.append(load(dataclasses.replace(place.below(name), backend=backend, options=options)))
    return found


def on_other_file_systems(place: Place) -> Any:
    """The same through fsspec's local and memory file systems."""
    found = []
    for root in (f"file://{place.url}", f"memory://{place.url.strip('/')}"):
        other = Place("file", root, "fsspec")
        for number, name in enumerate(ODD):
            save(other.below(name), number)
        found.append([load(other.below(name)) for name in ODD])
    return found


def refused_names(place: Place) -> Any:
    """Names that say different places to different clients; nothing may be written."""
    went_through = []
    for name in (
        "../x",
        "a/../b",
        "a/./b",
        "a//b",
        "..",
        ".",
        "a\nb",
        "a\tb",
        "a\x7f",
        "a\x00b",
        "a\\b",
    ):
        for use in (StreamingWriter, StreamingReader, latest):
            with contextlib.suppress(FlatOptimError):
                use(f"{place.url}/{name}", **place.arguments)
                went_through.append((name, use.__name__))
    return went_through


class CloudPath:
    """As of packages whose paths turn into that of a local copy."""

    def __fspath__(self) -> str:
        return "/tmp/copy"

    def __str__(self) -> str:
        return "s3://bucket/run"


MEANT_AS_URLS = (
    Path("s3://bucket/run"), PurePosixPath("gs://bucket/run"), Path("file:///run"),
    "s3:/bucket/run", "s3:bucket/run", "s3//bucket/run", "/data/s3:/bucket/run", Path("s3://b").absolute(),
    "/data/s3://bucket/run", "./s3://bucket", " s3://bucket/run", "'s3://bucket/run'", "S3:/bucket",
    "hdfs:/run", "unknown:/run", "C:/run", "simplecache::s3://bucket/run", "filecache::/run",
    "simplecache::file:///run", "zip://run::s3://bucket/run.zip", "s3://s3://bucket/run",
    "simplecache://bucket/run", "s3:///bucket/run", "s3://", "http://host/run?token=1", CloudPath(),
    "http://host/a/%2e%2E/b", "~/run", "~someone/run", "~", "/data/~/run", "$HOME/run",
    "${SCRATCH}/run", Path("~/run"), "run\n", "C:\\run", "a\\b",
)  # fmt: skip


def meant_as_urls(place: Place) -> Any:
    """As a path, as a checkpoint_id, and for latest; nothing may be made."""
    went_through = []
    uses: tuple[Callable[[Any], Any], ...] = (
        StreamingWriter,
        StreamingReader,
        latest,
        lambda path: dcp.save(state(0), checkpoint_id=path, storage_writer=StreamingWriter()),
        lambda path: dcp.load(state(0), checkpoint_id=path, storage_reader=StreamingReader()),
    )
    Path(place.url).mkdir(parents=True)
    before = Path.cwd()
    os.chdir(place.url)
    try:
        for path in MEANT_AS_URLS:
            for number, use in enumerate(uses):
                with contextlib.suppress(FlatOptimError):
                    use(path)
                    went_through.append((path, number))
    finally:
        os.chdir(before)
    return went_through, sorted(folders(place))


def to_the_letter(place: Place) -> Any:
    """What the refusal says to write for a local folder of such a name."""
    found = []
    for number, name in enumerate(("s3:/b", "~", "$HOME", "x:/y")):
        save(Place("local", f"file://{place.url}/{name}", "auto"), number)
        found.append(load(Place("local", f"file://{place.url}/{name}", "auto")))
    return found, folders(place) == {"s3:", "~", "$HOME", "x:"}


EXPECTED = [100.0 if name == "exp#2" else float(number) for number, name in enumerate(ODD)]
AS_SAVED = [float(number) for number in range(len(ODD))]

CASES = [
    Attack("odd names", attack=odd_names, must=Gives((EXPECTED, True)), seconds=90),
    Attack(
        "odd names, saved by one client and loaded by the other",
        attack=the_other_client,
        must=Gives(AS_SAVED),
        on=("s3fs", "obstore"),
        seconds=90,
    ),
    Attack(
        "odd names on fsspec's own file systems",
        attack=on_other_file_systems,
        must=Gives([AS_SAVED, AS_SAVED]),
        on=("local",),
    ),
    Attack(
        "keys that others left",
        attack=foreign_keys,
        must=Gives([]),
        on=("s3fs", "obstore"),
        seconds=60,
    ),
    Attack(
        "names that clients resolve",
        attack=refused_names,
        must=Gives([]),
        on=("s3fs", "obstore"),
    ),
    Attack("paths meant as URLs", attack=meant_as_urls, must=Gives(([], [])), on=("local",)),
    Attack(
        "local folders of names like URLs",
        attack=to_the_letter,
        must=Gives(([0.0, 1.0, 2.0, 3.0], True)),
        on=("local",),
    ),
    Attack(
        "Path of a URL says what to write",
        attack=lambda place: StreamingWriter(Path("s3://bucket/run")),
        must=Refused(r"'s3:/bucket/run' is a local path, .*'s3://bucket/run'.*'file:///.*/s3:/bu"),
        on=("local",),
    ),
    Attack(
        "a home that is not expanded",
        attack=lambda place: StreamingWriter("~/run"),
        must=Refused("os.path.expanduser"),
        on=("local",),
    ),
]
