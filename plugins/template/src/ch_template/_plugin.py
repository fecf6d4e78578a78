"""Hook specs of this package. commhooks imports this module to list hooks, so it must not import torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Option, hookimpl


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return one hook and one wrapper."""
    return (
        HookSpec(
            "half",
            "reduction",
            "ch_template.half:Half",
            "sends gradients in 16 bits",
            options={"dtype": Option("bfloat16", "dtype on the wire", choices=("bfloat16", "float16"))},
            capabilities=frozenset({"lossy", "changes_dtype"}),
        ),
        HookSpec(
            "clip",
            "wrapper",
            "ch_template.clip:clip",
            "clips each rank's gradient, element by element, before the inner hook gets it",
            options={"limit": Option(1000.0, "largest magnitude that is not clipped", above=0.0)},
            capabilities=frozenset({"lossy"}),
            example="clip(half, limit=1000.0)",
        ),
    )
