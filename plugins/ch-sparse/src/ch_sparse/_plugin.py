"""What ch-sparse provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Needs, Param, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))
_COMMON = {
    "feedback": Param(
        True,
        "keep what was not sent for the next step, in fp32",
        brings=frozenset({"stateful", "error_feedback", "checkpointable"}),
    ),
    "decay": Param(1.0, "what a step leaves of what was kept", above=0.0, at_most=1.0),
    "start_iter": Param(0, "committed steps that are averaged exactly before", at_least=0),
    "exempt": Param(True, "average norms, biases and what is smaller than 1 / density elements exactly"),
}


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """The largest entries, and random ones."""
    return (
        HookSpec(
            "topk",
            "reduction",
            "ch_sparse:TopK",
            "sends the largest entries of each chunk, keeps the others for later; volume grows with world size",
            params={
                "density": Param(0.01, "part of the entries that is sent", above=0.0, at_most=1.0),
                "chunk": Param(4096, "elements among which the largest are chosen", at_least=16, at_most=65536),
                "bits": Param(16, "bits of a value: fp32, bf16, or a sign and one of two levels", choices=(32, 16, 2)),
            }
            | _COMMON,
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
            example="topk(density=0.01, bits=2)",
            caution="volume grows with world size, past bf16_compress's at about 1.1 / density ranks (114 at 0.01)",
            paper="https://arxiv.org/abs/2508.15706",
        ),
        HookSpec(
            "randomk",
            "reduction",
            "ch_sparse:RandomK",
            "averages entries that all ranks choose at random alike: no indices, one all-reduce of values",
            params={
                "density": Param(0.05, "part of the entries that is sent", above=0.0, at_most=1.0),
                "seed": Param(0, "of the choice, the same on all ranks"),
            }
            | _COMMON,
            capabilities=frozenset({"lossy", "stateful", "checkpointable"}),
            needs=_FLOATS,
            paper="https://arxiv.org/abs/1809.07599",
        ),
    )
