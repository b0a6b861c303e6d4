"""A picture of a checkpoint as one HTML page that needs nothing else: no network, no other file.

Names in a checkpoint are anybody's: all text goes through :func:`html.escape`, or through JSON into
``textContent``, and the page's policy lets no script run but the one below.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator
from string import Template

from dcp_fsdp_osd.tools.chart import Chart, Drawn, FileBar, TensorRow
from dcp_fsdp_osd.tools.describe import rank_of_file
from dcp_fsdp_osd.tools.looks import DAMAGED, colour_of, drawable, size_text
from dcp_fsdp_osd.tools.reads import Request

__all__ = ["page"]

_SLIVER = 0.004  # of the width: boxes thinner than that are outlined in their own colour
_LEGEND = 8  # ranks

_SCRIPT = """
"use strict";
const tips = JSON.parse(document.getElementById("tips").textContent);
const tip = document.getElementById("tip");
function show(event) {
  const mark = event.target instanceof Element ? event.target.closest("[data-n]") : null;
  if (!mark) { tip.hidden = true; return; }
  const row = mark.closest("[data-row]");
  const head = row ? row.dataset.row + "\\n" : "";
  tip.textContent = head + tips[Number(mark.dataset.n)];
  tip.hidden = false;
  const space = 14, box = tip.getBoundingClientRect();
  let left = event.clientX + space, top = event.clientY + space;
  if (left + box.width > innerWidth) left = Math.max(0, event.clientX - space - box.width);
  if (top + box.height > innerHeight) top = Math.max(0, event.clientY - space - box.height);
  tip.style.left = left + "px";
  tip.style.top = top + "px";
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
const rows = Array.from(document.querySelectorAll("[data-row]"));
document.getElementById("filter").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    row.hidden = !row.dataset.row.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  document.getElementById("count").textContent = count + " of " + rows.length + " shown";
});
"""

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 1.5em auto;
  max-width: 1200px; padding: 0 1em; }
h1 { font-size: 1.25em; overflow-wrap: anywhere; } h2 { font-size: 1.05em; margin: 1.6em 0 .3em; }
p { margin: .3em 0; max-width: 95ch; }
.notes { background: #fff6dd; border-left: 4px solid #e0a800; padding: .4em .8em; margin: .8em 0; }
.notes p { overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: 25em 1fr; gap: .8em; align-items: center;
  margin: 3px 0; }
.row[hidden] { display: none; }
.name { text-align: right; font: 11px/1.25 ui-monospace, monospace; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; direction: rtl; }
.name bdi { direction: ltr; unicode-bidi: isolate; }
.size { color: #666; font-size: 10px; direction: ltr; unicode-bidi: isolate; }
svg { display: block; width: 100%; background: #f3f3f3; overflow: hidden; }
.row svg { height: 28px; } .tall svg { height: 170px; } .lanes svg { height: 230px; }
rect { vector-effect: non-scaling-stroke; }
[data-n]:hover { filter: brightness(1.25) saturate(1.2); }
.axis { display: flex; justify-content: space-between; font-size: 12px; color: #666; }
.key { display: inline-block; width: .9em; height: .9em; vertical-align: -.1em;
  margin: 0 .3em 0 .9em; }
.ramp { width: 12em; }
#tip { position: fixed; z-index: 9; white-space: pre-wrap; overflow-wrap: anywhere;
  background: #222; color: #fff; font: 12px/1.4 ui-monospace, monospace; padding: .5em .7em;
  border-radius: 4px; max-width: 60ch; pointer-events: none; }
#tip[hidden] { display: none; }
input { font: inherit; width: 24em; padding: .15em .4em; }
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
<p>$counts</p>
$notes
<p>$legend</p>
<h2>Which rank's boxes cover which tensor</h2>
<p>Each bar is a tensor: its first dimension from left to right, the others from top to bottom.
Point at a box to see what it is.</p>
<p><input id="filter" placeholder="part of a name" aria-label="Show names with this in them">
<span id="count"></span></p>
$rows
<h2>Sizes of files</h2>
$files
<h2>Requests of a load over time</h2>
$load
<div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="tips">$tips</script>
<script>$script</script>
</body>
</html>
""")


def page(chart: Chart) -> str:
    """The whole page."""
    tips: list[str] = []
    hashed = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    shown = len(chart.rows)
    some = f" ({shown} drawn)" if shown < chart.tensors else ""
    rows = "\n".join(_row(row, chart, tips) for row in chart.rows)
    files, load = _files(chart, tips), _load(chart, tips)
    # Within a script no end tag may occur, nor what begins a comment.
    told = json.dumps(tips).replace("<", "\\u003c")
    return _PAGE.substitute(
        policy="default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{hashed}'",
        title=_text(chart.title),
        style=_STYLE,
        counts=f"{chart.tensors} tensors{some} in {chart.boxes} boxes, "
        f"{sum(bar.files for bar in chart.files)} files, {size_text(chart.nbytes)}",
        notes=_notes(chart.notes),
        legend=_legend(chart),
        rows=rows or "<p>No tensors.</p>",
        files=files,
        load=load,
        tips=told,
        script=_SCRIPT,
    )


def _text(text: str) -> str:
    return html.escape(drawable(text))


def _notes(notes: Iterable[str]) -> str:
    lines = "".join(f"<p>{_text(note)}</p>" for note in notes)
    return f'<div class="notes">{lines}</div>' if lines else ""


def _legend(chart: Chart) -> str:
    if chart.ranks is None:
        return "Names of files do not tell which rank wrote them."
    if chart.ranks <= _LEGEND:
        keys = (_key(colour_of((n, n), chart.ranks), f"rank {n}") for n in range(chart.ranks))
        return "".join(keys)
    places = [n * (chart.ranks - 1) // 12 for n in range(13)]
    steps = ", ".join(colour_of((at, at), chart.ranks) for at in places)
    return (
        f'rank 0 <span class="key ramp" style="background: linear-gradient(to right, {steps})">'
        f"</span> rank {chart.ranks - 1}"
    )


def _key(colour: str, text: str) -> str:
    return f'<span class="key" style="background: {colour}"></span>{text}'


def _svg(marks: Iterable[str], width: float, height: float, label: str) -> str:
    return (
        f'<svg role="img" aria-label="{html.escape(label)}" preserveAspectRatio="none" '
        f'viewBox="0 0 {width:.6g} {height:.6g}">{"".join(marks)}</svg>'
    )


def _rect(
    place: tuple[float, float, float, float], fill: str, tip: str, tips: list[str], *, thin: bool
) -> str:
    tips.append(tip)
    x, y, width, height = place
    stroke = f'stroke="{fill}" stroke-width="1.5"' if thin else 'stroke="#fff" stroke-width=".7"'
    return (
        f'<rect data-n="{len(tips) - 1}" x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" '
        f'height="{height:.6g}" fill="{fill}" {stroke}/>'
    )


def _axis(*texts: str) -> str:
    return f'<div class="axis">{"".join(f"<span>{text}</span>" for text in texts)}</div>'


def _colour(file: str, chart: Chart) -> str:
    rank = rank_of_file(file)
    return colour_of(None if rank is None else (rank, rank), chart.ranks or 1)


# ---- tensors ----


def _row(row: TensorRow, chart: Chart, tips: list[str]) -> str:
    places = [(each.place(row.shape), each) for each in row.drawn]
    places.sort(key=lambda each: -each[0][2])  # what is thin comes last, and on top
    marks = (
        _rect(
            (1000 * place[0], 100 * place[1], 1000 * place[2], 100 * place[3]),
            colour_of(each.ranks, chart.ranks or 1),
            _of_box(each),
            tips,
            thin=place[2] < _SLIVER,
        )
        for place, each in places
    )
    what = f"{row.dtype} {list(row.shape)}"
    size = size_text(row.nbytes)
    return (
        f'<div class="row" data-row="{_text(row.key)}"><div class="name"><bdi>'
        f'{_text(row.key)}</bdi><br><span class="size">{what}, {size}</span></div>'
        f"{_svg(marks, 1000, 100, f'{row.chunks} boxes')}</div>"
    )


def _of_box(each: Drawn) -> str:
    box = f"offsets {list(each.box.offsets)} sizes {list(each.box.sizes)}"
    ranks = ""
    if each.ranks is not None:
        low, high = each.ranks
        ranks = f"rank {low}, " if low == high else f"ranks {low} to {high}, "
    where = f"file {drawable(each.file)}, entry at byte {each.offset}"
    if each.boxes > 1:
        box = f"{each.boxes} boxes drawn as one, within {box}"
        where = f"{each.files} files, the first: {where}"
    return f"box {box}\n{where}\n{ranks}{size_text(each.nbytes)} ({each.nbytes} bytes)"


# ---- files ----


def _files(chart: Chart, tips: list[str]) -> str:
    most = max((bar.nbytes for bar in chart.files), default=0) or 1
    marks = _bars(chart, most, tips)
    svg = _svg(marks, max(len(chart.files), 1), 100, f"{len(chart.files)} files")
    ends = ("", "") if not chart.files else (chart.files[0].name, chart.files[-1].name)
    return (
        f"<p>Highest: {size_text(most)}.</p>"
        f'<div class="tall">{svg}</div>{_axis(*map(_text, dict.fromkeys(ends)))}'
    )


def _bars(chart: Chart, most: int, tips: list[str]) -> Iterator[str]:
    wide = len(chart.files) > 60
    for at, bar in enumerate(chart.files):
        fill = DAMAGED if bar.problem else _colour(bar.name, chart)
        tip = _of_file(bar)
        x, width = (at, 1.0) if wide else (at + 0.1, 0.8)
        height = 100 * bar.nbytes / most
        yield _rect((x, 100 - height, width, height), fill, tip, tips, thin=False)
        if bar.files > 1:
            height = 100 * bar.least / most
            place = x + width / 4, 100 - height, width / 2, height
            yield _rect(place, "#222", tip, tips, thin=False)


def _of_file(bar: FileBar) -> str:
    size = f"{size_text(bar.nbytes)} ({bar.nbytes} bytes)"
    name = drawable(bar.name)
    if bar.files > 1:
        name = f"{bar.files} files from {name} on"
        size = f"{size_text(bar.least)} to {size}"
    return "\n".join([name, size, *([drawable(bar.problem)] if bar.problem else [])])


# ---- requests ----


def _load(chart: Chart, tips: list[str]) -> str:
    load = chart.load
    if load is None:
        return "<p>None is drawn; see above.</p>"
    title = _text(load.title.replace("\n", " "))
    lanes = 1 + max(each.lane for each in load.requests)
    scale = 1000 / (load.seconds or 1)
    marks = (
        _rect(
            (scale * each.start, each.lane + 0.08, scale * (each.end - each.start), 0.84),
            _colour(each.file, chart),
            _of_request(each),
            tips,
            thin=False,
        )
        for each in load.requests
    )
    steps = (f"{load.seconds * n / 4:.3g} s" for n in range(5))
    return (
        f"<p>{title}. One line for each request that is under way at a time; the first "
        "one (grey) reads the metadata. Colours are those of the ranks that wrote the files.</p>"
        f'<div class="lanes">{_svg(marks, 1000, lanes, f"{load.count} requests")}</div>'
        f"{_axis(*steps)}"
    )


def _of_request(each: Request) -> str:
    what = "request" if each.requests == 1 else f"{each.requests} requests drawn as one; the first"
    keys = [drawable(key) for key in each.keys[:6]]
    more = [f"and {len(each.keys) - 6} more"] if len(each.keys) > 6 else []
    return "\n".join(
        [
            *keys,
            *more,
            f"{what}: file {drawable(each.file)} from byte {each.offset} on",
            f"{size_text(each.nbytes)} ({each.nbytes} bytes)",
            f"{each.start:.3f} s to {each.end:.3f} s",
        ]
    )
