"""``ls``, ``latest``, ``show``, ``verify``, ``prune``: on ours, stock's, broken checkpoints."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pickle
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from typer.testing import CliRunner

import dcp_fsdp_osd
from dcp_fsdp_osd.cli import main
from dcp_fsdp_osd.cli.app import app
from dcp_fsdp_osd.cli.output import errors_as_lines
from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.tools import check_checkpoint, prune
from tests.servers import EmbeddedS3
from tests.storage.fakes import Script
from tests.tools.made import (
    BREAKS,
    COLUMNS,
    KINDS,
    ROWS,
    broken,
    data_file,
    flip,
    options,
    run,
    run_json,
    save,
    state,
    upload,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group
OLD = Path(__file__).parents[1] / "data" / "checkpoints_v1"
MATRIX = "model.0.weight"


def _matrix() -> torch.Tensor:
    found: torch.Tensor = state()["model"].state_dict()["0.weight"]
    return found.detach()


# ---------------------------------------------------------------- ls, latest


@pytest.fixture
def steps(run_folder: Path, tmp_path: Path) -> Path:
    """Steps 10, 20, 30, 40 with times in that order, and what a killed save of 50 left."""
    for second, step in enumerate((10, 20, 30, 40)):
        shutil.copytree(run_folder / "ours", tmp_path / f"step-{step}")
        os.utime(tmp_path / f"step-{step}" / ".metadata", (1000 + second, 1000 + second))
    (tmp_path / "step-50").mkdir()
    (tmp_path / "step-50" / "__0_0_ab.distcp").write_bytes(b"12345")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_ls_tells_whole_from_half_written_ones(steps: Path) -> None:
    found = run_json("ls", steps)
    assert [(each["name"], each["step"], each["committed"]) for each in found] == [
        ("step-10", 10, True),
        ("step-20", 20, True),
        ("step-30", 30, True),
        ("step-40", 40, True),
        ("step-50", 50, False),
    ]
    files = [file.stat().st_size for file in (steps / "step-10").iterdir()]
    assert (found[0]["nbytes"], found[0]["files"]) == (sum(files), len(files))
    assert [each["saved"] for each in found] == [1000, 1001, 1002, 1003, None]
    table = run("ls", steps)
    assert table.exit_code == 0
    assert "1970-01-01 00:16:40" in table.output and "not committed" in table.output


def test_ls_and_latest_of_nothing(tmp_path: Path) -> None:
    assert run("ls", tmp_path).exit_code == 1
    assert run("latest", tmp_path).exit_code == 1
    assert run_json("latest", tmp_path, status=1) == {"latest": None}
    for command in ("ls", "latest"):
        result = run(command, tmp_path / "absent")
        assert result.exit_code == 2 and "the folder does not exist" in result.output


def test_ls_of_a_checkpoint_and_of_only_half_written_ones(run_folder: Path, tmp_path: Path) -> None:
    (found,) = run_json("ls", run_folder / "stock")
    assert (found["name"], found["committed"]) == (".", True)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "__0_0.distcp").write_bytes(b"1")
    (found,) = run_json("ls", tmp_path, status=1)
    assert not found["committed"]


def test_latest_is_the_path_of_the_newest(steps: Path) -> None:
    result = run("latest", steps)
    assert (result.exit_code, result.stdout) == (0, f"{steps}/step-40\n")


# ---------------------------------------------------------------- show


@pytest.mark.parametrize("kind", KINDS)
def test_show_tells_what_is_in_it(run_folder: Path, kind: str) -> None:
    found = run_json("show", run_folder / kind)
    rows = {row["key"]: row for row in found["rows"]}
    metadata = FileSystemReader(run_folder / kind).read_metadata()
    assert set(rows) == set(metadata.state_dict_metadata)
    assert rows[MATRIX]["shape"] == [ROWS, COLUMNS]
    assert (rows[MATRIX]["dtype"], rows[MATRIX]["nbytes"]) == ("float32", 4 * ROWS * COLUMNS)
    moment = rows["optim.state.0.weight.exp_avg"]
    assert (moment["fqn"], moment["state"], moment["chunks"]) == ("0.weight", "exp_avg", 1)
    assert (rows["step"]["kind"], found["ranks"], found["entries"]) == ("object", 1, len(rows))
    assert found["writer"] == {"ours": "dcp-fsdp-osd"}.get(kind, "torch.distributed.checkpoint")
    assert (found["checksum"] is None) == (kind == "stock")
    (optim,) = found["optimizers"]  # our planner's, whatever the writer
    assert (optim["classes"], optim["groups"]) == (["torch.optim.adamw.AdamW"], [4])
    table = run("show", run_folder / kind).output
    assert f"{ROWS}x{COLUMNS}" in table and "AdamW" in table


def test_show_of_stocks_planner_and_of_two_ranks(tmp_path: Path) -> None:
    value = {"model": {"a.b": torch.ones(3)}, "lr": 0.1}
    dcp.save(value, storage_writer=FileSystemWriter(tmp_path / "stock"))
    found = run_json("show", tmp_path / "stock")
    assert found["optimizers"] == []
    assert {row["key"]: row["fqn"] for row in found["rows"]} == {"model.a.b": "a.b", "lr": "lr"}
    assert run_json("show", OLD / "extras_world2")["ranks"] == 2


def test_show_filters(run_folder: Path) -> None:
    def keys(*globs: str) -> list[str]:
        return [row["key"] for row in run_json("show", run_folder / "ours", *globs)["rows"]]

    assert keys("model") == [f"model.{i}.{name}" for i in (0, 1) for name in ("bias", "weight")]
    assert keys("*.exp_avg", "step") == [
        *(f"optim.state.{i}.{name}.exp_avg" for i in (0, 1) for name in ("bias", "weight")),
        "step",
    ]
    result = run("show", run_folder / "ours", "modle.*")
    assert result.exit_code == 2 and "none of its" in result.output


@pytest.mark.parametrize("kind", KINDS)
def test_show_values(run_folder: Path, kind: str) -> None:
    matrix = _matrix()
    found = run_json("show", run_folder / kind, MATRIX, "--slice", "1:3,-2:")
    assert found["values"] == matrix[1:3, -2:].tolist()
    told = found["figures"]
    assert (told["least"], told["most"]) == (matrix.min().item(), matrix.max().item())
    assert told["mean"] == pytest.approx(matrix.double().mean().item(), abs=1e-12)
    assert (told["numel"], told["nans"], told["infs"]) == (matrix.numel(), 0, 0)
    assert run_json("show", run_folder / kind, MATRIX, "--slice", "4,5")["values"] == (
        matrix[4, 5].item()
    )
    assert run_json("show", run_folder / kind, "step")["value"] == 7
    names = [each["key"] for each in run_json("show", run_folder / kind, "--values")]
    assert MATRIX in names and "step" not in names
    assert "min " in run("show", run_folder / kind, MATRIX).output


def test_figures_of_odd_values(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    value = {
        "odd": torch.tensor([[nan, -1.0], [inf, 4.0], [-inf, 0.0]], dtype=torch.bfloat16),
        "nans": torch.full((3,), nan),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "ints": torch.tensor([-(2**62), 2**62]),
        "complex": torch.tensor([3 + 4j]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    save(value, tmp_path / "odd")
    told = {each["key"]: each["figures"] for each in run_json("show", tmp_path / "odd", "--values")}
    assert (told["odd"]["nans"], told["odd"]["infs"], told["odd"]["zeros"]) == (1, 2, 1)
    assert (told["odd"]["least"], told["odd"]["most"], told["odd"]["mean"]) == ("-inf", "inf", 1.0)
    assert (told["nans"]["least"], told["nans"]["nans"]) == (None, 3)
    assert (told["none"]["numel"], told["none"]["mean"]) == (0, None)
    assert (told["flags"]["least"], told["flags"]["zeros"]) == (0, 1)
    assert (told["ints"]["least"], told["ints"]["most"]) == (-(2**62), 2**62)
    assert (told["complex"]["most"], told["scalar"]["mean"]) == (5.0, 2.5)
    assert run_json("show", tmp_path / "odd", "none", "--slice", "0:1")["values"] == []
    assert run_json("show", tmp_path / "odd", "scalar")["row"]["shape"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((MATRIX, "--slice", "0:1:2"), "expected a slice such as"),
        ((MATRIX, "--slice", "0,0,0"), "2 dimensions at most"),
        ((MATRIX, "--slice", "96"), "which has 96, found 96"),
        ((MATRIX, "--slice", ":"), "too many to print"),
        (("step", "--slice", "0"), "is an object"),
        (("model.0.wieght", "--slice", "0"), f"did you mean {MATRIX}"),
        (("--slice", "0"), "expected one KEY"),
    ],
)
def test_show_says_what_is_wrong(run_folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run("show", run_folder / "ours", *arguments)
    assert result.exit_code == 2 and said in result.output, result.output


def test_show_runs_no_code_of_a_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    shutil.copytree(run_folder / "stock", tmp_path / "evil")
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for command in ("show", "verify"):
        result = run(command, tmp_path / "evil")
        assert result.exit_code == {"show": 2, "verify": 1}[command]
        assert "mkdir" in result.output and "Traceback" not in result.output
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_show_of_damaged_metadata_is_one_line(run_folder: Path, tmp_path: Path, kind: str) -> None:
    path = broken(run_folder / kind, tmp_path / "broken", "metadata")
    result = run("show", path)
    assert result.exit_code == 1
    assert result.output.startswith("dcp-osd: ") and result.output.count("\n") == 1
    result = run("show", tmp_path / "absent")
    assert result.exit_code == 2 and "no checkpoint at" in result.output


def test_show_of_a_damaged_value_is_no_value(run_folder: Path, tmp_path: Path) -> None:
    path = broken(run_folder / "ours", tmp_path / "broken", "payload")
    result = run("show", path, MATRIX)
    assert result.exit_code == 1 and "checksum mismatch" in result.output
    assert run("show", path, "model.1.weight").exit_code == 0


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("kind", KINDS)
def test_verify_of_what_is_whole(run_folder: Path, kind: str) -> None:
    found = run_json("verify", run_folder / kind)
    assert found["whole"] and not found["problems"] and not found["orphans"]
    counts = {"ours": found["checked"], "stock": found["zipped"]}
    assert counts[kind] == found["entries"] == len(run_json("show", run_folder / kind)["rows"])
    assert found["nbytes"] == data_file(run_folder / kind).stat().st_size
    said = {"ours": "by crc32c", "stock": "no checksums of stock"}[kind]
    assert said in run("verify", run_folder / kind).output


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_damage(run_folder: Path, tmp_path: Path, kind: str, how: str) -> None:
    path = broken(run_folder / kind, tmp_path / "broken", how)
    found = run_json("verify", path, status=1)
    problems = [(each["file"], each["key"], each["what"]) for each in found["problems"]]
    name = data_file(run_folder / kind).name
    if how == "orphan":
        assert (problems, found["orphans"]) == ([], {"__5_0.distcp": 9})
        assert run("verify", path, "--ignore-orphans").exit_code == 0
        return
    assert not found["whole"] and not found["orphans"]
    if how == "payload":
        ((file, key, what),) = problems
        words = {"ours": "checksum mismatch in payload", "stock": "Bad CRC-32"}
        assert (file, key) == (name, MATRIX) and words[kind] in what
    elif how == "metadata":
        assert {file for file, _, _ in problems} == {".metadata"}
    else:
        ((file, key, what),) = problems
        words = {"cut": "cut off", "lost": "is missing", "longer": "4 bytes at"}
        assert (file, key) == (name, "") and words[how] in what
    assert "damaged: " in run("verify", path).output


def test_verify_finds_any_flipped_bit_of_ours(run_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(run_folder / "ours", path)
    file = data_file(path)
    for at in range(0, file.stat().st_size, file.stat().st_size // 40):
        flip(file, at)
        found = check_checkpoint(path)
        assert len(found.problems) == 1, at
        flip(file, at)
    assert check_checkpoint(path).whole


def test_verify_streams_large_entries_and_many_files(tmp_path: Path) -> None:
    """Entries of more than one piece, in several files; a flip in each is found, and named."""
    value = {name: torch.arange(5 << 20, dtype=torch.float32) + i for i, name in enumerate("ab")}
    save(value, tmp_path / "ours")
    save(value, tmp_path / "stock", "stock")
    for kind in KINDS:
        assert check_checkpoint(tmp_path / kind).whole
        for file in (tmp_path / kind).glob("*.distcp"):
            flip(file, file.stat().st_size - (1 << 20))
        found = check_checkpoint(tmp_path / kind)
        assert {problem.key for problem in found.problems} <= {"a", "b"} and found.problems
        assert len(found.problems) == len(list((tmp_path / kind).glob("*.distcp")))


def test_verify_says_what_it_cannot_check(tmp_path: Path) -> None:
    """Ours without checksums, and stock's when torch was told to compute none."""
    save({"a": torch.ones(9)}, tmp_path / "ours", checksum=False)
    torch.serialization.set_crc32_options(False)
    try:
        save({"a": torch.ones(9)}, tmp_path / "stock", "stock")
    finally:
        torch.serialization.set_crc32_options(True)
    for kind in KINDS:
        found = run_json("verify", tmp_path / kind)
        assert (found["unchecked"], found["checked"]) == (found["entries"], 0), kind
        assert "no checksum to compare" in run("verify", tmp_path / kind).output


def test_verify_of_metadata_that_leave_out_an_entry(tmp_path: Path) -> None:
    """A sealed file whose entries are not those of its chunks."""
    save({"a": torch.ones(9), "b": 1}, tmp_path / "c")
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    (index,) = (index for index in metadata.storage_data if index.fqn == "a")
    info = metadata.storage_data.pop(index)
    body = pickle.dumps(metadata)
    seal = struct.pack("<8sIQ", b"\nDCPOSD1", zlib.crc32(body), len(body))
    (tmp_path / "c" / ".metadata").write_bytes(body + seal)
    found = run_json("verify", tmp_path / "c", status=1)
    said = {each["key"]: each["what"] for each in found["problems"]}
    assert "no entry holds" in said["a"]
    assert f"{info.length} bytes at" in said[""]


def test_verify_of_an_old_checkpoint_of_two_ranks() -> None:
    found = run_json("verify", OLD / "adamw_flat_world2", "--ignore-orphans")
    assert (found["files"], found["checked"]) == (2, found["entries"])
    assert list(found["orphans"]) == ["expected.pt"]


# ---------------------------------------------------------------- prune


def _there(path: Path) -> set[str]:
    return {file.parent.name for file in path.glob("*/.metadata")}


def test_prune_keeps_the_newest_and_every_nth(steps: Path) -> None:
    plan = run_json("prune", steps, "--keep", 1, "--every", 20, "--dry-run")
    assert (plan["kept"], plan["deleted"]) == ([20, 40], [10, 30])
    assert len(_there(steps)) == 4
    assert run("prune", steps, "--keep", 1, "--every", 20).exit_code == 0
    assert _there(steps) == {"step-20", "step-40"}
    assert not (steps / "step-10").exists() and (steps / "step-50").exists()


def test_prune_never_deletes_the_only_good_one(steps: Path) -> None:
    """Damaged ones count for none that is kept; those after the newest good one stay."""
    data_file(steps / "step-40").unlink()
    (steps / "step-30" / ".metadata").write_bytes(b"\x80\x04N.")
    found = run_json("prune", steps, "--keep", 1)
    assert (found["kept"], found["deleted"]) == ([20, 30, 40], [10])
    assert set(found["damaged"]) == {"30", "40"}
    assert _there(steps) == {"step-20", "step-30", "step-40"}
    data_file(steps / "step-20").unlink()
    found = run_json("prune", steps, "--keep", 1)
    assert found["deleted"] == [] and len(_there(steps)) == 3


def test_prune_is_told_how_many(steps: Path) -> None:
    assert run("prune", steps).exit_code == 2
    assert run("prune", steps, "--keep", 0).exit_code == 2
    with pytest.raises(ValueError, match="1 at least"):
        prune(steps, keep=0)
    assert len(_there(steps)) == 4
    assert run("prune", steps / "notes", "--keep", 1).exit_code == 1
    assert run("prune", steps / "absent", "--keep", 1).exit_code == 2


def test_prune_does_not_take_storage_that_fails_for_damage(steps: Path) -> None:
    """What cannot be read for now may be the best there is."""

    def denied(operation: str, name: str) -> None:
        if operation == "read whole":
            raise PermissionError("not now")

    with pytest.raises(StorageError, match="not now"):
        prune(steps, keep=1, backend=Script(denied).store)
    assert len(_there(steps)) == 4


# ---------------------------------------------------------------- all of it on S3, and the script


def test_commands_on_s3(s3: EmbeddedS3, run_folder: Path, tmp_path: Path) -> None:
    """The same as on a local path, for whole and for broken ones."""
    args = options(s3)
    url = upload(run_folder, s3, "run")
    for kind in KINDS:
        here, there = run_folder / kind, f"{url}/{kind}"
        mine, its = run_json("show", here), run_json("show", there, *args)
        assert mine.pop("url") == str(here) and its.pop("url") == there
        assert mine == its
        mine, its = run_json("verify", here), run_json("verify", there, *args)
        assert {**mine, "url": ""} == {**its, "url": ""}
        assert run_json("show", here, MATRIX, "--slice", "0:2") == run_json(
            "show", there, MATRIX, "--slice", "0:2", *args
        )
    assert run_json("latest", url, *args)["latest"] in (f"{url}/ours", f"{url}/stock")
    for how in BREAKS:
        broken(run_folder / "ours", tmp_path / how, how)
    places = upload(tmp_path, s3, "broken")
    for how in BREAKS:
        mine = run_json("verify", tmp_path / how, status=1)
        its = run_json("verify", f"{places}/{how}", *args, status=1)
        assert (its["problems"], its["orphans"]) == (mine["problems"], mine["orphans"])
    for step in (1, 2, 3):
        upload(run_folder / "ours", s3, f"steps/step-{step}")
    steps = s3.url("steps")
    assert run_json("prune", steps, "--keep", 1, *args)["deleted"] == [1, 2]
    assert [each["name"] for each in run_json("ls", steps, *args)] == ["step-3"]
    result = run("show", s3.url("absent"), *args)
    assert result.exit_code == 2 and "no checkpoint at" in result.output


def test_secrets_are_not_printed(s3: EmbeddedS3) -> None:
    word = "s3cr3t/word"
    result = run("ls", "s3://bucket/x", "-o", f"secret={word}", "-o", "endpoint_url=http://[bad")
    assert result.exit_code == 2 and word not in result.output
    result = run("ls", "s3://bucket/x", "-o", f"secret={{{word}")
    assert result.exit_code == 2 and word not in result.output
    result = run("ls", "s3://bucket/x", "-o", word)
    assert result.exit_code == 2 and word not in result.output


def test_the_script_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "typer" else find(name)
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "typer" in (said := capsys.readouterr().err) and "'dcp-fsdp-osd[cli]'" in said


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CorruptCheckpointError("damaged"), 1),
        (StorageError("no answer"), 2),
        (RuntimeError("with s3cr3t/word in it"), 2),
        (KeyboardInterrupt(), 130),
        (typer.Exit(1), 1),
    ],
)
def test_exit_status_of_errors(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that nobody foresaw is no difference, and shows no secret either."""
    with (
        pytest.raises(typer.Exit) as ended,
        errors_as_lines({"storage_options": {"secret": "s3cr3t/word"}}),
    ):
        raise error
    assert ended.value.exit_code == status
    said = capsys.readouterr().err
    assert "s3cr3t" not in said and ("Traceback" in said) == (type(error) is RuntimeError)


def test_docs_show_every_command() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    for command in app.registered_commands:
        assert f"$ dcp-osd {command.name} " in text, command.name


# ---------------------------------------------------------------- all commands

BELOW = {
    "show": (), "verify": (), "diff": ("@",), "export": ("OUT/o.pt",), "rechunk": ("OUT/c",),
    "plan": ("--world-size", "2"), "plot": ("-o", "OUT/p.html"),
}  # fmt: skip
"""The commands that take a checkpoint, and what else they need; ``@`` is the checkpoint again."""


@pytest.mark.parametrize("where", ["missing", "empty", "file", "junk", "nothing", "folder", "odd"])
def test_what_is_no_checkpoint_is_a_line(tmp_path: Path, where: str) -> None:
    """In every command, with ``--json`` or without; and nothing is left behind."""
    place, out = tmp_path / where, tmp_path / "out"
    out.mkdir()
    if where == "file":
        place.write_text("x")
    elif where != "missing":
        place.mkdir()
    if where in ("junk", "nothing"):
        (place / ".metadata").write_bytes(b"junk" if where == "junk" else b"")
    elif where == "folder":
        (place / ".metadata").mkdir()
    path = "zz9://x/y" if where == "odd" else str(place)
    for command, more in BELOW.items():
        words = [path if each == "@" else each.replace("OUT", str(out)) for each in more]
        for how in ([], ["--json"]):
            result = run(command, path, *words, *how)
            assert result.exit_code in (1, 2), command
            if command == "verify" and result.exit_code == 1:
                assert ".metadata" in result.output  # damage, which it tells in its own words
                continue
            assert result.stdout == "" and result.stderr.startswith("dcp-osd: "), result.output
            assert len(result.stderr.splitlines()) == 1 and path in result.stderr
    assert [*out.iterdir()] == []


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in ("show", "ls"):
        result = run(command, "s3://bucket/run", "-o", "endpoint_url=http://127.0.0.1:9")
        assert result.exit_code == 2 and "dcp-osd doctor" in result.stderr, result.output
        assert len(result.stderr.splitlines()) == 1


def test_names_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    """Escapes, line ends, and halves of surrogate pairs, which no terminal's encoding has."""
    save({"model": {"a\x1b[31m\nb\udce4": torch.ones(2)}}, tmp_path / "c")
    path = broken(tmp_path / "c", tmp_path / "broken", "lost")
    for arguments in (
        ("show", tmp_path / "c"),
        ("show", tmp_path / "c", "--values"),
        ("show", tmp_path / "c", "a\x1b"),
        ("verify", path),
        ("diff", tmp_path / "c", path),
    ):
        result = run(*arguments)
        assert result.exit_code in (0, 1, 2) and "\x1b" not in result.output, arguments
        assert "codec" not in result.output and "Traceback" not in result.output, arguments
    assert "model.a\ufffd[31m\ufffdb\ufffd" in run("show", tmp_path / "c").output
    (row,) = run_json("show", tmp_path / "c")["rows"]  # JSON has escapes of its own
    assert row["key"] == "model.a\x1b[31m\nb\udce4"


def test_help_version_and_completion() -> None:
    commands = [each.name for each in app.registered_commands]
    assert len(commands) == 12 and set(BELOW) < set(commands)
    for command in commands:
        result = run(str(command), "--help")
        text = " ".join(result.output.split())
        assert result.exit_code == 0 and "--json" in text and "Exit status" in text, command
        assert run(str(command)).exit_code == 2
    version = run("--version")
    assert version.exit_code == 0
    try:
        importlib.metadata.version("dcp-fsdp-osd")
    except importlib.metadata.PackageNotFoundError:
        assert "not installed" in version.output
    else:
        assert version.output.split() == ["dcp-osd", dcp_fsdp_osd.__version__]
    assert "--show-completion" in run("--help").output
    found = CliRunner().invoke(
        app,
        prog_name="dcp-osd",
        env={
            "_DCP_OSD_COMPLETE": "complete_bash",
            "COMP_WORDS": "dcp-osd pl",
            "COMP_CWORD": "1",
        },
    )
    assert found.stdout.split() == ["plan", "plot"], found.output
