"""Loading: what a rank wants of a checkpoint, where it is read to, and the state dict it makes.

The order: ``planner`` begins a load of each optimizer and model (``begin``), each of which keeps to
``protocol``: ``optim`` for the flat form, ``forms`` for the others, ``model``. ``plan`` and
``match`` say what is read and what does not match, ``agree`` what all ranks make of that;
``assemble`` makes the state dict.

To add a form that an empty dict is filled with: :mod:`~dcp_fsdp_osd.load.forms`, and its name in
:mod:`~dcp_fsdp_osd.load.protocol`. To load a new kind of state: a method of ``plan``. Another kind
of thing to load: a class that keeps to the protocol, begun in ``begin``.
"""
