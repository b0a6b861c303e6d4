"""``.metadata`` that lies: crafted pickles.  No code runs, no class changes, no memory is taken."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage import StreamingWriter
from dcp_fsdp_osd.storage.metadata import dump_metadata, load_metadata
from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place
from tests.storage.states import assert_same, load

STATE = {"weight": torch.arange(3000.0).view(10, 300), "lr": 0.5}
PICKLE = "not a pickle of DCP metadata"


def crafted(pickled: bytes | Callable[[], bytes]) -> Any:
    """An attack that loads a checkpoint whose metadata are these bytes."""

    def attack(place: Place) -> None:
        dcp.save(dict(STATE), storage_writer=place.writer())
        data = pickled if isinstance(pickled, bytes) else pickled()
        place.store().put(".metadata", data, exclusive=False)
        load(place.reader(), STATE)

    return attack


def edited(change: Callable[[Metadata], None]) -> Any:
    """An attack that loads a checkpoint whose metadata were changed, and sealed again."""

    def attack(place: Place) -> Any:
        dcp.save(dict(STATE), storage_writer=place.writer())
        store = place.store()
        metadata = load_metadata(store.read(".metadata", 1 << 20), "test")
        change(metadata)
        store.put(".metadata", dump_metadata(metadata), exclusive=False)
        return load(place.reader(), STATE)

    return attack


def refused_quietly(data: bytes) -> Callable[[Place], Any]:
    """An attack that unpickles these bytes; what it was refused with, and whether memory was taken.

    Containers cost up to 64 bytes each, and there is at most one for 4 bytes of the file.
    """

    def attack(place: Place) -> Any:
        tracemalloc.start()
        try:
            load_metadata(data, "x")
        except Exception as error:
            return type(error).__name__, tracemalloc.get_traced_memory()[1] < 24 * len(data) + 10**6
        finally:
            tracemalloc.stop()
        return "accepted"

    return attack


def on_class(name: str, attribute: str, reader: Callable[[], Any]) -> Callable[[Place], Any]:
    """BUILD on what stands for a class; the attribute of the class afterwards, and before."""

    def attack(place: Place) -> Any:
        before = reader()
        module, _, kind = name.rpartition(".")
        state = b"}\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x8c\x01/" + b"s"
        for build in (state + b"b", b"N" + state + b"\x86b"):
            body = b"\x80\x04c%s\n%s\n" % (module.encode(), kind.encode()) + build
            try:
                load_metadata(body + b".", "x")
            except CorruptCheckpointError:
                pass
            else:
                return "accepted"
        return reader() == before

    return attack


def _tensor(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...]) -> Any:
    return TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks],
    )


def _nested(count: int) -> bytes:
    """A dict whose key is a tuple in a tuple in a tuple ..."""
    return b"\x80\x04})" + b"\x85" * count + b"Ns."


LONG = struct.pack("<Q", 1 << 40)
GADGETS = {
    "a bytearray of 1 GiB": b"\x80\x04cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R.",
    "a set of a range": b"\x80\x04cbuiltins\nset\ncbuiltins\nrange\nJ\x00\x00\x00\x10\x85R\x85R.",
    "a memo index of four bytes": b"\x80\x04Nr\x00\x00\x00\x7f.",
    "bytes that are not there": b"\x80\x04\x96" + LONG + b".",
    "text that is not there": b"\x80\x04\x8d" + LONG + b".",
    "a long that is not there": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "dicts by the thousand": b"\x80\x04" + b"}" * 200_000 + b".",
    "lists in a list by the thousand": b"\x80\x04]" + b"](]]]]]]e" * 5_000 + b".",
    "marks by the thousand": b"\x80\x04" + b"(" * 200_000 + b".",
    "a long memo": b"\x80\x04N" + b"\x94" * 200_000 + b".",
    "a tuple of a tuple, 500,000 times": _nested(500_000),
    "a key whose hash has 2**60 steps": b"\x80\x04)\x94"
    + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
    + b"}h\x3cNs.",
    "many opcodes that do nothing": b"\x80\x04" + b"N\x94h\x00\x85" * 100_000 + b".",
}
CLASSES: list[tuple[str, str, Callable[[], Any]]] = [
    ("pathlib.PurePosixPath", "_str", lambda: vars(PurePosixPath).get("_str")),
    ("pathlib.PosixPath", "_str", lambda: vars(PurePosixPath).get("_str")),
    (
        "torch.distributed.checkpoint.metadata.Metadata",
        "version",
        lambda: vars(Metadata).get("version"),
    ),
    (
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "__hash__",
        lambda: vars(MetadataIndex).get("__hash__"),
    ),
    ("torch.serialization._get_layout", "x", lambda: vars(torch.serialization._get_layout).copy()),
    ("collections.OrderedDict", "x", lambda: None),
    ("torch.float32", "x", lambda: None),
]


def _set(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata).update(fields)


def _chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["weight"] = _tensor(list(chunks), (10, 300))

    return change


def _alias(metadata: Metadata) -> None:
    first, second = list(metadata.storage_data)[:2]
    metadata.storage_data[first] = metadata.storage_data[second]


ALTERED_CHUNKS: dict[str, Callable[[Metadata], None]] = {
    "no chunk": _chunks(),
    "an empty chunk": _chunks(((0, 0), (0, 300))),
    "a chunk of fewer rows": _chunks(((0, 0), (9, 300))),
    "a chunk of fewer columns": _chunks(((0, 0), (10, 299))),
    "a chunk of more rows": _chunks(((0, 0), (11, 300))),
    "a chunk of fewer dimensions": _chunks(((0,), (10,))),
    "a chunk that lies elsewhere": _chunks(((1, 0), (10, 300))),
    "two chunks with a gap and an overlap": _chunks(((0, 0), (5, 300)), ((4, 0), (5, 300))),
    "two chunks that are one": _chunks(((0, 0), (5, 300)), ((0, 0), (5, 300))),
    "a larger tensor": lambda m: setattr(
        m.state_dict_metadata["weight"], "size", torch.Size((20, 300))
    ),
}

STOCK = {"a": torch.arange(3000.0).view(10, 300), "b": torch.ones(10, 300), "c": torch.zeros(300)}


def stock(first: str, second: str) -> Callable[[Place], Any]:
    """Stock's metadata, which no checksum covers, name the entry of one tensor for another's."""

    def attack(place: Place) -> Any:
        dcp.save(dict(STOCK), storage_writer=FileSystemWriter(place.url))
        path = Path(place.url, ".metadata")
        metadata = pickle.loads(path.read_bytes())
        entries = {index.fqn: index for index in metadata.storage_data}
        found = metadata.storage_data
        found[entries[first]] = found[entries[second]]
        if first == "c":  # so that nothing but the shape is wrong
            del found[entries[second]], metadata.state_dict_metadata[second]
        path.write_bytes(pickle.dumps(metadata))
        return load(place.reader(), {first: STOCK[first]})

    return attack


def flipped(make: type) -> Callable[[Place], Any]:
    """Bits of the metadata turned over, one at a time: those with which other values loaded."""

    def attack(place: Place) -> Any:
        state = {"w": torch.arange(12.0).view(3, 4), "s": torch.tensor(1.0), "lr": 0.5}
        dcp.save(dict(state), storage_writer=make(place.url))
        path = Path(place.url, ".metadata")
        data = bytearray(path.read_bytes())
        wrong = []
        for bit in range(0, 8 * len(data), 13):
            data[bit // 8] ^= 1 << bit % 8
            try:
                load_metadata(bytes(data), "x")
                path.write_bytes(data)
                assert_same(load(place.reader(), state), state)
            except AssertionError:
                wrong.append(bit)
            except (Exception, CheckpointException):
                pass
            data[bit // 8] ^= 1 << bit % 8
        return wrong

    return attack


REFUSED = Gives(("CorruptCheckpointError", True))
CASES = [
    Attack(
        "a call of os.system",
        attack=crafted(b"cos\nsystem\n(Vtrue\ntR."),
        must=Refused("os.system"),
    ),
    *(
        Attack(
            f"gadget: {name}",
            refused_quietly(data),
            Gives(("CorruptCheckpointError", True)),
            ("local",),
            60,
        )
        for name, data in GADGETS.items()
    ),
    *(
        Attack(f"BUILD on {name}", on_class(name, attribute, reader), Gives(True), ("local",))
        for name, attribute, reader in CLASSES
    ),
    *(
        Attack(f"{second} in place of {first}", stock(first, second), Refused(text), ("local",))
        for first, second, text in (("a", "b", "overlap"), ("c", "a", "c .*of sizes"))
    ),
    *(
        Attack(
            f"a flipped bit in the .metadata of {make.__name__}",
            flipped(make),
            Gives([]),
            ("local",),
            60,
        )
        for make in (FileSystemWriter, StreamingWriter)
    ),
    *(
        Attack(name, edited(change), Refused(r"weight.*(chunk|cover)"))
        for name, change in ALTERED_CHUNKS.items()
    ),
]
