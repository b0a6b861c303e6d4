"""Whether a checkpoint is whole: every file, every byte of it, every checksum, every element.

Nothing is loaded, and nothing is unpickled.  Entries of ours are checked against the checksums in
trailer and metadata, which cover each byte.  Those of stock DCP have none; but ``torch.save`` puts
the CRC-32 of each record into its zip, which ``torch.load`` does not look at, and this does.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_fsdp_osd.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsdp_osd.storage.checksum import BlockHasher, Checksum, checksum_named
from dcp_fsdp_osd.storage.entry import END, LOCAL, block_size, unpack_table
from dcp_fsdp_osd.storage.foreign import HEAD_BYTES, TAIL_BYTES
from dcp_fsdp_osd.storage.metadata import MAX_METADATA_BYTES, load_metadata, metadata_name
from dcp_fsdp_osd.storage.places import KIND_TENSOR, EntryInfo, Places, entry_info
from dcp_fsdp_osd.storage.session import make_session
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.unpack import Index, foreign_entry, tensor_entry
from dcp_fsdp_osd.tools.describe import entry_infos
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress

__all__ = ["Problem", "Verdict", "check_checkpoint"]

_PIECE = 8 << 20
_POLL = 0.2  # seconds
_Entry = tuple[MetadataIndex, EntryInfo]


@dataclass(frozen=True, order=True)
class Problem:
    """Something that is wrong.

    Attributes:
        file: that it is in, relative to the checkpoint.
        key: the entry of the state dict that it damages; ``""`` for none, or for many.
        what: in words.
    """

    file: str
    key: str
    what: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.key, self.what)))


@dataclass
class Verdict:
    """What was found.

    Attributes:
        url: fit to be shown.
        problems: what is wrong; none means that every byte is as it was written, as far as
            `checked`, `zipped` and `unchecked` go.
        orphans: files that belong to no entry, by name, with their bytes.
        files, entries, tensors, nbytes: how many were looked at.
        checked: entries whose bytes are all covered by checksums of ours.
        zipped: entries whose records were compared with their zip's CRC-32.
        unchecked: entries with neither; their bytes were read, and compared with nothing.
    """

    url: str
    problems: list[Problem] = field(default_factory=list)
    orphans: dict[str, int] = field(default_factory=dict)
    files: int = 0
    entries: int = 0
    tensors: int = 0
    nbytes: int = 0
    checksum: str | None = None
    checked: int = 0
    zipped: int = 0
    unchecked: int = 0

    @property
    def whole(self) -> bool:
        """Nothing is wrong; there may be orphans."""
        return not self.problems


def check_checkpoint(
    path_or_url: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Verdict:
    """Read all of a checkpoint, and tell what is wrong with it.

    Raises:
        StorageError: there is no checkpoint, or storage fails; damage raises nothing.
    """
    options: dict[str, Any] = {"backend": backend, "storage_options": storage_options}
    try:
        checkpoint = Checkpoint(path_or_url, **options)
        entries = entry_infos(checkpoint)
    except (CorruptCheckpointError, UnsafeCheckpointError) as error:
        url = make_session(path_or_url, **options).url
        text = str(error).removeprefix(f"{url}/{metadata_name()}: ")
        return Verdict(url, [Problem(metadata_name(), "", text)])
    with checkpoint:
        return _Check(checkpoint, entries, progress).run()


class _Check:
    def __init__(self, checkpoint: Checkpoint, entries: list[_Entry], progress: Progress) -> None:
        self._checkpoint, self._entries, self._progress = checkpoint, entries, progress
        self._index = Index(checkpoint.metadata)
        self._verdict = Verdict(
            checkpoint.url,
            entries=len(entries),
            tensors=len(checkpoint.tensors),
            checksum=checkpoint.checksum,
        )
        name = checkpoint.checksum
        self._checksum: Checksum | None = None if name is None else checksum_named(name)
        self._done = 0

    def run(self) -> Verdict:
        verdict = self._verdict
        verdict.problems += _uncovered(self._checkpoint.metadata)
        verdict.problems += self._index_problems()
        sizes = self._checkpoint.sizes()
        by_file: dict[str, list[_Entry]] = {}
        for entry in self._entries:
            by_file.setdefault(entry[1].name, []).append(entry)
        readable = []
        for name, entries in sorted(by_file.items()):
            entries.sort(key=lambda each: (each[1].offset, each[1].length))
            readable += self._account(name, entries, self._size(name, sizes))
        verdict.files = len(by_file)
        verdict.orphans = {
            name: size
            for name, size in sorted(sizes.items())
            if name not in by_file and name != metadata_name()
        }
        self._read(readable)
        verdict.problems.sort()
        return verdict

    def _index_problems(self) -> Iterable[Problem]:
        """Where what we read of large metadata is not what others read, which is all of them."""
        found = self._checkpoint.metadata
        if not isinstance(found.storage_data, Places):
            return
        name, store = metadata_name(), self._checkpoint.session.store
        size = self._checkpoint.call(lambda: store.size(name), f"size of {name}")
        data = self._checkpoint.call(
            lambda: store.read(name, MAX_METADATA_BYTES), f"read {name}", nbytes=size
        )
        try:
            whole = load_metadata(data, name)
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            yield Problem(name, "", str(error).removeprefix(f"{name}: "))
            return
        names: set[str] = set()
        entries = {i: entry_info(each, i.fqn, names) for i, each in whole.storage_data.items()}
        for what, same in (
            ("tensors", dict(found.state_dict_metadata) == whole.state_dict_metadata),
            ("entries", dict(self._entries) == entries),
            ("planner data", found.planner_data == whole.planner_data),
        ):
            if not same:
                yield Problem(name, "", f"its index names other {what} than its pickle")

    def _size(self, name: str, sizes: Mapping[str, int]) -> int | None:
        if name in sizes or "/" not in name:
            return sizes.get(name)
        try:
            return self._checkpoint.call(
                lambda: self._checkpoint.session.store.size(name), f"size of {name}"
            )
        except FileNotFoundError:
            return None

    def _account(self, name: str, entries: list[_Entry], size: int | None) -> list[_Entry]:
        """Each byte of a file is one entry's; those of its entries that can be read."""
        problems = self._verdict.problems
        first = entries[0][0].fqn
        others = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
        if size is None:
            problems.append(Problem(name, "", f"the file is missing, with {first}{others}"))
            return []
        end = 0
        for index, info in entries:
            if info.offset > end:
                what = f"{info.offset - end} bytes at {end} belong to no entry"
                problems.append(Problem(name, "", what))
            elif info.offset < end:
                what = f"its entry at byte {info.offset} overlaps the one before it"
                problems.append(Problem(name, index.fqn, what))
            end = max(end, info.offset + info.length)
        if end < size:
            problems.append(Problem(name, "", f"{size - end} bytes at {end} belong to no entry"))
        kept = [each for each in entries if each[1].offset + each[1].length <= size]
        lost = [each for each in entries if each[1].offset + each[1].length > size]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            what = f"cut off: expected {end} bytes, found {size}; lost: {lost[0][0].fqn}{more}"
            problems.append(Problem(name, "", what))
        return kept

    # ---- bytes ----

    def _read(self, entries: list[_Entry]) -> None:
        total = sum(info.length for _, info in entries)
        threads = self._checkpoint.session.config.concurrency
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp_fsdp_osd_check") as pool:
            todo = {pool.submit(self._check_batch, batch) for batch in _batches(entries)}
            try:
                while todo:
                    done, todo = wait(todo, timeout=_POLL)
                    for future in done:
                        future.result()
                    self._progress(self._done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self._verdict.nbytes = self._done

    def _check_batch(self, batch: list[_Entry]) -> None:
        """On a thread of the pool: one large entry, or small ones side by side."""
        name, begin = batch[0][1].name, batch[0][1].offset
        end = batch[-1][1].offset + batch[-1][1].length
        held: memoryview | None = None
        if end - begin <= _PIECE:
            held = self._fetch(name, begin, end - begin)
        for index, info in batch:
            if held is None:

                def read(at: int, size: int, info: EntryInfo = info) -> memoryview:
                    return self._fetch(info.name, info.offset + at, size)

            else:
                own = held[info.offset - begin : info.offset - begin + info.length]

                def read(at: int, size: int, own: memoryview = own) -> memoryview:  # type: ignore[misc]
                    return own[at : at + size]

            try:
                self._check_entry(index, info, read)
            except (CorruptCheckpointError, zipfile.BadZipFile, EOFError) as error:
                text = str(error).removeprefix(f"{info.name}: ").removeprefix(f"{index.fqn}: ")
                self._verdict.problems.append(Problem(info.name, index.fqn, text))
            self._done += info.length

    def _fetch(self, name: str, at: int, size: int) -> memoryview:
        data = bytearray(size)
        if size:
            self._checkpoint.call(
                lambda: self._checkpoint.session.store.read_into(name, at, [memoryview(data)]),
                f"read {name} bytes {at} to {at + size}",
                nbytes=size,
            )
        return memoryview(data)

    def _check_entry(self, index: MetadataIndex, info: EntryInfo, read: _Read) -> None:
        verdict = self._verdict
        if info.kind == KIND_TENSOR:
            tensor_entry(0, info, index, self._index, verify=True)
        if info.kind is None or info.crc is None or self._checksum is None:
            if info.kind is None:
                self._check_foreign(index, info, read)
            if _check_zip(info, read):
                verdict.zipped += 1
            else:
                verdict.unchecked += 1
            return
        if info.kind == KIND_TENSOR:
            _check_tensor(info, read, self._checksum)
        else:
            crc = 0
            for at in range(0, info.length, _PIECE):
                crc = self._checksum.extend(crc, read(at, min(_PIECE, info.length - at)))
            _compare("bytes", info.crc, crc)
        verdict.checked += 1

    def _check_foreign(self, index: MetadataIndex, info: EntryInfo, read: _Read) -> None:
        """What it says that it holds is what the metadata say."""
        if isinstance(
            self._checkpoint.metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata
        ):
            head = bytes(read(0, min(HEAD_BYTES, info.length)))
            tail = min(TAIL_BYTES, info.length)
            ends = head, bytes(read(info.length - tail, tail))
            foreign_entry(0, info, index, self._index, ends)


_Read = Callable[[int, int], memoryview]


def _batches(entries: Iterable[_Entry]) -> Iterable[list[_Entry]]:
    """Neighbours in a file, of about one piece together; larger entries by themselves."""
    batch: list[_Entry] = []
    for entry in entries:
        info = entry[1]
        if batch:
            first, last = batch[0][1], batch[-1][1]
            near = info.name == first.name and last.offset + last.length == info.offset
            if not near or info.offset + info.length - first.offset > _PIECE:
                yield batch
                batch = []
        batch.append(entry)
    if batch:
        yield batch


def _check_tensor(info: EntryInfo, read: _Read, checksum: Checksum) -> None:
    end = info.payload + info.nbytes
    trailer = bytes(read(end, info.length - end))
    _compare("trailer", info.crc or 0, checksum.extend(0, trailer))
    table = unpack_table(trailer, info.nbytes)
    _compare("header", table[0], checksum.extend(0, read(0, info.payload)))
    block = block_size(info.nbytes)
    hasher = BlockHasher(checksum, block)
    for at in range(info.payload, end, _PIECE):
        hasher.update(read(at, min(_PIECE, end - at)))
    wrong = [
        number
        for number, (expected, found) in enumerate(zip(table[1:], hasher.finish(), strict=True))
        if expected != found
    ]
    if wrong:
        places = ", ".join(
            f"{number * block} to {min((number + 1) * block, info.nbytes)}" for number in wrong[:3]
        )
        more = f" and {len(wrong) - 3} more blocks" if len(wrong) > 3 else ""
        raise CorruptCheckpointError(
            f"checksum mismatch in payload bytes {places}{more} of {info.nbytes} (entry at byte "
            f"{info.offset})"
        )


def _compare(part: str, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptCheckpointError(
            f"checksum mismatch in the {part}: expected {expected:08x}, found {found:08x}"
        )


class _Window(io.RawIOBase):
    """An entry as a file of its own."""

    def __init__(self, length: int, read: _Read) -> None:
        super().__init__()
        self._length, self._read, self._at = length, read, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        size = max(min(len(view), self._length - self._at), 0)
        view[:size] = self._read(self._at, size)
        self._at += size
        return size


def _check_zip(info: EntryInfo, read: _Read) -> bool:
    """Compare the CRC-32 of the records of what ``torch.save`` wrote; whether all had one.

    Where torch was told to compute none (``set_crc32_options``) they are 0, and so is that of the
    payload of an entry of ours.

    Raises:
        CorruptCheckpointError: they differ, or the zip is damaged.
    """
    tail = bytes(read(max(info.length - TAIL_BYTES, 0), min(TAIL_BYTES, info.length)))
    if bytes(read(0, min(4, info.length))) != LOCAL and END not in tail:
        for at in range(0, info.length, _PIECE):
            read(at, min(_PIECE, info.length - at))
        return False  # no zip: bytes of another planner's, or of torch before 1.6
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(info.length, read), 1 << 20)) as archive:
            records = archive.infolist()
            known = [record for record in records if record.CRC]
            for record in known:
                with archive.open(record) as stream:
                    while stream.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptCheckpointError(
            f"the zip of its entry at byte {info.offset} is damaged: {error}"
        ) from error
    return all(record.CRC or not record.file_size for record in records)


def _uncovered(metadata: Metadata) -> Iterable[Problem]:
    """Chunks without an entry, and entries without a chunk.  (That chunks fill each tensor without
    gap or overlap is checked whenever metadata are read.)
    """
    chunks: dict[str, set[tuple[int, ...] | None]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            chunks[key] = {tuple(map(int, chunk.offsets)) for chunk in stored.chunks}
        else:
            chunks[key] = {None}
    held: dict[str, set[tuple[int, ...] | None]] = {}
    for index in metadata.storage_data:
        offset = None if index.offset is None else tuple(map(int, index.offset))
        held.setdefault(index.fqn, set()).add(offset)
    for key in sorted({*chunks, *held}):
        there, wanted = held.get(key, set()), chunks.get(key, set())
        if None in there and len(wanted) == 1:
            there = (there - {None}) | wanted  # the one entry there is
        for offset in wanted - there:
            at = "" if offset is None else f" at {offset}"
            yield Problem(metadata_name(), key, f"no entry holds what is{at} in it")
        for offset in there - wanted:
            at = "" if offset is None else f" at {offset}"
            yield Problem(metadata_name(), key, f"an entry{at}, of which the metadata say nothing")
