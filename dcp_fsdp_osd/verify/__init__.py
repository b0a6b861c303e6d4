"""Is what lies in a checkpoint what is current, bit for bit?"""

from dcp_fsdp_osd.verify.comparison import Difference
from dcp_fsdp_osd.verify.planner import Verification, verify_model_state, verify_optim_state

__all__ = ["Difference", "Verification", "verify_model_state", "verify_optim_state"]
