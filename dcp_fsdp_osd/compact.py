"""Plans that are small on their way between ranks, and quick to take in.

DCP pickles every rank's plan, gathers them on one rank, and sends each rank its part of the global
plan. Names and shapes repeat, so that compressed they are a tenth. The coordinator unpickles
thousands of plans one after the other: Python's cycle collector then walks all that are there
already, again and again, and takes longer than the unpickling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from dcp_fsdp_osd.errors import LayoutError

try:
    import lzma
except ImportError:  # of a Python that was built without it
    lzma = None  # type: ignore[assignment]

__all__ = [
    "Lazy",
    "Numbers",
    "compact",
    "dump_strings",
    "joined",
    "load_strings",
    "no_collections",
    "numbers",
    "packed",
    "parted",
    "squeezed",
    "unpacked",
    "unsqueezed",
]

P = TypeVar("P", SavePlan, LoadPlan)

Numbers = tuple[int, ...] | range


def numbers(values: Sequence[int]) -> Numbers:
    """``values``, as a range if three or more of them are one: what is equal comes out alike.

    A range of thousands of ranks takes no more room than one of three.
    """
    if len(values) > 2 and values[1] > values[0]:
        step = values[1] - values[0]
        found = range(values[0], values[0] + len(values) * step, step)
        if found[-1] == values[-1] and list(found) == list(values):
            return found
    return tuple(values)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without the cycle collector, which would walk millions of new objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def packed(value: Any) -> bytes:
    """``value`` pickled and compressed; :func:`unpacked` gives it back."""
    # Level 1: more effort makes it a tenth smaller and takes twice as long.
    return zlib.compress(pickle.dumps(value, protocol=5), 1)


def unpacked(data: bytes) -> Any:
    """What :func:`packed` was given. It runs what a pickle says: of other ranks' bytes alone."""
    return pickle.loads(zlib.decompress(data))


def squeezed(data: bytes) -> bytes:
    """``data`` as small as it gets; :func:`unsqueezed` gives it back."""
    if lzma is None:
        return b"z" + zlib.compress(data, 9)
    return b"x" + lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)


def unsqueezed(data: bytes) -> bytes:
    """What :func:`squeezed` was given."""
    if data[:1] == b"z":
        return zlib.decompress(data[1:])
    if lzma is None:
        raise LayoutError(
            "expected the same Python on all ranks, found that another rank's has the module "
            "lzma, and this one's was built without it"
        )
    return lzma.decompress(data[1:], lzma.FORMAT_RAW, filters=_FILTERS)


_FILTERS: list[dict[str, int]] = [
    # LZMA2, of text, with no more memory than that needs. Preset 6 makes plans a twentieth to a
    # tenth smaller and takes ten times as long.
    {"id": 0x21, "preset": 3, "pb": 0, "dict_size": 1 << 18}
]


_RUNS = 8


class _Codes:
    """Numbers for strings, that repeat where lists of strings do, and so compress to little.

    Names come in the same order again and again: of entries, of their paths, of parameters.  So a
    string is not named by its number, which is another one each time, but 0 if it is a new one, and
    ``1 + k`` if it comes after the one at which the ``k``-th of some runs has arrived.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs: list[int] = []  # where each has arrived, the oldest first

    def code(self, number: int) -> int:
        """Of the string of that number; the next ones are new."""
        if number == self._count:
            self._count += 1
            return 0
        for k, at in enumerate(self._runs):
            if at + 1 == number:
                self._runs[k] = number
                return 1 + k
        self._begin(number)
        return 1 + _RUNS + number

    def number(self, code: int) -> int:
        """What :meth:`code` was given."""
        if code == 0:
            self._count += 1
            return self._count - 1
        if code <= _RUNS:
            self._runs[code - 1] += 1
            return self._runs[code - 1]
        number = code - 1 - _RUNS
        self._begin(number)
        return number

    def _begin(self, number: int) -> None:
        if number not in self._runs:
            self._runs = [*self._runs[1 - _RUNS :], number]


class _Strings(pickle.Pickler):
    """Each string once, and aside, whichever object it is."""

    def __init__(self, file: io.BytesIO, known: dict[str, int]) -> None:
        super().__init__(file, 5)
        self._known, self._codes = known, _Codes()

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not str:
            return None
        return self._codes.code(self._known.setdefault(obj, len(self._known)))


class _Stringless(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, strings: Sequence[str]) -> None:
        super().__init__(file)
        self._strings, self._codes = strings, _Codes()

    def persistent_load(self, pid: int) -> str:
        return self._strings[self._codes.number(pid)]


def dump_strings(value: Any) -> tuple[bytes, str]:
    """``value`` pickled without its strings; and these, one after the other."""
    known: dict[str, int] = {}
    file = io.BytesIO()
    _Strings(file, known).dump(value)
    return file.getvalue(), json.dumps(list(known), separators=(",", ":"))


def load_strings(data: bytes, strings: str) -> Any:
    """What :func:`dump_strings` was given; see :func:`unpacked`."""
    return _Stringless(io.BytesIO(data), json.loads(strings)).load()


def joined(data: bytes, strings: str) -> bytes:
    """Both that :func:`dump_strings` gives, squeezed; :func:`parted` gives them back."""
    text = strings.encode()
    return squeezed(len(text).to_bytes(8, "little") + text + data)


def parted(data: bytes) -> tuple[bytes, bytes]:
    """The pickle and the strings, as bytes, of what :func:`joined` made."""
    text = unsqueezed(data)
    end = 8 + int.from_bytes(text[:8], "little")
    return text[end:], text[8:end]


class Lazy(Sequence[Any]):
    """A list that is made when it is looked into; in place of a plan's ``items``.

    Args:
        count: its length, if that is known before.
    """

    def __init__(self, make: Callable[[], list[Any]], count: int | None = None) -> None:
        self._make: Callable[[], list[Any]] | None = make
        self._made: list[Any] = []
        self._count = count

    def _list(self) -> list[Any]:
        if self._make is not None:
            self._made = self._make()
            self._make = None
        return self._made

    def __len__(self) -> int:
        return len(self._list()) if self._count is None else self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list())

    def __getitem__(self, at: Any) -> Any:
        return self._list()[at]

    def __add__(self, other: list[Any]) -> list[Any]:
        return self._list() + other

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + self._list()

    def __eq__(self, other: object) -> bool:
        return self._list() == (other._list() if isinstance(other, Lazy) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list(),)


class _Compact:
    """Mixed into a plan: it is the plan that it was, and is pickled compressed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), packed(_fields(self)))


class _SavePlan(_Compact, SavePlan):
    pass


class _LoadPlan(_Compact, LoadPlan):
    pass


def compact(plan: P) -> P:
    """``plan``, which differs in how it is pickled alone; so do copies by ``dataclasses.replace``.

    Values in ``storage_data``, ``planner_data`` and ``items`` have to be picklable, as ever.
    """
    kind: Any = _SavePlan if isinstance(plan, SavePlan) else _LoadPlan
    return cast(P, kind(**_fields(plan)))


def _fields(plan: Any) -> dict[str, Any]:
    return {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}


def _restored(kind: type[Any], data: bytes) -> Any:
    with no_collections():
        return kind(**unpacked(data))
