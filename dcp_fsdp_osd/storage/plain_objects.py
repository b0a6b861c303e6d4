"""Objects that a plain load takes: what ``torch.load(weights_only=True)`` does, and NumPy's.

Every training loop has NumPy's random state and NumPy scalars, which torch refuses.  They are made
here from their pickle by constructors of our own, which look at each argument, and handed on as a
new pickle of what was made: no byte of the file's own pickle is ever executed.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from typing import Any

import torch

from dcp_fsdp_osd.errors import UnsafeCheckpointError
from dcp_fsdp_osd.storage.entry import END, LOCAL
from dcp_fsdp_osd.storage.foreign import directory, record
from dcp_fsdp_osd.storage.pickles import SCALARS, Maker, PickleError, load_pickle

__all__ = ["names_nothing", "numpy_object", "refused_names"]

_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,4}")
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since NumPy 2
_DESCRIPTOR = b"PK\x07\x08"
_LOOKED_AT = 1 << 16  # bytes; larger objects are worth torch's own look
_GLOBAL = re.compile(rb"c[\w.]+\n[\w.]+\n|\x93")


def refused_names(data: io.BytesIO) -> list[str]:
    """What a plain load will refuse in an object that ``torch.save`` wrote; `data` stays as it is.

    Cheap for the many objects that name no class at all.
    """
    copy = data.getvalue()
    if _GLOBAL.search(copy, 0, _end_of_pickle(copy)) is None:
        return []
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(copy))
    except Exception:  # not of torch.save: it is no pickle of ours to judge
        return []
    return names if names and numpy_object(copy) is None else []


def _end_of_pickle(data: bytes) -> int:
    """Where the first record of a zip ends: ``torch.save`` has the pickle in it."""
    if data[:4] == LOCAL:
        begin = 30 + sum(struct.unpack_from("<HH", data, 26))
        end = data.find(_DESCRIPTOR, begin)
        while end >= 0:
            if data[end + 8 : end + 12] == struct.pack("<I", end - begin):
                return end
            end = data.find(_DESCRIPTOR, end + 1)
    return len(data)


def names_nothing(data: bytes | bytearray) -> bool:
    """Whether they are ``torch.save`` of plain values alone: to unpickle them calls nothing.

    False where that cannot be seen at once.  What is looked at is what ``torch.load`` reads: a zip
    as ``torch.save`` writes it and nothing else, where no two readers find different records.
    """
    try:
        if data[-22:-18] != END or len(data) > _LOOKED_AT:
            return False
        records = directory(bytes(data), len(data))
        folder = next(iter(records)).partition(b"/")[0] + b"/"
        names = {name.lower() for name in records if name.startswith(folder)}
        if len(names) != len(records) or data[-12] | data[-11] << 8 != len(records):
            return False
        pickled = record(bytes(data), *records[folder + b"data.pkl"])
        load_pickle(pickled, _refuse)
    except (KeyError, PickleError, StopIteration, UnsafeCheckpointError, ValueError, struct.error):
        return False
    return True


def _refuse(module: str, name: str) -> Any:
    raise UnsafeCheckpointError(f"{module}.{name}")


def numpy_object(data: bytes | bytearray) -> bytes | None:
    """The bytes of ``torch.save`` of an object of NumPy arrays, scalars and plain values, made
    anew; None if `data` holds anything else.
    """
    try:
        import numpy  # noqa: F401

        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [i for i in archive.infolist() if i.filename.endswith("/data.pkl")]
            if len(members) != 1 or members[0].compress_type != zipfile.ZIP_STORED:
                return None
            pickled = archive.read(members[0])
        found, end = load_pickle(pickled, _find, builders=_builders())
    except (ImportError, PickleError, UnsafeCheckpointError, zipfile.BadZipFile, EOFError, OSError):
        return None
    if end != len(pickled) or not _is_plain(found):
        return None
    made = io.BytesIO()
    try:
        torch.save(found, made)
    except RecursionError:
        return None
    return made.getvalue()


def _is_plain(value: object) -> bool:
    """Whether nothing is left in it that only stands for something, such as a class."""
    import numpy as np

    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is dict:
            todo += [*each.keys(), *each.values()]
        elif type(each) in (list, tuple, set, frozenset):
            todo += each  # type: ignore[arg-type]
        elif type(each) not in SCALARS and not isinstance(each, np.ndarray | np.generic):
            return False
    return True


class _Dtype:
    """A dtype of plain elements; its byte order comes with BUILD."""

    def __init__(self, code: object, *_: object) -> None:
        if type(code) is not str or not _DTYPE.fullmatch(code):
            raise ValueError("a dtype that is not of plain numbers or text")
        self.code, self.order = code, "="

    def make(self) -> Any:
        import numpy as np

        return np.dtype(self.order + self.code)


def _find(module: str, name: str) -> Any:
    if module == "numpy" and name == "dtype":
        return Maker("numpy.dtype", call=_Dtype)
    if module == "numpy" and name == "ndarray":
        return Maker("numpy.ndarray")
    if module in _ARRAYS and name == "_reconstruct":
        return Maker("numpy's _reconstruct", call=_empty)
    if module in _ARRAYS and name == "scalar":
        return Maker("numpy's scalar", call=_scalar)
    if module in ("builtins", "__builtin__") and name == "bytes":
        return Maker("bytes", call=_no_bytes)
    if module == "_codecs" and name == "encode":
        return Maker("_codecs.encode", call=_encode)
    raise UnsafeCheckpointError(f"{module}.{name}")


def _empty(kind: object, shape: object, code: object) -> Any:
    import numpy as np

    if type(kind) is not Maker or kind.name != "numpy.ndarray" or shape != (0,):
        raise ValueError("not an array's beginning")
    return np.empty(0, np.uint8)


def _no_bytes() -> bytes:
    return b""


def _encode(text: object, encoding: object) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("not bytes as protocol 2 has them")
    return text.encode("latin1")


def _scalar(dtype: object, data: object) -> Any:
    import numpy as np

    if type(dtype) is not _Dtype or type(data) is not bytes:
        raise ValueError("not a plain scalar")
    made = dtype.make()
    if made.itemsize != len(data):
        raise ValueError("a scalar of another length than its dtype's")
    return np.frombuffer(data, made)[0]


def _set_order(dtype: _Dtype, state: Any) -> None:
    if type(state) is not tuple or state[1] not in ("<", ">", "|", "="):
        raise ValueError("not a dtype's state")
    if any(part is not None for part in state[2:5]):
        raise ValueError("a dtype with fields")
    dtype.order = state[1]


def _set_array(array: Any, state: Any) -> None:
    _, shape, dtype, fortran, data = state
    if type(dtype) is not _Dtype or type(data) is not bytes or type(fortran) is not bool:
        raise ValueError("not a plain array")
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("not a shape")
    made = dtype.make()
    if len(shape) > 32 or math.prod(shape) * made.itemsize != len(data):
        raise ValueError("an array of another size than its bytes")
    array.__setstate__((1, shape, made, fortran, data))


def _builders() -> dict[type, Any]:
    import numpy as np

    return {_Dtype: _set_order, np.ndarray: _set_array}
