"""FSDP optimizer state in ``torch.distributed.checkpoint`` without gathering a tensor."""
