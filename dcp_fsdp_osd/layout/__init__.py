"""Which elements of which parameters a rank holds, and boxes of them.  Pure: no model, no tensor.

To plan a rank of any world in one process: :func:`units_of` and :func:`simulate`.
"""

from dcp_fsdp_osd.layout.flat import (
    FlatLayout,
    ParamKind,
    ParamLayout,
    Piece,
    Segment,
    Unit,
    simulate,
    units_of,
)

__all__ = [
    "FlatLayout",
    "ParamKind",
    "ParamLayout",
    "Piece",
    "Segment",
    "Unit",
    "simulate",
    "units_of",
]
