"""Specifications of the wrappers. Importing this module loads no torch."""

from collections.abc import Iterable

from commhooks import HookSpec, Option, hookimpl


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return the specifications of `warmup`, `policy`, `error_feedback` and `two_level`."""
    return (
        HookSpec(
            "warmup",
            "wrapper",
            "ch_wrappers.warmup:warmup",
            "averages exactly, or runs a first hook, for some steps before the last hook",
            options={"steps": Option(1000, "steps before the last hook starts", at_least=0)},
            capabilities=frozenset({"needs_warmup"}),
            example="warmup(powersgd(rank=4), steps=100)",
            when="gradients change fast at the start of training, and the hook loses too much of them there",
            loss="none during the first steps; then the loss of the hook inside",
        ),
        HookSpec(
            "policy",
            "wrapper",
            "ch_wrappers.policy:policy",
            "gives each parameter to the hook of the first pattern that matches its name",
            options={},
            example='policy({"*.bias": allreduce, "*": powersgd(rank=4)})',
            when="some parameters need another hook than the rest, e.g. norms, biases or embeddings",
            loss="that of the hooks inside, for their parameters",
        ),
        HookSpec(
            "error_feedback",
            "wrapper",
            "ch_wrappers.error_feedback:error_feedback",
            "adds the residual that a rank did not send to its next gradient, in fp32",
            options={},
            capabilities=frozenset({"stateful", "error_feedback", "checkpointable"}),
            example="error_feedback(bf16_compress)",
            paper="https://arxiv.org/abs/1901.09847",
            when="the hook inside loses a part of the gradient and has no error feedback",
            loss="less than the hook inside alone; costs 8 bytes of memory per parameter",
        ),
        HookSpec(
            "two_level",
            "wrapper",
            "ch_wrappers.two_level:two_level",
            "adds gradients inside each node, and runs the hook inside between nodes only",
            options={
                "inside": Option(
                    "allreduce", "hook inside a node, without state: allreduce, bf16_compress, quant8", hook=True
                ),
                "nodes": Option(
                    None,
                    "ranks per node, or the ranks of each node; None asks torchrun or the hosts",
                    kind="an int or a list",
                ),
            },
            example="two_level(quant4)",
            paper="https://arxiv.org/abs/2306.10209",
            when="several nodes with several ranks each, and the links between nodes are the bottleneck",
            loss="that of the hook inside, which rounds sums of a node instead of single gradients",
        ),
    )
