"""Checkpoints of other people's training loops, by the planners and storage of this package.

A module for each library that needs code (:mod:`~dcp_fsdp_osd.trainers.lightning`,
:mod:`~dcp_fsdp_osd.trainers.accelerate`), which alone imports that library; nothing else imports
these.  ``docs/trainers`` has a page for each, and for those that need none.
"""
