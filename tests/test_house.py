"""The shape of the package, from its own imports: floors, circles, private names."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_fsdp_osd

ROOT = Path(dcp_fsdp_osd.__file__).parent
FLOORS = (
    ("dcp_fsdp_osd",),
    ("cli", "trainers"),
    ("tools",),
    ("manager",),
    ("verify",),
    ("save",),
    ("load",),
    ("stateful",),
    ("lowbit",),
    ("exchange",),
    ("storage",),
    ("checkpoint",),
    ("fsdp", "staging"),
    ("misuse",),
    ("layout",),
    ("optim_class", "containers", "async_process"),
    ("allocate",),
    ("tree", "compat", "compact"),
    ("errors",),
)
"""Each floor imports from those below it only."""
MOST_LINES = 450


def _modules() -> dict[str, Path]:
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import of the package, those in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""


def _inside(path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, str]]:
    for module, name in _imports(path):
        if module.split(".")[0] == "dcp_fsdp_osd":
            yield (f"{module}.{name}", "") if f"{module}.{name}" in modules else (module, name)


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_rooms_import_only_from_below() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    modules = _modules()
    assert {_room(module) for module in modules} == set(floor)
    wrong = []
    for module, path in modules.items():
        for imported, _ in _inside(path, modules):
            here, there = _room(module), _room(imported)
            if here != there and floor[there] <= floor[here]:
                wrong.append(f"{module} -> {imported}")
    assert not wrong


def test_no_module_imports_itself_over_others() -> None:
    modules = _modules()
    graph = {m: {i for i, _ in _inside(p, modules)} - {m} for m, p in modules.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for imported in graph[module]:
                visit(imported, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_private_name_crosses_a_module() -> None:
    modules = _modules()
    assert not [
        f"{module}: {imported}.{name}"
        for module, path in modules.items()
        for imported, name in _inside(path, modules)
        if name.startswith("_")
    ]


def test_modules_say_what_they_are_for_and_stay_small() -> None:
    for module, path in _modules().items():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
        assert len(text.splitlines()) <= MOST_LINES, f"{module} has outgrown its room"


def _named(hint: Any) -> Iterator[type]:
    """The classes in a type hint."""
    inner = [*typing.get_args(hint)]
    for each in inner:
        for part in each if isinstance(each, list) else [each]:
            yield from _named(part)
    if not inner and isinstance(hint, type):
        yield hint


def test_what_public_signatures_name_is_exported() -> None:
    public = {name: getattr(dcp_fsdp_osd, name) for name in dcp_fsdp_osd.__all__}
    calls = [each.__init__ if isinstance(each, type) else each for each in public.values()]
    missing = {
        f"{call.__qualname__}: {each.__name__}"
        for call in calls
        if inspect.isfunction(call) and call.__module__.startswith("dcp_fsdp_osd.")
        for hint in typing.get_type_hints(call, vars(typing) | public | call.__globals__).values()
        for each in _named(hint)
        if each.__module__.startswith("dcp_fsdp_osd.")
        if each not in [*public.values(), *vars(dcp_fsdp_osd.layout).values()]
    }
    assert not missing
