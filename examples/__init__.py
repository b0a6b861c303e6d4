"""Examples: ``python -m examples.train_resume``, ``torchrun ... examples/minimal.py``."""
