"""What ``dcp.save`` returns: on the coordinator its metadata, on other ranks those when looked at.

DCP pickles the metadata of a finished save, sends them to all ranks, and each makes millions of
objects of them, which hardly anybody looks at. Here they travel as the bytes that were written to
``.metadata``, and are unpickled where an attribute is asked for. From then on, as on the
coordinator once they have been sent, they are DCP's own ``Metadata`` and nothing else.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.storage.dump import INDEX
from dcp_fsdp_osd.storage.places import ATTRIBUTE

__all__ = ["send_as"]

_LOCK = threading.Lock()


def send_as(metadata: Metadata, data: bytes) -> None:
    """Have ``metadata`` pickled as ``data``, once: what :func:`dump_metadata` made of them.

    Metadata that are changed before then are pickled as ever.
    """
    metadata.__dict__[_Sent.WHAT] = data, dict(vars(metadata))
    metadata.__class__ = _Sent


class _Sent(Metadata):
    """Metadata on the way to other ranks; afterwards of their own class again."""

    WHAT = "_dcp_fsdp_osd_sent"

    def __reduce_ex__(self, protocol: Any) -> Any:
        data, before = self.__dict__.pop(_Sent.WHAT)
        self.__class__ = Metadata  # type: ignore[assignment]
        now = vars(self)
        if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
            return self.__reduce_ex__(protocol)
        return _received, (data,)


def _received(data: bytes) -> Metadata:
    found = _Unread.__new__(_Unread)
    object.__getattribute__(found, "__dict__")[_Unread.DATA] = data
    return found


class _Unread(Metadata):
    """Becomes ``Metadata`` as soon as anything of it is asked for, or set."""

    DATA = "_dcp_fsdp_osd_unread"

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # isinstance() asks for it
            return Metadata
        _read(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _read(self)
        setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        _read(self)
        delattr(self, name)


def _read(unread: Metadata) -> None:
    with _LOCK:  # of two threads the second waits until all is there
        fields = object.__getattribute__(unread, "__dict__")
        if _Unread.DATA not in fields:
            return
        found = vars(pickle.loads(fields[_Unread.DATA]))
        found.get(ATTRIBUTE, {}).pop(INDEX, None)
        del fields[_Unread.DATA]
        fields.update(found)
        object.__setattr__(unread, "__class__", Metadata)
