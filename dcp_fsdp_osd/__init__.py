"""FSDP optimizer state in ``torch.distributed.checkpoint`` without gathering a tensor.

See :class:`FlatOptimSavePlanner` and :class:`FlatOptimLoadPlanner`.
"""

from .errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    ExchangeError,
    FlatOptimError,
    LayoutError,
    StorageError,
    UnsafeCheckpointError,
    UnsupportedTorchError,
)
from .full_state import FullStateReader
from .layout import FlatLayout
from .load_planner import FlatOptimLoadPlanner
from .model_state import FlatModelState
from .optim_state import FlatOptimState
from .save_planner import FlatOptimSavePlanner
from .storage import StreamingReader, StreamingWriter, latest
from .verify import Difference, Verification, verify_model_state, verify_optim_state

__all__ = [
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "Difference",
    "ExchangeError",
    "FlatLayout",
    "FlatModelState",
    "FlatOptimError",
    "FlatOptimLoadPlanner",
    "FlatOptimSavePlanner",
    "FlatOptimState",
    "FullStateReader",
    "LayoutError",
    "StorageError",
    "StreamingReader",
    "StreamingWriter",
    "UnsafeCheckpointError",
    "UnsupportedTorchError",
    "Verification",
    "latest",
    "verify_model_state",
    "verify_optim_state",
]
