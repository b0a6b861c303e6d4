"""Colours of ranks, sizes in words, and texts of others that are fit to be shown."""

from __future__ import annotations

import math

__all__ = ["DAMAGED", "UNKNOWN", "colour_of", "drawable", "size_text"]

UNKNOWN = "#888888"
"""Of files whose names tell no rank, and of several ranks where each has a colour of its own."""
DAMAGED = "#cc2222"
# Okabe and Ito's, told apart by the colour-blind; without yellow, which is faint on white.
_FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#6a4c93", "#8a7f3f")
# For more ranks: viridis (van der Walt, Smith), short of its yellow.
_MANY = ("#440154", "#46307e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39")


def colour_of(ranks: tuple[int, int] | None, world_size: int) -> str:
    """Of the least and most rank, of as many as there are, as ``#rrggbb``."""
    if ranks is None:
        return UNKNOWN
    low, high = ranks
    if world_size <= len(_FEW):
        return _FEW[low % len(_FEW)] if low == high else UNKNOWN
    place = min((low + high) / 2 / (world_size - 1), 1.0) * (len(_MANY) - 1)
    first = min(int(place), len(_MANY) - 2)
    mixed = (
        round(a + (b - a) * (place - first))
        for a, b in zip(_parts(_MANY[first]), _parts(_MANY[first + 1]), strict=True)
    )
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def drawable(text: str, most: int | None = None) -> str:
    """Without what cannot be shown, and with `most` characters, the middle left out."""
    text = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def size_text(nbytes: float) -> str:
    """``1.5 GiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(int(math.log(nbytes, 1024)), 5)
    return f"{nbytes / 1024**power:.1f} {'KMGTP'[power - 1]}iB"
