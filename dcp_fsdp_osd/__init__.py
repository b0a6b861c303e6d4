"""FSDP optimizer state in ``torch.distributed.checkpoint`` without gathering a tensor.

See :class:`FlatOptimSavePlanner` and :class:`FlatOptimLoadPlanner`.
"""

from .errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    FlatOptimError,
    LayoutError,
    StorageError,
    UnsafeCheckpointError,
    UnsupportedTorchError,
)
from .layout import FlatLayout
from .load_planner import FlatOptimLoadPlanner
from .optim_state import FlatOptimState
from .save_planner import FlatOptimSavePlanner
from .storage import StreamingReader, StreamingWriter, latest

__all__ = [
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "FlatLayout",
    "FlatOptimError",
    "FlatOptimLoadPlanner",
    "FlatOptimSavePlanner",
    "FlatOptimState",
    "LayoutError",
    "StorageError",
    "StreamingReader",
    "StreamingWriter",
    "UnsafeCheckpointError",
    "UnsupportedTorchError",
    "latest",
]
