"""The picture of a terminal on docs/tools.md shows what commands print today."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET

import pytest

from tests.pages import ROOT
from tests.tools.screens import COMMANDS, draw

SHOWN = (ROOT / "docs/tools/table.svg").read_text()


def _words(svg: str) -> list[str]:
    """What it says, numbers and names of saves aside."""
    texts = [each for each in ET.fromstring(svg).itertext() if each.strip()]
    said = html.unescape(" ".join(texts)).replace("\xa0", " ")
    return [re.sub(r"[0-9a-f]*\d[0-9a-f]*", "0", word) for word in said.split()]


def test_it_fetches_nothing() -> None:
    assert not re.findall(r"(?:url\(|href=)[\"']?(?!#)[^)\"' ]*", SHOWN)
    words = " ".join(_words(SHOWN))
    for command in COMMANDS:
        assert f"$ dcp-osd {command.split()[0]}" in words
    assert "](tools/table.svg)" in (ROOT / "docs/tools.md").read_text()


@pytest.mark.slow  # a process for each command
def test_it_shows_what_commands_print() -> None:
    assert _words(draw()) == _words(SHOWN), "python -m tests.tools.screens draws it anew"
