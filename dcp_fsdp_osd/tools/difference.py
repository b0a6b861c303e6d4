"""Where two checkpoints differ, element by element, however each of them is cut into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_fsdp_osd.errors import StorageError, UnsafeCheckpointError
from dcp_fsdp_osd.tools.describe import matching
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress
from dcp_fsdp_osd.verify.elements import unequal_elements

__all__ = ["Comparison", "EntryDifference", "compare"]

_STEP = 1 << 20  # elements that are looked at at a time
_SHOWN = 200  # characters of an object's value


@dataclass(frozen=True)
class EntryDifference:
    """An entry that is not the same in both.

    Attributes:
        key: in the flattened state dict.
        what: in words.
        elements: of a tensor in both: how many differ in any bit.
        numel: how many there are.
        largest: the largest absolute difference of those that are numbers in both; None where
            there is none, as of elements that are NaN on one side.
    """

    key: str
    what: str
    elements: int | None = None
    numel: int | None = None
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Of two checkpoints.

    Attributes:
        left, right: their places, fit to be shown.
        same: how many entries are the same, bit for bit (objects: in value).
        differences: those that are not, in order of their keys.
    """

    left: str
    right: str
    same: int
    differences: tuple[EntryDifference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def compare(
    left: Checkpoint,
    right: Checkpoint,
    globs: Iterable[str] = (),
    *,
    atol: float | None = None,
    progress: Progress = no_progress,
) -> Comparison:
    """Compare two checkpoints; only entries whose keys match any of `globs`, if given.

    How they were cut and into which files does not matter.  Both are streamed.

    Args:
        atol: elements whose values are no further apart count as the same (NaN as NaN); None
            compares bit for bit.

    Raises:
        StorageError: no entry of either matches `globs`, or reading fails.
    """
    patterns = list(globs)
    keys = sorted(matching(dict.fromkeys([*left.entries, *right.entries]), patterns))
    if patterns and not keys:
        raise StorageError(
            f"neither checkpoint has an entry that matches {', '.join(map(repr, patterns))}"
        )
    found: dict[str, EntryDifference] = {}
    tensors: list[str] = []
    objects: list[str] = []
    for key in keys:
        unlike = _unlike(left, right, key)
        if unlike is not None:
            found[key] = EntryDifference(key, unlike)
        else:
            (tensors if key in left.tensors else objects).append(key)
    found.update(_objects(left, right, objects))
    found.update(_tensors(left, right, tensors, atol, progress))
    differences = tuple(found[key] for key in keys if key in found)
    return Comparison(left.url, right.url, len(keys) - len(differences), differences)


def _unlike(left: Checkpoint, right: Checkpoint, key: str) -> str | None:
    """What metadata alone tell."""
    for here, there, name in ((left, right, "second"), (right, left, "first")):
        if key in here.entries and key not in there.entries:
            return f"not in the {name}"
    if (key in left.tensors) != (key in right.tensors):
        kinds = ["tensor" if key in each.tensors else "object" for each in (left, right)]
        return f"{kinds[0]} in the first, {kinds[1]} in the second"
    if key in left.tensors:
        for what, a, b in (
            ("shape", left.shape(key), right.shape(key)),
            ("dtype", left.dtype(key), right.dtype(key)),
        ):
            if a != b:
                return f"{what} {a} in the first, {b} in the second"
    return None


def _objects(left: Checkpoint, right: Checkpoint, keys: list[str]) -> dict[str, EntryDifference]:
    a, b = left.read_bytes(keys), right.read_bytes(keys)
    found = {}
    for key in (key for key in keys if a[key] != b[key]):  # few, of a few bytes each
        try:
            here, there = left.read_objects([key])[key], right.read_objects([key])[key]
        except UnsafeCheckpointError:
            what = "its bytes differ; unpickling it could run code, so its value was not looked at"
            found[key] = EntryDifference(key, what)
            continue
        if not _same(here, there):
            what = f"{_short(here)} in the first, {_short(there)} in the second"
            found[key] = EntryDifference(key, what)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _same(a: Any, b: Any) -> bool:  # noqa: PLR0911 (a table of kinds)
    """Whether two plain objects are the same; tensors bit for bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        flat = a.detach().contiguous().view(-1), b.detach().contiguous().view(-1)
        return not int(unequal_elements(*flat).sum())
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if hasattr(a, "dtype") and hasattr(a, "tobytes"):  # NumPy's
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _tensors(
    left: Checkpoint,
    right: Checkpoint,
    keys: list[str],
    atol: float | None,
    progress: Progress,
) -> dict[str, EntryDifference]:
    windows = left.windows(keys)
    buffers = left.room(windows), left.room(windows)
    total, done = sum(map(left.nbytes, keys)), 0
    tallies = {key: _Tally(atol) for key in keys}
    for parts in windows:
        flats = left.read_parts(parts, buffers[0]), right.read_parts(parts, buffers[1])
        for part, a, b in zip(parts, *flats, strict=True):
            for one, other in zip(torch.split(a, _STEP), torch.split(b, _STEP), strict=True):
                tallies[part.key].add(one, other)
            done += a.nbytes
        progress(done, total)
    found = {}
    for key, tally in tallies.items():
        if tally.count:
            numel, most = left.tensors[key].size.numel(), tally.largest
            apart = "" if most is None else f", by up to {most:.6g}"
            what = f"{tally.count} of {numel} elements differ{apart}"
            found[key] = EntryDifference(key, what, tally.count, numel, most)
    return found


class _Tally:
    """What differs in one tensor.

    Attributes:
        count: elements.
        largest: distance, if any of them is a number.
    """

    def __init__(self, atol: float | None) -> None:
        self._atol = atol
        self.count = 0
        self.largest: float | None = None

    def add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """1-D tensors of one dtype, contiguous and on the CPU."""
        if torch.equal(_words(one), _words(other)):
            return
        unequal = unequal_elements(one, other)
        x, y = _numbers(one[unequal]), _numbers(other[unequal])
        distance = (x - y).abs().to(torch.float64)
        # Infinities of one sign are no distance apart; NaNs of different bits are none either.
        alike = (x == y) | (x.isnan() & y.isnan())
        distance = torch.where(alike, torch.zeros_like(distance), distance)
        if self._atol is not None:
            # NaN beside a number is further than any distance.
            distance = distance[~(distance <= self._atol)]
        self.count += distance.numel()
        known = distance[~distance.isnan()]
        if known.numel():
            self.largest = max(self.largest or 0.0, known.max().item())


def _words(values: torch.Tensor) -> torch.Tensor:
    """The same memory as large integers, which are compared many times faster than bytes are."""
    return values.view(torch.int64 if values.nbytes % 8 == 0 else torch.uint8)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
