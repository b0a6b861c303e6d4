"""Paths, folders and files that are not what they are taken for."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
    latest,
    verify_optim_state,
)
from tests.mistakes.case import Bench, mistake
from tests.planners.checks import make


def _save(bench: Bench, path: Any, **options: Any) -> None:
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim)
    writer = StreamingWriter(path, **options)
    dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)


def _load(bench: Bench, path: Any, **options: Any) -> None:
    model, optim = make()
    reader = StreamingReader(path, **options)
    dcp.load({"optim": {}}, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))


@mistake("an unknown scheme", raises="StorageError", says=r"s4://bucket.*s4")
def unknown_scheme_to_save(bench: Bench) -> None:
    _save(bench, "s4://bucket/run")


@mistake(
    "an unknown scheme",
    raises="Exception",
    says="s4://bucket.*s4",
)
def unknown_scheme_to_load(bench: Bench) -> None:
    _load(bench, "s4://bucket/run")


@mistake(
    "a file where the folder is to be",
    raises="Exception",
    says="file.*(is a file|folder)",
)
def file_for_folder_to_save(bench: Bench) -> None:
    path = bench.folder / "file"
    bench.once(lambda: path.write_text("x"))
    _save(bench, path)


@mistake(
    "a data file instead of its folder",
    raises="Exception",
    says="Not a directory|is a file",
)
def file_for_folder_to_load(bench: Bench) -> None:
    _load(bench, Path(bench.good) / ".metadata")


@mistake(
    "a folder that does not exist",
    raises="Exception",
    says="no checkpoint at .*new",
)
def load_from_nowhere(bench: Bench) -> None:
    _load(bench, bench.path)


@mistake(
    "verify of a folder that does not exist",
    raises="Exception",
    says="no checkpoint at",
)
def verify_nowhere(bench: Bench) -> None:
    verify_optim_state(*make(), bench.path)


@mistake(
    "a read-only folder",
    raises="StorageError",
    says="/proc/checkpoint: create",
)
def read_only_folder(bench: Bench) -> None:
    # Root may write anywhere but here.
    _save(bench, "/proc/checkpoint" if os.geteuid() == 0 else "/checkpoint")


@mistake("backend='local' for a URL", raises="StorageError", says=r"takes a path, not the URL")
def local_backend_for_url(bench: Bench) -> None:
    _save(bench, "s3://bucket/run", backend="local")


class Args:
    """As ``argparse`` would make it."""


@mistake(
    "an object that a load will not unpickle", raises="UnsafeCheckpointError", says=r"allow_pickle"
)
def custom_class_in_state(bench: Bench) -> None:
    model, optim = make()
    state: dict[str, Any] = {"optim": optim.state_dict(), "args": Args()}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save(state, storage_writer=StreamingWriter(bench.path), planner=planner)
    state = {"optim": {}, "args": 0}
    reader = StreamingReader(bench.path)
    dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))


@mistake(
    "a torch.save file instead of a checkpoint",
    raises="Exception",
    says="Not a directory|is a file",
)
def torch_save_file_for_checkpoint(bench: Bench) -> None:
    path = bench.folder / "optim.pt"
    bench.once(lambda: torch.save({"optim": {}}, path))
    _load(bench, path)


@mistake(
    "None of latest() used as a path",
    raises="Exception",
    says="no path or URL",
)
def latest_found_none(bench: Bench) -> None:
    _load(bench, latest(bench.folder))


@mistake(
    "a .metadata that is something else",
    raises="Exception",
    says=r"\.metadata",
)
def foreign_metadata(bench: Bench) -> None:
    bench.once(lambda: (bench.folder / ".metadata").write_bytes(pickle.dumps({"a": 1})))
    _load(bench, bench.folder)


@mistake("a number for the path", raises="TypeError", says=r"path_or_url.*int")
def number_for_path(bench: Bench) -> None:
    StreamingWriter(3)  # type: ignore[arg-type]


@mistake(
    "an empty path",
    raises="Exception",
    says="no path or URL",
)
def empty_path(bench: Bench) -> None:
    _load(bench, "")


@mistake(
    "the folder of all steps",
    raises="Exception",
    says="no checkpoint at.*step-10",
)
def load_from_the_folder_of_steps(bench: Bench) -> None:
    bench.once(lambda: (bench.folder / "step-10").symlink_to(bench.good))
    _load(bench, bench.folder)


@mistake(
    "latest() of a folder that is not there",
    raises="StorageError",
    says="the folder does not exist; mend the path, or make the folder before the first run",
)
def latest_of_nowhere(bench: Bench) -> None:
    latest(bench.path)


@mistake(
    "options of one client for the other",
    raises="Exception",
    says="bogus",
)
def unknown_storage_option(bench: Bench) -> None:
    _load(bench, "s3://bucket/run", backend="obstore", storage_options={"bogus": 1})


@mistake("a URL as a Path, which loses a slash", raises="Exception", says=r"s3:/bucket|s3://bucket")
def url_as_path(bench: Bench) -> None:
    _save(bench, Path("s3://bucket/run"))


@mistake("a path with ~, which nobody expands", raises="Exception", says=r"~/checkpoints")
def home_in_path(bench: Bench) -> None:
    _save(bench, "~/checkpoints/run")


@mistake("a value that a load will not unpickle, saved", raises="", says=r"args")
def save_what_cannot_be_loaded(bench: Bench) -> None:
    state: dict[str, Any] = {f"args{bench.rank}": Args()}  # so that each rank writes one
    dcp.save(state, storage_writer=StreamingWriter(bench.path))


@mistake("if verify_...(): taken for a bool", raises="TypeError", says=r"\.ok")
def verification_as_bool(bench: Bench) -> None:
    assert verify_optim_state(*make(), bench.good)
