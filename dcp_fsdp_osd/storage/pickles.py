"""An interpreter of the pickles that hold plain data and a few known classes, and of no others.

``pickle.Unpickler`` with an allow-list is not enough for a file that an enemy wrote: a class that
it gives out can be changed for the whole process (BUILD sets attributes on whatever is on the
stack), allowed callables can be called with a size to allocate, nested tuples end the process when
they are hashed, and a memo index of four bytes allocates the memo.  So here

- what stands for a class is a :class:`Maker`, which nothing but REDUCE, NEWOBJ and BUILD of its own
  instances can use, and which looks at its arguments;
- opcodes that metadata and headers do not need are refused: extensions, persistent ids (unless
  asked for), text numbers, classes by INST and OBJ;
- all that is hashed is flat and short, marks nest at most ``MAX_MARKS`` deep, and the containers,
  the memo and the stack are bounded by the length of the pickle.

Protocols 2 to 5 as ``pickle.dump`` writes them.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_fsdp_osd.errors import UnsafeCheckpointError

__all__ = ["MAX_FLAT", "MAX_MARKS", "SCALARS", "Maker", "PickleError", "is_flat", "load_pickle"]

MAX_MARKS = 100
MAX_FLAT = 64  # values in a tuple that may be hashed; torch has no more dimensions
_BATCH = 256  # opcodes between two looks at the stack and the memo
_MOST_OPEN = 1 << 16  # values on the stack; pickle writes containers by 1000 values

SCALARS: frozenset[type] = frozenset({str, int, float, bool, bytes, complex, type(None)})


class PickleError(ValueError):
    """The bytes are no pickle that is read here; says where and why."""


@dataclass(frozen=True, slots=True)
class Maker:
    """What stands for a class or function in a pickle; never the class itself.

    Attributes:
        name: for errors.
        call: makes a value from the arguments of REDUCE, and raises ValueError or TypeError for
            others.
        new: makes an instance without state, for NEWOBJ without arguments.
    """

    name: str
    call: Callable[..., Any] | None = None
    new: Callable[[], Any] | None = None


def is_flat(value: object, hashable: frozenset[type] = SCALARS) -> bool:
    """Whether it is a scalar, or a short tuple or list of scalars."""
    kind = type(value)
    if kind in hashable:
        return True
    return (
        isinstance(value, tuple | list)
        and len(value) <= MAX_FLAT
        and hashable.issuperset(map(type, value))
    )


def load_pickle(
    data: bytes,
    find: Callable[[str, str], Any],
    *,
    hashable: frozenset[type] = SCALARS,
    builders: Mapping[type, Callable[[Any, Any], None]] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """The value that a pickle describes, and the offset behind its STOP.

    Args:
        find: what stands for a global of a module and name: a :class:`Maker`, or a harmless value.
        hashable: types that may be keys, and elements of tuples that are; :data:`SCALARS` at least.
        builders: exact type of an instance -> what gives it its state, for BUILD.
        persistent: what a persistent id stands for.

    Raises:
        PickleError: they are no such pickle.
        Whatever `find` raises.
    """
    try:
        return _run(data, find, hashable, builders or {}, persistent)
    except (PickleError, UnsafeCheckpointError):
        raise
    except IndexError:
        raise PickleError("it ends early, or takes more from its stack than there is") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as e:
        raise PickleError(f"{type(e).__name__}: {str(e)[:200]}") from None


def _run(  # noqa: PLR0912, PLR0915
    data: bytes,
    find: Callable[[str, str], Any],
    hashable: frozenset[type],
    builders: Mapping[type, Callable[[Any, Any], None]],
    persistent: Callable[[Any], Any] | None,
) -> tuple[Any, int]:
    size = len(data)
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    made, most = 0, size // 4 + 64
    at = 0
    rarer = _Rarer(data, hashable, find)
    u32, i32 = _U32.unpack_from, _I32.unpack_from
    state: Any
    while True:
        if made + rarer.made > most or len(memo) > most or len(stack) > _MOST_OPEN:
            raise PickleError(f"too many values for {size} bytes, at byte {at}")
        for _ in range(_BATCH):
            op = data[at]
            at += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[u32(data, at)[0]])
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x29:  # EMPTY_TUPLE
                bare = data[at : at + 3] == _EMPTY_INSTANCE
                if (bare or data[at : at + 5] == _NOTED_INSTANCE) and len(marks) < MAX_MARKS:
                    stack[-1] = instance = _new(stack[-1], (), at)
                    state = {}
                    if not bare:
                        memo += (instance, state)
                    stack.append(state)
                    marks.append(stack)
                    stack = []
                    made += 2
                    at += 3 if bare else 5
                else:
                    stack.append(())
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
                made += 1
            elif op == 0x85:  # TUPLE1
                args = (stack[-1],)
                made += 1
                if data[at : at + 3] == _CALL:
                    memo.append(args)
                    del stack[-1]
                    stack[-1] = value = _called(stack[-1], args, at)
                    memo.append(value)
                    made += 1
                    at += 3
                else:
                    stack[-1] = args
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                state = stack[-1]
                _fill(state, items, hashable)
                if data[at] == 0x62:  # BUILD
                    del stack[-1]
                    _build(stack[-1], state, builders, at)
                    at += 1
            elif op == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif op == 0x4A:  # BININT
                stack.append(i32(data, at)[0])
                at += 4
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = _called(stack[-1], args, at)
                made += 1
            elif op == 0x28:  # MARK
                if len(marks) >= MAX_MARKS:
                    raise PickleError(f"values nest deeper than {MAX_MARKS}, at byte {at}")
                marks.append(stack)
                stack = []
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = _new(stack[-1], args, at)
                made += 1
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
                made += 1
            elif op == 0x62:  # BUILD
                state = stack.pop()
                _build(stack[-1], state, builders, at)
            elif op == 0x8C:  # SHORT_BINUNICODE
                begin = at + 1
                at = begin + data[at]
                if at > size:
                    raise PickleError("it ends in a text")
                stack.append(data[begin:at].decode("utf-8", "surrogatepass"))
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
                raw = _take(data, at, 1 if op == 0x71 else 4)
                at += len(raw)
                number = int.from_bytes(raw, "little")
                if number > len(memo):
                    raise PickleError(f"memo {number} at byte {at}, after {len(memo)} others")
                memo[number : number + 1] = [stack[-1]]
            elif op == 0x51 and persistent is not None:  # BINPERSID
                stack[-1] = persistent(stack[-1])
            elif op == 0x95:  # FRAME
                at += 8
            elif op == 0x2E:  # STOP
                value = stack.pop()
                if stack or marks:
                    raise PickleError(f"values are left at byte {at}")
                return value, at
            elif op in _CLOSING:
                items, stack = stack, marks.pop()
                _CLOSING[op](rarer, items, stack, at)
            else:
                at = rarer.do(op, stack, at)


class _Rarer:
    """Opcodes that metadata have few of, and that need neither marks nor memo.

    Each takes the stack and the offset behind the opcode, and returns the offset to go on at.

    Attributes:
        made: the values that they made.
    """

    def __init__(
        self, data: bytes, hashable: frozenset[type], find: Callable[[str, str], Any]
    ) -> None:
        self._data, self._hashable, self._find = data, hashable, find
        self.made = 0

    def do(self, op: int, stack: list[Any], at: int) -> int:
        if op in _COUNTED:
            wide, make = _COUNTED[op]
            count = int.from_bytes(_take(self._data, at, wide), "little")
            stack.append(make(_take(self._data, at + wide, count)))
            return at + wide + count
        if op not in _RARER:
            raise PickleError(f"opcode {op:#04x} at byte {at - 1}")
        return _RARER[op](self, stack, at)

    def proto(self, stack: list[Any], at: int) -> int:
        if not 2 <= self._data[at] <= 5:
            raise PickleError(f"protocol {self._data[at]} at byte {at}")
        return at + 1

    def long1(self, stack: list[Any], at: int) -> int:
        raw = _take(self._data, at + 1, self._data[at])
        stack.append(int.from_bytes(raw, "little", signed=True))
        return at + 1 + len(raw)

    def binfloat(self, stack: list[Any], at: int) -> int:
        stack.append(_F64.unpack_from(self._data, at)[0])
        return at + 8

    def empty_list(self, stack: list[Any], at: int) -> int:
        stack.append([])
        self.made += 1
        return at

    def empty_set(self, stack: list[Any], at: int) -> int:
        stack.append(set())
        self.made += _AS_SET
        return at

    def tuple3(self, stack: list[Any], at: int) -> int:
        last = stack.pop()
        middle = stack.pop()
        stack[-1] = (stack[-1], middle, last)
        self.made += 1
        return at

    def append(self, stack: list[Any], at: int) -> int:
        value = stack.pop()
        _list(stack[-1]).append(value)
        return at

    def setitem(self, stack: list[Any], at: int) -> int:
        value = stack.pop()
        name = stack.pop()
        _fill(stack[-1], [name, value], self._hashable)
        return at

    def stack_global(self, stack: list[Any], at: int) -> int:
        name = stack.pop()
        module = stack.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError(f"a global without a name at byte {at}")
        stack.append(self._find(module, name))
        return at

    def plain_global(self, stack: list[Any], at: int) -> int:
        middle = self._data.index(b"\n", at, at + 256)
        end = self._data.index(b"\n", middle + 1, middle + 256)
        module, name = self._data[at:middle], self._data[middle + 1 : end]
        stack.append(self._find(module.decode(), name.decode()))
        return end + 1

    def to_tuple(self, items: list[Any], stack: list[Any], at: int) -> None:
        stack.append(tuple(items))
        self.made += 1

    def appends(self, items: list[Any], stack: list[Any], at: int) -> None:
        _list(stack[-1]).extend(items)

    def additems(self, items: list[Any], stack: list[Any], at: int) -> None:
        if type(stack[-1]) is not set:
            raise PickleError(f"items of {_shown(stack[-1])} at byte {at}")
        stack[-1].update(_keys(items, self._hashable))

    def to_frozenset(self, items: list[Any], stack: list[Any], at: int) -> None:
        stack.append(frozenset(_keys(items, self._hashable)))
        self.made += _AS_SET


_RARER: Mapping[int, Callable[[_Rarer, list[Any], int], int]] = {
    0x80: _Rarer.proto,
    0x8A: _Rarer.long1,
    0x47: _Rarer.binfloat,
    0x5D: _Rarer.empty_list,
    0x8F: _Rarer.empty_set,
    0x87: _Rarer.tuple3,
    0x61: _Rarer.append,
    0x73: _Rarer.setitem,
    0x93: _Rarer.stack_global,
    0x63: _Rarer.plain_global,
}
# They take the items above the last mark, the stack below it, and the offset.
_CLOSING: Mapping[int, Callable[[_Rarer, list[Any], list[Any], int], None]] = {
    0x74: _Rarer.to_tuple,
    0x65: _Rarer.appends,
    0x90: _Rarer.additems,
    0x91: _Rarer.to_frozenset,
}


def _called(maker: Any, args: Any, at: int) -> Any:
    if type(maker) is not Maker or maker.call is None or type(args) is not tuple:
        raise PickleError(f"a call of {_shown(maker)} at byte {at}")
    return maker.call(*args)


def _new(maker: Any, args: Any, at: int) -> Any:
    if type(maker) is not Maker or maker.new is None or args != ():
        raise PickleError(f"an instance of {_shown(maker)} at byte {at}")
    return maker.new()


def _build(
    instance: Any, state: Any, builders: Mapping[type, Callable[[Any, Any], None]], at: int
) -> None:
    build = builders.get(type(instance))
    if build is None:
        raise PickleError(f"a state for {_shown(instance)} at byte {at}")
    build(instance, state)


# What metadata are made of, in one step: an instance without arguments and its dict, up to the
# mark before its items; a call with one argument.
_EMPTY_INSTANCE = b"\x81}("  # NEWOBJ EMPTY_DICT MARK, after EMPTY_TUPLE
_NOTED_INSTANCE = b"\x81\x94}\x94("  # the same with MEMOIZE
_CALL = b"\x94R\x94"  # MEMOIZE REDUCE MEMOIZE, after TUPLE1


def _take(data: bytes, at: int, count: int) -> bytes:
    if count > len(data) - at:
        raise PickleError(f"{count} bytes are announced at byte {at}, {len(data) - at} are left")
    return data[at : at + count]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


_AS_SET = 4  # a set takes as much memory as four other values
_U32, _I32, _F64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct(">d")
# Opcode -> bytes of the count that follows, and what is made of as many bytes after it.
_COUNTED: Mapping[int, tuple[int, Callable[[bytes], Any]]] = {
    0x58: (4, _text),  # BINUNICODE
    0x8D: (8, _text),  # BINUNICODE8
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x96: (8, bytearray),  # BYTEARRAY8
}


def _keys(values: list[Any], hashable: frozenset[type]) -> list[Any]:
    for value in values:
        kind = type(value)
        if kind not in hashable and not (isinstance(value, tuple) and is_flat(value, hashable)):
            raise PickleError(f"{_shown(value)} where a key belongs")
    return values


def _fill(target: Any, items: list[Any], hashable: frozenset[type]) -> None:
    keys = items[::2]
    kind = type(target)
    if (kind is not dict and kind is not OrderedDict) or len(items) % 2:
        raise PickleError(f"items of {_shown(target)}")
    if not hashable.issuperset(map(type, keys)):
        _keys(keys, hashable)
    target.update(zip(keys, items[1::2], strict=True))


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise PickleError(f"items of {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return value.name if isinstance(value, Maker) else f"a {type(value).__name__}"
