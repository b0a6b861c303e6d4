"""The picture of a terminal on docs/tools.md: commands that are run in one, and what they print.

python -m tests.tools.screens [docs/tools/table.svg]
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.pages import ROOT
from tests.shown import make_run

__all__ = ["COMMANDS", "draw", "main"]

COMMANDS = (
    "ls run",
    "show run/step-2500 model optim.state.0.weight step",
    "verify bad",
)
_COLUMNS = 100
_FETCHED = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # from a CDN, where they are not installed


def _printed(command: str, folder: Path) -> str:
    """What ``dcp-osd`` prints in a terminal of its own."""
    terminal, theirs = pty.openpty()
    environment = {
        **os.environ,
        "COLUMNS": str(_COLUMNS),
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_fsdp_osd.cli", *command.split()],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        if not part:
            break
        found += part
    os.close(terminal)
    process.wait()
    return found.decode().replace("\r\n", "\n")


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """With the folder as the current one, as on the page."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def draw(commands: Sequence[str] = COMMANDS) -> str:
    """An SVG of a terminal in which commands were run, among the checkpoints of the page."""
    with (
        tempfile.TemporaryDirectory() as name,
        Path(os.devnull).open("w") as nowhere,
        _inside(Path(name)),
    ):
        make_run()
        console = Console(record=True, width=_COLUMNS, file=nowhere, force_terminal=True)
        for number, command in enumerate(commands):
            if number:
                console.print()
            console.print(Text(f"$ dcp-osd {command}", "green"))
            console.print(Text.from_ansi(_printed(command, Path(name)).rstrip("\n")))
    text = console.export_svg(title="dcp-osd", unique_id="dcp-osd")
    return _FETCHED.sub("", text)


def main() -> None:
    target = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/tools/table.svg"
    target.write_text(draw())
    print(target)


if __name__ == "__main__":
    main()
