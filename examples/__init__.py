"""Examples: ``python -m examples.train_resume``, ``python -m examples.preempted``,
``torchrun ... examples/minimal.py``."""
