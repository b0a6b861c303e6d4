"""Copies committed checkpoints from one place to another, each rank a share of the files."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from functools import partial

from dcp_fsdp_osd.manager.group import Group
from dcp_fsdp_osd.manager.steps import Retention, Steps
from dcp_fsdp_osd.storage.commit import Committer
from dcp_fsdp_osd.storage.level import Level
from dcp_fsdp_osd.storage.metadata import MAX_METADATA_BYTES, metadata_name
from dcp_fsdp_osd.storage.session import LONG, SYNCED, Session
from dcp_fsdp_osd.storage.store import Upload
from dcp_fsdp_osd.storage.transfer import InOrder, Pool, Stats

__all__ = ["copy_up", "shares"]

_THREADS = 4
_PART = 8 << 20

_Listing = list[tuple[int, dict[str, int]]]


def copy_up(near: Steps, far: Steps, newest: int, retention: Retention, group: Group) -> None:
    """Copy the checkpoint of step `newest`, and those before it that `far` lacks and would keep.

    Collective; every rank must see the files of `near`.  Data files go first, then, when all ranks
    are done, the metadata, in one atomic step.  A rank holds :data:`_THREADS` parts of 8 MiB at a
    time (more where the storage takes larger parts alone).

    Raises:
        StorageError: on every rank; of the checkpoint that failed nothing is left at `far`.
    """
    for step, files in group.from_first(
        "list what to copy", lambda: _to_copy(near, far, newest, retention)
    ):
        with (
            contextlib.closing(near.session(step)) as source,
            contextlib.closing(far.session(step)) as target,
        ):
            _copy(source, target, step, files, group)
        far.damaged.discard(step)


def _to_copy(near: Steps, far: Steps, newest: int, retention: Retention) -> _Listing:
    """Steps, the newest first, and the data files (with sizes) of each."""
    there = set(far.committed())
    here = [step for step in near.committed() if step <= newest and step not in near.damaged]
    old = set(retention.obsolete(there.union(here), newest, far.damaged))
    wanted = [step for step in here if step == newest or step not in there | old]
    found: _Listing = []
    for step in sorted(wanted, reverse=True):
        with contextlib.closing(near.session(step)) as session:
            sizes = session.call(session.store.sizes, "list", Stats(), patience=LONG)
        found.append((step, {n: size for n, size in sizes.items() if n.endswith(".distcp")}))
    return found


def shares(files: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    """`files` (name -> bytes), to each rank about as many bytes; the same wherever it is called."""
    found: list[dict[str, int]] = [{} for _ in range(ranks)]
    loads = [0] * ranks
    for name, size in sorted(files.items(), key=lambda each: (-each[1], each[0])):
        rank = loads.index(min(loads))
        found[rank][name] = size
        loads[rank] += size
    return found


def _copy(
    source: Session, target: Session, step: int, files: Mapping[str, int], group: Group
) -> None:
    source.rank = target.rank = group.rank
    own = shares(files, group.size)[group.rank]
    committer = Committer(target, Stats(), rank=None, overwrite=True)
    problem = None
    try:
        if group.rank == 0:
            committer.check_free()
        _remove_earlier(target, committer, own)
        _copy_files(source, target, own)
    except Exception as error:
        problem = target.portable(error)
    try:
        group.agree(f"{target.url}: copy", step, problem, False)
    except BaseException:
        committer.quietly("remove the failed copy", lambda: committer.remove(own))
        raise

    def commit() -> None:
        name, store = metadata_name(), source.store
        size = source.call(lambda: store.size(name), "size", Stats())
        data = source.call(
            lambda: store.read(name, MAX_METADATA_BYTES), f"read {name}", Stats(), nbytes=size
        )
        committer.publish(data, files)

    group.from_first(f"commit the copy at {target.url}", commit)


def _remove_earlier(target: Session, committer: Committer, names: Collection[str]) -> None:
    """Files of a copy that was killed have the names of this one's, and so have its uploads."""
    committer.remove(names)
    with contextlib.suppress(Exception):  # not everybody may list uploads
        for name, upload in target.call(target.store.uploads, "list uploads", Stats()):
            if name in names:
                abort = partial(target.store.abort_upload, name, upload)
                target.call(abort, f"abort an upload of {name}", Stats())


def _copy_files(source: Session, target: Session, files: Mapping[str, int]) -> None:
    limits = target.store.limits
    uploads: dict[str, Upload] = {}
    stats = Stats()
    pool = Pool(
        Level(_THREADS), stall=target.config.stall_seconds, what=f"{target.url}: copy", stats=stats
    )

    def move(name: str, gate: InOrder, offset: int, count: int) -> None:
        """One part, in a thread of the pool."""
        data = memoryview(bytearray(count))
        read = partial(source.store.read_into, name, offset, [data])
        source.retried(read, f"read {name}", stats, pool.stopped)
        with gate.turn(offset, count):
            write = partial(uploads[name].write, offset, [data])
            target.retried(write, f"write {name} at {offset}", stats, pool.stopped)

    try:
        with pool:
            for name, size in files.items():
                part = max(_PART, limits.min_part, -(-size // limits.max_parts))
                create = partial(target.store.create, name, part, _THREADS)
                uploads[name] = target.call(create, f"create {name}", stats)
                gate = InOrder(pool.stopped, needed=limits.order in ("queue", "stream"))
                for offset in range(0, size, part):
                    while pool.full:
                        pool.poll(block=True)
                    one = partial(move, name, gate, offset, min(part, size - offset))
                    pool.submit(one, patience=limits.patience_for(part))
            pool.drain()
            for name, size in files.items():
                complete = partial(uploads[name].complete, size)
                call = partial(target.retried, complete, f"complete {name}", stats, pool.stopped)
                pool.submit(call, patience=SYNCED)
            pool.drain()
    except BaseException:

        def abort() -> None:
            for upload in uploads.values():
                with contextlib.suppress(Exception):
                    upload.abort()

        with contextlib.suppress(Exception):
            target.call(abort, "abort uploads", Stats())
        raise
