"""The packages of this project, and which names each provides, for the advice "pip install ...".

An installed package registers its names itself. This table tells of a package that is not installed. A test compares it with
the packages of the repository.
"""

HOOKS = {
    "ch-ddp": "allreduce bf16 bf16_compress bf16_compress_wrapper bf16_wrapper fp16 fp16_compress fp16_compress_wrapper "
    "fp16_wrapper noop post_local_sgd",
    "ch-fsdp": "allreduce bf16 bf16_compress fp16 fp16_compress reduce_scatter",
    "ch-outer": "diloco local_sgd muloco sparse_loco sparseloco streaming streaming_diloco",
    "ch-powersgd": "batched_powersgd powersgd",
    "ch-quant": "quant quant2 quant4 quant8 quantize_per_channel quantize_per_tensor sign",
    "ch-sparse": "randomk topk",
    "ch-wrappers": "error_feedback policy two_level warmup",
}
"""Names and aliases of hooks, by package."""

COMMANDS = {"ch-bench": "advise bench", "ch-run": "doctor run", "ch-trace": "trace"}
"""Commands of `python -m commhooks`, by package."""

ADAPTERS = {
    "commhooks": "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "ch-ddp": "torch.nn.parallel.distributed.DistributedDataParallel torch.distributed._composable.replicate.DDP "
    "torch.distributed.GradBucket",
    "ch-fsdp": "torch.distributed.fsdp.FSDPModule torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule",
    "ch-ft": "torchft.manager.Manager ch_ft.ddp.DistributedDataParallel ch_ft.ddp.PureDistributedDataParallel",
    "ch-testing": "ch_testing.simulated_manager.SimulatedManager",
}
"""Classes of models and managers that have an adapter, by package."""

PACKAGES = sorted({*HOOKS, *COMMANDS, *ADAPTERS, "ch-core"})
"""Distributions of this project."""


def package_of(names: dict[str, str], name: str) -> str | None:
    """Return the first package in a table that provides a name, or None.

    Example:
        >>> package_of(HOOKS, "quant4"), package_of(COMMANDS, "quant4")
        ('ch-quant', None)
    """
    return next((dist for dist, provided in names.items() if name in provided.split()), None)


def all_names(names: dict[str, str]) -> set[str]:
    """Return all names in a table."""
    return set(" ".join(names.values()).split())
