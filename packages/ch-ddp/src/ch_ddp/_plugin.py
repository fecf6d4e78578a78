"""What ch-ddp provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Param, hookimpl

_WIRE_OPTIONS = {
    "accumulate": Param(
        "wire",
        "add in the 16-bit wire type, or in fp32 after an all-to-all of 16-bit parts",
        choices=("wire", "fp32"),
    ),
    "rounding": Param("nearest", "how fp32 becomes 16 bits", choices=("nearest", "stochastic")),
}
_LOSSY = frozenset({"lossy", "changes_dtype"})


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Plain averaging, the 16-bit wires, their wrappers, and the hook that sends nothing."""
    return (
        HookSpec(
            "allreduce",
            "reduction",
            "ch_ddp:allreduce",
            "averages gradients, to the bit as DDP does without a hook",
            hook="ch_ddp:allreduce_hook",
            params={},
        ),
        HookSpec(
            "fp16_compress",
            "reduction",
            "ch_ddp:fp16_compress",
            "sends gradients as fp16, divided before the cast",
            hook="ch_ddp:fp16_compress_hook",
            params=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("fp16",),
        ),
        HookSpec(
            "bf16_compress",
            "reduction",
            "ch_ddp:bf16_compress",
            "sends gradients as bf16, divided before the cast",
            hook="ch_ddp:bf16_compress_hook",
            params=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("bf16",),
        ),
        HookSpec(
            "noop",
            "reduction",
            "ch_ddp:noop",
            "sends nothing and leaves each rank its own gradient; for measuring",
            hook="ch_ddp:noop_hook",
            params={},
            capabilities=frozenset({"skips_sync"}),
        ),
        HookSpec(
            "fp16_wrapper",
            "wrapper",
            "ch_ddp:fp16_compress_wrapper",
            "puts what the inner hook sends on the wire as fp16",
            params=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("fp16_compress_wrapper",),
        ),
        HookSpec(
            "bf16_wrapper",
            "wrapper",
            "ch_ddp:bf16_compress_wrapper",
            "puts what the inner hook sends on the wire as bf16",
            params=_WIRE_OPTIONS,
            capabilities=_LOSSY,
            aliases=("bf16_compress_wrapper",),
        ),
    )
