"""Steps that are dropped while their messages are in flight write nothing into later gradients of a DDP model."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import HookTimeoutError

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.timeout(120),
    pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies"),
]

MANY = 2_500_000  # numbers of each of two parameters
LOST = 2.0**20


class Sum(nn.Module):
    """Every element of its gradients is its input. The backward raises before the gradient of ``first``, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(MANY)) for _ in range(2))
        self.raises = False
        self.first.register_hook(self._stop)

    def _stop(self, gradient: torch.Tensor) -> None:
        if self.raises:
            raise ArithmeticError("the backward stops")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first.sum() + self.second.sum()) * x


def backward(model: DistributedDataParallel, x: float) -> None:
    model(torch.tensor(x)).backward()


def after_a_loss(rank: int, world: int, how: str, hook: str, options: dict[str, Any]) -> list[float]:
    """Shrink a model from three ranks to two after a step that they drop. Rank 2 takes part in that step later.

    Returns:
        The least and the greatest gradient of the next step.
    """
    store = dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(Sum(), **options)
    commhooks.attach(model, hook, timeout=60.0 if rank == 2 else 1.5)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        backward(model, 1.0)
    model.zero_grad(set_to_none=False)
    model.module.raises = how == "a backward that raises"
    if rank == 2:
        store.wait(["accumulated 0", "accumulated 1"])
    with pytest.raises(ArithmeticError) if model.module.raises else pytest.raises(HookTimeoutError):
        backward(model, LOST)
        if rank == 2:  # the others have gone, so its step fails or not
            raise HookTimeoutError("they have gone")
    model.module.raises = False
    if rank == 2:
        time.sleep(0.5)  # its message travels
        store.set("sent", "")
        return [1.5, 1.5]
    model._update_process_group(dist.new_group([0, 1], use_local_synchronization=True))
    model.zero_grad(set_to_none=False)
    with model.no_sync():
        backward(model, rank + 0.5)
    store.set(f"accumulated {rank}", "")
    store.wait(["sent"])
    time.sleep(0.3)  # this rank's part of the lost message ends, too
    backward(model, 0.5)
    gradients = torch.cat([p.grad for p in model.parameters()])
    return [gradients.min().item(), gradients.max().item()]


ONE, TWO = {"bucket_cap_mb": 100}, {"bucket_cap_mb": 8}


@pytest.mark.parametrize(
    ("how", "hook", "options"),
    [
        ("a lost peer", "allreduce", {**ONE, "gradient_as_bucket_view": True}),
        ("a backward that raises", "allreduce", {**TWO, "gradient_as_bucket_view": True}),
        pytest.param("a lost peer", "allreduce", {**TWO, "gradient_as_bucket_view": True}, marks=pytest.mark.full),
        pytest.param("a lost peer", "allreduce", TWO, marks=pytest.mark.full),
        pytest.param("a lost peer", "bf16_compress", {**TWO, "gradient_as_bucket_view": True}, marks=pytest.mark.full),
        pytest.param("a backward that raises", "allreduce", TWO, marks=pytest.mark.full),
    ],
)
def test_a_dropped_step_writes_nothing_into_later_gradients(how: str, hook: str, options: dict[str, Any]) -> None:
    assert spawn(after_a_loss, 3, how, hook, options) == [[1.5, 1.5]] * 3
