"""The table of ``docs/optimizers.md``, row by row, as real optimizers behave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizers.jobs import Plain, Saved, load_elsewhere, save_and_resume
from tests.optimizers.zoo import LAYOUTS, ZOO
from tests.ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"
WORLD, OTHER = 2, 4
WHOLE = ("DDP", "one process")
FLAT = ("FSDP1", "FSDP1 flat")
DIES = "-"


def table(title: str) -> dict[str, dict[str, str]]:
    """Row -> layout -> cell of the table below a heading of the docs."""
    lines = DOCS.read_text().split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    columns = rows[0][1:]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows[2:]}


OURS = "Saved by us, loaded by us"
STOCK = "Saved by stock PyTorch, loaded by us"


def _run(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    if world == 0:  # this process, which has no process group
        threads = torch.get_num_threads()
        try:
            return [function(0, 1, *args)]
        finally:
            torch.set_num_threads(threads)
    return run_ranks(function, world, *args, timeout=240)


@functools.cache
def _expected(writer: str) -> dict[str, dict[str, str]]:
    return table({"ours": OURS, "stock": STOCK}[writer])


def _grouped(layout: str, names: Iterable[str]) -> list[list[str]]:
    """Names that the table expects to fare alike, together; what it expects to fail, alone."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        cells = tuple(_expected(w).get(name, {}).get(layout, "") for w in ("ours", "stock"))
        groups.setdefault(cells if cells[0] in ("any", "same", *_TARGETS) else name, []).append(
            name
        )
    return list(groups.values())


def _merged(ranks: list[dict[str, Saved]]) -> dict[str, Saved]:
    """One :class:`Saved` of all ranks'."""
    merged = ranks[0]
    for other in ranks[1:]:
        for name, saved in other.items():
            mine = merged[name]
            mine.died = mine.died or saved.died
            mine.problems = {**saved.problems, **mine.problems}
            for number, values in saved.plain.items():
                mine.plain.setdefault(number, values)
    return merged


Measured = dict[str, dict[str, tuple[list[str], str]]]


def _measure(
    layout: str,
    folder: Path,
    names: Iterable[str] = ZOO,
    targets: Iterable[str] = LAYOUTS,
    other: int = OTHER,
) -> Measured:
    """Writer -> name -> (cells of the table that are true, the most telling first; why)."""
    found: Measured = {"ours": {}, "stock": {}}
    names = [name for name in names if ZOO[name].installed]
    for kind in dict.fromkeys(ZOO[name].model for name in names):
        runnable = [n for n in names if ZOO[n].model == kind and layout not in ZOO[n].unrunnable]
        for name in (n for n in names if ZOO[n].model == kind and n not in runnable):
            found["ours"][name] = found["stock"][name] = ([DIES], "")
        if not runnable:
            continue
        world = 0 if layout == "one process" else WORLD
        (folder / kind).mkdir()
        groups = _grouped(layout, runnable)
        saved = _merged(_run(save_and_resume, world, layout, kind, groups, str(folder / kind)))
        elsewhere = {
            target: _elsewhere(layout, kind, target, saved, other)
            for target in targets
            if not layout == target == "one process"
        }
        for name, result in saved.items():
            for writer, cells in found.items():
                cells[name] = _cell(name, writer, result, elsewhere)
    return found


_TARGETS = {
    "whole": WHOLE,
    "flat": FLAT,
    "not FSDP1": ("FSDP2", *WHOLE),
    "any but FSDP1": ("FSDP1 flat", "FSDP2", *WHOLE),
    "any but FSDP1 flat": ("FSDP1", "FSDP2", *WHOLE),
}


def _elsewhere(
    layout: str, kind: str, target: str, saved: dict[str, Saved], other: int
) -> dict[tuple[str, str], str]:
    """Load what was saved under ``target``; what is wrong by (path, name)."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, result in saved.items():
        if _expected("ours").get(name, {}).get(target) == DIES or target in ZOO[name].unrunnable:
            continue
        for writer, path in result.path.items():
            if not result.problems.get(writer):
                cell = _expected(writer).get(name, {}).get(layout, "").rstrip("!")
                fits = cell == "any" or target in _TARGETS.get(cell, ())
                groups.setdefault((path, "" if fits else name), []).append(name)
    checkpoints = [(path, names) for (path, _), names in groups.items()]
    plain: dict[str, Plain] = {name: result.plain for name, result in saved.items()}
    if not checkpoints:
        return {}
    world = 0 if target == "one process" else other
    ranks = _run(load_elsewhere, world, target, kind, checkpoints, plain)
    return {key: next((r[key] for r in ranks if r[key]), "") for key in ranks[0]}


def _cell(
    name: str, writer: str, saved: Saved, elsewhere: dict[str, dict[tuple[str, str], str]]
) -> tuple[list[str], str]:
    """The cells of the table that are true, and why; several if few layouts were tried."""
    if saved.died:
        return [DIES], saved.died
    empty = saved.problems.get(writer, "")
    in_place = saved.problems.get(f"{writer}, in place", "" if writer in saved.path else empty)
    if empty.startswith(("cannot", "loses")):
        return [f"stock {empty.partition(':')[0]}"], empty
    wrong = [text for text in (empty, in_place) if text and not text.startswith("refused")]
    if wrong:
        return ["WRONG"], wrong[0]
    if empty:
        return ["refused" if in_place else "in place"], empty
    if in_place:
        return ["WRONG"], f"in place: {in_place}"
    texts = {
        target: found[saved.path[writer], name]
        for target, found in elsewhere.items()
        if (saved.path[writer], name) in found
    }
    loaded = {target for target, text in texts.items() if not text}
    refused = [text for text in texts.values() if text.startswith("refused")]
    raised = [text for text in texts.values() if text.startswith("the next step raises")]
    if len(loaded) + len(refused) + len(raised) < len(texts):
        return ["WRONG"], str({target: text for target, text in texts.items() if text})
    mark = "!" if raised else ""
    places = {"any": texts, "same": (), **_TARGETS}
    cells = [
        cell + mark for cell, targets in places.items() if loaded == texts.keys() & set(targets)
    ]
    why = "; ".join([*raised[:1], *refused[:1]])
    return (cells, why) if cells else (["WRONG"], str(texts))


def _check(found: Measured, layout: str, *, few: bool = False) -> None:
    """Fail where the table says other than what was ``found``, at a ``few`` of the targets."""
    wrong = []
    for writer, rows in found.items():
        for name, (cells, why) in rows.items():
            said = _expected(writer).get(name, {}).get(layout, "")
            if said not in cells[: None if few else 1]:
                wrong.append(f"{writer}, {name}: table {said!r}, found {cells}: {why[:600]}")
    assert not wrong, f"{len(wrong)} differ\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizers(tmp_path: Path, layout: str) -> None:
    """Whatever the table says of a layout is what happens, for every optimizer that is there."""
    _check(_measure(layout, tmp_path), layout)


FEW = ("heavyball AdamW", "schedulefree AdamW", "CAME", "Prodigy", "torch LBFGS")
LATE = ("transformers Adafactor", "PEFT LoRA, torch AdamW")  # each rank imports for seconds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [FEW, pytest.param(LATE, marks=pytest.mark.slow)])
def test_a_few_optimizers(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The same in little: some under FSDP1, loaded there and under DDP."""
    _check(_measure("FSDP1", tmp_path, names, ["DDP"], WORLD), "FSDP1", few=True)


@pytest.mark.parametrize("title", [OURS, STOCK])
def test_the_table_has_a_row_for_every_optimizer_and_no_other(title: str) -> None:
    rows = table(title)
    assert list(rows) == list(ZOO)
    assert all(list(row) == list(LAYOUTS) for row in rows.values())


@pytest.mark.parametrize(
    "package", sorted({entry.package for entry in ZOO.values() if entry.package})
)
def test_packages(package: str) -> None:
    """Rows that were not tested are told."""
    names = [name for name, entry in ZOO.items() if entry.package == package]
    if not ZOO[names[0]].installed:
        pytest.skip(f"{package} is not installed: rows {names} are not tested")
