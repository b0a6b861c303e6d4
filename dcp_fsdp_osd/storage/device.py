"""Copies between an accelerator and pinned buffers of the host, on a stream of their own.

Training's stream (whichever is current where a save or load is called) goes on queueing meanwhile,
and the host waits for the copy that it needs next, never for the device.  Devices, streams and
events are those of :mod:`torch.accelerator`, whatever the accelerator is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from dcp_fsdp_osd.storage.memory import copy_flat_range, has_streams

__all__ = ["SideStreams"]

_PIECE = 2 << 20
"""Bytes that are copied before they are looked at, while the next are being copied."""


class SideStreams:
    """What one save or load copies: a stream for each device, made when it is first used.

    Each copy comes after all that the current stream has been given before it.  Not thread-safe.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def down(self, tensor: torch.Tensor, start: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy the tensor's row-major elements from ``start`` on into ``flat``, of the CPU.

        Yields parts of ``flat``, in order, each when it is there.  ``tensor`` must live, and
        neither may change, until the last one is.
        """
        if not has_streams(tensor.device):
            copy_flat_range(tensor, start, flat, into_tensor=False)
            if not tensor.is_cpu:
                _after_current(tensor.device).synchronize()
            yield flat
            return
        parts = torch.split(flat, max(_PIECE // flat.element_size(), 1))
        events = []
        with self._beside(tensor.device) as stream:
            for part in parts:
                copy_flat_range(tensor, start, part, into_tensor=False)
                events.append(stream.record_event())
                start += part.numel()
        for part, event in zip(parts, events, strict=True):
            event.synchronize()
            yield part

    def up(self, device: torch.device, copy: Callable[[], None]) -> torch.Event:
        """Call ``copy``, which copies to ``device``, for which its current stream then waits.

        What was copied from must stay as it is until the event has come.
        """
        if not has_streams(device):
            copy()
            return _after_current(device)
        with self._beside(device) as stream:
            copy()
            event = stream.record_event()
        torch.accelerator.current_stream(device).wait_event(event)
        return event

    def wait(self) -> None:
        """Return when all is copied."""
        for stream in self._streams.values():
            stream.synchronize()

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[torch.Stream]:
        """Make the device's side stream the current one, behind what the current one was given."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        here = torch.accelerator.current_stream()
        there = torch.accelerator.current_stream(device)
        stream.wait_stream(there)
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(there)
            torch.accelerator.set_stream(here)  # makes its device the current one, too


def _after_current(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record()
    return event
