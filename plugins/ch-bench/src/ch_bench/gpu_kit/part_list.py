"""Parts of the kit, most informative first, with the seconds that each may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part of the kit.

    Attributes:
        name: on the command line.
        target: ``module:function`` of this package, called as ``function(findings, kit)``.
        title: heading in the record.
        seconds: time limit.
    """

    name: str
    target: str
    title: str
    seconds: float


PARTS = [
    Part("environment", "environment:run", "The machine", 30),
    Part("adapters", "adapters:run", "Every hook and adapter over NCCL, one rank, compared with plain DDP", 90),
    Part("shared_gpu", "adapters:run_shared", "gloo with CUDA tensors: several ranks on one GPU", 70),
    Part("levels", "levels:run", "two_level compared with the flat hook, two nodes of two ranks", 40),
    Part("order", "streams:run_order", "Order of streams, each hand-over behind a delaying kernel", 40),
    Part("waits", "streams:run_waits", "Host waits: torch.cuda.set_sync_debug_mode inside every hook", 50),
    Part("numerics", "numerics:run", "Numbers: input = sent + residual, TF32, late failures", 30),
    Part("kernels", "costs:run_kernels", "Kernels and host time of one step", 50),
    Part("memory", "costs:run_memory", "Memory beyond the model and its gradients", 50),
    Part("costs", "costs:run_costs", "Milliseconds of a step, GPT shapes of 124 M parameters", 50),
    Part("codec", "codec:run", "Packing on the GPU: torch's operations and Triton's kernels", 30),
    Part("costs_large", "costs:run_costs_large", "Milliseconds of a step, GPT shapes of 1.3 G parameters", 50),
    Part("graphs", "streams:run_graphs", "CUDA graphs", 20),
]
"""In the order of a run; together they take at most ten minutes."""
