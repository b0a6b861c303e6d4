"""Saving: a rank's state as entries of a checkpoint, and what all ranks agree on.

To save a new kind of state: :mod:`~dcp_fsdp_osd.save.entries` takes state dicts apart, and puts
what is no tensor into a :mod:`~dcp_fsdp_osd.save.report`. What ranks must agree on about it:
:mod:`~dcp_fsdp_osd.save.consensus`, which has the order of the steps. What is written down beyond
what stock PyTorch needs: ``SavedInfo`` in :mod:`dcp_fsdp_osd.checkpoint`.
"""
