"""The process groups of one exchange: made for it, seen by nothing else, gone with it.

``dist.new_group`` will not do: it is a collective of the whole world, and with
``use_local_synchronization=True`` it derives a group's name from how many groups the rank is in, so
that ranks in unequally many groups never meet, and a group made after another was destroyed meets
the dead one's addresses.  Here groups meet under a name that is drawn anew for each load.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.errors import ExchangeError
from dcp_fsdp_osd.exchange.messages import Message

__all__ = ["Channels"]

_TEXT_LIMIT = 10_000  # characters of an error that others are sent


class Channels:
    """Connects the participants of one load.  Collective over all of them.

    Args:
        store: of the job; reached by all participants.
        session: a name that no other load has.
        number, size: of this participant, and of all.
        timeout: for each operation, seconds.

    Small things and CPU tensors go over gloo; CUDA tensors over NCCL, with no detour over the host.
    Groups of fewer members are made when their first message comes, which all members reach in
    the same order.
    """

    def __init__(self, store: Any, session: str, *, number: int, size: int, timeout: float) -> None:
        self._store = _prefixed(f"dcp_fsdp_osd/{session}", store)
        self._number, self._everyone = number, numbers(range(size))
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[Numbers, bool], Any] = {}
        try:
            self._control = self._group(self._everyone, False)
        except Exception as error:
            raise ExchangeError(
                f"participant {number} of {size} could not connect with the others within "
                f"{timeout:g} s to broadcast what is read: {error}. Nothing has been read yet"
            ) from error

    def close(self) -> None:
        """Let go of the groups and of the store.  Not collective."""
        self.disconnect()
        self._store = None

    def disconnect(self) -> None:
        """Let go of the groups, so that operations of others with this rank fail.

        Waits for operations under way, until their time limit.
        """
        for (_, cuda), group in self._groups.items():
            if cuda:
                group.shutdown()
        self._groups.clear()
        self._control = None

    def silent(self, seconds: float) -> list[int] | None:
        """Of participants that do not call this within ``seconds``, the first few.

        None if the store does not answer.  For when communication has failed.
        """
        end = time.monotonic() + seconds
        pause = 0.05
        names = {n: f"left/{n}" for n in self._everyone}
        try:
            self._store.set(names[self._number], "1")
            while not self._store.check(list(names.values())):
                if time.monotonic() > end:
                    missing = (n for n in self._everyone if not self._store.check([names[n]]))
                    return list(itertools.islice(missing, 16))
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        except Exception:  # of the store, whatever it is
            return None
        return []

    def _group(self, members: Numbers, cuda: bool) -> Any:
        found = self._groups.get((members, cuda))
        if found is None:
            name = f"{'nccl' if cuda else 'gloo'}/{'_'.join(map(str, members))}"
            store = _prefixed(name, self._store)
            number = members.index(self._number)
            if cuda:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                found = dist.ProcessGroupNCCL(store, number, len(members), options)
            else:
                found = dist.ProcessGroupGloo(store, number, len(members), timeout=self._timeout)
            self._groups[members, cuda] = found
        return found

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """In place, over all participants."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._control.allreduce([tensor], options).wait()

    def broadcast_text(self, text: str, root: int) -> str:
        """``text`` of participant ``root``, on all participants."""
        data = text[:_TEXT_LIMIT].encode(errors="backslashreplace")
        return self._broadcast_bytes(self._everyone, root, [data])[0].decode()

    def broadcast_bytes(self, message: Message, payloads: Sequence[bytes]) -> list[bytes]:
        """The root's payloads, on all members of ``message``."""
        return self._broadcast_bytes(message.members, message.root, payloads)

    def _broadcast_bytes(
        self, members: Numbers, root: int, payloads: Sequence[bytes]
    ) -> list[bytes]:
        own = root == self._number
        count = torch.tensor([len(payloads)])
        self._broadcast(members, root, count)
        sizes = torch.tensor([len(p) for p in payloads], dtype=torch.int64)
        sizes = sizes if own else torch.zeros(int(count), dtype=torch.int64)
        if sizes.numel():
            self._broadcast(members, root, sizes)
        total = int(sizes.sum())
        data = bytearray(b"".join(payloads) if own else total)
        if total:
            self._broadcast(members, root, torch.frombuffer(data, dtype=torch.uint8))
        if own:
            return list(payloads)
        found, position = [], 0
        for size in sizes.tolist():
            found.append(bytes(data[position : position + size]))
            position += size
        return found

    def _broadcast(self, members: Numbers, root: int, tensor: torch.Tensor) -> None:
        self._start(members, root, tensor, False).wait()

    def _start(self, members: Numbers, root: int, tensor: torch.Tensor, cuda: bool) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = members.index(root)
        work: dist.Work = self._group(members, cuda).broadcast([tensor], options)
        return work

    def send(self, message: Message, data: torch.Tensor) -> dist.Work:
        """Start sending ``data`` (1-D, uint8) from the message's root to its other members.

        Two CPU ranks need no group of their own: they talk over the one that all are in.
        """
        members, root = message.members, message.root
        if len(members) > 2 or message.cuda:
            return self._start(members, root, data, message.cuda)
        if root == self._number:
            (peer,) = (n for n in members if n != root)
            work: dist.Work = self._control.send([data], peer, message.tag)
            return work
        received: dist.Work = self._control.recv([data], root, message.tag)
        return received


def _prefixed(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
