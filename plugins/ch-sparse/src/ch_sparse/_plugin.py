"""What ch-sparse provides, as data; importing this loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Needs, Param, hookimpl

_FLOATS = Needs(dtypes=("float32", "float16", "bfloat16", "float64"))
_EXEMPT = Param(True, "average norms, biases and what is smaller than 1 / density elements exactly")
_START = Param(0, "committed steps that are averaged exactly before", at_least=0)
_FEEDBACK = frozenset({"stateful", "error_feedback", "checkpointable"})


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """The largest entries."""
    return (
        HookSpec(
            "topk",
            "reduction",
            "ch_sparse:TopK",
            "sends the largest entries of each chunk, keeps the others for later; volume grows with world size",
            params={
                "density": Param(0.01, "part of the entries that is sent", above=0.0, at_most=1.0),
                "chunk": Param(4096, "elements among which the largest are chosen", at_least=16, at_most=65536),
                "bits": Param(16, "bits of a value: bf16, or a sign and one of two levels", choices=(16, 2)),
                "feedback": Param(True, "keep what was not sent for the next step, in fp32", brings=_FEEDBACK),
                "decay": Param(1.0, "what a step leaves of what was kept", above=0.0, at_most=1.0),
                "start_iter": _START,
                "exempt": _EXEMPT,
            },
            capabilities=frozenset({"lossy", "changes_dtype"}),
            needs=_FLOATS,
            example="topk(density=0.01, bits=2)",
            paper="https://arxiv.org/abs/2508.15706",
        ),
    )
