"""PowerSGD equals PyTorch's own hook on the same recorded gradients and first Q.

Gradients with a signal of the sent rank are compared for 50 steps in fp32. A model that fits random targets has no such
signal. The recursion then amplifies any difference by about a quarter per step, and after twenty steps in fp32 the
rounding of two correct programs shows. These gradients are compared for 50 steps in fp64 and for a few in fp32.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from ch_core import SimulatedRank, simulate
from ch_powersgd.powersgd import PowerSGD
from ch_testing import spawn
from commhooks import Bucket, HookState

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

STEPS, START = 50, 2
Named = dict[str, torch.Tensor]


def fitting(model: nn.Module, dtype: torch.dtype, rank: int, approximation: int) -> Callable[[int], torch.Tensor]:
    """Return one loss per step, of random targets that differ between the ranks."""
    torch.manual_seed(1 + rank)
    inputs, targets = torch.randn(64, 48, dtype=dtype), torch.randn(64, 56, dtype=dtype)
    return lambda step: (model(inputs) - targets).square().mean()


def signal(model: nn.Module, dtype: torch.dtype, rank: int, approximation: int) -> Callable[[int], torch.Tensor]:
    """Return one loss per step. Its gradients are a few directions that grow and shrink, plus noise of that size on
    each rank.
    """
    common, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(100 + rank)
    size = {p: math.sqrt(p.numel()) for p in model.parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2]
    sides = [[torch.linalg.qr(torch.randn(n, approximation, generator=common))[0] for n in p.shape] for p in matrices]
    weights = torch.linspace(2, 1, approximation)

    def loss(step: int) -> torch.Tensor:
        noise = [p.mul(torch.randn(p.shape, generator=own).to(dtype)).sum() / size[p] for p in model.parameters()]
        now = weights * (1 + 0.3 * math.sin(0.2 * step))
        shared = [p.mul(((a * now) @ b.T).to(dtype)).sum() for p, (a, b) in zip(matrices, sides, strict=True)]
        return sum(noise + shared, model(torch.zeros(1, 48, dtype=dtype)).sum() * 0)

    return loss


def record(
    rank: int, world: int, approximation: int, dtype: torch.dtype, losses: Callable[..., Callable[[int], torch.Tensor]]
) -> tuple[list[Named], list[Named], Named]:
    """Train with PyTorch's hook in one bucket. Return its input gradients, its averages and the first Q."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 56)).to(dtype)
    model = DistributedDataParallel(net)
    names = {id(p): n for n, p in net.named_parameters()}
    state = theirs.PowerSGDState(None, matrix_approximation_rank=approximation, start_powerSGD_iter=START)
    put_in: list[Named] = []
    first_q: Named = {}

    def recorder(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last()
        gradients = dict(zip((names[id(p)] for p in bucket.parameters()), bucket.gradients(), strict=True))
        if state.iter == START:  # the hook draws its first Q next, so draw the same numbers
            draw = torch.Generator().manual_seed(copy.deepcopy(state.rng).randint(1_000_000_000))
            for name, g in gradients.items():
                if g.dim() == 2 and sum(g.shape) * approximation * 2 < g.numel():
                    first_q[name] = torch.randn(g.shape[1], approximation, generator=draw, dtype=dtype).T.contiguous()
        if state.iter >= START:
            put_in.append({name: g.clone() for name, g in gradients.items()})
        return theirs.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, recorder)
    loss = losses(model, dtype, rank, approximation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    came_out: list[Named] = []
    for step in range(START + STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        came_out.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    assert len(put_in) == STEPS
    return put_in, came_out[START:], first_q


@pytest.mark.parametrize("approximation", [1, 4])
@pytest.mark.parametrize(
    ("losses", "dtype", "steps"),
    [
        (signal, torch.float32, STEPS),
        pytest.param(fitting, torch.float64, STEPS, marks=pytest.mark.full),
        pytest.param(fitting, torch.float32, 5, marks=pytest.mark.full),
    ],
)
def test_the_averaged_residual_follows_pytorch(approximation: int, losses: Any, dtype: torch.dtype, steps: int) -> None:
    recorded = spawn(record, 2, approximation, dtype, losses)
    assert len(recorded[0][2]) == 3

    def replay(rank: SimulatedRank) -> float:
        put_in, came_out, first_q = recorded[rank.rank]
        state = HookState()
        state.replace({(name, "q"): q for name, q in first_q.items()}, step=0)
        engine = rank.engine(PowerSGD(approximation, residual="averaged"), state)
        worst = 0.0
        for gradients, want in zip(put_in[:steps], came_out[:steps], strict=True):
            bucket = Bucket.from_tensors(gradients)
            engine.submit(bucket)
            assert engine.finish() is None
            for p, got in bucket.views():
                worst = max(worst, float((got - want[p.name]).norm() / want[p.name].norm()))
        assert engine.counters.compressed_steps == steps
        return worst

    assert max(simulate(2, replay)) < 1e-5
