"""The overlapped optimizer equals the separate one to the bit, on gloo processes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_ddp import OverlappedOptimizer
from ch_testing import spawn

pytestmark = pytest.mark.timeout(150)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 4))
        self.spare = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        return self.body(x) + (self.spare(x) if spare else 0)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


MAKERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": adam,
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
}


def foreign(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda f: f.value()[0].mul(1.5))


def losses_and_parameters(
    rank: int, what: Any, make: Any, overlapped: bool, *, accumulate: int = 1, **options: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """Run the whole training loop. Only the wrapper differs between both calls."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **options)
    handle = commhooks.attach(model, what)
    optimizer = make(model)
    hooked: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    if overlapped:
        optimizer = OverlappedOptimizer(optimizer, handle)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(4):
        use_spare = not options.get("find_unused_parameters") or (step + rank) % 2 == 0 or step == 3
        for part in range(accumulate):
            x = torch.randn(5, 12, generator=generator)
            if part < accumulate - 1:
                with model.no_sync():
                    model(x, use_spare).pow(2).mean().backward()
            else:
                loss = model(x, use_spare).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    handle.assert_active()
    assert len(hooked) == 4
    return losses, [p.detach().clone() for p in model.parameters()]


def body_equal(rank: int, world: int) -> None:
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        ("allreduce", "sgd", {}),
        ("allreduce", "adamw", {"gradient_as_bucket_view": True}),
        ("allreduce", "adagrad", {"find_unused_parameters": True}),
        ("allreduce", "adamw, foreach", {"static_graph": True}),
        ("bf16_compress(accumulate='fp32')", "adamw", {"accumulate": 3}),
        ("error_feedback(fp16_compress)", "sgd", {"accumulate": 2, "gradient_as_bucket_view": True}),
        ("post_local_sgd(start_iter=2, subgroup_size=1)", "sgd", {}),
        (foreign, "adamw", {"find_unused_parameters": True}),
    ]
    for what, maker, options in cases:
        separate = losses_and_parameters(rank, what, MAKERS[maker], False, **options)
        overlapped = losses_and_parameters(rank, what, MAKERS[maker], True, **options)
        assert separate[0] == overlapped[0], (what, maker)
        assert all(torch.equal(a, b) for a, b in zip(separate[1], overlapped[1], strict=True)), (what, maker)


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_equal_to_the_separate_optimizer_to_the_bit(world: int) -> None:
    spawn(body_equal, world, timeout=120)


def body_during(rank: int, world: int) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    handle = commhooks.attach(model, "allreduce")
    inner = MAKERS["sgd"](model)
    optimizer = OverlappedOptimizer(inner, handle)
    x = torch.randn(5, 12)
    model(x).sum().backward()  # DDP rebuilds its buckets after this backward
    optimizer.step()
    optimizer.zero_grad()
    first, last = model.module.body[0].weight, model.module.spare.weight
    before, changed = last.detach().clone(), []
    first.register_hook(lambda grad: changed.append(not torch.equal(last, before)))
    model(x).sum().backward()
    assert changed == [True], changed  # a late layer was updated before the first layer had a gradient
    assert model.module.spare.weight.grad is not None  # gradients exist afterwards, as without overlap
    with pytest.raises(commhooks.HookConfigError, match="was already updated in an earlier backward"):
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()  # the model remains usable
    optimizer.step()
    # A checkpoint passes through the wrapper, also into an optimizer without one.
    plain = MAKERS["sgd"](copy.deepcopy(model.module))
    plain.load_state_dict(optimizer.state_dict())
    with pytest.raises(commhooks.HookNotSupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(commhooks.HookNotSupportedError, match="Train in bf16"):
        scaler.step(optimizer)
    handle.detach()
    optimizer.zero_grad()
    optimizer.step()
    before = last.detach().clone()
    model(x).sum().backward()
    assert torch.equal(before, last)  # after detach only step() updates
    optimizer.step()
    assert not torch.equal(before, last)


@pytest.mark.gloo
def test_it_updates_during_the_backward_and_refuses_a_second_one() -> None:
    spawn(body_during, 2)


def test_refusals() -> None:
    model = Net()
    handle = commhooks.create("allreduce")
    with pytest.raises(commhooks.HookNotSupportedError, match="not attached to a DistributedDataParallel model"):
        OverlappedOptimizer(MAKERS["sgd"](model), handle)
    with pytest.raises(commhooks.HookConfigError, match="LBFGS needs a closure"):
        OverlappedOptimizer(torch.optim.LBFGS(model.parameters()), handle)
