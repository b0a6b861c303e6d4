"""State that is quantized in blocks (torchao's optimizers), behind one seam.

Saves see it as plain tensors (:mod:`~dcp_fsdp_osd.lowbit.save`), loads as intervals of elements
(:mod:`~dcp_fsdp_osd.lowbit.load`). To add another quantized tensor: ``blocks.split`` and ``join``.
"""
