"""The Statefuls: an optimizer or model as DCP asks for it, with its layout.

A dict that one of them gives out carries a guard (:mod:`~dcp_fsdp_osd.stateful.guard`): our
planners read the layout from it, any other planner is stopped by it.
"""
