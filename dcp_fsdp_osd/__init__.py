"""FSDP optimizer state in ``torch.distributed.checkpoint`` without gathering a tensor.

See :class:`FlatOptimSavePlanner` and :class:`FlatOptimLoadPlanner`.

The rooms, each importing from those below it only (``tests/test_house.py``): ``manager``,
``verify``, ``save``, ``load``, ``stateful``, ``lowbit``, ``exchange``, ``storage``, ``checkpoint``
(the written format), ``fsdp``, ``misuse``, ``layout``, and what all share. Each says in its
docstring what belongs to it.
"""

from dcp_fsdp_osd.async_process import recover_async_process
from dcp_fsdp_osd.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    ExchangeError,
    FlatOptimError,
    LayoutError,
    StorageError,
    UnsafeCheckpointError,
    UnsupportedTorchError,
)
from dcp_fsdp_osd.exchange.decide import Broadcast
from dcp_fsdp_osd.layout import FlatLayout
from dcp_fsdp_osd.load.planner import FlatOptimLoadPlanner
from dcp_fsdp_osd.load.protocol import Form
from dcp_fsdp_osd.manager.manager import CheckpointManager
from dcp_fsdp_osd.save.planner import FlatOptimSavePlanner
from dcp_fsdp_osd.staging import FlatStager
from dcp_fsdp_osd.stateful.model import FlatModelState
from dcp_fsdp_osd.stateful.optim import FlatOptimState
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.full_state import FullStateReader
from dcp_fsdp_osd.storage.store import Backend, Store, StoreConfig
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from dcp_fsdp_osd.verify import (
    Difference,
    Verification,
    verify_model_state,
    verify_optim_state,
)

__all__ = [
    "Backend",
    "Broadcast",
    "CheckpointManager",
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
    "FlatStager",
    "Form",
    "FullStateReader",
    "LayoutError",
    "RetryPolicy",
    "StorageError",
    "Store",
    "StoreConfig",
    "StreamingReader",
    "StreamingWriter",
    "UnsafeCheckpointError",
    "UnsupportedTorchError",
    "Verification",
    "latest",
    "recover_async_process",
    "verify_model_state",
    "verify_optim_state",
]

__version__ = "0.1.0"
