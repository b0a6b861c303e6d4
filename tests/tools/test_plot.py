"""``plot``: what is drawn, and what a reader of the page is told."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dcp_fsdp_osd.errors import FlatOptimError, StorageError
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.tools import Checkpoint, Limits, forecast, plot
from dcp_fsdp_osd.tools.chart import Drawn, draw
from dcp_fsdp_osd.tools.looks import colour_of, drawable
from dcp_fsdp_osd.tools.reads import Pace, requests_of, schedule
from tests.servers import EmbeddedS3
from tests.tools.browser import Browser, chromium
from tests.tools.made import KINDS, broken, data_file, options, run, run_json, save, upload

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group
OLD = Path(__file__).parents[1] / "data" / "checkpoints_v1" / "adamw_flat_world2"
EVIL = (
    "<script>document.title='owned'</script>",
    "</script><img src=x onerror=\"document.title='owned'\">",
    "$\\frac{1}{$ x_1^2 & <b>--></svg>",
    "a\x1b[31m\nb\udce4\u202e",
)
MANY = Limits(tensors=100, boxes=10_000)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "c"
    save({"model": {name: torch.ones(4, 3) for name in EVIL}}, path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class _Tags(HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


# ---------------------------------------------------------------- what is drawn


def test_boxes_are_those_of_the_checkpoint() -> None:
    with Checkpoint(OLD) as checkpoint:
        chart = draw(checkpoint, MANY)
        assert {row.key for row in chart.rows} == set(checkpoint.tensors)
        assert sum(row.nbytes for row in chart.rows) == sum(
            map(checkpoint.nbytes, checkpoint.tensors)
        )
        for row in chart.rows:
            assert sum(each.nbytes for each in row.drawn) == row.nbytes
            area = sum(w * h for _, _, w, h in (each.place(row.shape) for each in row.drawn))
            assert area == pytest.approx(1)
        (cube,) = (row for row in chart.rows if row.key == "model.cube")
        assert [each.ranks for each in cube.drawn] == [(0, 0), (0, 0), (1, 1)]
        assert cube.drawn[2].place(cube.shape) == pytest.approx((2 / 3, 0.4, 1 / 3, 0.6))
        sizes = checkpoint.sizes()
        assert {bar.name: bar.nbytes for bar in chart.files} == {
            name: size for name, size in sizes.items() if name.endswith(".distcp")
        }
        assert not any(bar.problem for bar in chart.files)
    assert chart.ranks == 2 and any("13 objects" in note for note in chart.notes)


def test_where_a_box_lies_in_the_unit_square() -> None:
    def place(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        return Drawn(Box(offsets, sizes), None, "f", 0, 1).place(shape)

    assert place((), (), ()) == (0, 0, 1, 1)
    assert place((2,), (2,), (8,)) == (0.25, 0, 0.25, 1)
    assert place((4, 0), (4, 10), (8, 10)) == (0.5, 0, 0.5, 1)
    assert place((3, 2), (1, 5), (8, 10)) == (0.375, 0.2, 0.125, 0.5)
    assert place((0, 1, 0), (2, 1, 5), (2, 4, 5)) == (0, 0.25, 1, 0.25)
    assert place((1, 1, 2), (1, 1, 3), (2, 4, 5)) == (0.5, 0.35, 0.5, 0.15)


@pytest.mark.parametrize("boxes", [6, 30, 100])
def test_what_is_merged_is_said_and_loses_nothing(tmp_path: Path, boxes: int) -> None:
    from tests.tools.test_foresee import write_large

    write_large(tmp_path / "c", layers=2, ranks=32)
    with Checkpoint(tmp_path / "c") as checkpoint:
        chart = draw(checkpoint, Limits(tensors=5, boxes=boxes, files=10, requests=7))
    drawn = [each for row in chart.rows for each in row.drawn]
    assert len(drawn) <= max(boxes, 5) and sum(each.boxes for each in drawn) == 5 * 32
    assert (len(chart.rows), chart.tensors, chart.boxes) == (5, 12, 12 * 32)
    for row in chart.rows:
        assert sum(each.nbytes for each in row.drawn) == row.nbytes
        assert row.drawn[0].ranks is not None and row.drawn[0].ranks[0] == 0
        assert row.drawn[-1].ranks is not None and row.drawn[-1].ranks[1] == 31
    assert len(chart.files) <= 10 and sum(bar.files for bar in chart.files) == 32
    assert chart.load is not None and chart.load.count > 16
    assert sum(each.requests for each in chart.load.requests) == chart.load.count
    notes = "\n".join(chart.notes)
    for said in ("5 of 12 tensors", "boxes are drawn as", "files are drawn 4 to a bar", "requests"):
        assert said in notes
    assert "32 more" not in notes and "and 29 more" in notes  # of files that are missing


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_those_of_the_forecast(run_folder: Path, kind: str, world_size: int) -> None:
    with Checkpoint(run_folder / kind) as checkpoint:
        told = forecast(checkpoint, world_size, latency=0.1, bandwidth=1e5, concurrency=2)
        for rank in range(world_size):
            found = requests_of(
                checkpoint, world_size, rank, latency=0.1, bandwidth=1e5, concurrency=2
            )
            mine = told.ranks[rank]
            assert len(found) == mine.requests + 1 and found[0].file == ".metadata"
            assert sum(each.nbytes for each in found[1:]) == mine.nbytes
            assert max(each.end for each in found) == pytest.approx(mine.seconds)
            assert {each.file for each in found[1:]} <= {data_file(run_folder / kind).name}
            keys = {key for each in found for key in each.keys}
            assert keys <= set(checkpoint.tensors) and (keys or mine.requests == 0)
    with (
        Checkpoint(run_folder / kind) as checkpoint,
        pytest.raises(ValueError, match="from 0 to 2"),
    ):
        requests_of(checkpoint, 3, 3)


def test_requests_share_the_bandwidth() -> None:
    """Two at a time, 10 bytes a second, 1 s each."""
    times = schedule([10, 30, 20], 10, Pace(10, 1, 2))
    assert times == [(2, 5, 0), (2, 7, 1), (7, 10, 0)]
    assert schedule([], 10, Pace(10, 1, 2)) == []
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Pace(bandwidth=0)


def test_colours_and_texts() -> None:
    for world_size in (1, 2, 8, 9, 4096):
        for rank in (0, world_size // 2, world_size - 1):
            assert re.fullmatch("#[0-9a-f]{6}", colour_of((rank, rank), world_size))
    assert len({colour_of((rank, rank), 8) for rank in range(8)}) == 8
    assert colour_of((0, 1), 8) == colour_of(None, 8) != colour_of((0, 1), 9)
    assert drawable("a" * 50 + "b" * 50, 9) == "aaa…bbbbb"
    assert drawable(EVIL[3]) == "a\ufffd[31m\ufffdb\ufffd\ufffd"


# ---------------------------------------------------------------- files that are written


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_ours_and_of_stocks(run_folder: Path, tmp_path: Path, kind: str) -> None:
    for name in ("a.png", "a.svg", "a.html"):
        told = run_json("plot", run_folder / kind, "-o", tmp_path / name)
        assert told["nbytes"] == (tmp_path / name).stat().st_size
        assert told["tensors"] == [16, 16] and told["files"] == [1, 1] and told["requests"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    result = run("plot", run_folder / kind, "model", "-o", tmp_path / "b.html", "--rank", 1,
                 "--world-size", 4, "--latency", "5ms", "--bandwidth", "2GB")  # fmt: skip
    assert result.exit_code == 0 and "4 tensors" in result.output, result.output
    text = (tmp_path / "b.html").read_text()
    assert "rank 1 of 4 (fsdp1)" in text and "at 2000 MB/s and 5 ms each" in text
    assert "Forecast, not measured" in text and "exp_avg" not in text.split('id="tips"')[0]


def test_names_of_others_are_text(evil: Path, tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "a.html"):
        assert run("plot", evil, "-o", tmp_path / name).exit_code == 0, name
    tree = ElementTree.parse(tmp_path / "a.svg")
    assert not [each for each in tree.iter() if str(each.tag).endswith("script")]
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    page = _Tags(text)
    assert page.tags.count("script") == 2 and not {"img", "b"} & {*page.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    tips = re.search(r'id="tips">(.*?)</script>', text, re.DOTALL)
    assert tips is not None and "<" not in tips[1] and json.loads(tips[1])
    addresses = re.findall(r"(?:src|href|url|action)\s*=\s*[\"']?([^\"'>\s]*)", text)
    assert set(addresses) <= {"data:,", "x"}  # the latter in a name, as text


def test_a_broken_checkpoint_is_drawn_as_far_as_it_is_there(
    run_folder: Path, tmp_path: Path
) -> None:
    for how, said in (("lost", "is missing"), ("cut", "bytes, not")):
        path = broken(run_folder / "ours", tmp_path / how, how)
        told = run_json("plot", path, "-o", tmp_path / f"{how}.html")
        assert any(note.startswith("Damaged: ") and said in note for note in told["notes"])
        text = (tmp_path / f"{how}.html").read_text()
        assert said in text and "#cc2222" in text
        assert said in run("plot", path, "-o", tmp_path / f"{how}.png").stderr
    path = broken(run_folder / "ours", tmp_path / "metadata", "metadata")
    result = run("plot", path, "-o", tmp_path / "none.html")
    assert result.exit_code == 1 and result.output.startswith("dcp-osd: ")
    assert not (tmp_path / "none.html").exists() and not list(tmp_path.glob("*.tmp"))


def test_odd_shapes_and_no_tensors(tmp_path: Path) -> None:
    save({"none": torch.empty(0, 4), "scalar": torch.tensor(2.0), "step": 3}, tmp_path / "odd")
    save({"step": 1}, tmp_path / "objects")
    for name in ("odd", "objects"):
        for kind in ("png", "svg", "html"):
            told = run_json("plot", tmp_path / name, "-o", tmp_path / f"{name}.{kind}")
            assert told["requests"] == 0
            assert any("No load is drawn" in note for note in told["notes"])


def test_plot_says_what_is_wrong(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run_folder / "ours"
    (tmp_path / "there.png").write_bytes(b"")
    for arguments, said in (
        (("-o", tmp_path / "a.gif"), "ends with .png, .svg, .html"),
        (("-o", "endpoint_url=http://x"), "here -o is the picture"),
        ((), "Missing option"),
        (("-o", tmp_path / "there.png"), "exists"),
        (("-o", tmp_path / "no" / "a.png"), "does not exist"),
        (("modle.*", "-o", tmp_path / "a.html"), "none of its"),
        (("-o", tmp_path / "a.html", "--rank", 1), "expected a rank from 0 to 0"),
        (("-o", tmp_path / "a.html", "--wrap", "x"), "no module"),
        (("-o", tmp_path / "a.html", "--layout", "ddp"), "expected fsdp1 or fsdp2"),
        (("-o", tmp_path / "a.html", "--concurrency", 0), "concurrency"),
    ):
        result = run("plot", ours, *arguments)
        text = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and said in text, (arguments, text)
    assert [each.name for each in tmp_path.iterdir()] == ["there.png"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Checkpoint(ours) as checkpoint:
        with pytest.raises(FlatOptimError, match=r"dcp-fsdp-osd\[plot\]"):
            plot(checkpoint, tmp_path / "a.png")
        plot(checkpoint, tmp_path / "a.html")
        with pytest.raises(StorageError, match="local path"):
            plot(checkpoint, "s3://bucket/a.html")
    assert run("plot", ours, "-o", tmp_path / "a.svg").exit_code == 2


def test_no_state_of_pyplot_and_many_threads(run_folder: Path, tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    errors = []

    def one(number: int) -> None:
        try:
            with Checkpoint(run_folder / "ours") as checkpoint:
                plot(checkpoint, tmp_path / f"{number}.svg", ["model"])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(list(tmp_path.glob("*.svg"))) == 2
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_plot_on_s3(s3: EmbeddedS3, run_folder: Path, tmp_path: Path) -> None:
    url = upload(run_folder / "ours", s3, "plot")
    args = [text.replace("-o", "--storage-option") for text in options(s3)]
    result = run("plot", url, "-o", tmp_path / "a.html", *args)
    assert result.exit_code == 0, result.output
    assert s3.secret_key not in result.output + (tmp_path / "a.html").read_text()


# ---------------------------------------------------------------- the page in a browser


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    with Checkpoint(OLD) as checkpoint:
        plot(checkpoint, tmp_path / "a.html")
        files = {info.relative_path for info in checkpoint.metadata.storage_data.values()}
    browser.open(tmp_path / "a.html")
    told = browser.hover('[data-row="model.cube"] rect:nth-of-type(3)').splitlines()
    assert told[:2] == ["model.cube", "box offsets [2, 2, 0] sizes [1, 3, 2]"]
    assert told[2].split()[1].rstrip(",") in files and told[3] == "rank 1, 24 B (24 bytes)"
    assert browser.hover("h1") == ""  # nothing is left of it
    told = browser.hover(".tall rect").splitlines()
    assert told[0] in files and re.fullmatch(r".* KiB \(\d+ bytes\)", told[1])
    assert ".metadata" in browser.hover(".lanes rect")
    driver = browser.driver
    field = driver.find_element("id", "filter")
    field.send_keys("model.cube")
    rows = driver.find_elements("css selector", "[data-row]")
    assert [row.get_attribute("data-row") for row in rows if row.is_displayed()] == ["model.cube"]
    assert driver.find_element("id", "count").text == f"1 of {len(rows)} shown"
    assert browser.complaints() == [] and browser.requests() == []


def test_names_run_nothing_in_a_browser(browser: Browser, evil: Path, tmp_path: Path) -> None:
    with Checkpoint(evil) as checkpoint:
        plot(checkpoint, tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    title = browser.driver.title
    shown = {
        row.get_attribute("data-row")
        for row in browser.driver.find_elements("css selector", "[data-row]")
    }
    assert shown == {drawable(f"model.{name}") for name in EVIL}
    for number in range(len(EVIL)):
        told = browser.hover(f".row:nth-of-type({number + 1}) rect") or browser.hover(
            f"[data-row]:nth-of-type({number + 2}) rect"
        )
        assert told.startswith("model.")
    assert browser.driver.title == title != "owned"
    assert browser.complaints() == [] and browser.requests() == []


def test_a_page_of_thousands_of_boxes_is_usable(browser: Browser, tmp_path: Path) -> None:
    from tests.tools.test_foresee import write_large

    write_large(tmp_path / "c", layers=6, ranks=256)
    with Checkpoint(tmp_path / "c") as checkpoint:
        told = plot(checkpoint, tmp_path / "a.html")
    assert told.boxes[1] == 6 * 6 * 256 and told.boxes[0] <= 8000
    assert told.nbytes < 8 << 20
    browser.open(tmp_path / "a.html")
    assert "boxes drawn as one" in browser.hover("[data-row] rect")
    notes = browser.driver.find_element("class name", "notes").text
    assert f"{told.boxes[1]} boxes are drawn as {told.boxes[0]}" in notes
    assert browser.complaints() == [] and browser.requests() == []
