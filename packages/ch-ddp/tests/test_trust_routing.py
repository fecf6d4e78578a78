"""Unusual models and training loops give the right result or a typed error, never a silent mistake."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
from ch_testing import spawn
from commhooks import AllReduce, Bucket, Reduction, StepContext

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


class Exact(Reduction):
    """Declares itself lossy, with a state and two rounds. Its result is nevertheless the exact mean."""

    name = "exact"
    lossy = True
    fields = {"count": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        one = ctx.scratch("one", (1,), device=bucket.device).fill_(1.0)
        yield AllReduce(one)
        buffer = bucket.buffer
        yield AllReduce(buffer)
        bucket.buffer = buffer
        for p in bucket.params:
            old = ctx.read(p.name, "count")
            ctx.write(p.name, "count", (1,), device=bucket.device).copy_(1 if old is None else old + 1)

    def route(self, param: Any, step: int) -> str | None:
        return "small" if param.numel < 5 else None


class Odd(nn.Module):
    """Has one parameter of every unusual kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6, sparse=True)
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.complex = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(6, 9).t())  # (9, 6), stored by columns
        self.brief = nn.Parameter(torch.randn(6, 5, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.small = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = (self.table(words).sum(1) + x) * self.scalar
        total = (y @ self.turned.t()).pow(2).sum() + (y.to(torch.complex64) @ self.complex).abs().sum()
        total = total + (y.bfloat16() @ self.brief).float().sum() + (y.double() @ self.wide).float().pow(2).sum()
        total = total + self.empty.sum() + (self.small * y[:, :4]).sum()
        return total + self.conv(y[:, :2].reshape(-1, 2, 1, 1).expand(-1, 2, 4, 4)).pow(2).sum()


def dense(p: torch.Tensor) -> torch.Tensor:
    return p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad


def odd_parameters(rank: int, world: int) -> dict[str, Any]:
    plain = DistributedDataParallel(Odd(), bucket_cap_mb=0.0001)
    model = DistributedDataParallel(Odd(), bucket_cap_mb=0.0001)
    handle = commhooks.attach(model, Exact())
    wrong = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        words, x = torch.randint(11, (4, 3)), torch.randn(4, 6)
        for m in (plain, model):
            m.zero_grad()
            m(words, x).backward()
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            if a.requires_grad and not torch.equal(dense(a), dense(b)):
                wrong.append(f"step {step}: {name}")
    return {"wrong": wrong, "plan": {row.name: (row.treatment, row.reason) for row in handle.plan()}}


def test_every_kind_of_parameter_is_averaged_exactly_and_shown_in_the_plan() -> None:
    for found in spawn(odd_parameters, 2):
        assert found["wrong"] == []
        plan = found["plan"]
        assert plan["table.weight"] == ("plain", "sparse")
        assert plan["empty"] == ("plain", "empty")
        assert plan["complex"] == ("plain", "complex")
        assert plan["scalar"] == plan["small"] == ("plain", "small")
        assert plan["turned"] == plan["brief"] == plan["wide"] == plan["conv.weight"] == ("exact", "")
        assert "frozen" not in plan


# -- training loops


class Net(nn.Module):
    def __init__(self, *, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(20, 9), nn.Linear(9, 4)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.recompute is not None:
            y = checkpoint(lambda z: self.b(z.relu()), y, use_reentrant=self.recompute)
        else:
            y = self.b(y.relu())
        return self.c(y)


def wrapped(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model if model is not None else Net(), bucket_cap_mb=0.0001, **options)


def grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def step(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    torch.manual_seed(100 * seed + rank)
    model.zero_grad()
    model(torch.randn(3, 12)).pow(2).sum().backward()
    return grads(model)


def kind(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def ways(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def same(name: str, model: DistributedDataParallel, plain: DistributedDataParallel) -> None:
        handle = commhooks.attach(model, Exact())
        found[name] = all(torch.equal(step(model, rank, i), step(plain, rank, i)) for i in range(4))
        handle.assert_active()

    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        same(str(options), wrapped(**options), wrapped(**options))
    for reentrant in (False, True):
        options = {"static_graph": reentrant}
        model = wrapped(Net(recompute=reentrant), **options)
        same(f"checkpoint, reentrant={reentrant}", model, wrapped(Net(recompute=reentrant), **options))
    plain, model = DistributedDataParallel(Net()), DistributedDataParallel(Net())  # dynamo needs buckets over 1 MiB
    commhooks.attach(model, Exact())
    fast, slow = torch.compile(model, backend="aot_eager"), torch.compile(plain, backend="aot_eager")
    found["compiled"] = all(torch.equal(step(fast, rank, i), step(slow, rank, i)) for i in range(3))
    found["compiled unsynchronised"] = kind(lambda: model.module(torch.ones(2, 12)).sum().backward())

    # no_sync, and a second backward
    model, plain = wrapped(), wrapped()
    handle = commhooks.attach(model, Exact())
    for m in (model, plain):
        with m.no_sync():
            step(m, rank, 1)
        m(torch.ones(2, 12)).sum().backward()
    found["no_sync"] = torch.equal(grads(model), grads(plain))
    found["steps"] = handle.state_dict()["step"]
    loss = model(torch.ones(2, 12)).sum()
    loss.backward(retain_graph=True)
    handle.assert_active()
    found["second backward"] = kind(loss.backward)
    found["second backward, active"] = kind(handle.assert_active)
    found["module"] = kind(lambda: model.module(torch.ones(2, 12)).sum().backward())
    with model.no_sync():
        found["module, no_sync"] = kind(lambda: model.module(torch.ones(2, 12)).sum().backward())
    found["after it"] = torch.equal(step(model, rank, 9), step(plain, rank, 9))
    loss = model(torch.ones(2, 12)).pow(2).sum()
    found["grad"] = len(torch.autograd.grad(loss, list(model.parameters()), create_graph=True)) == 6
    step(model, rank, 8)
    found["create_graph"] = kind(lambda: model(torch.ones(2, 12)).pow(2).sum().backward(create_graph=True))
    found["after create_graph"] = torch.equal(step(model, rank, 10), step(plain, rank, 10))

    # copies
    model = wrapped()
    handle = commhooks.attach(model, Exact())
    twin = copy.deepcopy(model)
    step(twin, rank, 1)
    found["copy, active"] = kind(handle.assert_active)
    second = commhooks.attach(twin, Exact())
    found["copy attached"] = torch.equal(step(twin, rank, 2), step(model, rank, 2))
    second.assert_active()
    torch.save(model, io.BytesIO())
    found["pickled"] = isinstance(pickle.loads(pickle.dumps(model)), DistributedDataParallel)

    # slots and states
    found["two handles"] = kind(lambda: commhooks.attach(model, Exact()))
    taken = wrapped()
    taken.register_comm_hook(None, averaging)
    found["foreign in the slot"] = kind(lambda: commhooks.attach(taken, Exact(), verify_ranks=False))
    found["not wrapped"] = kind(lambda: commhooks.attach(Net(), Exact()))
    found["one state, two models"] = kind(lambda: commhooks.attach(wrapped(), Exact(), state=handle.state))
    handle.detach()
    found["state after detach"] = kind(lambda: commhooks.attach(wrapped(), Exact(), state=handle.state))
    found["plain after detach"] = torch.equal(step(model, rank, 3), step(wrapped(), rank, 3))
    return found


def averaging(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.full
def test_ways_of_training_end_in_the_right_result_or_a_typed_error() -> None:
    for found in spawn(ways, 2, timeout=110):
        errors = {
            "compiled unsynchronised": "AttachError",
            "second backward": "AttachError",
            "second backward, active": "AttachError",
            "module": "AttachError",
            "module, no_sync": "",
            "create_graph": "HookNotSupportedError",
            "copy, active": "AttachError",
            "two handles": "SlotTakenError",
            "foreign in the slot": "SlotTakenError",
            "not wrapped": "AttachError",
            "one state, two models": "StateError",
            "state after detach": "",
        }
        assert {name: found.pop(name) for name in errors} == errors
        assert found.pop("steps") == 1
        assert {name: value for name, value in found.items() if value is not True} == {}


def uneven(rank: int, world: int) -> list[str]:
    wrong = []
    for what in (Exact(), averaging):
        plain, model = wrapped(), wrapped()
        commhooks.attach(model, what)
        seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for which, m in enumerate((plain, model)):
            optimizer = torch.optim.SGD(m.parameters(), 0.01)
            with m.join(divide_by_initial_world_size=True):
                for number in range(3 + 2 * rank):
                    step(m, rank, number)
                    optimizer.step()
                    seen[which].append(grads(m).clone())
            seen[which].append(torch.cat([p.detach().reshape(-1) for p in m.parameters()]))
        if not all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(seen[0], seen[1], strict=True)):
            wrong.append(f"{what}: not what DDP computes under join")
        model.zero_grad()
        model(torch.ones(2, 12)).sum().backward()  # training continues afterwards
    return wrong


def test_uneven_inputs_under_join() -> None:
    assert Join is not None
    assert spawn(uneven, 2) == [[], []]


def regroup(rank: int, world: int) -> list[str]:
    """Call ``_update_process_group``. The hook must then use the new group."""
    pair = dist.new_group([0, 1])
    model, plain = wrapped(), wrapped()
    commhooks.attach(model, Exact())
    step(model, rank, 0), step(plain, rank, 0)
    for m in (model, plain):
        m._update_process_group(pair)
    if rank == 2:
        return []
    return [] if all(torch.equal(step(model, rank, i), step(plain, rank, i)) for i in range(1, 4)) else ["other mean"]


def test_another_process_group() -> None:
    assert spawn(regroup, 3) == [[], [], []]


def regroup_after_detaching(rank: int, world: int) -> bool:
    """Call ``_update_process_group`` on a model whose handle is detached."""
    pair = dist.new_group([0, 1])
    model, plain = wrapped(), wrapped()
    handle = commhooks.attach(model, Exact())
    step(model, rank, 0), step(plain, rank, 0)
    handle.detach()
    for m in (model, plain):
        m._update_process_group(pair)
    return rank == 2 or all(torch.equal(step(model, rank, i), step(plain, rank, i)) for i in range(1, 4))


def test_another_process_group_after_detaching() -> None:
    assert spawn(regroup_after_detaching, 3) == [True, True, True]


def what_stays(rank: int, world: int) -> list[bool]:
    """Return True for each time if the objects of a hook exist, before and after the handle is deleted."""
    model = wrapped()
    handle = commhooks.attach(model, Exact())
    step(model, rank, 0)
    held = [weakref.ref(handle.binding.engine), weakref.ref(handle.state), weakref.ref(handle.reduction)]
    before = all(ref() is not None for ref in held)
    handle.detach()
    del handle
    step(model, rank, 1)
    gc.collect()
    return [before, any(ref() is not None for ref in held)]


def test_a_detached_model_holds_nothing_of_the_hook() -> None:
    assert spawn(what_stays, 2) == [[True, False]] * 2


class Narrow(dist.ProcessGroup):
    """A CPU backend that supports all-reduce only."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.inner = dist.new_group()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.inner.allreduce(tensors, opts)

    def getBackendName(self) -> str:
        return "narrow"


def over_another_backend(rank: int, world: int) -> bool:
    dist.Backend.register_backend("narrow", lambda store, r, w, timeout: Narrow(r, w), devices=["cpu"])
    model, plain = wrapped(), wrapped()
    commhooks.attach(model, Exact(), process_group=dist.new_group(backend="narrow"))
    return all(torch.equal(step(model, rank, i), step(plain, rank, i)) for i in range(3))


@pytest.mark.cpu("its back end carries CPU tensors")
def test_a_backend_with_all_reduce_only() -> None:
    assert spawn(over_another_backend, 2) == [True, True]
