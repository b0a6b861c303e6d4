"""Small programs to copy, for ``torchrun --nproc-per-node 2 examples/<name>.py``: ``minimal``,
``s3_streaming``, ``async_preemption``, ``migrate_fsdp1_to_fsdp2``, ``export``, ``fine_tune``; and
two that compare with a reference: ``python -m examples.train_resume``, ``python -m
examples.preempted``."""
