"""The metadata's unpickler under fire: crafted and mutated ``.metadata``, for as long as is wanted.

    python -m tests.storage.fuzz_metadata --seconds 600

Inputs are drawn by hypothesis: pickles of stock's and ours with bytes flipped, cut, doubled and
spliced, and opcode soup with the names of allowed classes.  For each: an error of this package or
metadata, within a second, no attribute of any class or function that the unpickler knows changed,
and memory within what :func:`limit` says.  Prints how many inputs there were.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pickle
import struct
import time
import tracemalloc
from collections import OrderedDict
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dcp_fsdp_osd.errors import FlatOptimError
from dcp_fsdp_osd.storage.dcp_pickle import _makers
from dcp_fsdp_osd.storage.metadata import dump_metadata, load_metadata
from tests.cpu_time import cpu_seconds

KNOWN = [
    getattr(dcp, name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
]  # fmt: skip
KNOWN += [_StorageInfo, OrderedDict, PurePosixPath, PureWindowsPath, torch.Size, set, frozenset]
KNOWN += [slice, range, complex, bytearray, torch.serialization._get_layout]


_FIELDS = [field.name for field in dataclasses.fields(dcp.StorageMeta)]
_MODULES = (["m"],) if "modules" in _FIELDS else ()  # since torch 2.7


def _sample() -> dcp.Metadata:
    def tensor(*size: int) -> dcp.TensorStorageMetadata:
        chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        return dcp.TensorStorageMetadata(
            dcp.TensorProperties(torch.float32), torch.Size(size), [chunk]
        )

    def info(number: int) -> _StorageInfo:
        found = _StorageInfo("__0_0.distcp", number * 5000, 5000)
        found.dcp_fsdp_osd = (1, 7, 704, 48, "float32")
        return found

    return dcp.Metadata(
        {"w": tensor(3, 4), "s": tensor(), "lr": dcp.BytesStorageMetadata()},
        planner_data={"w": ("w",), "o": OrderedDict(x={1, 2}), "n": [1.5, b"x", None]},
        storage_data={
            dcp.MetadataIndex("w", torch.Size([0, 0]), 0): info(0),
            dcp.MetadataIndex("s", torch.Size([]), 0): info(1),
            dcp.MetadataIndex("lr"): info(2),
        },
        storage_meta=dcp.StorageMeta(PurePosixPath("/x/y"), "save", None, *_MODULES),
    )


SEEDS = [pickle.dumps(_sample(), protocol) for protocol in (2, 3, 4, 5)]
SEEDS.append(dump_metadata(_sample()))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(at + draw(st.integers(0, 40)), len(data))
        kind = draw(st.sampled_from(["flip", "cut", "double", "splice", "insert", "end"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:end]
        elif kind == "double":
            data[at:at] = data[at:end] * draw(st.sampled_from([1, 2, 50]))
        elif kind == "splice":
            other = draw(st.sampled_from(SEEDS))
            begin = draw(st.integers(0, len(other)))
            data[at:end] = other[begin : begin + 40]
        elif kind == "insert":
            data[at:at] = draw(soup)
        elif kind == "end":
            del data[at:]
            data += b"."
    return bytes(data)


_names = st.sampled_from(sorted(_makers())).map(
    lambda name: b"c%s\n%s\n" % (name[0].encode(), name[1].encode())
)
_plain = st.sampled_from(
    [bytes([op]) for op in b"()]}\x8f\x85\x86\x87tRb\x81ues\x90\x91a\x94N\x88\x890."]
)
_numbers = st.one_of(
    st.integers(0, 255).map(lambda n: b"K" + bytes([n])),
    st.integers(-(1 << 31), (1 << 31) - 1).map(lambda n: b"J" + struct.pack("<i", n)),
    st.integers(0, 40).map(lambda n: b"h" + bytes([n])),
    st.integers(0, 255).map(lambda n: b"q" + bytes([n])),
    st.integers(0, (1 << 32) - 1).map(lambda n: b"r" + struct.pack("<I", n)),
    st.integers(0, 1 << 50).map(lambda n: b"\x8d" + struct.pack("<Q", n)),
    st.integers(0, 1 << 50).map(lambda n: b"\x96" + struct.pack("<Q", n)),
    st.sampled_from(["fqn", "offset", "__class__", "__hash__", "_str", "x"]).map(
        lambda text: b"\x8c" + bytes([len(text)]) + text.encode()
    ),
)
soup = st.lists(st.one_of(_plain, _plain, _numbers, _names), max_size=60).map(b"".join)
crafted = st.builds(
    lambda body, again: b"\x80\x04" + body * again + b".", soup, st.sampled_from([1, 1, 3, 400])
)
inputs = st.one_of(mutated(), crafted)


def limit(data: bytes) -> int:
    """Bytes that reading `data` may take: containers are up to 24 times what stands for them, and
    64 KiB for what does not depend on it (a block of opcodes, caches, errors)."""
    return 24 * len(data) + (1 << 16)


def attributes() -> list[Any]:
    return [(kind, dict(vars(kind))) for kind in KNOWN]


def read(data: bytes) -> None:
    with contextlib.suppress(FlatOptimError):
        load_metadata(data, "fuzz")


def check(data: bytes) -> float:
    """Bytes that were taken, for each byte of `data`."""
    before = attributes()
    tracemalloc.start()
    try:
        begin = time.thread_time()
        read(data)
        seconds = time.thread_time() - begin
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if seconds >= 0.5:  # the machine's doing, or the input's: the input's is so each time
        seconds = cpu_seconds(lambda: read(data))
    assert seconds < 1.0, "it took longer than a second"
    assert taken < limit(data), f"{taken} bytes for {len(data)}"
    assert attributes() == before, "a class was changed"
    return taken / max(len(data), 1)


def fuzz(seconds: float, examples: int | None = None) -> tuple[int, float, float]:
    """How many inputs there were, and the most memory and time that one took.

    It ends after so many seconds, or so many inputs.
    """
    count, most, slowest = 0, 0.0, 0.0
    deadline = time.monotonic() + seconds

    @settings(
        max_examples=min(examples or 200, 200),
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(data: bytes) -> None:
        nonlocal count, most, slowest
        if time.monotonic() > deadline:
            return
        begin = time.thread_time()
        taken = check(data)
        count += 1
        slowest = max(slowest, time.thread_time() - begin)
        if len(data) > 4096:
            most = max(most, taken)

    check(SEEDS[0])  # what is made once
    while time.monotonic() < deadline and (examples is None or count < examples):
        run()
    return count, most, slowest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    count, most, slowest = fuzz(parser.parse_args().seconds)
    print(
        f"{count} inputs; at most {most:.1f} bytes of memory for each byte of those longer than "
        f"4 KiB, and {slowest:.3f} s"
    )


if __name__ == "__main__":
    main()
