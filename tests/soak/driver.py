"""Runs rounds, and keeps the account: what was struck, what was committed, what was lost."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import StreamingReader
from dcp_fsdp_osd.storage.location import join
from dcp_fsdp_osd.storage.session import make_session
from tests.ranks import RankError, RankPool
from tests.servers import EmbeddedS3, Fault, FaultProxy, fault_proxy, s3_server
from tests.soak import jobs
from tests.soak.growth import Used, grown, used
from tests.soak.jobs import Digest
from tests.soak.rounds import CLIENTS, KINDS, Round, Strike, draw_round
from tests.soak.striking import aimed, fallen

__all__ = ["Account", "Soak", "soak"]

TIMEOUT = 240.0
"""Seconds of one call on all ranks; who is not back by then hangs."""
GROUP_TIMEOUT = 100.0
"""Of a collective, seconds: a busy machine lets one rank wait for half a minute."""
_SAMPLE_EVERY = 5  # rounds


class Loss(Exception):
    """A committed checkpoint is not what was saved, or ranks do not agree on what happened."""


@dataclass
class Account:
    """What a soak did.

    Attributes:
        rounds: by kind.
        struck: rounds in which a fault fell, by kind; others came too late.
        faults: that fell, by kind.
        raised: rounds in which a call on all ranks ended with an error, as it may under a fault.
        committed, compared: checkpoints that were committed; loads that were compared bit by bit.
        losses, errors, hangs: of which seed and kind, and what was seen: states that are not what
            was saved; calls that raised with no fault; calls that did not end.
        samples: of each long-lived rank.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    committed: int = 0
    compared: int = 0
    losses: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    samples: dict[int, list[Used]] = field(default_factory=dict)
    seconds: float = 0.0

    def grown(self) -> list[str]:
        """What long-lived ranks did not let go of."""
        found = []
        for rank, samples in sorted(self.samples.items()):
            found += [f"rank {rank}: {text}" for text in grown(samples)]
            if len({each.pid for each in samples}) > 1:
                found.append(f"rank {rank}: a process was replaced; see losses and hangs")
        return found

    def problems(self) -> list[str]:
        return [*self.losses, *self.errors, *self.hangs, *self.grown()]

    def lines(self) -> Iterator[str]:
        yield (
            f"{sum(self.rounds.values())} rounds in {self.seconds:.0f} s; {self.committed} "
            f"checkpoints committed, {self.compared} loads compared bit by bit; "
            f"{len(self.losses)} losses, {len(self.errors)} other errors, {len(self.hangs)} hangs"
        )
        yield (
            f"faults that fell: {sum(self.faults.values())} in {sum(self.struck.values())} rounds, "
            f"{sum(self.raised.values())} of which raised"
        )
        for kind, count in sorted(self.rounds.items()):
            yield (
                f"  {kind}: {count} rounds, {self.struck[kind]} struck, "
                f"{self.faults[kind]} faults, {self.raised[kind]} raised"
            )
        for rank, samples in sorted(self.samples.items()):
            few = [samples[n * (len(samples) - 1) // 4] for n in range(5)]
            yield f"rank {rank} (pid {samples[-1].pid}), from begin to end: " + "; ".join(
                f"{each.resident >> 20} MiB, {each.files} files, {each.threads} threads"
                for each in few
            )
        for text in self.problems():
            yield f"PROBLEM: {text}"


@dataclass(frozen=True)
class _Kept:
    """A committed checkpoint: where, what it holds, and the seed of its round."""

    options: dict[str, Any]
    digest: Digest
    seed: int


class Soak:
    """Use :func:`soak`.

    Args:
        lasting: ranks that live for the whole soak; nothing that ends one happens to them.
        dying: ranks for what is killed.
    """

    def __init__(
        self,
        folder: Path,
        s3: EmbeddedS3,
        proxy: FaultProxy,
        *,
        world: int,
        lasting: RankPool,
        dying: RankPool,
        log: TextIO | None,
    ) -> None:
        self.account = Account()
        self.world = world
        self._folder, self._s3, self._proxy = folder, s3, proxy
        self._lasting, self._dying = lasting, dying
        self._log = log
        self._kept: dict[str, _Kept] = {}
        # Of the round under way.
        self._faults = 0
        self._raised = False

    @contextlib.contextmanager
    def apart(self, folder: Path) -> Iterator[Soak]:
        """Another soak on the same ranks and servers, with an account of its own."""
        yield Soak(
            folder,
            self._s3,
            self._proxy,
            world=self.world,
            lasting=self._lasting,
            dying=self._dying,
            log=None,
        )

    # ---- rounds ----

    def run(self, seed: int, kind: str | None = None) -> None:
        """One round; what goes wrong in it is put down, with the command that makes it again."""
        begin = time.monotonic()
        found = draw_round(seed, self.world, kind)
        account = self.account
        account.rounds[found.kind] += 1
        self._faults, self._raised = 0, False
        problem, noted = "", account.losses
        try:
            self._round(found)
        except RankError as error:
            problem = f"an error that should not be: {error}"
            noted = account.hangs if "Hung" in error.types.values() else account.errors
        except Loss as error:
            problem = str(error)
        finally:
            self._proxy.clear()
        if problem:
            again = (
                f"python -m tests.soak --replay {seed} --kind '{found.kind}' --world {self.world}"
            )
            noted.append(f"[{again}] {found.kind} on {found.place}, {found.job}: {problem}")
        if sum(account.rounds.values()) % _SAMPLE_EVERY == 0:
            self.sample()
        account.seconds += time.monotonic() - begin
        account.faults[found.kind] += self._faults
        account.struck[found.kind] += self._faults > 0
        account.raised[found.kind] += self._raised
        self._say(
            seed=seed,
            kind=found.kind,
            place=found.place,
            worlds=[found.job.source.world, found.job.target.world],
            seconds=round(time.monotonic() - begin, 2),
            faults=self._faults,
            raised=self._raised,
            committed=account.committed,
            compared=account.compared,
            problem=problem,
        )

    def warm_up(self) -> None:
        """All ranks use each store once, so that growth later is none of imports and clients."""
        places = sorted({name for _, names in KINDS.values() for name in names})
        every = [(place, *CLIENTS[0]) for place in places]
        every += [("s3 fsspec", *each) for each in CLIENTS[1:]]
        for number, (place, stall, concurrency) in enumerate(every):
            found = draw_round(-1 - number, self.world, "no fault")
            side = replace(found.job.source, world=self.world, strategy="FULL_SHARD", by="ours")
            job = replace(found.job, source=side, target=side, streaming=True)
            about = {**found.options, "max_inflight_bytes": 32 << 20}
            about |= {"stall_seconds": stall, "concurrency": concurrency}
            found = replace(found, job=job, place=place, statefuls=True, options=about)
            options = self._options(found)
            saved = self._save(found, options, calm=False)
            self._compare(found, saved[0][0], self._load(found, options, calm=False))

    def sample(self) -> None:
        """Note what the long-lived ranks hold."""
        for rank, found in enumerate(self._lasting.run(used, self.world, timeout=TIMEOUT)):
            self.account.samples.setdefault(rank, []).append(found)
        self._say(used=[vars(samples[-1]) for samples in self.account.samples.values()])

    def on_each_rank(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """A call on the long-lived ranks, beside the rounds."""
        return self._lasting.run(fn, self.world, *args, timeout=TIMEOUT)

    def check_all(self) -> None:
        """Each committed checkpoint that was not replaced loads bit by bit, once more."""
        for kept in self._kept.values():
            try:
                problem = _different(kept.digest, self._read(kept.options), whole=False)
            except (Exception, dcp.CheckpointException) as error:
                problem = f"{type(error).__name__}: {error}"
            self.account.compared += 1
            if problem:
                where = kept.options["url"]
                self.account.losses.append(f"at the end, {where} of seed {kept.seed}: {problem}")
        self._say(checked_at_the_end=len(self._kept))

    def _round(self, found: Round) -> None:
        options = self._options(found)
        kind = found.kind
        if kind.startswith("retention"):
            self._retention(found, options)
        elif kind == "killed process of async_save":
            self._process(found, options)
        elif kind in ("kill an overwrite", "kill a save"):
            self._killed_save(found, options)
        elif kind == "replaced while read":
            self._replaced(found, options)
        elif kind == "damaged file":
            self._damaged(found, options)
        elif found.wire:
            self._wired(found, options)
        elif kind.endswith("load"):
            self._struck_load(found, options)
        else:
            self._struck_save(found, options)

    def _struck_save(self, found: Round, options: dict[str, Any]) -> None:
        """A save under a fault works on all ranks or on none, and then works without."""
        again = {**options, "url": f"{options['url']}-again"}
        expected = self._save(found, again, counting=True)
        self._same(found, expected, again)
        found = self._aimed(found)
        results = self._may_raise(found, jobs.save, found, options, 0, found.strike)
        committed = self._committed(options)
        if results is not None and not committed:
            raise Loss("all ranks have saved, and there is no checkpoint")
        if committed:
            # What is committed although ranks raised must be all of it.
            self._same(found, expected, options)
        if results is None:
            self._same(found, self._save(found, options, overwrite=True), options)

    def _wired(self, found: Round, options: dict[str, Any]) -> None:
        """A save and a load under faults of the network: retried, or raised by all ranks."""
        again = {**options, "url": f"{options['url']}-again"}
        self._proxy.clear()
        expected = self._save(found, again)
        self._same(found, expected, again)
        counts = Counter(each.method for each in self._proxy.seen())
        counts[""] = sum(counts.values())
        for wire in found.wire:
            fault = getattr(Fault, wire.fault)(*wire.arguments)
            method = wire.method if counts[wire.method] else "PUT"
            skip = int(wire.at * counts[method])
            self._proxy.inject(fault, method=method, skip=skip, times=wire.times)
        saved = self._may_raise(found, jobs.save, found, options)
        committed = self._committed(options)
        if saved is not None and not committed:
            raise Loss("all ranks have saved, and there is no checkpoint")
        loaded = self._may_raise(found, jobs.load, found, options) if committed else None
        self._proxy.clear()
        self._compare(found, expected[0][0], loaded or [])
        if committed:
            self._same(found, expected, options)
        self._same(found, self._save(found, options, overwrite=True), options)

    def _struck_load(self, found: Round, options: dict[str, Any]) -> None:
        saved = self._save(found, options)
        self._compare(found, saved[0][0], self._load(found, options, counting=True))
        found = self._aimed(found)
        pool = self._dying if found.kind.startswith("kill") else self._lasting
        loaded = self._may_raise(found, jobs.load, found, options, found.strike, pool=pool)
        self._compare(found, saved[0][0], loaded or [])
        self._same(found, saved, options)

    def _killed_save(self, found: Round, options: dict[str, Any]) -> None:
        """Version 0 lies there, or nothing; version 1 is being saved when a rank is killed."""
        saved = self._save(found, options, counting=True)
        found = self._aimed(found)
        first, second = saved[0]
        overwrite = found.kind == "kill an overwrite"
        url = options["url"] if overwrite else f"{options['url']}-1"
        target = {**options, "url": url}
        results = self._may_raise(
            found, jobs.save, found, target, 1, found.strike, overwrite, pool=self._dying
        )
        committed = self._committed(target)
        if not committed and (overwrite or results is not None):
            raise Loss("no checkpoint, where there was one, or all ranks have saved it")
        if committed:
            loaded = self._load(found, target)
            either = [second] if results is not None or not overwrite else [first, second]
            self._compare(found, either, loaded)
        # What the dead left behind is in nobody's way.
        saved = self._save(found, target, overwrite=True)
        self._same(found, saved, target)
        if not overwrite:
            self._same(found, saved, options)

    def _replaced(self, found: Round, options: dict[str, Any]) -> None:
        """A slow load beside a save that replaces what it reads: one of the two, or an error."""
        world = found.job.source.world
        first, second = self._save(found, options)[0]
        failures: list[BaseException] = []

        def replace_it() -> None:
            try:
                self._dying.run(
                    jobs.save, world, found, options, 1, jobs.NOTHING, True, timeout=TIMEOUT
                )
            except BaseException as error:
                failures.append(error)

        saving = threading.Thread(target=replace_it)
        saving.start()
        self._faults = 1
        slow = self._noted(replace(found.strike, call=0))
        try:
            loaded = self._may_raise(found, jobs.load, found, options, slow)
        finally:
            saving.join()
        if failures:
            raise failures[0]
        if loaded:
            self._compare(found, [first, second], loaded)
        self._same(found, [[second]], options)

    def _damaged(self, found: Round, options: dict[str, Any]) -> None:
        """A bit, the end, or a whole file is gone: the load says so, or needed none of it."""
        saved = self._save(found, options)
        self._same(found, saved, options)
        copy = Path(f"{options['url']}-damaged")
        shutil.copytree(options["url"], copy)
        rng = random.Random(found.seed)
        path = rng.choice(sorted(each for each in copy.iterdir() if each.stat().st_size))
        how = rng.choice(("flip", "flip", "cut", "delete"))
        data = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: -rng.randint(1, min(100, len(data)))])
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        self._faults = 1
        loaded = self._may_raise(found, jobs.load, found, {**options, "url": str(copy)})
        if loaded:
            self._compare(found, saved[0][0], loaded)

    def _retention(self, found: Round, options: dict[str, Any]) -> None:
        """A managed run, resumed by another layout; under a fault it resumes from a whole step."""
        last, world = 7, found.job.source.world
        calm, count = _calm(found), self._noted(found.strike)
        clean = self._lasting.run(jobs.manage, world, calm, options, last, count, timeout=TIMEOUT)[
            0
        ]
        if clean["steps"] != [4, 6] or clean["failed"]:
            raise Loss(f"expected steps 4 and 6 to be kept, found {clean}")
        digests = clean["digests"]
        if found.strike.what:
            options = {**options, "url": f"{options['url']}-struck"}
            found = self._aimed(found)
            kills = found.kind.endswith("kill")
            results = self._may_raise(
                found,
                jobs.manage,
                found,
                options,
                last,
                found.strike,
                pool=self._dying if kills else self._lasting,
            )
            self._raised = results is None or any(each["failed"] for each in results)
            there = self._steps(options)
            for step in there:
                self._keep(
                    {**options, "url": join(options["url"], f"step-{step}")}, digests[step], found
                )
            # The same layout goes on as if nothing had been.
            resumed = self._lasting.run(jobs.manage, world, calm, options, last, timeout=TIMEOUT)[0]
            if resumed["restored"] != max(there, default=None):
                raise Loss(f"of steps {there}, {resumed['restored']} was restored")
            for step, digest in resumed["digests"].items():
                if problem := _different(digests[step], digest):
                    raise Loss(f"step {step} after {resumed['restored']}: {problem}")
            self.account.compared += 1
            for step in there:
                self._forget({**options, "url": join(options["url"], f"step-{step}")})
        there = self._steps(options)
        other = self._lasting.run(
            jobs.manage,
            found.job.target.world,
            calm,
            options,
            0,
            jobs.NOTHING,
            True,
            timeout=TIMEOUT,
        )
        for each in other:
            if each["restored"] != 6:
                raise Loss(f"of steps {there}, {each['restored']} was restored")
            self._compare(found, digests[6], [each["digests"][6]])
        for step in there:
            self._keep(
                {**options, "url": join(options["url"], f"step-{step}")}, digests[step], found
            )

    def _process(self, found: Round, options: dict[str, Any]) -> None:
        elsewhere = {**options, "url": f"{options['url']}-elsewhere"}
        found = Round(**{**vars(found), "statefuls": False})
        world = found.job.source.world
        saved = self._save(found, elsewhere)
        said = self._dying.run(
            jobs.save_by_process, world, found, options, found.strike.at, timeout=TIMEOUT
        )
        self._dying.close()  # torch keeps the dead process for good
        self._faults, self._raised = 1, any(said)
        loaded = self._load(found, options)
        self._compare(found, saved[0][:2] if any(said) else [saved[0][1]], loaded)

    # ---- what they have in common ----

    def _may_raise(
        self,
        found: Round,
        fn: Callable[..., Any],
        *args: Any,
        pool: RankPool | None = None,
    ) -> list[Any] | None:
        """Results of all ranks; None where all raised, or one was killed and others raised.

        Where no fault fell, an error is one that should not be.
        """
        died: list[int] = []
        try:
            return (pool or self._lasting).run(fn, self._world(found, fn), *args, timeout=TIMEOUT)
        except RankError as error:
            if "Hung" in error.types.values() or "AssertionError" in error.types.values():
                raise
            if len(error.failures) < error.world_size and found.strike.what != "kill":
                raise Loss(f"some ranks raised, others did not: {error}") from error
            died = [rank for rank, kind in error.types.items() if kind == "Died"]
            if died and (found.strike.what != "kill" or died != [found.strike.victim]):
                raise
            if not died and not self._fallen(found):
                raise
            self._raised = True
            return None
        finally:
            self._faults = max(self._faults, self._fallen(found), len(died))

    def _fallen(self, found: Round) -> int:
        fell = [each.fault for each in self._proxy.seen() if each.fault is not None]
        return max(self._faults, fallen(found.strike), len(fell))

    def _noted(self, strike: Strike) -> Strike:
        """With a place for what ranks have to say of it, where nothing is said yet."""
        note = self._folder / "notes" / str(sum(self.account.rounds.values()))
        note.parent.mkdir(exist_ok=True)
        return replace(strike, note=str(note))

    def _aimed(self, found: Round) -> Round:
        if not found.strike.what:
            return found
        return replace(found, strike=aimed(self._noted(found.strike), found.world))

    def _save(
        self,
        found: Round,
        options: dict[str, Any],
        *,
        overwrite: bool = False,
        counting: bool = False,
        calm: bool = True,
    ) -> list[list[Digest]]:
        """Version 0, with no fault."""
        found = _calm(found) if calm else found
        world = found.job.source.world
        strike = self._noted(found.strike) if counting else jobs.NOTHING
        args = (found, options, 0, strike, overwrite)
        return self._lasting.run(jobs.save, world, *args, timeout=TIMEOUT)

    def _load(
        self,
        found: Round,
        options: dict[str, Any],
        *,
        counting: bool = False,
        calm: bool = True,
    ) -> list[Digest]:
        found = _calm(found) if calm else found
        args = (found, options, self._noted(found.strike) if counting else jobs.NOTHING)
        return self._lasting.run(jobs.load, found.job.target.world, *args, timeout=TIMEOUT)

    def _world(self, found: Round, fn: Callable[..., Any]) -> int:
        side = found.job.target if fn is jobs.load else found.job.source
        return side.world

    def _same(self, found: Round, saved: list[list[Digest]], options: dict[str, Any]) -> None:
        """What was saved is loaded by the other side, and kept to be looked at again."""
        for each in saved[1:]:
            if problem := _different(saved[0][0], each[0]):
                raise Loss(f"ranks gathered different states: {problem}")
        loaded = self._load(found, options)
        self._compare(found, saved[0][0], loaded)
        self._keep(options, saved[0][0], found)

    def _compare(self, found: Round, expected: Digest | list[Digest], loaded: list[Digest]) -> None:
        """All ranks have the same one of what is expected."""
        either = [expected] if isinstance(expected, dict) else expected
        problems = []
        for version in either:
            different = (_different(version, each) for each in loaded)
            problem = next((text for text in different if text), "")
            if not problem:
                self.account.compared += len(loaded)
                return
            problems.append(problem)
        raise Loss("what was loaded is not what was saved: " + " | ".join(problems))

    def _keep(self, options: dict[str, Any], digest: Digest, found: Round) -> None:
        self.account.committed += 1
        self._kept[options["url"]] = _Kept(options, digest, found.seed)

    def _forget(self, options: dict[str, Any]) -> None:
        self._kept.pop(options["url"], None)

    def _options(self, found: Round) -> dict[str, Any]:
        """Where the round's checkpoint lies, for writer and reader."""
        name = f"{found.seed}-{found.kind.replace(' ', '-').replace(',', '')}"
        if found.place.startswith("s3"):
            obstore = found.place == "s3 obstore"
            s3 = self._proxy.s3
            return {
                "url": s3.url(f"soak/{name}"),
                "backend": "obstore" if obstore else "fsspec",
                "storage_options": s3.obstore_options if obstore else s3.storage_options,
            }
        options = {"url": str(self._folder / name)}
        return {**options, "backend": "fsspec"} if found.place.startswith("fsspec") else options

    def _behind(self, options: dict[str, Any]) -> dict[str, Any]:
        """The same place, without the proxy."""
        if "storage_options" not in options:
            return {"url": options["url"]}
        s3 = self._s3.obstore_options
        return {"url": options["url"], "backend": "obstore", "storage_options": s3}

    def _committed(self, options: dict[str, Any]) -> bool:
        behind = self._behind(options)
        session = make_session(behind.pop("url"), **behind)
        with contextlib.closing(session):
            try:
                return session.store.size(".metadata") > 0
            except FileNotFoundError:
                return False

    def _steps(self, options: dict[str, Any]) -> list[int]:
        behind = self._behind(options)
        session = make_session(behind.pop("url"), **behind)
        with contextlib.closing(session):
            return sorted(int(each.folder[5:]) for each in session.store.commits())

    def _read(self, options: dict[str, Any]) -> Digest:
        """All tensors of a checkpoint, read by this process by their keys."""
        behind = self._behind(options)
        reader = StreamingReader(behind.pop("url"), **behind)
        about = reader.read_metadata().state_dict_metadata
        state = {
            key: torch.zeros(each.size, dtype=each.properties.dtype)
            for key, each in about.items()
            if isinstance(each, dcp.metadata.TensorStorageMetadata)
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        return {key: jobs.state_digest(key, value) for key, value in state.items()}

    def _say(self, **what: Any) -> None:
        if self._log is not None:
            self._log.write(json.dumps(what) + "\n")
            self._log.flush()


def _calm(found: Round) -> Round:
    """The round with the patience of usual jobs: where nothing stalls, a busy machine may."""
    return replace(found, options={**found.options, "stall_seconds": 20.0})


def _different(expected: Digest, found: Digest, *, whole: bool = True) -> str:
    """In words; not `whole`: only tensors are compared, which have a key of their own."""
    keys = expected.keys() | found.keys() if whole else {*found}
    if not whole:
        keys |= {key for key in expected if not key.startswith("options.")}
    wrong = [key for key in sorted(keys) if expected.get(key) != found.get(key)]
    if not wrong:
        return ""
    key = wrong[0]
    return f"{len(wrong)} of {len(keys)} differ, {key}: {expected.get(key)} -> {found.get(key)}"


@contextlib.contextmanager
def soak(folder: Path, *, world: int, log: TextIO | None = None) -> Iterator[Soak]:
    """Servers and ranks for rounds; all of them end with the block."""
    lasting = RankPool(lasting=True, group_timeout=GROUP_TIMEOUT)
    dying = RankPool(group_timeout=GROUP_TIMEOUT)
    with s3_server(memory=4 << 30) as s3, fault_proxy(s3) as proxy:
        try:
            yield Soak(folder, s3, proxy, world=world, lasting=lasting, dying=dying, log=log)
        finally:
            lasting.close()
            dying.close()
