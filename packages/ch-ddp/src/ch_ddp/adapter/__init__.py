"""Adapter for ``DistributedDataParallel``, with the parts that classes derived from DDP build on."""
