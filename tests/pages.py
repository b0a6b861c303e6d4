"""The code that documentation shows, found in its pages and run.

    run_page(Path("docs/storage.md"), folder, endpoint)

Pages are Markdown with fenced blocks, each of a kind that is known here:

============ =====================================================================================
fence        what is done with it
============ =====================================================================================
``python``   run by two ranks (gloo), in the page's own folder; blocks of a page share their names
``bash``     each line is a command: see :func:`check_command`
``console``  lines that begin with ``$`` are commands, those below are what they print
``text``     no code; nothing
============ =====================================================================================

Comments, which readers do not see, say what is to be done beside:

    <!-- setup
    model = ...                      Python that is run at this place, on both ranks
    -->
    <!-- output -->                  the text block below is what rank 0 printed since the last one
    <!-- file: example.py -->        the block below is a file; ``torchrun`` of it runs it on ranks
    <!-- not run: it needs a GPU --> the block below is not run; tests/test_docs.py lists these
    <!-- ranks: 1 -->                how many ranks run the page, where not two
    <!-- torch: 2.9 -->              what it needs; with an older one the page is not run

URLs ``s3://bucket/...`` and the endpoint ``http://localhost:9000`` stand for a server of the tests,
whose credentials are in the environment; ``/checkpoints`` for the page's own folder.  In what is
printed, ``...`` stands for anything; numbers are not compared in consoles, where they tell of
sizes, times and dates.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.servers import S3Endpoint, free_ports
from tests.torch_gaps import VERSION

__all__ = ["ROOT", "Block", "Failure", "blocks_of", "commands_in", "run_page"]

ROOT = Path(__file__).parent.parent
ENDPOINT = "http://localhost:9000"
BUCKET = "s3://bucket/"
FOLDER = "/checkpoints"
RANKS = 2
LIMIT = 400.0

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^`]*?) *$")
_COMMENT = re.compile(
    r"^ *<!--\s*(setup|output|file|not run|ranks|torch)\b:?\s?(.*?)-->\s*$", re.DOTALL
)
_NUMBER = re.compile(r"[0-9a-f]{12,}|[-+]?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")


class Failure(AssertionError):
    """A block that is not what its page says."""


@dataclass(frozen=True)
class Block:
    """A piece of a page: `kind` is the fence's language, or the comment's first word.

    `mark` is the comment above a fence, and `note` its text; `line` that of the first line inside.
    """

    page: str
    line: int
    kind: str
    text: str
    mark: str = ""
    note: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks_of(path: Path, name: str | None = None) -> list[Block]:
    """The blocks of a page, and its set-up comments, in order.

    Raises:
        Failure: a fence without a known language, a comment that belongs to no fence, code that is
            only indented.
    """
    page = name or path.name
    lines = path.read_text().splitlines()
    found: list[Block] = []
    mark, note = "", ""
    number = 0
    above = ""  # the last line that is not blank
    blank = True
    while number < len(lines):
        line = lines[number]
        number += 1
        fence = _FENCE.match(line)
        if fence and fence[3] == "" and fence[2][0] == "~":
            raise Failure(f"{page}, line {number}: fences are ```")
        if fence:
            first = number
            while number < len(lines) and lines[number].strip() != fence[2]:
                number += 1
            if number == len(lines):
                raise Failure(f"{page}, line {first}: the fence is not closed")
            inside = [each.removeprefix(fence[1]) for each in lines[first:number]]
            number += 1
            kind = fence[3].split(" ")[0]
            if kind not in ("python", "bash", "console", "text"):
                raise Failure(
                    f"{page}, line {first}: expected ```python, bash, console, or text for what "
                    f"is no code, found {kind!r}"
                )
            text = "\n".join(inside) + "\n"
            found.append(Block(page, first + 1, kind, text, mark, note))
            mark, note = "", ""
        elif re.match(r"^ *<!--", line):
            first = number
            while "-->" not in lines[number - 1]:
                if number == len(lines):
                    raise Failure(f"{page}, line {first}: the comment is not closed")
                number += 1
            comment = _COMMENT.match("\n".join(lines[first - 1 : number]))
            if comment is None:
                continue
            if comment[1] in ("setup", "ranks", "torch"):
                found.append(Block(page, first, comment[1], comment[2]))
            else:
                mark, note = comment[1], " ".join(comment[2].split())
                if mark in ("not run", "file") and not note:
                    raise Failure(f"{page}, line {first}: '{mark}' of what?")
        elif line.strip():
            if mark:
                raise Failure(f"{page}, line {number}: expected a fence below <!-- {mark} -->")
            listed = re.match(r"^\s*([-*+]|\d+\.) ", above) or above.startswith("  ")
            if line.startswith("    ") and blank and not listed:
                raise Failure(f"{page}, line {number}: indented code; use a fence")
        if line.strip():
            above = line
        blank = not line.strip()
    if mark:
        raise Failure(f"{page}: nothing below <!-- {mark} -->")
    return found


def commands_in(block: Block) -> list[tuple[int, str, str]]:
    """(line, command, what it prints) of a console or bash block; joined where ``\\`` ends them."""
    found: list[list[Any]] = []
    goes_on = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        if goes_on:
            found[-1][1] += " " + line.strip()
        elif block.kind == "bash":
            if not line.strip() or line.startswith("#"):
                continue
            found.append([number, line, ""])
        elif line.startswith("$ "):
            found.append([number, line[2:], ""])
        elif not found:
            raise Failure(f"{block.page}, line {number}: output of no command ($ ...)")
        else:
            found[-1][2] += line + "\n"
            continue
        goes_on = found[-1][1].endswith("\\")
        found[-1][1] = found[-1][1].removesuffix("\\")
    return [(number, command, text) for number, command, text in found]


def run_page(
    path: Path,
    folder: Path,
    endpoint: S3Endpoint,
    name: str | None = None,
    *,
    torchrun: bool = False,
) -> None:
    """Do what the page's blocks show, in `folder`, which is empty; programs come first.

    With `torchrun` they are run by it, as the page says; else by ranks that are there already.

    Raises:
        Failure: a command that does not exist, an output that is another one.
        RankError: what a block raised.
    """
    blocks = blocks_of(path, name)
    page = name or path.name
    ranks, needed = RANKS, (0,)
    for block in blocks:
        if block.kind == "ranks":
            ranks = int(block.text)
        elif block.kind == "torch":
            needed = tuple(map(int, block.text.split(".")))
    if needed > VERSION:
        pytest.skip(f"{page} needs torch {'.'.join(map(str, needed))}")
    real = {
        FOLDER: str(folder),
        BUCKET: f"{BUCKET}{re.sub(r'[^a-z0-9]+', '-', f'{page} {folder.name}'.lower())}/",
        ENDPOINT: endpoint.endpoint_url,
    }
    environ = {
        "AWS_ACCESS_KEY_ID": endpoint.access_key,
        "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
        "AWS_ENDPOINT_URL": endpoint.endpoint_url,
        "AWS_REGION": endpoint.region,
        "AWS_DEFAULT_REGION": endpoint.region,
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    steps = []
    for block in blocks:
        if block.mark == "not run":
            continue
        if block.mark == "file":
            target = folder / block.note
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_replaced(block.text, real))
        elif block.kind in ("bash", "console"):
            for number, command, text in commands_in(block):
                place = f"{page}, line {number}"
                program = program_of(command, place, folder)
                if program is not None:
                    run = _torchrun if torchrun else _run_program
                    run(program, place, folder, environ)
                elif not check_command(command, place):
                    steps.append(Block(page, number, f"{block.kind} command", command, note=text))
        elif block.kind in ("python", "setup") or block.mark == "output":
            steps.append(block)
    if steps:
        run_ranks(
            _run_steps, ranks, steps, str(path.resolve()), str(folder), real, environ, timeout=LIMIT
        )


# --------------------------------------------------------------------------- commands


def program_of(command: str, place: str, folder: Path) -> argparse.Namespace | None:
    """What ``torchrun`` of a file of the page is to run."""
    words = shlex.split(command, comments=True)
    if words[:1] != ["torchrun"]:
        return None
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    try:
        program = parser.parse_args(words[1:])
    except (argparse.ArgumentError, SystemExit) as error:
        raise Failure(f"{place}: {command}: {error}") from None
    return program if (folder / program.script).exists() else None


def check_command(command: str, place: str) -> bool:
    """Whether a command is right, without running it, where that can be told; False for later.

    ``pip install`` names extras and packages that there are, ``make`` a target, ``python -m`` a
    module with these options.  ``dcp-osd`` and ``export`` are for the ranks.
    """
    words = shlex.split(command, comments=True)
    match words:
        case ["dcp-osd", *_] | ["export", _]:
            return False
        case ["pip", "install", *names]:
            _check_packages(names, place)
        case ["make", *targets]:
            done = subprocess.run(
                ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Failure(f"{place}: {command}: {done.stderr.strip()}")
        case ["python", "-m", module, *options]:
            _check_options(ROOT / f"{module.replace('.', '/')}.py", options, place)
        case ["python", script, *options]:
            _check_options(ROOT / script, options, place)
        case ["torchrun", *options] if (ROOT / options[-1]).exists():
            pass  # tests/test_examples.py runs the examples
        case _:
            raise Failure(
                f"{place}: {words[0]} is no command that can be checked; see CONTRIBUTING"
            )
    return True


def _check_packages(names: Sequence[str], place: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^([a-z0-9]+) = \[", section, re.MULTILINE)
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for name in names:
        parts = re.fullmatch(r"([A-Za-z0-9_-]+)(?:\[([a-z0-9,]+)\])?([=<>]=?[\d.]+)?", name)
        if parts is None:
            raise Failure(f"{place}: pip install of {name!r}")
        if parts[1] != "dcp-fsdp-osd":
            if parts[1].lower().replace("_", "-") not in pinned:
                raise Failure(f"{place}: {parts[1]} is not in constraints.txt")
        elif unknown := set((parts[2] or "").split(",")) - {"", *extras}:
            raise Failure(f"{place}: no extra {', '.join(sorted(unknown))}")


def _check_options(script: Path, options: Sequence[str], place: str) -> None:
    script = script if script.exists() else script.with_suffix("") / "__main__.py"
    if not script.exists():
        raise Failure(f"{place}: there is no {script.relative_to(ROOT)}")
    text = script.read_text()
    for option in options:
        if option.startswith("--") and f'"{option.partition("=")[0]}"' not in text:
            raise Failure(f"{place}: {script.relative_to(ROOT)} has no option {option}")


def _torchrun(
    program: argparse.Namespace, place: str, folder: Path, environ: Mapping[str, str]
) -> None:
    """``torchrun`` of a file, with the package of this tree and a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={program.nproc_per_node}", program.script, *program.arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    # FSDP1 on gloo now and then aborts while the process exits, after its last line (torch 2.13).
    if done.returncode and "terminate called without an active exception" not in done.stdout:
        raise Failure(f"{place}: exit status {done.returncode}:\n{done.stdout[-4000:]}")


def _run_program(
    program: argparse.Namespace, place: str, folder: Path, environ: Mapping[str, str]
) -> None:
    """The same by ranks of the pool, which have imported torch."""
    argv = [program.script, *program.arguments]
    environ = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    run_ranks(_run_script, program.nproc_per_node, argv, place, str(folder), environ, timeout=LIMIT)


def _run_script(
    rank: int, world: int, argv: list[str], place: str, folder: str, environ: Mapping[str, str]
) -> None:
    """A program as ``torchrun`` begins it: with an environment, and without a process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before, sys.argv = sys.argv, argv
    try:
        with _surroundings(folder, {**environ, **{name: str(n) for name, n in ranks.items()}}):
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise Failure(f"{place}: exit status {end.code}") from None
    except Exception as error:
        raise Failure(f"{place}: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = before


# --------------------------------------------------------------------------- on the ranks


def _run_steps(
    rank: int,
    world_size: int,
    steps: Sequence[Block],
    source: str,
    folder: str,
    real: Mapping[str, str],
    environ: Mapping[str, str],
) -> None:
    """What a page shows, step by step, on a rank; commands and comparisons are rank 0's."""
    import torch.distributed as dist

    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    with _surroundings(folder, environ):
        for step in steps:
            if step.kind in ("python", "setup"):
                # Line numbers of tracebacks are those of the page.
                text = "\n" * (step.line - 1) + _replaced(step.text, real)
                code = compile(text, source, "exec", dont_inherit=True)
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
            elif step.kind.endswith(" command") and step.text.startswith("export "):
                name, _, value = shlex.split(step.text, comments=True)[1].partition("=")
                os.environ[name] = _replaced(value, real)
            elif step.mark == "output":
                got = _restored(printed.getvalue(), real)
                printed.seek(printed.truncate(0))
                _on_first(rank, _compare, step.place, step.text, got)
            else:
                _on_first(rank, _run_tool, step, real)
        dist.barrier()


@contextlib.contextmanager
def _surroundings(folder: str, environ: Mapping[str, str]) -> Iterator[None]:
    here, before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def _on_first(rank: int, action: Callable[..., None], *args: Any) -> None:
    """What rank 0 does while the others wait; its error is raised on all of them."""
    import torch.distributed as dist

    problem: list[Failure | None] = [None]
    if rank == 0:
        try:
            action(*args)
        except Failure as error:
            problem = [error]
        except Exception as error:
            problem = [Failure(f"{action.__name__}: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


def _run_tool(step: Block, real: Mapping[str, str]) -> None:
    """A ``dcp-osd`` command; where the page shows no output it has to end with status 0."""
    from typer.testing import CliRunner

    from dcp_fsdp_osd.cli.app import app

    words = shlex.split(_replaced(step.text, real), comments=True)
    result = CliRunner().invoke(app, words[1:], prog_name="dcp-osd")
    output = _restored(result.output, real)
    fine = (0, 1) if step.note else (0,)
    if result.exit_code not in fine:
        raise Failure(f"{step.place}: {step.text}: status {result.exit_code}\n{output[-3000:]}")
    if step.note:
        _compare(step.place, _plain(step.note), _plain(output), output)


def _plain(text: str) -> str:
    return _NUMBER.sub("0", re.sub(r"\[ +", "[", text))


def _compare(place: str, want: str, got: str, shown: str | None = None) -> None:
    """Line by line, however long blanks are; ``...`` in what is wanted is anything."""
    parts = [" ".join(part.split()) for part in want.split("...")]
    pattern = r".*".join(map(re.escape, parts))
    # A line that is "..." alone may stand for no line.
    pattern = pattern.replace(r"\ .*\ ", r".*").replace(r"\ .*", r".*").replace(r".*\ ", r".*")
    if not re.fullmatch(pattern, " ".join(got.split())):
        raise Failure(f"{place}: expected\n{want}\nfound\n{(shown or got)[:3000]}")


def _replaced(text: str, real: Mapping[str, str]) -> str:
    for shown, meant in real.items():  # not the end of another path or URL
        text = re.sub(rf"(?<![\w/.]){re.escape(shown)}", lambda _, to=meant: to, text)
    return text


def _restored(text: str, real: Mapping[str, str]) -> str:
    for shown, meant in real.items():
        text = text.replace(meant, shown)
    return text
