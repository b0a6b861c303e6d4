"""The written format: what we add to a checkpoint's metadata, and what others have.  Pure.

:class:`SavedInfo` lies in ``Metadata.planner_data`` under :data:`INFO_KEY`, where stock readers
never look, as a tuple of texts: the version of the format, JSON of the fields that the first
version of this package had (which took no others), and JSON of the fields that came later. A later
field must be one that a reader may pass over, as older versions do; what may not be passed over is
another version of the format, which they refuse.

:func:`index_checkpoint` finds one optimizer's keys, of our planner and of stock PyTorch: nested
(``optim.state.<fqn>.<name>``, ``optim.param_groups.<i>.<option>``) and those of
``flatten_optimizer_state_dict=True`` (``optim.param_groups.<fqn>.<option>``, with one path element
for all of it).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_fsdp_osd.containers import Container, Containers
from dcp_fsdp_osd.errors import CheckpointMismatchError, CorruptCheckpointError
from dcp_fsdp_osd.layout.flat import without_wrappers
from dcp_fsdp_osd.tree import Path

__all__ = [
    "INFO_KEY",
    "CheckpointIndex",
    "SavedInfo",
    "index_checkpoint",
    "is_flattened",
    "per_rank_prefix",
]


@dataclass
class CheckpointIndex:
    """Keys of one optimizer in a checkpoint.

    Attributes:
        state: name in ``state`` -> path below it -> key.
        groups: group (a number, or an FQN in a flattened checkpoint) -> path of the option -> key.
        extra: path -> key, of what is neither ``state`` nor ``param_groups``.
        per_rank: first FQN -> signature -> path -> key, of state that cannot be resharded.
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
    per_rank: dict[str, dict[str, dict[Path, str]]] = field(default_factory=dict)
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
        """Names of the param groups' options, as far as metadata has them."""
        return {str(path[0]) for paths in self.groups.values() for path in paths if path} - {
            "params",
            "param_names",
        }

    def known_groups(self) -> list[list[str]] | None:
        """The FQNs of each group where metadata alone has them; None if they must be read."""
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
        fqns: names that parameters have now; needed to separate FQN and state name where the
            checkpoint's paths do not.
    """
    planner_data = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    key = ".".join(path)
    index = CheckpointIndex(info=SavedInfo.unpack(metadata.planner_data, key))
    known = set(fqns)
    hidden = per_rank_prefix(path)
    for name, storage in metadata.state_dict_metadata.items():
        where: Path = tuple(planner_data.get(name) or (name,))
        if len(where) == 1 and name.startswith(key + "."):  # saved with flatten_state_dict=False
            where = (*path, name[len(key) + 1 :])
        if where[: len(hidden)] == hidden:
            fqn, signature, *rest = where[len(hidden) :]
            by_signature = index.per_rank.setdefault(str(fqn), {})
            by_signature.setdefault(str(signature), {})[tuple(rest)] = name
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
        paths += [p for by_path in index.per_rank.get(name, {}).values() for p in by_path]
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


def is_flattened(state_dict: Mapping[str, Any]) -> bool:
    """Whether this is a state dict with ``flatten_optimizer_state_dict=True``."""
    return "state" not in state_dict and any(
        str(k).startswith(("state.", "param_groups.")) for k in state_dict
    )


def per_rank_prefix(key: Path) -> Path:
    """Where per-rank state, which cannot be resharded, lies: beside the optimizer, out of stock's
    sight."""
    return (*key[:-1], f"{key[-1]}__opaque")


INFO_KEY = "dcp_fsdp_osd"


_VERSION = "1"


_FIRST = ("groups", "user", "absent", "opaque", "odd", "int_keys", "quantized")


@dataclass(frozen=True)
class SavedInfo:
    """What is recorded of one optimizer; plain JSON.  Fields have the names that are written.

    A save makes one on each rank, of its own part, and :meth:`joined` makes one of all; what ranks
    have to agree on is not in those of ranks.

    Attributes:
        groups: the FQNs of each param group; None if it was not recorded.
        user: names in ``state`` that are no parameter's.
        absent: key -> spans of elements for which a rank had no state (zeros are stored): start
            and stop; and, where they count within a box of the tensor, its offsets and sizes.
        opaque: key of per-rank state -> the part of the model that its rank held.
        odd: keys of whole tensors that do not have their parameter's shape.
        int_keys: paths below ``state`` of mappings whose keys are integers; of use to versions that
            know of no ``containers``.
        quantized: how each state that is quantized in blocks is made again (``Quantized``).
        placed: key of a value under a DTensor parameter that does not lie as the parameter does ->
            how it lies (``placement_text``); "" for a whole tensor that is no DTensor.
        optimizers: class and defaults of the optimizer (``describe_optim``); several where ranks
            differ in it.
        containers: mappings that are not dicts with text for keys (``containers.Container.pack``).
            None if it was not recorded.
        layouts: what ranks held (``FlatLayout.signature``), all of which per-rank state may depend
            on. None if it was not recorded.
        stateless: FQN -> what those ranks held (``FlatLayout.signature``) that had elements of it
            and no state, while others had state. An optimizer may keep all of a parameter's
            state on one of the ranks that it is cut for.
    """

    groups: Sequence[Sequence[str]] | None = ()
    user: list[str] = field(default_factory=list)
    absent: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    int_keys: Sequence[Sequence[str]] = ()
    quantized: Sequence[Mapping[str, Any]] = ()
    placed: dict[str, str] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    containers: Sequence[Sequence[Any]] | None = None
    layouts: Sequence[str] | None = None
    stateless: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @staticmethod
    def joined(infos: Iterable[SavedInfo]) -> SavedInfo:
        """Of several ranks' parts of one optimizer."""
        parts = list(infos)
        optimizers: list[dict[str, Any]] = []
        for part in parts:
            optimizers += [each for each in part.optimizers if each not in optimizers]
        return SavedInfo(
            user=sorted({name for part in parts for name in part.user}),
            opaque={key: held for part in parts for key, held in part.opaque.items()},
            odd=sorted({key for part in parts for key in part.odd}),
            placed={key: text for part in parts for key, text in part.placed.items()},
            optimizers=optimizers,
        )

    @staticmethod
    def pack(infos: Mapping[str, SavedInfo]) -> tuple[str, ...]:
        """By key of the optimizer, as it lies in a checkpoint."""
        first: dict[str, dict[str, Any]] = {}
        later: dict[str, dict[str, Any]] = {}
        for key, info in infos.items():
            first[key] = {name: value for name, value in vars(info).items() if name in _FIRST}
            later[key] = {name: value for name, value in vars(info).items() if name not in _FIRST}
        texts = (_VERSION, json.dumps(first))
        return (*texts, json.dumps(later)) if any(later.values()) else texts

    @staticmethod
    def unpack(planner_data: Any, key: str) -> SavedInfo | None:
        """The info of one optimizer, or None if the checkpoint is not of our planner.

        Raises:
            CheckpointMismatchError: a later version of this package saved in another format.
            CorruptCheckpointError: what lies there is none of ours.
        """
        packed = planner_data.get(INFO_KEY) if isinstance(planner_data, Mapping) else None
        if packed is None:
            return None
        try:
            version = packed[0]
            if version == _VERSION:
                first, *later = (json.loads(text).get(key) for text in packed[1:])
                if first is None:
                    return None
                known = {each.name for each in dataclasses.fields(SavedInfo)}
                found = {k: v for more in later if more for k, v in more.items() if k in known}
                return SavedInfo(**first, **found)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{key}: expected what FlatOptimSavePlanner records in the checkpoint's metadata, "
                f"found something else there ({type(error).__name__}: {error}): the file "
                f".metadata is damaged, or was changed"
            ) from error
        raise CheckpointMismatchError(
            f"{key}: expected a checkpoint whose optimizer state is recorded in format {_VERSION} "
            f"of dcp-fsdp-osd, found format {version!r}: a later version of dcp-fsdp-osd saved it. "
            f"Load it with that version"
        )
