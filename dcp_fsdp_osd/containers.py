"""Mappings in a state dict: what the text of a path does not say of them, and how they are remade.

A checkpoint names values by paths of text, so that ``{0: x}`` and ``{"0": x}`` look alike, as do an
``OrderedDict`` and a dict. Here is told which mappings are more than dicts with text for keys, as
plain JSON; all others are remade as such dicts.  Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.tree import Path, dotted, is_entered_list

__all__ = ["Container", "Containers", "containers_of", "key_clashes", "remade", "unlike"]

_FACTORIES: dict[str, Any] = {
    "None": None,
    **{each.__name__: each for each in (list, dict, set, int, float, str, bool, tuple, Counter)},
    "OrderedDict": OrderedDict,
}


@dataclass(frozen=True)
class Container:
    """One mapping.

    Attributes:
        kind: ``"dict"``, ``"OrderedDict"``, ``"Counter"``, or ``"defaultdict:<factory>"``.
        keys: its keys, in order. Keys that it gets beside them are text.
    """

    kind: str
    keys: tuple[Any, ...]

    def key_of(self, text: str) -> Any:
        """The key whose text is ``text``."""
        return next((key for key in self.keys if str(key) == text), text)

    def make(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """The mapping with ``values``, which are by the texts of keys."""
        left = {str(key): value for key, value in values.items()}
        found = {key: left.pop(str(key)) for key in self.keys if str(key) in left}
        found.update(left)
        kind, _, factory = self.kind.partition(":")
        if kind == "OrderedDict":
            return OrderedDict(found)
        if kind == "Counter":
            return Counter(found)
        return defaultdict(_FACTORIES[factory], found) if kind == "defaultdict" else found

    def joined(self, other: Container) -> Container | None:
        """This with another rank's keys; None if they are not of one mapping."""
        known = {str(key): key for key in self.keys}
        for key in other.keys:
            if not _same_key(known.setdefault(str(key), key), key):
                return None
        return Container(self.kind, tuple(known.values())) if self.kind == other.kind else None

    def pack(self, path: Path) -> list[Any]:
        """As JSON, with the path of the mapping."""
        return [list(path), self.kind, [_pack_key(key) for key in self.keys]]


class Containers(dict[Path, Container]):
    """Path -> mapping; only those that are not dicts with nothing but text for keys."""

    @staticmethod
    def unpack(packed: Iterable[Sequence[Any]]) -> Containers:
        """Of what :meth:`Container.pack` gave."""
        return Containers(
            (tuple(path), Container(kind, tuple(map(_unpack_key, keys))))
            for path, kind, keys in packed
        )

    def below(self, path: Path) -> Containers:
        """Those at ``path`` and under it, by the rest of their paths."""
        n = len(path)
        return Containers((p[n:], each) for p, each in self.items() if p[:n] == path)


def containers_of(value: Any, label: Path, *, path: Path = (), strict: bool = True) -> Containers:
    """What has to be told of the mappings in ``value``.

    Args:
        label: where ``value`` lies, for errors.
        path: put before the paths.
        strict: False: pass over what could not be told of, instead of raising.

    Raises:
        LayoutError: a mapping or a key is of a type that is not remade, two keys have one text, or
            a list that holds state is of a class of its own.
    """
    return Containers(_walk(value, label, path, strict))


def _walk(value: Any, label: Path, path: Path, strict: bool) -> Iterator[tuple[Path, Container]]:
    if isinstance(value, Mapping):
        try:
            told = _container(value, label)
        except LayoutError:
            if strict:
                raise
            told = None
        if told is not None:
            yield path, told
        for key, item in value.items():
            yield from _walk(item, (*label, str(key)), (*path, str(key)), strict)
    elif is_entered_list(value):
        if type(value) is not list and strict:
            raise LayoutError(
                f"{dotted(label)}: expected a list, found a {type(value).__qualname__}, which "
                f"a load could not make again; use a list"
            )
        for i, item in enumerate(value):
            yield from _walk(item, (*label, i), (*path, i), strict)


def _container(value: Mapping[Any, Any], label: Path) -> Container | None:
    plain = type(value) is dict
    if plain and all(type(key) is str for key in value):
        return None
    kind = type(value).__name__
    if type(value) is defaultdict:
        names = [n for n, f in _FACTORIES.items() if f is value.default_factory]
        if not names:
            raise LayoutError(
                f"{dotted(label)}: expected a defaultdict of a built-in type, found one of "
                f"{value.default_factory!r}, which a load could not make again; use a dict, or one "
                f"of {', '.join(_FACTORIES)}"
            )
        kind = f"defaultdict:{names[0]}"
    elif type(value) not in (dict, OrderedDict, Counter):
        raise LayoutError(
            f"{dotted(label)}: expected a dict, OrderedDict, defaultdict or Counter, found a "
            f"{type(value).__module__}.{type(value).__qualname__}, which a load could not make "
            f"again; use one of these"
        )
    texts: dict[str, Any] = {}
    for key in value:
        _check_key(key, label)
        if str(key) in texts:
            raise LayoutError(
                f"{dotted(label)}: expected keys that differ as text, found {texts[str(key)]!r} "
                f"and {key!r}: a checkpoint would have one entry for both"
            )
        texts[str(key)] = key
    return Container(kind, tuple(value))


def _check_key(key: Any, label: Path) -> None:
    if type(key) is tuple:
        for each in key:
            _check_key(each, label)
    elif key is not None and type(key) not in (str, int, bool, float, bytes):
        raise LayoutError(
            f"{dotted(label)}: expected keys of str, int, bool, float, bytes, None or tuples of "
            f"them, found {key!r} of {type(key).__module__}.{type(key).__qualname__}, which a load "
            f"could not make again; convert it"
        )


def _pack_key(key: Any) -> Any:
    if isinstance(key, float):
        return ["float", key.hex()]
    if isinstance(key, bytes):
        return ["bytes", key.hex()]
    return ["tuple", *map(_pack_key, key)] if isinstance(key, tuple) else key


def _unpack_key(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *rest = packed
    if kind == "float":
        return float.fromhex(rest[0])
    return bytes.fromhex(rest[0]) if kind == "bytes" else tuple(map(_unpack_key, rest))


def _same_key(left: Any, right: Any) -> bool:
    return type(left) is type(right) and repr(left) == repr(right)


def remade(value: Any, containers: Containers, path: Path = ()) -> Any:
    """``value``, of dicts with text for keys, with the mappings that it was made of."""
    if not containers:
        return value
    if type(value) is dict:
        inner = {k: remade(v, containers, (*path, str(k))) for k, v in value.items()}
        found = containers.get(path)
        return inner if found is None else found.make(inner)
    if type(value) is list and is_entered_list(value):
        return [remade(v, containers, (*path, i)) for i, v in enumerate(value)]
    return value


def key_clashes(
    saved: Containers, current: Containers, paths: Iterable[Path]
) -> Iterator[tuple[Path, str, str]]:
    """Each key that is another in the checkpoint than here, though its text is the same.

    Args:
        paths: of the values that both have.

    Yields:
        Its path, and both sides in words.
    """
    steps = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    for path in dict.fromkeys([*saved, *current]):
        there, here = (each.get(path, Container("dict", ())) for each in (saved, current))
        for text in dict.fromkeys(str(key) for key in (*there.keys, *here.keys)):
            if (*path, text) in steps and not _same_key(there.key_of(text), here.key_of(text)):
                yield (*path, text), f"key {there.key_of(text)!r}", f"{here.key_of(text)!r} here"


def unlike(
    saved: Containers, current: Containers, paths: Iterable[Path]
) -> Iterator[tuple[Path, str, str]]:
    """As :func:`key_clashes`, and each mapping that is of another kind."""
    known = list(paths)
    yield from key_clashes(saved, current, known)
    steps = {path[:n] for path in known for n in range(len(path))}
    for path in dict.fromkeys([*saved, *current]):
        there, here = (each.get(path, Container("dict", ())) for each in (saved, current))
        if path in steps and there.kind != here.kind:
            yield path, f"a {there.kind}", f"a {here.kind} here"
