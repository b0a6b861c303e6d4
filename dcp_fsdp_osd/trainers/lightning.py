"""Lightning's FSDP strategies with checkpoints that are saved and loaded with no gather.

::

    from dcp_fsdp_osd.trainers.lightning import FlatFSDPStrategy

    trainer = Trainer(strategy=FlatFSDPStrategy(auto_wrap_policy={Layer}))
    trainer.fit(model, ckpt_path="s3://bucket/run/last.ckpt")

A checkpoint is the folder that Lightning's own strategies write with ``state_dict_type="sharded"``
(``save_distributed_checkpoint=True``): they read it, and their checkpoints are read here.  What is
neither the model's nor an optimizer's (loops, callbacks, schedulers, hyper-parameters) lies in the
same checkpoint, so that it is committed with the rest; for Lightning's own strategies it is written
to ``meta.pt`` as well, where the folder is local.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.load.planner import FlatOptimLoadPlanner
from dcp_fsdp_osd.save.planner import FlatOptimSavePlanner
from dcp_fsdp_osd.stateful.model import FlatModelState
from dcp_fsdp_osd.stateful.optim import FlatOptimState
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.location import is_local, join, local_path, resolve

__all__ = ["FlatFSDPStrategy", "FlatModelParallelStrategy"]

T = TypeVar("T")
_Strategy: Any = object
if TYPE_CHECKING:
    _Strategy = Any  # what this is mixed into has the rest

_REST = "lightning"
"""Key of what is neither the model's nor an optimizer's: the bytes of a ``torch.save``."""
_META = "meta.pt"
"""Lightning's own file of that."""

_OVERRIDDEN = (
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "load_checkpoint",
)
for _strategy in (FSDPStrategy, ModelParallelStrategy):
    _missing = [name for name in _OVERRIDDEN if not hasattr(_strategy, name)]
    if _missing:
        raise ImportError(
            f"expected lightning's {_strategy.__name__} to have {', '.join(_missing)}, as 2.6 has; "
            f"found lightning {lightning.__version__} without"
        )


class _FlatCheckpoints(_Strategy):
    """Both strategies' checkpoints; goes before the strategy in the list of bases."""

    _model_key: str  # Lightning's name
    _writer_options: dict[str, Any]
    _reader_options: dict[str, Any]

    def lightning_module_state_dict(self) -> Any:
        """The model as it is; nothing is copied before :meth:`save_checkpoint`."""
        return FlatModelState(self.model)

    def optimizer_state(self, optimizer: Any) -> Any:
        """Likewise of an optimizer, Lightning's wrapper or the one in it."""
        return FlatOptimState(self.model, getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save as one checkpoint at a path or URL; one that is there is replaced.  Collective.

        Raises:
            CheckpointException: on every rank, what ``dcp.save`` raised.
            StorageError: on every rank, where rank 0 could not pickle the rest.
        """
        if storage_options is not None:
            raise TypeError(
                f"expected options of the storage in {type(self).__name__}(writer_options="
                "{'storage_options': ...}), found some in save_checkpoint"
            )
        url = resolve(self.broadcast(filepath))
        state = {self._model_key: checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[_optimizer_key(number)] = optimizer
        state[_REST] = self._on_rank_0(lambda: _pickled(checkpoint, url), f"saving {url}")
        writer = StreamingWriter(url, overwrite=True, **self._writer_options)
        save(state, storage_writer=writer, planner=FlatOptimSavePlanner())

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load model and, to fit, optimizers in place; the rest is returned.  Collective.

        Of this class, of Lightning's own strategies, saved by any number of ranks; one file with
        everything (``state_dict_type="full"``) is left to Lightning.  With the module's
        ``strict_loading=False`` what does not match stays as it is, and is warned of.

        Args:
            weights_only: of ``torch.load``, for the rest.
        """
        url = resolve(self.broadcast(checkpoint_path))
        if is_local(url) and Path(local_path(url)).is_file():
            return dict(super().load_checkpoint(url, weights_only=weights_only))
        reader = StreamingReader(url, **self._reader_options)
        saved = self._on_rank_0(lambda: _saved_keys(reader), f"loading {url}")
        # Of FSDP1 and FSDP2 Lightning calls it by different names.
        [model_key] = saved & {"model", "state_dict"} or {self._model_key}
        state: dict[str, Any] = {model_key: FlatModelState(self.model)}
        module = self.lightning_module
        if module.trainer.state.fn == TrainerFn.FITTING:
            for number, optimizer in enumerate(self.optimizers):
                state[_optimizer_key(number)] = self.optimizer_state(optimizer)
        if _REST in saved:
            state[_REST] = b""  # replaced
        planner = FlatOptimLoadPlanner(strict=module.strict_loading)
        load(state, storage_reader=reader, planner=planner)
        if planner.skipped:
            rank_zero_warn(f"{url}: left as it was:\n  " + "\n  ".join(planner.skipped))
        rest = io.BytesIO(state[_REST]) if _REST in saved else local_path(join(url, _META))
        return dict(torch.load(rest, weights_only=weights_only))

    def _on_rank_0(self, call: Callable[[], T], doing: str) -> T:
        """Its result on all ranks; or its error on all, so that none waits for rank 0."""
        answer: tuple[T | None, str] = (None, "")
        if self.global_rank == 0:
            try:
                answer = call(), ""
            except Exception as error:
                answer = None, f"{type(error).__name__}: {error}"
        value: T
        value, problem = self.broadcast(answer)
        if problem:
            raise StorageError(f"{doing}: rank 0 failed with {problem}")
        return value


def _optimizer_key(number: int) -> str:
    return f"optimizer_{number}"


def _saved_keys(reader: StreamingReader) -> set[str]:
    """What lies at the top of the state dict that was saved."""
    return {name.partition(".")[0] for name in reader.read_metadata().state_dict_metadata}


def _pickled(rest: Mapping[str, Any], url: str) -> bytes:
    """The bytes of ``torch.save``, which are also written to a local checkpoint's meta.pt."""
    data = io.BytesIO()
    torch.save(rest, data)
    if is_local(url):
        folder = Path(local_path(url))
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{_META}.tmp"
        temporary.write_bytes(data.getvalue())
        temporary.replace(folder / _META)
    return data.getvalue()


class FlatFSDPStrategy(_FlatCheckpoints, FSDPStrategy):
    """``FSDPStrategy`` (FSDP1) whose checkpoints take no gather and may be URLs.

    Args:
        writer_options: of ``StreamingWriter``: ``storage_options``, ``backend``, ``retry``, ...
        reader_options: of ``StreamingReader``.
        options: of ``FSDPStrategy``, less ``state_dict_type``.
    """

    _model_key = "model"

    def __init__(
        self,
        *,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.setdefault("state_dict_type", "sharded") != "sharded":
            raise ValueError(
                "expected state_dict_type='sharded', which FlatFSDPStrategy always writes, found "
                f"{options['state_dict_type']!r}: one file is made of a checkpoint by "
                "`dcp-osd export`"
            )
        super().__init__(**options)
        self._writer_options = dict(writer_options or {})
        self._reader_options = dict(reader_options or {})


class FlatModelParallelStrategy(_FlatCheckpoints, ModelParallelStrategy):
    """``ModelParallelStrategy`` (FSDP2, tensor parallelism) with the same checkpoints.

    Lightning's own gathers nothing here either; this one reads state that several ranks want once,
    streams to and from URLs, and checks what it reads.

    Args:
        writer_options, reader_options: as for :class:`FlatFSDPStrategy`.
        options: of ``ModelParallelStrategy``, less ``save_distributed_checkpoint``.
    """

    _model_key = "state_dict"

    def __init__(
        self,
        *,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.setdefault("save_distributed_checkpoint", True) is not True:
            raise ValueError(
                "expected save_distributed_checkpoint=True, which FlatModelParallelStrategy always "
                f"writes, found {options['save_distributed_checkpoint']!r}: one file is made of a "
                "checkpoint by `dcp-osd export`"
            )
        super().__init__(**options)
        self._writer_options = dict(writer_options or {})
        self._reader_options = dict(reader_options or {})
