"""Kill -9 of a rank or of the server at random moments of save, overwrite and load.

Whatever the moment: the previous checkpoint loads bitwise, nothing half-written passes for a
checkpoint, and the survivors end within the stated limit, with an error unless all was done.  The
moments are seeded; a few run always, all the others with ``-m slow``.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.storage import latest
from tests.servers import EmbeddedS3, S3Endpoint, SeaweedS3, s3_server
from tests.storage.killable import (
    SURVIVORS_END_WITHIN,
    Crew,
    Outcome,
    Task,
    calibrate,
    check_version,
    load_alone,
    moments,
    state_of,
    writer,
)

pytestmark = pytest.mark.filterwarnings("ignore")

ACTIONS = ("save", "overwrite", "load")
#: Moments per place and action: always, and with -m slow.
FEW, MANY = 1, 6


class Scene:
    """A folder of checkpoints: step-1 is committed before every moment."""

    def __init__(self, root: str, options: dict[str, Any], clear: Callable[[], None]) -> None:
        self.root, self.options, self._clear = root, options, clear
        self._seconds: dict[str, float] = {}

    def task(self, kind: str, step: int, version: int, *, overwrite: bool = False) -> Task:
        url = f"{self.root}/step-{step}"
        return Task(kind, url, version, self.options, overwrite=overwrite)

    def of(self, action: str) -> Task:
        """The task of an action: version 1 lies at step-1, a save writes version 2."""
        if action == "load":
            return self.task("load", 1, 1)
        if action == "save":
            return self.task("save", 2, 2)
        return self.task("save", 1, 2, overwrite=True)

    def reset(self) -> None:
        """Only step-1, of version 1."""
        self._clear()
        save_alone(self.task("save", 1, 1))

    def seconds(self, action: str) -> float:
        """What the action takes undisturbed."""
        if action not in self._seconds:
            self.reset()
            self._seconds[action] = calibrate(self.of(action))
        return self._seconds[action]

    def faster(self, action: str) -> None:
        """A kill came too late: the machine was busier when the action was timed."""
        self._seconds[action] *= 0.7

    def latest(self) -> str | None:
        return latest(self.root, **self.options)


def save_alone(task: Task) -> None:
    """Save all ranks' state from this process."""
    dcp.save(state_of(task.version, None, task), storage_writer=writer(task), no_dist=True)


def version_at(task: Task) -> int | None:
    """The version that loads from ``task.url``, checked to the bit; None where loading raises."""
    try:
        state = load_alone(task)
    except CheckpointException:
        return None
    version = int(state["version"])
    check_version(state, version, task)
    return version


def check_after(scene: Scene, action: str, survivors: list[Outcome]) -> None:
    """What must hold after a kill during ``action``."""
    for outcome in survivors:
        assert outcome.report is not None, f"a survivor ended without a word: {outcome}"
        assert outcome.exitcode == 0
    done = all(outcome.report[0] == "done" for outcome in survivors if outcome.report)
    first = version_at(scene.task("load", 1, 1))
    if action == "overwrite":
        assert first in (1, 2), "neither the old nor the new checkpoint loads"
        if done:
            assert first == 2, "the survivors think that they saved version 2"
        assert scene.latest() == scene.task("load", 1, 1).url
    else:
        assert first == 1, "the previous checkpoint does not load"
    if action == "save":
        second = version_at(scene.task("load", 2, 2))
        assert second in (None, 2)
        if done:
            assert second == 2, "the survivors think that they saved it"
        expected = scene.of("save").url if second == 2 else scene.task("load", 1, 1).url
        assert scene.latest() == expected, "a half-written checkpoint was found, or a whole one not"
    # What the dead left behind is in nobody's way.
    again = scene.task("save", 2, 3, overwrite=True)
    save_alone(again)
    assert version_at(again) == 3
    assert version_at(scene.task("load", 1, 1)) == first


def kill_a_rank(scene: Scene, action: str, fraction: float, victim: int) -> bool:
    """One moment; whether the victim was killed in mid-action (else it had already ended)."""
    pause = scene.seconds(action) * fraction
    scene.reset()
    with Crew(scene.of(action)) as crew:
        crew.go()
        time.sleep(pause)
        crew.kill(victim)
        begin = time.monotonic()
        outcomes = crew.outcomes(SURVIVORS_END_WITHIN)
        took = time.monotonic() - begin
    assert took < SURVIVORS_END_WITHIN
    struck = outcomes[victim].exitcode == -signal.SIGKILL
    survivors = [o for rank, o in enumerate(outcomes) if rank != victim]
    check_after(scene, action, survivors)
    return struck


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("kill")

    def clear() -> None:
        for each in root.iterdir():
            shutil.rmtree(each)

    return Scene(str(root), {}, clear)


def scene_on(s3: S3Endpoint, backend: str) -> Scene:
    import boto3

    bucket = boto3.resource("s3", **s3.boto3_options).Bucket(s3.bucket)
    options = s3.obstore_options if backend == "obstore" else s3.storage_options
    return Scene(
        s3.url("kill"),
        {"backend": backend, "storage_options": options},
        lambda: bucket.objects.filter(Prefix="kill/").delete(),
    )


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedS3]:
    # A few ms a request, as a real server takes, so that there is a middle to be killed in.
    with s3_server(latency=0.005, memory=1 << 30) as s3:
        yield s3


@pytest.fixture(scope="module", params=["disk", "obstore", "fsspec"])
def scene(request: pytest.FixtureRequest) -> Scene:
    if request.param == "disk":
        return request.getfixturevalue("disk")
    return scene_on(request.getfixturevalue("embedded"), request.param)


@pytest.mark.each_value
@pytest.mark.parametrize("action", ACTIONS)
def test_kill_a_rank(scene: Scene, action: str) -> None:
    for fraction, victim in moments(f"{action}", FEW):
        kill_a_rank(scene, action, 0.1 + 0.7 * fraction, victim)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
def test_kill_a_rank_at_many_moments(scene: Scene, action: str) -> None:
    struck = 0
    for fraction, victim in moments(f"many-{action}", MANY):
        if kill_a_rank(scene, action, fraction, victim):
            struck += 1
        else:
            scene.faster(action)
    assert struck >= MANY // 3, "most kills came too late to tell anything"


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_multipart_upload_of_the_dead(embedded: EmbeddedS3, backend: str) -> None:
    """SIGKILL while parts are sent: the next save there, of other sizes, aborts the upload."""
    scene = scene_on(embedded, backend)
    url = f"{scene.root}/dead-{backend}"
    task = Task("save", url, 1, scene.options, kib=24 << 10, ranks=1)
    embedded.configure(bandwidth=4e6)
    try:
        with Crew(task) as crew:
            crew.go()
            end = time.monotonic() + 30
            while not (left := uploads_below(embedded, url)):
                assert time.monotonic() < end, "no multipart upload was begun"
                time.sleep(0.01)
            crew.kill(0)
            outcome = crew.outcomes(SURVIVORS_END_WITHIN)[0]
    finally:
        embedded.configure(latency=0.005)
    assert outcome.exitcode == -signal.SIGKILL and outcome.report is None
    assert uploads_below(embedded, url) >= left  # the server keeps it for ever
    assert version_at(task) is None
    again = dataclasses.replace(task, version=2, kib=64)
    save_alone(again)
    assert uploads_below(embedded, url) == set()
    assert version_at(again) == 2


def uploads_below(s3: S3Endpoint, url: str) -> set[str]:
    import boto3

    client = boto3.client("s3", **s3.boto3_options)
    prefix = url.partition(f"{s3.bucket}/")[2]
    found = client.list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix)
    return {each["UploadId"] for each in found.get("Uploads", ())}


def kill_the_server(weed: SeaweedS3, scene: Scene, action: str, fraction: float) -> None:
    pause = scene.seconds(action) * fraction
    scene.reset()
    with Crew(scene.of(action)) as crew:
        crew.go()
        time.sleep(pause)
        weed.kill()
        outcomes = crew.outcomes(SURVIVORS_END_WITHIN)
    weed.restart()
    check_after(scene, action, outcomes)


@pytest.mark.integration
@pytest.mark.parametrize("action", ["overwrite"])
def test_kill_the_server(weed: SeaweedS3, action: str) -> None:
    kill_the_server(weed, scene_on(weed, "obstore"), action, 0.5)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("action", ACTIONS)
def test_kill_the_server_at_many_moments(weed: SeaweedS3, action: str, backend: str) -> None:
    for fraction, _ in moments(f"server-{action}-{backend}", 2):
        kill_the_server(weed, scene_on(weed, backend), action, fraction)


def test_the_ranks_can_be_killed(tmp_path: Path) -> None:
    """The tools of this file: a rank killed at once has not saved, and the other one raises."""
    task = Task("save", str(tmp_path / "step"), 1)
    with Crew(task) as crew:
        crew.kill(1)
        crew.ranks[1].join()
        crew.go()
        outcomes = crew.outcomes(SURVIVORS_END_WITHIN)
    assert outcomes[1].exitcode == -signal.SIGKILL and outcomes[1].report is None
    assert outcomes[0].report is not None and outcomes[0].report[0] == "raised"
    assert version_at(task) is None
    assert torch.equal(state_of(3, 0, task)["version"], torch.tensor(3))
