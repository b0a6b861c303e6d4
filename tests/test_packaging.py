"""What is installed is the package and no more, and says its version."""

from __future__ import annotations

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dcp_fsdp_osd

ROOT = Path(__file__).parent.parent


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(dcp_fsdp_osd.__version__)}\b", text, re.MULTILINE)


_HERE = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/dcp-fsdp-osd/dcp-fsdp-osd"
    r"(?:/(?:blob|tree)/main/|/main/)([^)#\s\"]+)"
)
_PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("docs/**/*.md"),
]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    near = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    far = {ROOT / link for link in _HERE.findall(text)}
    assert [path for path in near | far if not path.exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_work_outside_of_the_repository(name: str) -> None:
    """These are read elsewhere: on a package index, and as pages of the documentation."""
    assert re.findall(r"\]\((?!https://)[^)]*\)", (ROOT / name).read_text()) == []


def test_metadata_names_places_that_there_are() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = _HERE.findall(text)
    assert len(found) == 2 and [name for name in found if not (ROOT / name).exists()] == []


_BROUGHT = {"aiobotocore": "s3fs", "botocore": "s3fs"}  # by what is required


def test_what_is_imported_is_required() -> None:
    """By the package or by one of its extras for users; DCP itself wants NumPy, which torch does
    not require."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for name in ("docs", "test", "mutate", "optimizers"):
        extras = re.sub(rf"^{name} = \[.*?\]$", "", extras, flags=re.MULTILINE | re.DOTALL)
    always = text.partition("\ndependencies = ")[2].partition("\n")[0]
    required = set(re.findall(r'"([A-Za-z0-9_-]+)', always + extras))
    imported = set()
    for path in (ROOT / "dcp_fsdp_osd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    others = imported - sys.stdlib_module_names - {"dcp_fsdp_osd"}
    assert {_BROUGHT.get(name, name) for name in others} - required == set()
    assert "numpy" in re.findall(r'"([a-z]+)', always)


def _check_description(wheel: Path) -> None:
    """The README as a package index shows it: no link or picture that is only in the repository."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    metadata = email.message_from_string(text)
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert isinstance(description, str) and description.startswith("# ")
    links = re.findall(r"\]\(([^)\s]*)|(?:src|href|srcset)=\"?([^\">\s]+)", description)
    relative = [link for pair in links for link in pair if link and not link.startswith("https://")]
    assert links and relative == []
    missing = [name for name in _HERE.findall(description) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.slow  # pip fetches what builds the package
def test_a_wheel_is_what_is_imported(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheels, place = tmp_path / "wheels", tmp_path / "place"
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, ROOT], check=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.startswith(f"dcp_fsdp_osd-{dcp_fsdp_osd.__version__}-")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert names == {"dcp_fsdp_osd", f"dcp_fsdp_osd-{dcp_fsdp_osd.__version__}.dist-info"}
    _check_description(wheel)
    subprocess.run([*pip, "install", "--no-deps", "-t", place, wheel], check=True, timeout=300)
    program = "import dcp_fsdp_osd as d; print(d.__file__, d.__version__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    file, version = done.stdout.split()
    assert Path(file).is_relative_to(place) and version == dcp_fsdp_osd.__version__
    assert (place / "dcp_fsdp_osd" / "py.typed").exists()
    assert (place / "bin" / "dcp-osd").exists()


def _sdist(folder: Path) -> Path:
    """The source archive; the test is skipped where no setuptools can build it."""
    program = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if "No module named 'setuptools'" in done.stderr or "license" in done.stderr:
        pytest.skip("the setuptools that is installed here is too old for this pyproject.toml")
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.mark.slow
def test_the_source_has_its_licence_and_tests(tmp_path: Path) -> None:
    with tarfile.open(_sdist(tmp_path)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {
        name
        for name in tracked.stdout.split()
        if not name.startswith(".") and name != "MANIFEST.in"
    }
    assert wanted - names == set() and "LICENSE" in names


_FAST = ("tests/planners/test_geometry.py", "tests/storage/test_ranges.py",
         "tests/tools/test_look.py", "tests/test_house.py")  # fmt: skip
"""Of the tests: what needs no ranks, for the package as it is installed."""


@pytest.mark.slow
def test_the_tests_of_the_source_pass_on_the_wheel(tmp_path: Path) -> None:
    """From the unpacked archive, against what is installed of a wheel that is built of it."""
    with tarfile.open(_sdist(tmp_path)) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("dcp_fsdp_osd-*/")
    place = tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--no-deps", "-t", place, source], check=True, timeout=300)
    shutil.rmtree(source / "dcp_fsdp_osd")  # what is imported is the wheel's
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *_FAST],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b\d\d+ passed", done.stdout) and "skipped" not in done.stdout
