"""The counter of bytes between ranks: the benchmarks' claim of "0 tensor bytes" rests on it."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from benchmarks.wire import WireBytes
from tests.ranks import run_ranks

_NUMEL = 250_000
_BARRIER = 1024  # more than the bytes of a few barriers


def _count(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    counts = {}

    def note(name: str, wire: WireBytes) -> None:
        counts[name] = (wire.tensors, wire.objects)
        dist.barrier()

    with WireBytes() as wire:
        pass
    note("nothing", wire)
    with WireBytes() as wire:
        dist.barrier()
    note("barrier", wire)
    with WireBytes() as wire:
        dist.all_gather_object([None] * world_size, bytes(_NUMEL))
    note("objects", wire)
    with WireBytes() as wire:
        dist.all_gather_into_tensor(torch.empty(world_size * _NUMEL), torch.ones(_NUMEL))
    note("tensors", wire)
    with WireBytes() as wire:
        group = dist.new_group()
        work = threading.Thread(
            target=dist.all_gather_into_tensor,
            args=(torch.empty(world_size * _NUMEL), torch.ones(_NUMEL), group),
        )
        work.start()
        work.join()
    note("thread and group of its own", wire)
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_counted_at_the_sockets(world_size: int) -> None:
    for counts in run_ranks(_count, world_size):
        assert counts["nothing"] == (0, 0)
        assert 0 < sum(counts["barrier"]) < _BARRIER
        tensors, objects = counts["objects"]
        assert tensors < _BARRIER
        assert objects == pytest.approx((world_size - 1) * _NUMEL, rel=0.01)
        for name in ("tensors", "thread and group of its own"):
            tensors, objects = counts[name]
            assert objects < _BARRIER
            assert tensors == pytest.approx((world_size - 1) * _NUMEL * 4, rel=0.01)


def test_ports_can_be_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            peer, _ = server.accept()
            with peer:
                for ignore, expected in (((), 1000), ((port,), 0)):
                    with WireBytes(ignore=ignore) as wire:
                        client.sendall(bytes(1000))
                        assert len(peer.recv(1000, socket.MSG_WAITALL)) == 1000
                    assert wire.total == expected
