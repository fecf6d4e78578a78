"""Hook functions of PyTorch's signature, over gloo processes and with buckets of ordinary sizes."""

import random
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
from ch_testing import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

SIZES = (2_500_000, 7, 300_000)  # the last bucket has 10 MB of fp32, and its message goes in halves
HOOKS = {
    "bf16_compress_hook": ch_ddp.bf16_compress_hook,
    "fp16_compress_hook": ch_ddp.fp16_compress_hook,
    "bf16_compress_wrapper": ch_ddp.bf16_compress_wrapper(ch_ddp.allreduce_hook),
    "allreduce_hook": ch_ddp.allreduce_hook,
}


class Sums(nn.Module):
    """Has the given gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def wrong_steps(rank: int, world: int, hook: str) -> list[int]:
    model, delay, wrong = Sums(), random.Random(rank), []
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, HOOKS[hook])
    base = [(torch.arange(size) % 16 - 8).float() * world for size in SIZES]  # integers, which 16 bits hold exactly
    for step in range(30):
        model.zero_grad(set_to_none=step % 2 == 0)
        time.sleep(delay.random() * 0.004)
        scale = step % 5 + 1
        ddp([(one + rank - (world - 1) / 2) * scale for one in base]).backward()  # their mean is one * scale
        if not all(torch.equal(p.grad, one * scale) for p, one in zip(model.weights, base, strict=True)):
            wrong.append(step)
    return wrong


@pytest.mark.parametrize(
    "hook", [name if name == "bf16_compress_hook" else pytest.param(name, marks=pytest.mark.full) for name in HOOKS]
)
def test_every_step_of_ordinary_buckets_is_the_average(hook: str) -> None:
    assert spawn(wrong_steps, 2, hook) == [[], []]
