"""What a checkpoint's metadata holds of one optimizer, whoever wrote it.  Pure: no IO.

Reads the keys of our planner and of stock PyTorch: nested (``optim.state.<fqn>.<name>``,
``optim.param_groups.<i>.<option>``) and those of ``flatten_optimizer_state_dict=True``
(``optim.param_groups.<fqn>.<option>``, with one path element for all of it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .containers import Container, Containers
from .layout import without_wrappers
from .optim_state import opaque_prefix
from .saved_info import SavedInfo
from .tree import Path

__all__ = ["CheckpointIndex", "index_checkpoint"]


@dataclass
class CheckpointIndex:
    """Keys of one optimizer in a checkpoint.

    Attributes:
        state: name in ``state`` -> path below it -> key.
        groups: group (a number, or an FQN in a flattened checkpoint) -> path of the option -> key.
        extra: path -> key, of what is neither ``state`` nor ``param_groups``.
        opaque: first FQN -> signature -> path -> key, of state that cannot be resharded.
        paths: key -> path below the optimizer.
        tensors: key -> its storage metadata, for keys of tensors (other keys are objects).
        info: what our save planner recorded; None for a checkpoint of stock PyTorch.
        containers: the mappings that are not dicts with text for keys, as far as is recorded; paths
            are below the optimizer.
        renamed: names that the checkpoint has with names of wrappers in them -> FQNs.
        flattened: saved with ``flatten_optimizer_state_dict=True``.
        by_number: parameters are numbers, as in ``optim.state_dict()``, and not names.
        one_state, one_list: keys of ``state`` and of ``param_groups`` as one object each, as torch
            before 2.4 writes what holds no tensor.
        one_object: saved with the planner option ``flatten_state_dict=False``; not to be read.
    """

    state: dict[str, dict[Path, str]] = field(default_factory=dict)
    groups: dict[int | str, dict[Path, str]] = field(default_factory=dict)
    extra: dict[Path, str] = field(default_factory=dict)
    opaque: dict[str, dict[str, dict[Path, str]]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    info: SavedInfo | None = None
    containers: Containers = field(default_factory=Containers)
    renamed: dict[str, str] = field(default_factory=dict)
    flattened: bool = False
    by_number: bool = False
    one_state: str | None = None
    one_list: str | None = None
    one_object: bool = False

    @property
    def knows_containers(self) -> bool:
        """Whether mappings that are not in ``containers`` are dicts with text for keys."""
        return self.info is not None and self.info.containers is not None

    @property
    def empty(self) -> bool:
        return not (self.state or self.groups or self.one_state or self.one_list)

    def whole_objects(self) -> list[str]:
        """Keys of ``state`` and ``param_groups`` where they are one object each."""
        return [name for name in (self.one_state, self.one_list) if name is not None]

    def options(self) -> set[str]:
        """Names of the param groups' options, as far as metadata tells them."""
        return {str(path[0]) for paths in self.groups.values() for path in paths if path} - {
            "params",
            "param_names",
        }

    def known_groups(self) -> list[list[str]] | None:
        """The FQNs of each group where metadata alone tells them; None if they must be read."""
        if self.info is not None and self.info.groups is not None:
            return [list(fqns) for fqns in self.info.groups]
        if self.flattened:
            return [[str(fqn)] for fqn in self.groups]
        return None


def index_checkpoint(
    metadata: Metadata, path: tuple[str, ...], fqns: Iterable[str]
) -> CheckpointIndex:
    """Find the entries of the optimizer at ``path`` in a checkpoint.

    Args:
        path: where the optimizer lies in the state dict, e.g. ``("optim",)``.
        fqns: names that parameters have now; needed to tell FQN and state name apart where the
            checkpoint's paths do not.
    """
    planner_data = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    key = ".".join(path)
    index = CheckpointIndex(info=SavedInfo.unpack(metadata.planner_data, key))
    known = set(fqns)
    hidden = opaque_prefix(path)
    for name, storage in metadata.state_dict_metadata.items():
        where: Path = tuple(planner_data.get(name) or (name,))
        if len(where) == 1 and name.startswith(key + "."):  # saved with flatten_state_dict=False
            where = (*path, name[len(key) + 1 :])
        if where[: len(hidden)] == hidden:
            fqn, signature, *rest = where[len(hidden) :]
            found = index.opaque.setdefault(str(fqn), {}).setdefault(str(signature), {})
            found[tuple(rest)] = name
        elif where[: len(path)] == path:
            index.paths[name] = where[len(path) :]
            _place(index, where[len(path) :], name, known)
        else:
            continue
        if isinstance(storage, TensorStorageMetadata):
            index.tensors[name] = storage
    index.containers = _containers(index)
    _rename(index, known)
    index.by_number = bool(index.state) and all(
        name.isdigit() and name not in known for name in index.state
    )
    return index


def _containers(index: CheckpointIndex) -> Containers:
    if index.info is None:
        return Containers()
    if index.info.containers is not None:
        return Containers.unpack(index.info.containers)
    found = Containers()  # of a version that recorded which mappings have integers for keys
    for name, *above in index.info.int_keys:
        paths = [*index.state.get(name, ())]
        paths += [p for by_path in index.opaque.get(name, {}).values() for p in by_path]
        n = len(above)
        keys = dict.fromkeys(p[n] for p in paths if [*p[:n]] == above and len(p) > n)
        if keys and all(str(key).lstrip("-").isdigit() for key in keys):
            where: Path = ("state", name, *above)
            found[where] = Container("dict", tuple(map(int, keys)))
    return found


def _rename(index: CheckpointIndex, known: set[str]) -> None:
    """Take the names of wrappers out of names, where a known FQN is left."""
    saved = {*index.state, *(str(group) for group in index.groups if isinstance(group, str))}
    for name in saved - known:
        fqn = next((n for n in without_wrappers(name) if n in known and n not in saved), None)
        if fqn is None or fqn in index.renamed.values():
            continue
        index.renamed[name] = fqn
        keys = list(index.state.get(name, {}).values())
        if name in index.state:
            index.state[fqn] = index.state.pop(name)
        if name in index.groups:
            keys += index.groups[name].values()
            index.groups[fqn] = index.groups.pop(name)
        for key in keys:
            index.paths[key] = tuple(
                step.replace(name, fqn) if isinstance(step, str) else step
                for step in index.paths[key]
            )


def _place(index: CheckpointIndex, where: Path, name: str, known: set[str]) -> None:
    if not where:
        index.one_object = True
        return
    if len(where) == 1 and str(where[0]).startswith(("state.", "param_groups.")):
        section, _, rest = str(where[0]).partition(".")
        index.flattened = True
        fqn, option = _split(rest, known)
        table: dict[int | str, dict[Path, str]] = (
            index.groups if section == "param_groups" else index.state  # type: ignore[assignment]
        )
        table.setdefault(fqn, {})[option] = name
    elif where == ("state",):
        index.one_state = name
    elif where == ("param_groups",):
        index.one_list = name
    elif where[0] == "state" and len(where) > 1:
        index.state.setdefault(str(where[1]), {})[where[2:]] = name
    elif where[0] == "param_groups" and len(where) > 1:
        group = where[1]
        index.groups.setdefault(group, {})[where[2:]] = name
    else:
        index.extra[where] = name


def _split(text: str, known: set[str]) -> tuple[str, Path]:
    """``"a.weight.exp_avg"`` as FQN and path: the longest known FQN, else all but the last part."""
    parts = text.split(".")
    for i in range(len(parts) - 1, 0, -1):
        fqn = ".".join(parts[:i])
        if fqn in known:
            return fqn, tuple(parts[i:])
    return ".".join(parts[:-1]), (parts[-1],)
