"""The exchange: what one rank has read goes to the others, while the next is being read.

An :class:`Exchange` runs the rank's part of the schedule (:mod:`dcp_fsdp_osd.exchange_plan`) on a
thread and process groups of its own, so that no collective of the training job or of DCP is
disturbed and ranks that take no part in the load are not involved.  Round by round: wait for this
rank's reads, agree over all ranks that all have theirs, then send and receive.

An error on one rank is told to all in the next agreement, so that every rank raises and none waits
for data that will not come.  While a rank is waiting for its reads it says so every few seconds; a
rank that dies closes its connections, and one that hangs is given up after ``stall_seconds``.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .channels import Channels
from .errors import ExchangeError
from .exchange_plan import Message, RankSchedule
from .shared_reads import Part

__all__ = ["Exchange", "ExchangeStats"]

_READY, _WAITING, _FAILED = range(3)
_TICK = 2.0  # seconds between signs of life
_SCRATCH_BYTES = 64 << 20  # what is read for others and not yet sent


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


class Exchange:
    """One load's exchange on one rank.

    Call order: ``start``; ``resolve_read`` and ``committed`` or ``took_object`` for each of
    :attr:`reads` (from the thread that reads), ``failed`` on any error there; then ``wait``.

    Args:
        schedule: this rank's.
        items: this rank's reads, in the order of :func:`~dcp_fsdp_osd.shared_reads.in_order`.
        resolve: gives the memory that a part of one of `items` belongs in; called from the
            exchange's thread too.
        channels: the process groups; owned.
        stall_seconds: without a commit for so long, reading counts as failed; None: the storage
            reader reports its failures itself.

    Attributes:
        reads: what this rank has to read of what is exchanged.
        objects: after ``wait``: received objects, as (item, bytes).
    """

    def __init__(
        self,
        schedule: RankSchedule,
        items: Sequence[ReadItem],
        resolve: Callable[[ReadItem], torch.Tensor],
        channels: Channels,
        *,
        stall_seconds: float | None,
    ) -> None:
        self._schedule, self._items, self._resolve = schedule, items, resolve
        self._channels, self._stall = channels, stall_seconds
        self.reads: list[ReadItem] = []
        self._scratch: dict[ReadItem, torch.dtype | None] = {}
        for read in schedule.reads:
            if isinstance(read, Part):
                self.reads.append(read.of(items))
            else:
                self.reads.append(read[0])
                self._scratch[read[0]] = read[1]
        self.objects: list[tuple[ReadItem, bytes]] = []
        self.stats = ExchangeStats(rounds=len(schedule.rounds))
        self._numbers: dict[ReadItem, list[int]] = {}
        for number, item in enumerate(self.reads):
            self._numbers.setdefault(item, []).append(number)
        self._missing = set(range(len(self.reads)))
        self._held: dict[ReadItem, torch.Tensor] = {}  # scratch
        self._held_bytes = 0
        self._payloads: dict[ReadItem, bytes] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        self._devices: set[torch.device] = set()  # GPUs that data went to or came from
        self._changed = threading.Condition()
        self._progress = time.monotonic()
        self._idle = False  # the thread waits for this rank's reads
        self._failure: str | None = None  # of this rank
        self._error: BaseException | None = None  # that ends the exchange
        self._buffer: torch.Tensor | None = None
        self._thread = threading.Thread(target=self._run, name="dcp_fsdp_osd-exchange", daemon=True)

    # ------------------------------------------------------------ the reading thread's side

    def start(self) -> None:
        self._progress = time.monotonic()
        self._thread.start()

    def resolve_read(self, item: ReadItem) -> torch.Tensor | None:
        """Memory for a read on behalf of others; None for one that this rank wants itself."""
        if item not in self._scratch:
            return None
        with self._changed:
            if item not in self._held:
                self._held[item] = torch.empty(item.lengths, dtype=self._scratch[item])
                self._held_bytes += self._held[item].nbytes
            return self._held[item]

    def committed(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """``item`` is read. Waits while much that was read for others alone is yet to be sent.

        Raises:
            ExchangeError: the exchange has failed; there is no use in reading on.
        """
        self._take(item, tensor)
        if item in self._scratch:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._held_bytes <= _SCRATCH_BYTES or self._idle or self._over
                )
        self.check()

    def took_object(self, item: ReadItem, value: io.BytesIO) -> bool:
        """An object is read; returns whether this rank wants it itself."""
        if item in self._numbers:
            self._payloads[item] = value.getvalue()
        self._take(item, None)
        self.check()
        return item not in self._scratch

    def _take(self, item: ReadItem, tensor: torch.Tensor | None) -> None:
        numbers = self._numbers.get(item, ())
        event = None
        if numbers and tensor is not None and tensor.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tensor.device))
        with self._changed:
            self._progress = time.monotonic()
            for number in numbers:
                self._missing.discard(number)
                if event is not None:
                    self._events[number] = event
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """Reading failed on this rank: tell all, and return when they have been told."""
        with self._changed:
            if self._failure is None:
                self._failure = f"{type(error).__name__}: {error}"
            self._changed.notify_all()
        self._thread.join()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when everything has been sent and received.

        Raises:
            ExchangeError: on some rank something failed; names it.
        """
        self._thread.join()
        self.check()

    @property
    def _over(self) -> bool:
        return self._error is not None or not self._thread.is_alive()

    # ------------------------------------------------------------ the exchange's own thread

    def _run(self) -> None:
        try:
            with contextlib.closing(self._channels), self._on_device():
                for messages in self._schedule.rounds:
                    self._agree({n for message in messages for n in message.needs})
                    begin = time.perf_counter()
                    self._transfer(messages)
                    self.stats.seconds += time.perf_counter() - begin
                self._agree(set(range(len(self.reads))))
                for device in self._devices:  # who waits for us uses a stream of its own
                    torch.cuda.synchronize(device)
        except ExchangeError as error:
            self._error = error
        except BaseException as error:  # raised by wait()
            self._error = ExchangeError(
                f"rank {self._rank(self._schedule.number)}: the exchange of what was read broke "
                f"off: {type(error).__name__}: {error}. Another rank may have died, or not "
                f"answered in time; {_NOT_TO_BE_USED}"
            )
            self._error.__cause__ = error
        finally:
            with self._changed:
                self._buffer = None
                self._changed.notify_all()

    def _rank(self, number: int) -> int:
        return self._schedule.ranks[number]

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the destinations' GPU the thread's current one, which NCCL wants."""
        if not any(message.cuda for messages in self._schedule.rounds for message in messages):
            yield
            return
        parts = (p for messages in self._schedule.rounds for m in messages for p in m.parts)
        devices = (self._resolve(part.of(self._items)).device for part in parts)
        device = next(d for d in devices if d.type == "cuda")
        with torch.cuda.device(device):
            yield

    def _agree(self, needs: set[int]) -> None:
        """Return when all ranks have read what the round needs; raise if one has failed."""
        while True:
            state = self._await(needs)
            number = self._schedule.number
            flags = torch.tensor([state, number if state == _FAILED else -1])
            self._channels.all_reduce_max(flags)
            worst, who = flags.tolist()
            if worst == _READY:
                return
            if worst == _FAILED:
                text = self._channels.broadcast_text(self._failure or "", root=int(who))
                if who == number:
                    raise ExchangeError(f"rank {self._rank(number)} failed: {text}")
                raise ExchangeError(
                    f"rank {self._rank(int(who))} failed, and this rank was to get data from it "
                    f"or with it: {text}; {_NOT_TO_BE_USED}"
                )

    def _await(self, needs: set[int]) -> int:
        """Wait for this rank's reads, a tick at most."""
        end = time.monotonic() + _TICK
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            try:
                while self._failure is None and needs & self._missing:
                    now = time.monotonic()
                    if self._stall is not None and now - self._progress > self._stall:
                        self._failure = (
                            f"its storage reader has committed nothing for {self._stall:.0f} s: "
                            f"it failed or hangs, or needs a larger stall_seconds"
                        )
                    elif now >= end:
                        return _WAITING
                    self._changed.wait(min(end - now, 1.0))
                return _READY if self._failure is None else _FAILED
            finally:
                self._idle = False

    def _transfer(self, messages: Sequence[Message]) -> None:
        """Send and receive one round."""
        number = self._schedule.number
        tensors = [m for m in messages if not m.objects]
        used = 0
        under_way: list[tuple[Message, torch.Tensor, list[torch.Tensor], dist.Work]] = []
        for message in tensors:
            views = self._views(message)
            device = views[0].device if message.cuda else torch.device("cpu")
            data = _joined(views, device)
            if data is None:
                data = self._staging(used, message.nbytes, device)
                used += message.nbytes
                if message.root == number:
                    _pack(views, data)
            work = self._channels.send(message, data)
            under_way.append((message, data, views, work))
        for message, data, views, work in under_way:
            work.wait()
            if message.root == number:
                self.stats.sent += message.nbytes
                self._drop(message)
            else:
                self.stats.received += message.nbytes
                if _joined(views, data.device) is None:
                    _unpack(data, views)
        for message in messages:
            if message.objects:
                self._transfer_objects(message)

    def _views(self, message: Message) -> list[torch.Tensor]:
        """The memory that a message is sent from or received into, in order."""
        if message.parts:
            views = [self._resolve(part.of(self._items)).detach() for part in message.parts]
        else:
            views = [self._held[self.reads[n]] for n in message.needs]
        self._devices.update(view.device for view in views if view.is_cuda)
        for need in message.needs:
            event = self._events.pop(need, None)
            if event is not None:
                event.synchronize()
        return views

    def _drop(self, message: Message) -> None:
        """Let go of what was read for others alone and has been sent."""
        if message.parts:
            return
        with self._changed:
            for need in message.needs:
                self._held_bytes -= self._held.pop(self.reads[need]).nbytes
            self._changed.notify_all()

    def _staging(self, offset: int, size: int, device: torch.device) -> torch.Tensor:
        """``size`` bytes of the thread's own buffer; of fresh memory where it does not reach."""
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(_STAGING_BYTES, dtype=torch.uint8, device=device)
        if offset + size > self._buffer.numel():
            return torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[offset : offset + size]

    def _transfer_objects(self, message: Message) -> None:
        own = message.root == self._schedule.number
        payloads = [self._payloads.pop(self.reads[n]) for n in message.needs] if own else []
        payloads = self._channels.broadcast_bytes(message, payloads)
        size = sum(map(len, payloads))
        if own:
            self.stats.sent += size
            return
        self.stats.received += size
        items = [part.of(self._items) for part in message.parts]
        assert all(item.type == LoadItemType.BYTE_IO for item in items)
        self.objects += zip(items, payloads, strict=True)


_STAGING_BYTES = 32 << 20
_NOT_TO_BE_USED = "state that was being loaded in place may hold old and new values: do not use it"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _joined(views: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The views as one stretch of bytes, where they are one in memory on ``device``."""
    end = None
    for view in views:
        if not view.is_contiguous() or view.device != device:
            return None
        if end is not None and view.data_ptr() != end:
            return None
        end = view.data_ptr() + view.nbytes
    first = _bytes_of(views[0])
    if len(views) == 1:
        return first
    total = sum(view.nbytes for view in views)
    storage = first.untyped_storage()
    if first.storage_offset() + total > storage.nbytes():
        return None  # neighbours by chance
    return first.as_strided((total,), (1,))


def _pack(views: Sequence[torch.Tensor], data: torch.Tensor) -> None:
    position = 0
    for view in views:
        data[position : position + view.nbytes].view(view.dtype).view(view.shape).copy_(view)
        position += view.nbytes


def _unpack(data: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    position = 0
    for view in views:
        view.copy_(data[position : position + view.nbytes].view(view.dtype).view(view.shape))
        position += view.nbytes
