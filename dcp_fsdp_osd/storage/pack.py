"""From the items of a save plan to the chunks of files: the save side's layout and its bytes.

The caller's thread walks a file's chunks with :func:`pack`; threads write them.  A chunk's pieces
are views of the tensors' own memory where that is contiguous CPU memory, else of scratch buffers
that hold one chunk's worth at a time.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from dcp_fsdp_osd.compat import object_bytes
from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.checksum import BlockHasher, Checksum
from dcp_fsdp_osd.storage.device import SideStreams
from dcp_fsdp_osd.storage.entry import Envelopes, block_size, tensor_header, tensor_trailer
from dcp_fsdp_osd.storage.memory import (
    DTYPE_NAMES,
    ScratchPool,
    is_plain,
    view_bytes,
)
from dcp_fsdp_osd.storage.metadata import (
    KIND_BYTES,
    KIND_OPAQUE,
    KIND_TENSOR,
    EntryInfo,
)
from dcp_fsdp_osd.storage.plain_objects import refused_names

__all__ = ["Chunk", "FilePlan", "item_bytes", "pack", "place_of", "plan_files"]

SMALL = 1 << 16
"""Items below this many bytes are laid side by side at the start of a rank's first file."""
TINY = 1 << 11
"""Items up to this many bytes lie before other small ones, which are up to 32 times as large: what
is read of thousands of files because of them is mostly asked for."""
_NUMBER = re.compile(r"\d+")
_JOIN = 1 << 12  # payloads up to this are copied: a thousand of them make one piece
_JOINED = 1 << 20  # bytes that are copied before they become a piece
_ENVELOPE = 800  # about what header and trailer take


@dataclass(frozen=True)
class FilePlan:
    """One file of a rank: its items in order, and about how many bytes they make."""

    name: str
    items: tuple[WriteItem, ...]
    nbytes: int


@dataclass
class Chunk:
    """Bytes of a file from `offset` on, and what has to outlive their writing.

    Attributes:
        charge: bytes taken from the budget for it.
        scratch: buffers to give back to the pool.
        keep: tensors whose memory `pieces` point into.
    """

    name: str
    offset: int
    pieces: list[memoryview] = field(default_factory=list)
    size: int = 0
    charge: int = 0
    scratch: list[torch.Tensor] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)


def item_bytes(item: WriteItem) -> int:
    """What the plan says of an item's size; 0 where it says nothing."""
    if item.tensor_data is not None:
        numel = math.prod(item.tensor_data.chunk.sizes)
        return numel * int(item.tensor_data.properties.dtype.itemsize)
    return object_bytes(item)


def place_of(key: str, nbytes: int, *, small: bool) -> tuple[bool, bool, str]:
    """What the items of a rank are sorted by.

    Tiny ones are first: a load that wants all scalars, or a rank's slivers of all norms, reads one
    range.  Other small ones follow by what they are, the same of each layer (keys but for their
    numbers): another layout's rank that holds the part of a unit where they lie wants that part of
    each unit.
    """
    if not small:
        return True, False, ""
    return False, nbytes > TINY, _NUMBER.sub("", key) if nbytes > TINY else ""


def plan_files(
    items: Sequence[WriteItem], *, prefix: str, save_id: str, files: int, least: int
) -> list[FilePlan]:
    """Spread `items` over at most `files` files of at least about `least` bytes.

    Small items come first, in the first file (see :func:`place_of`).  The others keep their order,
    cut where the bytes are even: neighbours in the plan (a flat tensor's boxes) stay neighbours on
    the disk, so that a load at another layout reads long ranges.
    """
    sizes = {id(item): item_bytes(item) for item in items}
    is_small = {
        id(item): item.type == WriteItemType.BYTE_IO or sizes[id(item)] < SMALL for item in items
    }
    ordered = sorted(
        items, key=lambda i: place_of(i.index.fqn, sizes[id(i)], small=is_small[id(i)])
    )
    total = sum(sizes.values()) + _ENVELOPE * len(items)
    count = max(1, min(files, total // max(least, 1)))
    groups: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    position = 0
    for item in ordered:
        size = sizes[id(item)] + _ENVELOPE
        # The file in which the item's middle falls when the files are cut evenly.
        index = 0 if is_small[id(item)] else min(count - 1, (position + size // 2) * count // total)
        groups[index].append(item)
        filled[index] += size
        position += size
    return [
        FilePlan(f"{prefix}{number}_{save_id}.distcp", tuple(group), nbytes)
        for number, (group, nbytes) in enumerate(zip(groups, filled, strict=True))
        if group
    ]


def pack(
    plan: FilePlan,
    planner: SavePlanner,
    *,
    part_size: int,
    copies: int,
    checksum: Checksum | None,
    scratch: ScratchPool,
    streams: SideStreams,
    reserve: Callable[[int], None],
    written: list[tuple[MetadataIndex, EntryInfo]],
) -> Iterator[Chunk]:
    """The file as chunks of exactly `part_size` bytes (a multiple of 64) but the last.

    Each item is resolved when its turn comes.  `reserve(n)` is called before n bytes of buffers
    are filled, and may wait; the consumer of a chunk gives its `charge` back.  An item's entry is
    appended to `written` when its last chunk has been yielded or is about to be.
    """
    packer = _Packer(plan.name, part_size, copies, reserve)
    envelopes = Envelopes(None if checksum is None else checksum.raw)
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            _check_loadable(item, data)
            if not is_plain(data):
                buffer = io.BytesIO()
                try:
                    torch.save(data, buffer)
                except Exception as error:
                    raise StorageError(
                        f"{item.index.fqn}: torch.save cannot write this {type(data).__name__}: "
                        f"{error}"
                    ) from error
                entry = yield from _pack_bytes(packer, buffer, KIND_OPAQUE, checksum)
            else:
                data = _with_memory(item, data.detach())
                _check_shape(item, data)
                if data.nbytes <= _JOIN and data.is_cpu and data.is_contiguous():
                    entry = _join_tensor(packer, data, checksum, envelopes)
                    if packer.joined >= _JOINED:
                        yield from packer.flush()
                else:
                    entry = yield from _pack_tensor(packer, data, checksum, scratch, streams)
        elif isinstance(data, io.BytesIO):
            refused = refused_names(data)
            if refused:
                warnings.warn(
                    f"{item.index.fqn}: a load will refuse this unless allow_pickle=True, because "
                    f"it names {', '.join(refused[:10])}; save numbers, text, tensors, NumPy "
                    "arrays and plain containers of them instead",
                    stacklevel=2,
                )
            entry = yield from _pack_bytes(packer, data, KIND_BYTES, checksum)
        else:
            raise StorageError(
                f"{item.index.fqn}: expected the planner to resolve a Tensor or a BytesIO, found "
                f"{type(data).__name__}"
            )
        del data
        written.append((item.index, entry))
    yield from packer.flush()
    if packer.chunk.size or packer.position == 0:
        yield packer.chunk


class _Packer:
    """The chunk being filled.  `add` yields it when it is full, and begins the next.

    `position` counts what was added, and `joined` bytes that wait for a `flush`.
    """

    def __init__(
        self, name: str, part_size: int, copies: int, reserve: Callable[[int], None]
    ) -> None:
        self.name = name
        self.part_size = part_size
        self._copies = copies
        self.reserve = reserve
        self.position = self.joined = 0
        self._small: list[bytes] = []
        self.chunk = self._begin()

    def _begin(self) -> Chunk:
        chunk = Chunk(self.name, self.position - self.joined)
        if self._copies:
            self.charge(chunk, self._copies * self.part_size)
        return chunk

    def charge(self, chunk: Chunk, count: int) -> None:
        self.reserve(count)
        chunk.charge += count

    @property
    def room(self) -> int:
        return self.part_size - self.chunk.size

    def join(self, *parts: bytes) -> None:
        """Add a few bytes, which become a piece with others."""
        size = sum(map(len, parts))
        self._small += parts
        self.joined += size
        self.position += size

    def flush(self) -> Iterator[Chunk]:
        """What was joined becomes a piece."""
        if self.joined:
            data = b"".join(self._small)
            self._small.clear()
            self.position -= self.joined
            self.joined = 0
            yield from self.add(data)

    def next_if_full(self) -> Iterator[Chunk]:
        if self.room == 0:
            yield self.chunk
            self.chunk = self._begin()

    def add(self, data: bytes | memoryview, keep: object = None) -> Iterator[Chunk]:
        yield from self.flush()
        view = memoryview(data)
        done = 0
        while done < len(view):
            yield from self.next_if_full()
            piece = view[done : done + self.room]
            self.chunk.pieces.append(piece)
            if keep is not None:
                self.chunk.keep.append(keep)
            self.chunk.size += len(piece)
            self.position += len(piece)
            done += len(piece)


def _pack_bytes(
    packer: _Packer, data: io.BytesIO, kind: int, checksum: Checksum | None
) -> Generator[Chunk, None, EntryInfo]:
    view = data.getbuffer()
    crc = checksum.extend(0, view) if checksum else None
    begin = packer.position
    if len(view) <= _JOIN:
        packer.join(bytes(view))
        if packer.joined >= _JOINED:
            yield from packer.flush()
    else:
        yield from packer.add(view, data)
    return EntryInfo(packer.name, begin, len(view), kind, crc)


def _join_tensor(
    packer: _Packer, tensor: torch.Tensor, checksum: Checksum | None, envelopes: Envelopes
) -> EntryInfo:
    dtype = DTYPE_NAMES[tensor.dtype]
    payload = bytes(view_bytes(tensor))
    begin = packer.position
    header, trailer = envelopes.around(dtype, tensor.shape, payload, begin)
    packer.join(header, payload, trailer)
    return EntryInfo(
        packer.name,
        begin,
        packer.position - begin,
        KIND_TENSOR,
        checksum.raw(trailer, 0) if checksum else None,
        len(header),
        len(payload),
        dtype,
    )


def _pack_tensor(
    packer: _Packer,
    tensor: torch.Tensor,
    checksum: Checksum | None,
    scratch: ScratchPool,
    streams: SideStreams,
) -> Generator[Chunk, None, EntryInfo]:
    dtype = DTYPE_NAMES[tensor.dtype]
    nbytes = tensor.nbytes
    begin = packer.position
    header = tensor_header(dtype, tensor.shape, nbytes, begin)
    hasher = BlockHasher(checksum, block_size(nbytes)) if checksum else None
    yield from packer.add(header)
    if tensor.is_cpu and tensor.is_contiguous():
        yield from _lend(packer, tensor, hasher)
    else:
        yield from _stage(packer, tensor, hasher, scratch, streams)
    table = None
    if checksum is not None and hasher is not None:
        table = [checksum.extend(0, header), *hasher.finish()]
    trailer = tensor_trailer(header, nbytes, table)
    yield from packer.add(trailer)
    return EntryInfo(
        name=packer.name,
        offset=begin,
        length=packer.position - begin,
        kind=KIND_TENSOR,
        crc=checksum.extend(0, trailer) if checksum else None,
        payload=len(header),
        nbytes=nbytes,
        dtype=dtype,
    )


def _lend(packer: _Packer, tensor: torch.Tensor, hasher: BlockHasher | None) -> Iterator[Chunk]:
    """The payload as views of the tensor's own memory, hashed a chunk at a time: the rest is hashed
    while that is written.
    """
    view = view_bytes(tensor)
    done = 0
    while done < len(view):
        yield from packer.next_if_full()
        piece = view[done : done + packer.room]
        if hasher:
            hasher.update(piece)
        yield from packer.add(piece, tensor)
        done += len(piece)


def _stage(
    packer: _Packer,
    tensor: torch.Tensor,
    hasher: BlockHasher | None,
    scratch: ScratchPool,
    streams: SideStreams,
) -> Iterator[Chunk]:
    """Row-major bytes of a tensor on another device, or with strides, through scratch buffers.

    What has come is hashed while the rest is copied, and written by threads meanwhile.

    The payload begins at a multiple of 64 in the file and chunks are multiples of 64, so no element
    is cut by the end of a chunk.
    """
    done, total = 0, tensor.numel()
    while done < total:
        yield from packer.next_if_full()
        count = min(total - done, packer.room // tensor.element_size())
        size = count * tensor.element_size()
        packer.charge(packer.chunk, size)
        buffer = scratch.take(size, tensor.device)
        packer.chunk.scratch.append(buffer)
        flat = buffer[:size].view(tensor.dtype)
        for part in streams.down(tensor, done, flat):
            if hasher:
                hasher.update(view_bytes(part))
        yield from packer.add(view_bytes(flat))
        done += count


def _check_loadable(item: WriteItem, tensor: torch.Tensor) -> None:
    problem = ""
    if tensor.device.type == "meta":
        problem = "it is on the meta device and has no values; materialize it,"
    elif tensor.layout != torch.strided:
        problem = f"its layout is {tensor.layout}, which no reader takes apart; save its parts,"
    if problem:
        raise StorageError(
            f"{item.index.fqn}: expected a tensor with strides and memory, found a tensor of shape "
            f"{tuple(tensor.shape)} that could not be loaded: {problem} or leave it out of the "
            "state dict"
        )


def _with_memory(item: WriteItem, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its values where autograd holds zeros without memory.

    Raises:
        StorageError: its memory was freed.
    """
    if tensor.numel() == 0:
        return tensor
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if found < needed:
        raise StorageError(
            f"{item.index.fqn}: a tensor of shape {tuple(tensor.shape)} needs {needed} bytes of "
            f"storage, found {found}: its memory was freed (FSDP frees that of unsharded "
            "parameters between uses). Save the sharded state, or inside of summon_full_params."
        )
    if tensor.is_cpu and tensor.data_ptr() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor


def _check_shape(item: WriteItem, tensor: torch.Tensor) -> None:
    expected = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
    if expected is not None and math.prod(expected) != tensor.numel():
        raise StorageError(
            f"{item.index.fqn} at {item.index.offset}: the plan says shape {tuple(expected)}, the "
            f"planner resolved {tuple(tensor.shape)}; the state changed between plan and write"
        )
