"""What differs between the torch versions that are supported, 2.6 to 2.15, in one place.

Each function names the version that brought what it stands in for; with an older torch it does the
same by other means, or raises :class:`~dcp_fsdp_osd.errors.UnsupportedTorchError`, which names the
attribute and the version.  What is looked at is whether the attribute is there, not the number of
the version: nightly and vendors' builds have what their number does not say.

Through here must go everything that torch 2.6 lacks:

- ``WriteItem.bytes_io_data`` (2.8): :func:`object_bytes`.
- ``ProcessGroup.get_group_store`` (2.9) and ``Store.clone`` (2.8): :func:`job_store`.
- ``DeviceMesh._get_root_mesh`` (2.8 to 2.10 move it): :func:`root_mesh`.
- ``AsyncCheckpointerType.PROCESS`` (2.7): :func:`background_process` and
  :func:`forget_background_process`.
- ``TensorProperties`` in a pickle (2.15 has a field more): :func:`reduce_properties` and
  :func:`properties_state`.
- private attributes, which may go in any version: :func:`private`.

Nobody needs it for what has been the same since 2.6 (``Metadata`` of an older torch has no
``version`` and ``StorageMeta`` no ``modules``: give neither, read them with ``getattr``).
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh

from dcp_fsdp_osd.errors import UnsupportedTorchError

__all__ = [
    "PROPERTIES",
    "SUPPORTED",
    "background_process",
    "forget_background_process",
    "job_store",
    "object_bytes",
    "private",
    "properties_state",
    "reduce_properties",
    "root_mesh",
]

SUPPORTED = "torch 2.6 to 2.15"

PROPERTIES = 5
"""Fields of a pickled ``TensorProperties`` that every torch has; later ones are behind these."""


def private(owner: Any, name: str, of: str, purpose: str) -> Any:
    """The private attribute ``name`` of ``owner``, a ``of``.

    Raises:
        UnsupportedTorchError: it is not there; says what it is needed for.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {of}.{name}, {purpose}; supported are {SUPPORTED}"
        ) from error


def object_bytes(item: WriteItem) -> int:
    """Bytes of the object that a BYTE_IO item writes; 0 where nothing is known of it.

    Torch 2.6 and 2.7 say nothing (``WriteItem`` has no ``bytes_io_data``).
    """
    data = getattr(item, "bytes_io_data", None)
    return 0 if data is None else int(data.nbytes)


def properties_state(kind: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ``kind`` (a ``TensorProperties``) of this torch takes of a pickled state of another's.

    Torch 2.15 adds the strides, a sixth field, which older ones refuse to unpickle.
    """
    return state if len(state) == PROPERTIES else state[: len(kind().__getstate__())]


def reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """For pickle: as torch 2.6 does it, so that every torch reads it; no load asks for more."""
    state = properties.__getstate__()  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state[:PROPERTIES]  # type: ignore[attr-defined]


def job_store() -> Any:
    """The store that all ranks of the job reach, for a thread of its own.

    A thread that waits for a key keeps all others of the process from using the same connection, so
    this is one of our own: ``Store.clone`` (torch 2.8), before that a second client of a TCPStore.

    Raises:
        UnsupportedTorchError: this torch does not tell which store that is.
    """
    c10d: Any = dist  # exports stores without telling type checkers
    world: Any = c10d.group.WORLD
    if hasattr(world, "get_group_store"):  # torch 2.9
        store = world.get_group_store()
    else:
        purpose = "over which ranks meet to broadcast what is read once: pass broadcast=False"
        get = private(c10d.distributed_c10d, "_get_default_store", "distributed_c10d", purpose)
        store = get()
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if isinstance(store, c10d.TCPStore):
        return c10d.TCPStore(store.host, store.port, is_master=False, timeout=store.timeout)
    return store


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which ``mesh`` is a slice; itself if it is none."""
    if hasattr(mesh, "_get_root_mesh"):
        found: DeviceMesh = mesh._get_root_mesh()
        return found
    purpose = "which tells the mesh that a mesh was sliced from"
    resources = private(torch.distributed.device_mesh, "_mesh_resources", "device_mesh", purpose)
    get: Callable[[DeviceMesh], DeviceMesh] = private(
        resources, "get_root_mesh", "_MeshEnv", purpose
    )
    return get(mesh)


_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_FOR_KILLED = "without which a killed background process of dcp.async_save cannot be replaced"


def background_process() -> BaseProcess | None:
    """This rank's of ``AsyncCheckpointerType.PROCESS``, alive or dead; None before the first save.

    Torch 2.6 knows no such process.
    """
    if importlib.util.find_spec(_EXECUTOR) is None:
        return None
    module = importlib.import_module(_EXECUTOR)
    owner = private(module, "_CHECKPOINT_PROCESS", "_async_process_executor", _FOR_KILLED)
    if owner is None:
        return None
    process: BaseProcess = private(owner, "_save_process", "_AsyncCheckpointProcess", _FOR_KILLED)
    return process


def forget_background_process() -> None:
    """Have the next save by process start another one; every version keeps a dead one for good."""
    module = importlib.import_module(_EXECUTOR)
    private(module, "_CHECKPOINT_PROCESS", "_async_process_executor", _FOR_KILLED)
    module._CHECKPOINT_PROCESS = None  # type: ignore[attr-defined]
