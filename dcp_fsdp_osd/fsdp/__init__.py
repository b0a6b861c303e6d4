"""FSDP as it lies in memory: the one place for its private attributes.

FSDP1's own values are read in :mod:`~dcp_fsdp_osd.fsdp.units` and nowhere else. To add a sharding:
describe its parameters in :mod:`~dcp_fsdp_osd.fsdp.optim` as a layout; weights of FSDP1 are in
:mod:`~dcp_fsdp_osd.fsdp.weights`.
"""

from dcp_fsdp_osd.fsdp.optim import ShardGroup, Target, describe_target

__all__ = ["ShardGroup", "Target", "describe_target"]
