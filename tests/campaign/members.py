"""The part of a fault-tolerant case that every member runs. ``ch_ft``'s DDP uses a simulated manager, and members are
threads.

Members take different ways through the model, so a parameter may be unused on some of them.
"""

import copy
import threading
from typing import Any

import torch

from ch_ft import DistributedDataParallel, OptimizerWrapper
from ch_testing import SimulatedCluster
from tests.campaign import models
from tests.campaign.checks import Bounds, Exact, Oracle, Wrong, flat64
from tests.campaign.draw import Case
from tests.campaign.hooks import entry_of
from tests.campaign.notes import Notes

_BUILD = threading.Lock()  # building a model draws from torch's global generator


def run(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """One case; raise the first check that fails."""
    names = [f"member{index}" for index in range(case.world)]
    barrier = threading.Barrier(case.world)
    own: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def body(manager: Any) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        me = names.index(manager.name)
        with _BUILD:
            net = models.build(case.model, "float32")
        bare = copy.deepcopy(net)
        model = DistributedDataParallel(manager, net, hook=case.hook or None, bucket_cap_mb=case.cap)
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(net.parameters(), lr=0.05))
        given = []
        for step in range(case.steps):
            bare.load_state_dict(net.state_dict())
            bare.zero_grad()
            x = models.batch(case.seed, step, me, 0, torch.float32)
            bare(x, _use(case, step, me)).backward()
            own[step, me] = {
                n: flat64(p.grad if p.grad is not None else torch.zeros_like(p)) for n, p in bare.named_parameters()
            }
            barrier.wait(30.0)
            optimizer.zero_grad()
            model(x, _use(case, step, me)).backward()
            grads = {n: p.grad for n, p in net.named_parameters()}
            given.append(
                {n: flat64(g) if g is not None else torch.zeros_like(own[step, me][n]) for n, g in grads.items()}
            )
            optimizer.step()
        return given, {n: p.detach().clone() for n, p in net.named_parameters()}

    notes.phase("the members train")
    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys(names, body))
    notes.phase("the checks")
    first = found[names[0]][1]
    for name in names[1:]:
        for param, value in found[name][1].items():
            if not torch.equal(value, first[param]):
                raise Wrong("same bits on all members", f"{param} of {name} differs from {names[0]}")
    bounds = Bounds(entry_of(case.hook or "allreduce"), case.world)
    for step in range(case.steps):
        each = [own[step, me] for me in range(case.world)]
        exact = {
            n: Exact(_mean(each, n), _mean([{n: t.abs() for n, t in one.items()} for one in each], n)) for n in each[0]
        }
        peak = max((float(t.abs().max()) for one in each for t in one.values() if t.numel()), default=0.0)
        for me, name in enumerate(names):
            for param, gradient in found[name][0][step].items():
                bounds.near(param, gradient, Oracle(exact, each[me], peak), torch.float32)
    return {"compressed_steps": 0.0}


def _use(case: Case, step: int, member: int) -> int:
    return case.seed + step * 3 + member


def _mean(each: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([one[name] for one in each]).mean(0)
