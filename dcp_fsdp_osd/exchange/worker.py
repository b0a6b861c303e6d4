"""The exchange: what one rank has read goes to the others, while the next is being read.

An :class:`Exchange` runs the rank's part of the schedule (:mod:`dcp_fsdp_osd.exchange.schedule`) on
a thread and process groups of its own, so that no collective of the training job or of DCP is
disturbed and ranks that take no part in the load are not involved. Round by round: wait for this
rank's reads, lay out what is sent, agree over all ranks that all are ready, then send and receive.

All ranks learn of an error on one of them in the next agreement, so that every rank raises and none
waits for data that will not come.  While a rank is waiting for its reads it says so every few
seconds; a rank that dies closes its connections, and one that hangs is given up after
``stall_seconds``.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.errors import ExchangeError, message_of
from dcp_fsdp_osd.exchange.buffers import Held, Staging, one_stretch, pack, unpack
from dcp_fsdp_osd.exchange.messages import Message, RankSchedule, Source
from dcp_fsdp_osd.exchange.regions import Part
from dcp_fsdp_osd.exchange.transport import Channels
from dcp_fsdp_osd.layout.geometry import narrowed_view
from dcp_fsdp_osd.storage.memory import has_streams

__all__ = ["Exchange", "ExchangeStats"]

_READY, _WAITING, _FAILED = range(3)
_ALLOCATED, _FINISHED = -1, -2  # beside the numbers of reads
_TICK = 2.0  # seconds between signs of life
_ANSWER = 5.0  # seconds that others get to answer after communication has failed
_CLOSE = 5.0  # seconds for which the reading thread waits for ours to end after an error
_NOT_TO_BE_USED = "state that was being loaded in place may hold old and new values: do not use it"
_log = logging.getLogger(__name__)


@dataclass
class ExchangeStats:
    """What the exchange of one load moved on this rank.

    Attributes:
        sent, received: bytes of messages, a message to several ranks counted once.
        rounds: how many rounds there were.
        seconds: spent sending and receiving, waiting for others not included.
    """

    sent: int = 0
    received: int = 0
    rounds: int = 0
    seconds: float = 0.0


@dataclass
class _Transfer:
    """One message, laid out: ``data`` is sent or received, then unpacked into ``views``."""

    message: Message
    data: torch.Tensor
    views: list[torch.Tensor]


class Exchange:
    """One load's exchange on one rank.

    Call order: ``start``; ``ready`` when the memory is there; ``resolve_read`` and ``committed`` or
    ``took_object`` for each read (from the threads that read), ``failed`` on any error there;
    ``receive`` when all is read, and ``conclude`` when it is put to use.

    Args:
        schedule: this rank's.
        items: this rank's reads, in the order of :func:`~dcp_fsdp_osd.exchange.regions.in_order`.
        resolve: gives the memory that a part of one of `items` belongs in; called from the
            exchange's thread too, from ``ready`` until ``receive`` has returned.
        channels: the process groups; owned.
        stall_seconds: without a commit for so long, though others wait for it, reading counts as
            failed.

    Attributes:
        reads: what this rank has to read of what is exchanged.
        stats: counted as it goes.
    """

    def __init__(
        self,
        schedule: RankSchedule,
        items: Sequence[ReadItem],
        resolve: Callable[[ReadItem], torch.Tensor],
        channels: Channels,
        *,
        stall_seconds: float,
    ) -> None:
        self._schedule, self._items, self._resolve = schedule, items, resolve
        self._channels, self._stall = channels, stall_seconds
        self._changed = threading.Condition()
        self.reads: list[ReadItem] = []
        scratch: dict[ReadItem, torch.dtype | None] = {}
        for read in schedule.reads:
            if isinstance(read, Part):
                self.reads.append(read.of(items))
            else:
                self.reads.append(read[0])
                scratch[read[0]] = read[1]
        messages = [message for round_ in schedule.rounds for message in round_]
        uses = Counter(n for m in messages for n in {source.read for source in m.sources})
        self._held = Held(scratch, Counter({self.reads[n]: count for n, count in uses.items()}))
        self._staging = Staging()
        self.stats = ExchangeStats(rounds=len(schedule.rounds))
        self._numbers: dict[ReadItem, list[int]] = {}
        for number, item in enumerate(self.reads):
            self._numbers.setdefault(item, []).append(number)
        self._missing = {*range(len(self.reads)), _ALLOCATED, _FINISHED}
        self._objects: list[tuple[ReadItem, bytes]] = []
        self._payloads: dict[ReadItem, bytes] = {}
        self._events: dict[int, torch.Event] = {}
        self._allocated: torch.Event | None = (
            None  # what the memory was given, e.g. zeros, is in it
        )
        self._devices: set[torch.device] = set()  # accelerators that data went to or came from
        self._progress = time.monotonic()
        self._idle = False  # the thread waits for this rank's reads
        self._failure: str | None = None  # of this rank
        self._error: ExchangeError | None = None  # that ends the exchange
        self._received = self._over = False
        self._thread = threading.Thread(target=self._run, name="dcp_fsdp_osd-exchange", daemon=True)

    # ------------------------------------------------------------ the reading threads' side

    def start(self) -> None:
        self._thread.start()

    def ready(self, own_reads: Sequence[ReadItem]) -> None:
        """Memory is allocated; ``own_reads`` are what this rank reads beside :attr:`reads`."""
        if torch.accelerator.is_available():
            self._allocated = torch.accelerator.current_stream().record_event()
        with self._changed:
            for number, item in enumerate(own_reads, len(self.reads)):
                self._numbers.setdefault(item, []).append(number)
                self._missing.add(number)
        self._done(_ALLOCATED)

    def resolve_read(self, item: ReadItem) -> torch.Tensor | None:
        """Memory for a read for others; None for one into this rank's own.

        Raises:
            ExchangeError: the exchange has failed; there is no use in reading on.
        """
        self.check()
        with self._changed:
            return self._held.resolve(item)

    def committed(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """``item`` is read.  Waits while much that was read for others is yet to be sent.

        Raises:
            ExchangeError: as :meth:`resolve_read`.
        """
        self._take(item, tensor)
        with self._changed:
            if item in self._held:
                self._changed.wait_for(lambda: not self._held.full or self._idle or self._over)
                self._progress = time.monotonic()
        self.check()

    def took_object(self, item: ReadItem, value: io.BytesIO) -> bool:
        """An object is read; returns whether this rank wants it itself."""
        if item in self._numbers:
            self._payloads[item] = value.getvalue()
        self._take(item, None)
        self.check()
        return item not in self._held

    def _take(self, item: ReadItem, tensor: torch.Tensor | None) -> None:
        numbers = self._numbers.get(item, ())
        if numbers and tensor is not None and has_streams(tensor.device):
            event = torch.accelerator.current_stream(tensor.device).record_event()
            self._events.update(dict.fromkeys(numbers, event))
        self._done(*numbers)

    def _done(self, *numbers: int) -> None:
        with self._changed:
            self._progress = time.monotonic()
            self._missing.difference_update(numbers)
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """This rank failed: all learn of it, and this returns when they have.

        At any time after ``start``; without effect when the exchange is over.
        """
        self._fail(error)
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        self._thread.join(_CLOSE)

    def receive(self) -> list[tuple[ReadItem, bytes]]:
        """Return when all ranks have all their tensors: the objects that others read for this one.

        Raises:
            ExchangeError: on some rank something failed; names it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._received or self._over)
        self.check()
        return self._objects

    def conclude(self) -> None:
        """Return when all ranks have come as far as this.

        Raises:
            ExchangeError: as :meth:`receive`.
        """
        self._done(_FINISHED)
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        self._thread.join(_CLOSE)
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------ the exchange's own thread

    def _run(self) -> None:
        try:
            self._agree({_ALLOCATED})
            if self._allocated is not None:  # on another stream than this thread's
                self._allocated.synchronize()
            self._take_device()
            for messages in self._schedule.rounds:
                self._round(messages)
            with self._changed:
                rest = {n for n in self._missing if n >= 0}
            self._agree(rest)
            for device in self._devices:  # who waits for us uses a stream of its own
                torch.accelerator.current_stream(device).synchronize()
            with self._changed:
                self._received = True
                self._changed.notify_all()
            self._agree({_FINISHED})
        except ExchangeError as error:
            self._end(error)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold connections open
            text = f"{type(error).__name__}: {error}"
            del error
            self._broke_off(text)
        finally:
            if self._error is not None:
                # Where a rank is dead or hangs, DCP's own collectives fail next, and hide it.
                _log.error("%s", self._error)
            self._end(None)
            self._channels.close()

    def _broke_off(self, text: str) -> None:
        """Communication failed: find out who is gone."""
        closing = threading.Thread(
            target=self._channels.disconnect, name="dcp_fsdp_osd-exchange-closing", daemon=True
        )
        closing.start()  # so that the others learn of it; may wait for what is under way
        silent = self._channels.silent(min(self._stall, _ANSWER))
        if silent is None:
            who = "The store of the job's process group does not answer either"
        elif silent:
            ranks = ", ".join(str(self._rank(n)) for n in silent)
            who = f"Dead, hanging or cut off: rank {ranks}"
        else:
            who = "All ranks have answered since"
        me = self._rank(self._schedule.number)
        self._end(
            ExchangeError(
                f"rank {me}: the exchange of what was read broke off: {text}. {who}; "
                f"{_NOT_TO_BE_USED}"
            )
        )
        closing.join()

    def _end(self, error: ExchangeError | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._over = True
            self._held.clear()
            self._payloads.clear()
            self._staging = Staging()
            self._changed.notify_all()

    def _rank(self, number: int) -> int:
        return self._schedule.ranks[number]

    def _take_device(self) -> None:
        """Make the destinations' GPU this thread's current one, which NCCL wants."""
        if any(message.cuda for messages in self._schedule.rounds for message in messages):
            parts = (p for messages in self._schedule.rounds for m in messages for p in m.parts)
            devices = (self._resolve(part.of(self._items)).device for part in parts)
            device = next(d for d in devices if d.type == "cuda")
            torch.accelerator.set_stream(torch.accelerator.current_stream(device))

    def _fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {message_of(error)}"
        with self._changed:
            if self._failure is None:
                self._failure = text
            self._changed.notify_all()

    def _agree(self, needs: set[int], prepare: Callable[[], None] = lambda: None) -> None:
        """Return when all ranks have what they need, and are prepared; raise if one has failed."""
        since = time.monotonic()
        prepared = False
        while True:
            state = self._await(needs, since)
            if state == _READY and not prepared:
                try:
                    prepare()
                    prepared = True
                except BaseException as error:
                    self._fail(error)
                    state = _FAILED
            number = self._schedule.number
            flags = torch.tensor([state, number if state == _FAILED else -1])
            self._channels.all_reduce_max(flags)
            worst, who = flags.tolist()
            if worst == _READY:
                return
            if worst == _FAILED:
                text = self._channels.broadcast_text(self._failure or "", root=int(who))
                where = "" if who == number else ", with which this rank shares what is read"
                raise ExchangeError(
                    f"rank {self._rank(int(who))} failed{where}: {text}; {_NOT_TO_BE_USED}"
                )

    def _await(self, needs: set[int], since: float) -> int:
        """Wait for what this rank needs, a tick at most."""
        end = time.monotonic() + _TICK
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            try:
                while self._failure is None and needs & self._missing:
                    now = time.monotonic()
                    if now - max(self._progress, since) > self._stall:
                        self._failure = _stalled(needs & self._missing, self._stall)
                    elif now >= end:
                        return _WAITING
                    else:
                        self._changed.wait(min(end - now, self._stall / 4))
                return _READY if self._failure is None else _FAILED
            finally:
                self._idle = False

    def _round(self, messages: Sequence[Message]) -> None:
        """Send and receive one round."""
        transfers: list[_Transfer] = []
        self._agree(
            {n for m in messages for n in m.needs}, lambda: self._lay_out(messages, transfers)
        )
        begin = time.perf_counter()
        under_way = [
            (transfer, self._channels.send(transfer.message, transfer.data))
            for transfer in transfers
            if len(transfer.message.members) > 1
        ]
        for transfer, work in under_way:
            work.wait()
            if transfer.message.root == self._schedule.number:
                self.stats.sent += transfer.message.nbytes
            else:
                self.stats.received += transfer.message.nbytes
        payloads = [
            (message, self._transfer_objects(message)) for message in messages if message.objects
        ]
        try:
            for transfer in transfers:
                unpack(transfer.data, transfer.views)
            for message, found in payloads:
                items = [part.of(self._items) for part in message.parts]
                if found:
                    self._objects += zip(items, found, strict=True)
        except BaseException as error:  # all learn of it in the next agreement
            self._fail(error)
        with self._changed:
            for message in messages:
                if message.root == self._schedule.number:
                    self._held.drop(self.reads[n] for n in {s.read for s in message.sources})
            self._changed.notify_all()
        self.stats.seconds += time.perf_counter() - begin

    def _lay_out(self, messages: Sequence[Message], transfers: list[_Transfer]) -> None:
        """Local work alone, so that all can learn of what fails here."""
        transfers.clear()
        self._staging.reset()
        for message in messages:
            if message.objects:
                continue
            views = [self._resolve(part.of(self._items)).detach() for part in message.parts]
            self._devices.update(view.device for view in views if has_streams(view.device))
            for need in message.needs:
                event = self._events.pop(need, None)
                if event is not None:
                    event.synchronize()
            sources = [self._source(source) for source in message.sources]
            at = views[0].device if message.cuda else torch.device("cpu")
            data = one_stretch(sources or views, at)
            if message.root == self._schedule.number:
                if data is None:
                    data = self._staging.take(message.nbytes, at)
                    pack(sources or views, data)
                transfers.append(_Transfer(message, data, views if sources else []))
            elif data is None:
                transfers.append(_Transfer(message, self._staging.take(message.nbytes, at), views))
            else:
                transfers.append(_Transfer(message, data, []))

    def _source(self, source: Source) -> torch.Tensor:
        with self._changed:
            view = self._held[self.reads[source.read]]
        if source.offsets is not None and source.sizes is not None:
            return narrowed_view(view, source.offsets, source.sizes)
        return view

    def _transfer_objects(self, message: Message) -> list[bytes]:
        """The payloads that have come; none on the rank that sent them."""
        own = message.root == self._schedule.number
        payloads = [self._payloads.pop(self.reads[n]) for n in message.needs] if own else []
        payloads = self._channels.broadcast_bytes(message, payloads)
        size = sum(map(len, payloads))
        if own:
            self.stats.sent += size
            return []
        self.stats.received += size
        return payloads


def _stalled(missing: set[int], seconds: float) -> str:
    if _ALLOCATED in missing:
        what = "has not allocated its memory"
    elif _FINISHED in missing:
        what = "has not put to use what it read"
    else:
        what = "has read nothing"
    return f"it {what} for {seconds:g} s: it failed or hangs, or needs a larger stall_seconds"
