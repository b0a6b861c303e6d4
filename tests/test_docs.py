"""Documentation: it is built without a warning, and what its pages show is run (tests/pages.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_fsdp_osd
from tests.pages import ROOT, Failure, blocks_of, run_page
from tests.ranks import RankError
from tests.servers import S3Endpoint, s3_server
from tests.torch_gaps import PICKLES_SHORTLY, lacks

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
NOT_RUN: dict[str, list[str]] = {
    "docs/trainers/accelerate.md": [
        "importing accelerate takes each rank seconds; tests/trainers/test_accelerate.py runs this "
        "code"
    ],
    "docs/trainers/composer.md": [
        "Composer 0.32 needs torch 2.6 or 2.7.0; it was run by hand, see below"
    ],
    "docs/trainers/hf_trainer.md": [
        "importing transformers takes each rank many seconds; it was run by hand, see below"
    ],
    "docs/trainers/lightning.md": [
        "importing Lightning takes each rank four seconds; tests/trainers/test_lightning.py runs "
        "this code"
    ],
    "docs/trainers/torchtitan.md": [
        "torchtitan's pins (fsspec) exclude those of the tests; tests/trainers/test_torchtitan.py "
        "runs this code where it is installed"
    ],
}
"""The blocks that are not run, by page: their reasons, as the pages give them."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Endpoint]:
    with s3_server(memory=512 << 20) as server:
        yield server


_SHOWS_SIZES = lacks(PICKLES_SHORTLY, "objects of the sizes that the page shows")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[
                *[_SHOWS_SIZES] * page.startswith("docs/tools"),
                *[pytest.mark.slow] * (page == "docs/tools_output.md"),  # many a checkpoint
            ],
        )
        for page in PAGES
    ],
)
def test_what_a_page_shows_is_so(page: str, tmp_path: Path, s3: S3Endpoint) -> None:
    run_page(ROOT / page, tmp_path, s3, page)


@pytest.mark.slow  # torchrun twice; elsewhere ranks that are there already run it
def test_the_readme_under_torchrun(tmp_path: Path, s3: S3Endpoint) -> None:
    run_page(ROOT / "README.md", tmp_path, s3, torchrun=True)


def test_the_example_of_the_readme_is_in_the_examples() -> None:
    (shown,) = [block for block in blocks_of(ROOT / "README.md") if block.mark == "file"]
    text = (ROOT / "examples/minimal.py").read_text()
    assert text.partition('"""\n\n')[2] == shown.text


def test_every_public_name_is_in_the_api() -> None:
    text = (ROOT / "docs/api.md").read_text()
    shown = re.findall(r"^::: dcp_fsdp_osd\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted([*dcp_fsdp_osd.__all__, "tools"])


def test_what_is_not_run_is_known() -> None:
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block in blocks_of(ROOT / page, page):
            if block.mark == "not run":
                found.setdefault(page, []).append(block.note)
    assert found == NOT_RUN


def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = [*tmp_path.rglob("*.html")]
    assert len(built) > 10
    fetched = re.compile(
        r"<(?:script|img|link rel=\"(?:stylesheet|preconnect|icon)\")[^>]*https?:[^>]*"
    )
    assert fetched.search('<script src="https://cdn.example/x.js">')
    assert [(page.name, each) for page in built for each in fetched.findall(page.read_text())] == []


_BROKEN = {
    "raises": ("```python\nx = 1 // 0\n```", "ZeroDivisionError"),
    "one rank raises": (
        "```python\nimport torch.distributed as dist\nassert dist.get_rank() == 0, 'not 0'\n```",
        "not 0",
    ),
    "hidden set-up raises": ("<!-- setup\nraise OSError('x')\n-->", "OSError"),
    "another output": (
        "```python\nprint('a')\n```\n<!-- output -->\n```text\nb\n```",
        "expected\nb\n\nfound\na",
    ),
    "another output of a command": ("```console\n$ dcp-osd ls .\nname\n```", "found"),
    "no such option": ("```bash\ndcp-osd ls . --nothing\n```", "status 2"),
    "no such checkpoint": ("```bash\ndcp-osd show nowhere\n```", "status 2"),
    "no such target": ("```bash\nmake nothing\n```", "nothing"),
    "no such module": ("```bash\npython -m benchmarks.no_such\n```", "there is no"),
    "no such benchmark option": ("```bash\npython -m benchmarks.storage --no\n```", "no option"),
    "no such extra": ("```bash\npip install 'dcp-fsdp-osd[no]'\n```", "no extra"),
    "no such package": ("```bash\npip install nothing-at-all\n```", "constraints.txt"),
    "unknown command": ("```bash\nrm -rf x\n```", "no command that can be checked"),
    "no language": ("```\nx\n```", "found ''"),
    "not closed": ("```python\nx\n", "not closed"),
    "indented": ("text\n\n    x = 1\n", "indented"),
    "no reason": ("<!-- not run -->\n```python\nx\n```", "of what"),
    "comment above no fence": ("<!-- output -->\ntext", "expected a fence"),
    "a program that fails": (
        "<!-- file: a.py -->\n```python\nraise SystemExit(3)\n```\n```bash\ntorchrun a.py\n```",
        "exit status 3",
    ),
    "a program that raises": (
        "<!-- file: a.py -->\n```python\n1 // 0\n```\n```bash\ntorchrun a.py\n```",
        "ZeroDivisionError",
    ),
    "no such program": ("```bash\ntorchrun nothing.py\n```", "no command that can be checked"),
    "no such option of torchrun": ("```bash\ntorchrun --no a.py\n```", "--no"),
}  # fmt: skip


@pytest.mark.parametrize("how", _BROKEN)
def test_a_broken_page_fails(how: str, tmp_path: Path, s3: S3Endpoint) -> None:
    text, message = _BROKEN[how]
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    with pytest.raises((Failure, RankError), match=re.escape(message)) as caught:
        run_page(page, tmp_path, s3)
    assert "page.md" in str(caught.value)


def test_the_rest_of_a_good_page_runs(tmp_path: Path, s3: S3Endpoint) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        """# Page
<!-- setup
import torch.distributed as dist
seen = ["setup"]
-->

```python
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} saw 17 things")
seen.append("block")
```

<!-- output -->
```text
rank 0 of 2 ... things
```

<!-- not run: it would not end -->
```python
while True: pass
```

1. A list:
   ```python
   assert seen == ["setup", "block"]
   from pathlib import Path
   Path(f"ran-{rank}").touch()
   ```

```bash
dcp-osd --help  # fine
```
"""
    )
    run_page(page, tmp_path, s3)
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-0", "ran-1"}
