"""FullStateReader: a full state dict that one rank holds, as a checkpoint that all ranks load.

With :class:`~dcp_fsdp_osd.FlatOptimLoadPlanner` each rank gets what it keeps and nothing else:
rank 0 reads piece by piece and broadcasts, in bounded memory everywhere.  Replaces, for optimizer
state, ``FSDP.scatter_full_optim_state_dict``, ``rank0_only`` with
``_broadcast_processed_state`` (``torch/distributed/fsdp/_optim_utils.py``), and
``BroadcastingTorchSaveReader`` (``torch/distributed/checkpoint/format_utils.py``), which broadcasts
every tensor whole.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_fsdp_osd.checkpoint import INFO_KEY, SavedInfo
from dcp_fsdp_osd.containers import containers_of
from dcp_fsdp_osd.errors import (
    CheckpointMismatchError,
    StorageError,
    UnsafeCheckpointError,
    portable_errors,
)
from dcp_fsdp_osd.layout.geometry import narrowed_view
from dcp_fsdp_osd.misuse.arguments import HasRole
from dcp_fsdp_osd.misuse.in_use import InUse, begins, goes_on, resets
from dcp_fsdp_osd.storage.missing import Unreadable
from dcp_fsdp_osd.storage.once import from_first_rank
from dcp_fsdp_osd.storage.session import telling
from dcp_fsdp_osd.tree import dotted, leaves

__all__ = ["FullStateReader"]


class FullStateReader(HasRole, StorageReader):
    """Serves a full state dict of rank 0 to all ranks of a load.

    Args:
        source: on rank 0 of the process group, a file written by ``torch.save`` (it is mapped into
            memory, not read into it) or the state dict itself, which is not changed and not copied.
            On other ranks it is ignored and may be None.
        key: if the source is an optimizer's state dict itself (with ``state`` and
            ``param_groups`` at its top, as ``FSDP.full_optim_state_dict`` and
            ``get_optimizer_state_dict`` give it): where it is to lie. Else the source's own keys
            stay.
        process_group: the ranks that load, the same as ``dcp.load`` is given; by default all. One
            collective, of names and shapes, is run over it when the load begins.
        allow_pickle: load a file with ``weights_only=False``. Runs code of its author's choice.

    Tensors must be plain (no DTensor or ShardedTensor) and are read by their FQNs.  With another
    planner than ours every rank would have to read for itself, which is an error.

    Raises:
        StorageError: (in ``dcp.load``) the file is missing, or not one of ``torch.save``.
        UnsafeCheckpointError: it holds more than tensors and plain values; see `allow_pickle`.
    """

    role = "dcp.load(storage_reader=...)"

    def __init__(
        self,
        source: str | os.PathLike[str] | Mapping[str, Any] | None,
        *,
        key: str = "optim",
        process_group: dist.ProcessGroup | None = None,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        self._source, self._key, self._group = source, key, process_group
        self._allow_pickle = allow_pickle
        self._values: dict[str, Any] = {}
        self._in_use = InUse()

    def __repr__(self) -> str:
        source = self._source
        shown = type(source).__name__ if isinstance(source, Mapping) else repr(source)
        return f"{type(self).__name__}({shown}, key={self._key!r})"

    def _ranks(self) -> dist.ProcessGroup | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return self._group or dist.group.WORLD

    def _is_source(self) -> bool:
        group = self._ranks()
        return group is None or dist.get_rank(group) == 0

    @resets
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from the file `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._source = checkpoint_id
        self._values = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and dtypes of the source.  Collective over the process group.

        Where it cannot be read, what is returned raises the reason when it is looked at (see
        ``missing.py``).
        """
        with self._in_use.beginning() as served:
            metadata = self._metadata()  # collective
            return metadata if served else Unreadable(self._in_use.refusal, missing=False)

    def _metadata(self) -> Metadata:
        try:
            return self._read_metadata()
        except Exception as error:
            failure = error
        return Unreadable(lambda: failure, missing=False)

    @portable_errors()
    def _read_metadata(self) -> Metadata:
        return from_first_rank(self._ranks(), "read the full state", self._describe)

    @goes_on
    def _describe(self) -> Metadata:
        state = self._load()
        if "state" in state and "param_groups" in state:
            for step in reversed(self._key.split(".")):
                state = {step: state}
        entries: dict[str, Any] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        self._values = {}
        for path, value in leaves(state):
            name = dotted(path)
            if name in entries:
                raise StorageError(
                    f"expected distinct names, found two values of the full state named {name!r}"
                )
            if isinstance(value, torch.Tensor):
                if hasattr(value, "placements") or hasattr(value, "local_shards"):
                    raise CheckpointMismatchError(
                        f"{name}: expected a plain tensor, found {type(value).__name__}: gather it "
                        f"(full_state_dict=True), or save it with dcp.save"
                    )
                chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
                properties = TensorProperties.create_from_tensor(value)
                entries[name] = TensorStorageMetadata(properties, value.shape, [chunk])
            else:
                entries[name] = BytesStorageMetadata()
            paths[name] = path
            self._values[name] = value
        infos = {
            dotted(path): SavedInfo(groups=None, containers=[c.pack(p) for p, c in found.items()])
            for path, optim in _optimizers(state, ())
            if (found := containers_of(optim, path))
        }
        data = {**paths, INFO_KEY: SavedInfo.pack(infos)} if infos else paths
        return Metadata(state_dict_metadata=entries, planner_data=data, storage_data={})

    def _load(self) -> Mapping[str, Any]:
        source = self._source
        if source is None:
            raise StorageError(
                "expected a file of torch.save or a state dict on rank 0 of the process group, "
                "found None"
            )
        if isinstance(source, Mapping):
            return source
        path = Path(source)
        if path.is_dir():
            raise StorageError(
                f"{path}: expected a file written by torch.save, found that it is a folder: "
                f"StreamingReader reads the checkpoint in a folder"
            )
        try:
            found = torch.load(
                path, map_location="cpu", mmap=True, weights_only=not self._allow_pickle
            )
        except FileNotFoundError as error:
            raise StorageError(f"no file of a full state at {path}") from error
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{path}: expected tensors and plain values alone, found more: {error}. If you "
                f"trust the file's author, pass allow_pickle=True"
            ) from error
        except (RuntimeError, EOFError, OSError) as error:
            raise StorageError(
                f"{path}: expected a file written by torch.save in the zip format (the default "
                f"since torch 1.6), which can be mapped into memory, found: {error}"
            ) from error
        if not isinstance(found, Mapping):
            raise StorageError(f"{path}: expected a state dict, found {type(found).__name__}")
        return found

    @begins
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise why the metadata could not be read, if so; there is nothing to set up."""
        metadata.state_dict_metadata  # noqa: B018

    @goes_on
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, which says whether this rank can read (see ``StreamingReader``)."""
        about = {
            "can_read": self._is_source(),
            "reads_parts": True,
            "reports_errors": True,
            "remote": False,
        }
        return dataclasses.replace(plan, storage_data={"dcp_fsdp_osd": about})

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @portable_errors()
    @goes_on
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy out what the plan wants, in its order; the future is complete on return."""
        with telling(planner):
            if plan.items and not self._is_source():
                raise StorageError(
                    f"only rank 0 of the process group can read a full state, and this one has "
                    f"{len(plan.items)} reads: pass planner=FlatOptimLoadPlanner(model, optim) to "
                    f"dcp.load, and the same process group to it and to the reader"
                )
            for item in plan.items:
                self._read(item, planner)
        self._values = {}
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        value = self._values[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(value, stream)
            stream.seek(0)
            planner.load_bytes(item, stream)
            return
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrowed_view(value, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file."""
        return Path(checkpoint_id).is_file()


def _optimizers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The optimizers' state dicts in a state dict, with their paths."""
    if isinstance(value, Mapping) and "state" in value and "param_groups" in value:
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _optimizers(item, (*path, str(key)))
