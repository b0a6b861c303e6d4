"""One folder of checkpoints for all tests of the tools; they copy what they change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import EmbeddedS3, s3_server
from tests.tools.made import save, state


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ours`` and ``stock``, of the same state."""
    folder = tmp_path_factory.mktemp("run")
    for kind in ("ours", "stock"):
        save(state(), folder / kind, kind)
    return folder


@pytest.fixture(scope="package")
def s3() -> Iterator[EmbeddedS3]:
    with s3_server(memory=256 << 20) as server:
        yield server
