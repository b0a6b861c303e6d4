"""accelerate's FSDP checkpoints, saved and loaded with no gather while a context is entered.

::

    from dcp_fsdp_osd.trainers.accelerate import flat_checkpoints

    with flat_checkpoints():
        accelerator.save_state("run/step-100")
        accelerator.load_state("run/step-100")

accelerate has no place to plug this in: ``save_state``, ``load_state`` and the Trainer of
transformers call four functions of ``accelerate.utils``.  Inside of the context, and nowhere else,
their names stand for functions of this module with the same arguments and the same files, which
accelerate reads without this, too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import fsdp_utils, is_peft_model
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import StateDictType

from dcp_fsdp_osd.load.planner import FlatOptimLoadPlanner
from dcp_fsdp_osd.save.planner import FlatOptimSavePlanner
from dcp_fsdp_osd.stateful.model import FlatModelState
from dcp_fsdp_osd.stateful.optim import FlatOptimState
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter

__all__ = ["flat_checkpoints"]


class _Functions:
    """The four functions; arguments are accelerate's."""

    def __init__(self, writer_options: dict[str, Any], reader_options: dict[str, Any]) -> None:
        self._writer_options, self._reader_options = writer_options, reader_options
        self.originals = {name: _original(name) for name in _PARAMETERS}

    def save_fsdp_model(  # noqa: PLR0917 - accelerate's
        self,
        fsdp_plugin: Any,
        accelerator: Any,
        model: Any,
        output_dir: Any,
        model_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> None:
        _check(fsdp_plugin, use_dcp)
        if adapter_only and is_peft_model(model):  # of which few weights are the adapter's
            original = self.originals["save_fsdp_model"]
            original(fsdp_plugin, accelerator, model, output_dir, model_index, adapter_only)
            return
        folder = _folder(output_dir, fsdp_utils.FSDP_MODEL_NAME, model_index)
        self._save({"model": FlatModelState(model)}, folder)

    def load_fsdp_model(  # noqa: PLR0917 - accelerate's
        self,
        fsdp_plugin: Any,
        accelerator: Any,
        model: Any,
        input_dir: Any,
        model_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> Any:
        _check(fsdp_plugin, use_dcp)
        if adapter_only and is_peft_model(model):
            original = self.originals["load_fsdp_model"]
            return original(fsdp_plugin, accelerator, model, input_dir, model_index, adapter_only)
        folder = _folder(input_dir, fsdp_utils.FSDP_MODEL_NAME, model_index)
        self._load({"model": FlatModelState(model)}, folder)
        return _AllKeys()

    def save_fsdp_optimizer(  # noqa: PLR0917 - accelerate's
        self,
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        output_dir: Any,
        optimizer_index: int = 0,
        use_dcp: bool = True,
    ) -> None:
        _check(fsdp_plugin, use_dcp)
        folder = _folder(output_dir, fsdp_utils.OPTIMIZER_NAME, optimizer_index)
        self._save({"optimizer": FlatOptimState(model, _plain(optimizer))}, folder)

    def load_fsdp_optimizer(  # noqa: PLR0917 - accelerate's
        self,
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        input_dir: Any,
        optimizer_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> None:
        _check(fsdp_plugin, use_dcp)
        folder = _folder(input_dir, fsdp_utils.OPTIMIZER_NAME, optimizer_index)
        self._load({"optimizer": FlatOptimState(model, _plain(optimizer))}, folder)

    def _save(self, state: dict[str, Any], folder: Path) -> None:
        writer = StreamingWriter(folder, overwrite=True, **self._writer_options)
        save(state, storage_writer=writer, planner=FlatOptimSavePlanner())

    def _load(self, state: dict[str, Any], folder: Path) -> None:
        reader = StreamingReader(folder, **self._reader_options)
        load(state, storage_reader=reader, planner=FlatOptimLoadPlanner())


class _AllKeys:
    """What ``module.load_state_dict`` returns where all matched."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


_PARAMETERS = {
    name: list(inspect.signature(getattr(_Functions, name)).parameters)[1:]
    for name in (
        "save_fsdp_model",
        "load_fsdp_model",
        "save_fsdp_optimizer",
        "load_fsdp_optimizer",
    )
}


def _original(name: str) -> Callable[..., Any]:
    """accelerate's own function, where it is as it was when this was written."""
    function: Callable[..., Any] | None = getattr(fsdp_utils, name, None)
    found = list(inspect.signature(function).parameters) if callable(function) else None
    known = _PARAMETERS[name]
    # Older versions lack the last of them (use_dcp), and pass none.
    if function is None or found is None or found != known[: len(found)] or len(found) < 5:
        raise ImportError(
            f"expected accelerate.utils.fsdp_utils.{name} with the parameters {', '.join(known)}, "
            f"as accelerate 1.15 has; found {'none' if found is None else ', '.join(found)} in "
            f"accelerate {accelerate.__version__}. Save and load as docs/trainers/accelerate.md "
            "shows for any version"
        )
    return function


def _check(fsdp_plugin: Any, use_dcp: bool) -> None:
    kind = fsdp_plugin.state_dict_type
    if kind != StateDictType.SHARDED_STATE_DICT or not use_dcp:
        raise ValueError(
            "expected the FSDP plugin's state_dict_type to be SHARDED_STATE_DICT, which "
            f"flat_checkpoints writes, found {kind}{'' if use_dcp else ' with use_dcp=False'}: set "
            'it ("fsdp_state_dict_type: SHARDED_STATE_DICT"), or leave flat_checkpoints'
        )


def _folder(folder: Any, name: str, index: int) -> Path:
    """accelerate's own, of which callers may have given the last part already."""
    path = Path(folder)
    return path if path.name == f"{name}_{index}" else path / f"{name}_{index}"


def _plain(optimizer: Any) -> Any:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


@contextlib.contextmanager
def flat_checkpoints(
    *,
    writer_options: Mapping[str, Any] | None = None,
    reader_options: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Inside of it accelerate, and transformers' Trainer, save and load FSDP with no gather.

    FSDP1 and FSDP2 with ``SHARDED_STATE_DICT``; other kinds are an error, so that nothing is
    gathered unnoticed.  Adapters alone (``adapter_only`` of a PEFT model) go accelerate's way.
    Process-wide, and not for several threads at a time.

    Args:
        writer_options: of ``StreamingWriter``.
        reader_options: of ``StreamingReader``.

    Raises:
        ImportError: this version of accelerate has other functions.
    """
    functions = _Functions(dict(writer_options or {}), dict(reader_options or {}))
    ours = {name: getattr(functions, name) for name in functions.originals}
    _swap(functions.originals, ours)
    try:
        yield
    finally:
        _swap(ours, functions.originals)  # wherever they were imported to in the meantime, too


def _swap(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Let the names of `old` stand for `new` in all modules of accelerate and transformers."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("accelerate", "transformers"):
            for name, function in old.items():
                if vars(module).get(name) == function:  # methods are made anew at each access
                    setattr(module, name, new[name])
