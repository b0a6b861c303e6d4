"""What a checkpoint of ours says beyond what stock PyTorch needs.

It lies in ``Metadata.planner_data`` under :data:`INFO_KEY`, where stock readers never look, as a
tuple of texts: the version of the format, JSON of the fields that the first version of this
package had (which took no others), and JSON of the fields that came later. A later field must be
one that a reader may pass over, as older versions do; what may not be passed over is another
version of the format, which they refuse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import CheckpointMismatchError, CorruptCheckpointError

__all__ = ["INFO_KEY", "SavedInfo"]

INFO_KEY = "dcp_fsdp_osd"
_VERSION = "1"
_FIRST = ("groups", "user", "absent", "opaque", "odd", "int_keys", "quantized")


@dataclass(frozen=True)
class SavedInfo:
    """What is recorded of one optimizer; plain JSON.

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
    """

    groups: Sequence[Sequence[str]] | None = ()
    user: Sequence[str] = ()
    absent: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    odd: Sequence[str] = ()
    int_keys: Sequence[Sequence[str]] = ()
    quantized: Sequence[Mapping[str, Any]] = ()
    placed: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[Mapping[str, Any]] = ()
    containers: Sequence[Sequence[Any]] | None = None
    layouts: Sequence[str] | None = None

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
