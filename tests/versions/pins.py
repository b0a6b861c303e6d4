"""Constraints for another torch than CI's: ``python tests/versions/pins.py 2.6.0``.

Those of ``constraints.txt``, without what depends on torch's version.  Needs nothing but Python.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

TORCHAO = {(2, 6): "0.15.0", (2, 7): "0.15.0", (2, 8): "0.17.0", (2, 9): "0.17.0"}
"""The last torchao that works with a torch, where that is not the one of ``constraints.txt``."""

_FREE = {
    (2, 6): {"sympy", "cfn-lint"},  # sympy==1.13.1, which is too old for today's cfn-lint
}


def constraints(torch: str, lines: list[str]) -> Iterator[str]:
    """The lines of a constraints file for ``torch``, from those of ``constraints.txt``."""
    version = tuple(int(part) for part in torch.split(".")[:2])
    free = _FREE.get(version, set())
    for line in lines:
        name = line.partition("==")[0].strip()
        if name == "torch":
            yield f"torch=={torch}"
        elif name == "torchao" and version in TORCHAO:
            yield f"torchao=={TORCHAO[version]}"
        elif name and name not in free:
            yield line


if __name__ == "__main__":
    pinned = Path(__file__).parents[2] / "constraints.txt"
    print("\n".join(constraints(sys.argv[1], pinned.read_text().splitlines())))
