"""CheckpointManager: when to save, which checkpoints to keep, and which to begin from.

Nothing below knows of it; it calls ``dcp.save`` and ``dcp.load`` as a user would.
"""
