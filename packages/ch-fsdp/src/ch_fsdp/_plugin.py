"""The hooks and adapters of ch-fsdp, as data. Importing this module loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, hookimpl

_LOSSY = frozenset({"lossy", "changes_dtype"})


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return FSDP1's hooks. FSDP2 has no hook functions: ``commhooks.attach`` takes the name of a reduction."""
    return (
        HookSpec(
            "allreduce",
            "fsdp",
            "ch_fsdp:allreduce_hook",
            "averages the flat gradient of a NO_SHARD unit",
            options={},
            when="FSDP1 with NO_SHARD",
            loss="none",
        ),
        HookSpec(
            "reduce_scatter",
            "fsdp",
            "ch_fsdp:reduce_scatter_hook",
            "averages the flat gradient of a sharded unit; each rank keeps its shard",
            options={},
            when="FSDP1 with sharded gradients",
            loss="none",
        ),
        HookSpec(
            "fp16_compress",
            "fsdp",
            "ch_fsdp:fp16_compress_hook",
            "allreduce or reduce_scatter with fp16 on the wire",
            options={},
            capabilities=_LOSSY,
            aliases=("fp16",),
            when="FSDP1 on a slow link, well-scaled gradients",
            loss="not measurable in our runs",
        ),
        HookSpec(
            "bf16_compress",
            "fsdp",
            "ch_fsdp:bf16_compress_hook",
            "allreduce or reduce_scatter with bf16 on the wire",
            options={},
            capabilities=_LOSSY,
            aliases=("bf16",),
            when="FSDP1 on a slow link",
            loss="within the noise of 3 seeds",
        ),
    )


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Return the adapter of the class that ``fully_shard`` mixes into modules (FSDP2)."""
    return (
        ("torch.distributed.fsdp.FSDPModule", "ch_fsdp.fsdp2:adapter"),
        ("torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule", "ch_fsdp.fsdp2:adapter"),
    )


@hookimpl
def commhooks_local_gradients() -> Iterable[tuple[str, str]]:
    """Return the function that turns FSDP2's average between replicas off, for outer optimizers."""
    return (
        ("torch.distributed.fsdp.FSDPModule", "ch_fsdp.local_gradients:of_fsdp2"),
        ("torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule", "ch_fsdp.local_gradients:of_fsdp2"),
    )


@hookimpl
def commhooks_wraps() -> Iterable[str]:
    """Return FSDP2's function."""
    return ("torch.distributed.fsdp._fully_shard._fully_shard:fully_shard",)
