"""Hook specs of ch-sparse. This module imports no torch."""

from collections.abc import Iterable

from ch_sparse.options import RandomKOptions, TopKOptions
from commhooks import HookSpec, Needs, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return ``topk`` and ``randomk``."""
    return (
        HookSpec(
            "topk",
            "reduction",
            "ch_sparse:TopK",
            "sends the largest entries of each chunk, keeps the others for later; volume grows with world size",
            options=TopKOptions.options(),
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
            example="topk(density=0.01, bits=2)",
            caution="volume grows with world size, past bf16_compress's at about 1.1 / density ranks (from 115 at 0.01)",
            paper="https://arxiv.org/abs/2508.15706",
            group="sparse",
            when="a very slow link and few ranks, if a much higher loss is acceptable",
            loss="density 0.01: +1.06 nats held-out on the text GPT (AdamW, 1200 steps)",
        ),
        HookSpec(
            "randomk",
            "reduction",
            "ch_sparse:RandomK",
            "averages the same random entries on all ranks: no indices, one all-reduce of values",
            options=RandomKOptions.options(),
            capabilities=frozenset({"lossy", "stateful", "checkpointable"}),
            needs=_FLOATS,
            paper="https://arxiv.org/abs/1809.07599",
            group="sparse",
            when="as topk with many ranks: its bytes do not grow with them",
            loss="more than topk at equal bytes; measure it on your task",
        ),
    )
