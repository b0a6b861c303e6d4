"""What is done with checkpoints when no training runs: look into one, check it, turn it, plan a
load of it.

One process, no process group, no GPU, bounded memory; paths and URLs alike.  The commands of
``dcp-osd`` (``dcp_fsdp_osd.cli``) are calls into this.
"""

from dcp_fsdp_osd.tools.chart import Limits
from dcp_fsdp_osd.tools.check import Problem, Verdict, check_checkpoint
from dcp_fsdp_osd.tools.convert import Written, import_file, rechunk
from dcp_fsdp_osd.tools.describe import Description, OptimDescription, Row, describe
from dcp_fsdp_osd.tools.difference import Comparison, EntryDifference, compare
from dcp_fsdp_osd.tools.export import Exported, export_safetensors, export_torch
from dcp_fsdp_osd.tools.forecast import Forecast, RankForecast, forecast
from dcp_fsdp_osd.tools.listing import Found, list_checkpoints
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.plot import Plotted, plot
from dcp_fsdp_osd.tools.probe import Diagnosis, Probe, diagnose
from dcp_fsdp_osd.tools.pruning import Pruning, prune
from dcp_fsdp_osd.tools.values import Figures, figures

__all__ = [
    "Checkpoint",
    "Comparison",
    "Description",
    "Diagnosis",
    "EntryDifference",
    "Exported",
    "Figures",
    "Forecast",
    "Found",
    "Limits",
    "OptimDescription",
    "Plotted",
    "Probe",
    "Problem",
    "Pruning",
    "RankForecast",
    "Row",
    "Verdict",
    "Written",
    "check_checkpoint",
    "compare",
    "describe",
    "diagnose",
    "export_safetensors",
    "export_torch",
    "figures",
    "forecast",
    "import_file",
    "list_checkpoints",
    "plot",
    "prune",
    "rechunk",
]
