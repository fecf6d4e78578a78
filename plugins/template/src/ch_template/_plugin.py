"""Specs of this package. commhooks imports this module to list hooks, so it must not import torch.

The hook `half` needs no spec: its entry point names its class.
"""

from collections.abc import Iterable

from commhooks import HookSpec, Option, hookimpl


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return the spec of the wrapper."""
    return (
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
