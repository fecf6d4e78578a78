"""Specifications of ch-ddp's hooks, wrappers and adapters. Importing this module loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Option, hookimpl

_WIRE_OPTIONS = {
    "accumulate": Option(
        "wire",
        "add in the 16-bit wire type, or in fp32 after an all-to-all of 16-bit parts",
        choices=("wire", "fp32"),
    ),
}
_LOSSY = frozenset({"lossy", "changes_dtype"})


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return the specifications of plain averaging, 16-bit hooks and wrappers, `noop` and `post_local_sgd`."""
    return (
        HookSpec(
            "allreduce",
            "reduction",
            "ch_ddp:allreduce",
            "averages gradients, to the bit as DDP does without a hook",
            hook="ch_ddp:allreduce_hook",
            options={},
            group="exact",
            recommended=True,
            when="the network is not the bottleneck, or as the baseline of a comparison",
            loss="none: the bits of DDP",
        ),
        HookSpec(
            "fp16_compress",
            "reduction",
            "ch_ddp:fp16_compress",
            "sends gradients as fp16, divided before the cast",
            hook="ch_ddp:fp16_compress_hook",
            options=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("fp16",),
            group="16-bit",
            when="gradients are well scaled; magnitudes above 65504 overflow",
            loss="none seen: the same 300 steps to a loss as allreduce",
        ),
        HookSpec(
            "bf16_compress",
            "reduction",
            "ch_ddp:bf16_compress",
            "sends gradients as bf16, divided before the cast",
            hook="ch_ddp:bf16_compress_hook",
            options=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("bf16",),
            group="16-bit",
            recommended=True,
            when="the safe first step on a slow link: half the bytes, any shapes, no state",
            loss="within the noise of 3 seeds: +0.0003 held-out on the text GPT, 1200 steps",
        ),
        HookSpec(
            "noop",
            "reduction",
            "ch_ddp:noop",
            "sends nothing and leaves each rank its own gradient; for measuring",
            hook="ch_ddp:noop_hook",
            options={},
            capabilities=frozenset({"skips_sync"}),
            group="local",
            when="to measure how long a step takes without communication; never to train",
            loss="the ranks train different models",
        ),
        HookSpec(
            "post_local_sgd",
            "ddp",
            "ch_ddp:post_localSGD_hook",
            "averages over all ranks at first, later within subgroups or not at all; needs a model averager",
            state="ch_ddp.local_sgd.hook:make_state",
            options={
                "start_iter": Option(1000, "steps of averaging over all ranks", at_least=0),
                "gradient_allreduce": Option(True, "average within the subgroup after that; False: not at all"),
                "subgroup_size": Option(0, "ranks of a subgroup; 0: those of one machine", at_least=0),
            },
            capabilities=frozenset({"stateful", "checkpointable", "needs_warmup", "skips_sync"}),
            example="post_local_sgd(start_iter=100, subgroup_size=1)",
            paper="https://arxiv.org/abs/1808.07217",
            group="local",
            when="ranks cannot communicate in every step, and a model averager runs",
            loss="not measured here: models drift apart between averages",
        ),
        HookSpec(
            "fp16_wrapper",
            "wrapper",
            "ch_ddp:fp16_compress_wrapper",
            "puts what the inner hook sends on the wire as fp16",
            options=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("fp16_compress_wrapper",),
            when="the hook inside sends fp32, and its values are well scaled",
            loss="that of the hook inside; magnitudes above 65504 overflow",
        ),
        HookSpec(
            "bf16_wrapper",
            "wrapper",
            "ch_ddp:bf16_compress_wrapper",
            "puts what the inner hook sends on the wire as bf16",
            options=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("bf16_compress_wrapper",),
            recommended=True,
            when="the hook inside sends fp32, e.g. powersgd: halves its bytes",
            loss="that of the hook inside: bf16 around powersgd changed nothing on the text GPT",
        ),
    )


@hookimpl
def commhooks_adapter() -> Iterable[tuple[str, str]]:
    """Return DistributedDataParallel, the class that ``replicate`` mixes into a module, and the maker of hook functions."""
    return (
        ("torch.nn.parallel.distributed.DistributedDataParallel", "ch_ddp.adapter.binding:adapter"),
        ("torch.distributed._composable.replicate.DDP", "ch_ddp.adapter.replicate:adapter"),
        ("torch.distributed.GradBucket", "ch_ddp.hook_function:as_hook"),
    )


@hookimpl
def commhooks_local_gradients() -> Iterable[tuple[str, str]]:
    """Return the functions that turn DDP's averaging off, for outer optimizers."""
    return (
        ("torch.nn.parallel.distributed.DistributedDataParallel", "ch_ddp.adapter.local_gradients:of_ddp"),
        ("torch.distributed._composable.replicate.DDP", "ch_ddp.adapter.local_gradients:of_replicate"),
    )


@hookimpl
def commhooks_wraps() -> Iterable[str]:
    """Return the wrappers whose models all-reduce their gradients."""
    return (
        "torch.nn.parallel.distributed:DistributedDataParallel",
        "torch.distributed._composable.replicate:replicate",
    )
