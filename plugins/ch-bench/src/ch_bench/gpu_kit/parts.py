"""The parts of the kit, most telling first, and the seconds that each may take."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ch_bench.gpu_kit.rows import Rows
from ch_bench.gpu_kit.setting import Setting


@dataclass(frozen=True)
class Part:
    """One part: a module of this package with a function ``run(rows, setting)``.

    Attributes:
        title: a heading of the record.
        seconds: its deadline.
    """

    name: str
    title: str
    seconds: float

    def load(self) -> Callable[[Rows, Setting], None]:
        run: Callable[[Rows, Setting], None] = import_module(f"ch_bench.gpu_kit.{self.name}").run
        return run


PARTS = [
    Part("environment", "The machine", 30),
    Part("adapters", "Every hook and adapter over NCCL, one rank, beside plain DDP", 100),
    Part("shared_gpu", "gloo with CUDA tensors: several ranks on one GPU", 80),
    Part("order", "Order of streams, each hand-over behind a delaying kernel", 40),
    Part("waits", "Host waits: torch.cuda.set_sync_debug_mode inside every hook", 50),
    Part("numerics", "Numbers: input = sent + residual, TF32, failures told late", 30),
    Part("kernels", "Kernels and host time of one step", 50),
    Part("memory", "Memory beside the model and its gradients", 50),
    Part("costs", "Milliseconds of a step, GPT shapes of 124 M parameters", 60),
    Part("codec", "Packing on the GPU: torch's operations and Triton's kernels", 30),
    Part("costs_large", "Milliseconds of a step, GPT shapes of 1.3 G parameters", 60),
    Part("graphs", "CUDA graphs", 20),
]
"""In this order; together they take ten minutes at most."""
