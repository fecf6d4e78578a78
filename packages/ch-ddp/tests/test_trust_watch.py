"""The watch follows DDP's synchronisation without false or missed alarms. It covers ignored parameters and groups."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import Plain

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]


class Heads(nn.Module):
    """Has two heads. A call with a head's number uses that head alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), self.b(h)


def both(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0].pow(2).sum() + outputs[1].pow(2).sum()


def raised(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def wrapped(**options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(Heads(), bucket_cap_mb=0.0001, **options)
    commhooks.attach(model, Plain())
    return model


def watched(rank: int, world: int) -> dict[str, str]:
    x = torch.full((3, 6), 1.0 + rank)
    found: dict[str, str] = {}

    # loops that DDP accepts
    model = wrapped()
    with model.no_sync():
        loss = both(model(x))
    found["forward in no_sync, backward outside"] = raised(loss.backward)
    both(model(x)).backward()
    found["regulariser"] = raised(lambda: sum(p.pow(2).sum() for p in model.parameters()).backward())  # type: ignore
    loss = both(model(x))
    with model.no_sync():
        found["forward outside of no_sync, backward in it"] = raised(loss.backward)
    found["regulariser after it"] = raised(lambda: sum(p.pow(2).sum() for p in model.parameters()).backward())  # type: ignore
    with model.no_sync():
        found["create_graph in no_sync"] = raised(lambda: both(model(x)).backward(create_graph=True))
    model.zero_grad()
    found["model.forward"] = raised(lambda: both(model.forward(x)).backward())
    found["with the module in one backward"] = raised(lambda: (both(model(x)) + both(model.module(x))).backward())
    found["two forwards, one backward"] = raised(lambda: (both(model(x)) + both(model(x))).backward())
    loss = both(model(x))
    found["autograd.grad"] = raised(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    loss = both(model.module(x))
    found["autograd.grad of the module"] = raised(lambda: torch.autograd.grad(loss, list(model.parameters())))
    outer = DistributedDataParallel(nn.Sequential(wrapped(), nn.Identity()))
    commhooks.attach(outer, Plain())
    found["nested"] = raised(lambda: both(outer(x)).backward())
    model = wrapped()
    model(x)
    again = DistributedDataParallel(model.module)
    found["wrapped again"] = raised(lambda: both(again(x)).backward())

    # gradients that DDP does not average
    for head in (0, 1):
        model = wrapped()
        outputs = model(x)
        both(outputs).backward(retain_graph=True)
        found[f"again through head {head}"] = raised(outputs[head].pow(2).sum().backward)
        found[f"after head {head}"] = raised(lambda: both(model(x)).backward())  # noqa: B023
    first, second = both(model(x)), both(model(x))
    second.backward()
    found["the first of two"] = raised(first.backward)
    found["the module"] = raised(lambda: both(model.module(x)).backward())
    found["create_graph"] = raised(lambda: both(model(x)).backward(create_graph=True))
    model = wrapped()
    model.reducer._remove_autograd_hooks()
    found["without DDP's own hooks"] = raised(lambda: both(model(x)).backward())
    return {name: kind for name, kind in found.items() if kind}


def test_legal_backwards_raise_nothing_and_unaveraged_gradients_raise() -> None:
    missed = (
        "again through head 0",
        "again through head 1",
        "the first of two",
        "the module",
        "without DDP's own hooks",
    )
    wrong = dict.fromkeys(missed, "AttachError")
    assert spawn(watched, 2) == [{**wrong, "create_graph": "HookNotSupportedError"}] * 2


# -- parameters that DDP ignores


def ignored(rank: int, world: int) -> tuple[Any, ...]:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6 + rank))  # the second layer is this rank's shard
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    model = DistributedDataParallel(net)
    handle = commhooks.attach(model, Plain())
    planned = handle.payload_per_step()
    model(torch.ones(2, 6)).sum().backward()
    names = [name for name, _ in handle.state_dict()["params"]]
    return [row.name for row in handle.plan()], names, planned == handle.stats()["payload_bytes"]


def test_parameters_that_ddp_ignores_are_neither_compared_nor_planned_nor_counted() -> None:
    names = ["0.weight", "0.bias"]
    assert spawn(ignored, 2) == [(names, names, True)] * 2


# -- groups


def after_detaching(rank: int, world: int) -> list[float]:
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))

    def gradient() -> float:
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        return float(model.module.weight.grad[0, 0])

    handle = commhooks.attach(model, Plain(), process_group=alone)
    found = [gradient()]
    handle.detach()
    return [*found, gradient()]


def test_a_detached_model_averages_over_its_own_group() -> None:
    assert spawn(after_detaching, 2) == [[0.0, 0.5], [1.0, 0.5]]


def attached_again(rank: int, world: int) -> list[int]:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # this rank has one more group than the other
    model = DistributedDataParallel(nn.Linear(4, 4))
    found = []
    for _ in range(3):
        handle = commhooks.attach(model, bf16_like, timeout=20)
        model(torch.ones(2, 4)).sum().backward()
        handle.assert_active()
        found.append(int(handle.stats()["calls"]))
        handle.detach()
    return found


def bf16_like(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return bf16_compress_hook(state, bucket)


def test_a_foreign_hook_is_attached_again_although_one_rank_has_more_groups() -> None:
    assert spawn(attached_again, 2) == [[1, 1, 1], [1, 1, 1]]


def out_of_step(rank: int, world: int) -> list[str]:
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=60))
    model = DistributedDataParallel(nn.Linear(6, 6), process_group=group)
    handle = commhooks.attach(model, Plain(), timeout=2)

    def step() -> None:
        model.zero_grad()
        model(torch.full((2, 6), 1.0 + rank)).sum().backward()

    step()
    step()  # DDP has rebuilt its buckets, so from now on only the hook communicates
    if rank == 1:
        time.sleep(5)
    found = [raised(step), raised(step)]
    dist.barrier()
    handle.detach()
    found += [raised(lambda: commhooks.attach(model, Plain(), timeout=2)), raised(step)]
    anew = DistributedDataParallel(nn.Linear(6, 6))
    commhooks.attach(anew, Plain())
    anew(torch.ones(2, 6)).sum().backward()
    return found


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
@pytest.mark.full
def test_a_group_that_was_given_up_is_used_no_more() -> None:
    slow, late = spawn(out_of_step, 2, timeout=100.0)
    assert slow == ["HookTimeoutError", "HookTimeoutError", "TransportError", "TransportError"]
    assert late[1:] == ["HookTimeoutError", "TransportError", "TransportError"]


def default_deadline(rank: int, world: int) -> tuple[float, float]:
    model = DistributedDataParallel(nn.Linear(6, 6))
    longer = dist.new_group(list(range(world)), timeout=timedelta(seconds=44))
    handle = commhooks.attach(model, Plain())
    first = handle.binding.engine.messenger.timeout  # type: ignore[union-attr]
    handle.detach()
    handle = commhooks.attach(model, Plain(), process_group=longer)
    return first, handle.binding.engine.messenger.timeout  # type: ignore[union-attr, return-value]


def test_the_deadline_is_the_process_groups_own() -> None:
    assert spawn(default_deadline, 2, group_timeout=33.0) == [(33.0, 44.0)] * 2
