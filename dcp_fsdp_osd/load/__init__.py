"""Loading: what a rank wants of a checkpoint, where it is read to, and the state dict it makes.

To add a form that an empty dict is filled with: :mod:`~dcp_fsdp_osd.load.forms`, and the name in
``FlatOptimLoadPlanner``. To load a new kind of state: :mod:`~dcp_fsdp_osd.load.plan`.
"""
