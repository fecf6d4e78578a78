"""PowerSGD on real gloo processes with several buckets and unused parameters, through both registration forms."""

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import ch_powersgd
import commhooks
from ch_testing import spawn
from commhooks import HookConfigError, StateError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(180)]

# bucket_cap_mb -> buckets of the net below: 1, 3 and more than 10
CAPS = {1: 25.0, 3: 0.03, 10: 0.0001}


class Net(nn.Module):
    """Six layers. The model uses one at even steps only and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))
        self.sometimes, self.never = nn.Linear(40, 40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor, some: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.sometimes(x) if some else x


def build(buckets: int, unused: bool) -> DistributedDataParallel:
    net = Net()
    if not unused:
        del net.never
    return DistributedDataParallel(net, bucket_cap_mb=CAPS[buckets], find_unused_parameters=unused)


def train(model: DistributedDataParallel, rank: int, steps: int, unused: bool) -> torch.Tensor:
    """Return all parameters after some steps on different data for each rank."""
    torch.manual_seed(1 + rank)
    x = torch.randn(16, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(x, not unused or step % 2 == 0).sub(x.roll(1, 0)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def equal_everywhere(flat: torch.Tensor, world: int) -> bool:
    all_of_them = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(all_of_them, flat)
    return bool(flat.isfinite().all()) and all(torch.equal(flat, other) for other in all_of_them)


CASES = [
    ("powersgd(rank=1)", 1, True),
    ("powersgd(rank=4)", 3, True),
    ("powersgd(rank=4)", 10, False),
    ("powersgd(rank=2, start_iter=5, residual='averaged')", 10, True),
    ("powersgd(rank=2)", 3, False),
    ("batched_powersgd(rank=4)", 1, False),
    ("batched_powersgd(rank=2)", 10, True),
    ("bf16_wrapper(powersgd(rank=4))", 3, True),
    ("fp16_wrapper(powersgd(rank=1))", 10, False),
    ("bf16_wrapper(batched_powersgd(rank=2))", 3, False),
]


def attached(rank: int, world: int, steps: int) -> list[tuple[str, int, float, float, bool]]:
    rows = []
    for expression, buckets, unused in CASES:
        model = build(buckets, unused)
        handle = commhooks.attach(model, expression)
        flat = train(model, rank, steps, unused)
        seen = handle.stats()
        rows.append((expression, buckets, seen["steps"], seen["compressed_steps"], equal_everywhere(flat, world)))
    return rows


@pytest.mark.full
@pytest.mark.parametrize(("world", "steps"), [(2, 20), (4, 10)])
def test_trains_with_any_number_of_buckets(world: int, steps: int) -> None:
    for rows in spawn(attached, world, steps, timeout=150.0):
        for expression, buckets, taken, compressed, equal in rows:
            assert equal, (expression, buckets)
            assert taken == steps
            assert compressed >= (steps - 5 if "start_iter" in expression else steps), (expression, buckets)


def bare(rank: int, world: int) -> list[tuple[int, float, int, bool]]:
    rows = []
    for hook in (ch_powersgd.powerSGD_hook, ch_powersgd.batched_powerSGD_hook):
        for wrapped in (hook, ch_ddp.bf16_compress_wrapper(hook)):
            for buckets in (1, 3, 10):
                model = build(buckets, unused=False)
                state = ch_powersgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
                model.register_comm_hook(state, wrapped)
                flat = train(model, rank, 12, unused=False)
                rows.append((state.iter, state.compression_stats()[0], buckets, equal_everywhere(flat, world)))
    return rows


@pytest.mark.full
def test_register_comm_hook_with_pytorchs_names() -> None:
    for rows in spawn(bare, 2):
        for taken, rate, buckets, equal in rows:
            assert taken == 12
            assert rate > 2, buckets
            assert equal


def resumed(rank: int, world: int) -> tuple[int, bool, str, str]:
    def start(state: Any) -> DistributedDataParallel:
        model = build(3, unused=False)
        model.register_comm_hook(state, ch_powersgd.powerSGD_hook)
        return model

    state = ch_powersgd.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    first = start(state)  # keep the model alive, because its state becomes free with it
    train(first, rank, 6, unused=False)
    copy = pickle.loads(pickle.dumps(state))
    kept = all(torch.equal(t, u) for (*_, t), (*_, u) in zip(state.entries(), copy.entries(), strict=True)) and any(
        field == "residual" and t.count_nonzero() for _, field, t in copy.entries()
    )
    train(start(copy), rank, 3, unused=False)
    second, wrong = "", ""
    try:
        train(start(state), rank, 1, unused=False)
    except StateError as error:
        second = str(error)
    model = build(1, unused=False)
    model.register_comm_hook(None, ch_powersgd.powerSGD_hook)
    try:
        train(model, rank, 1, unused=False)
    except HookConfigError as error:
        wrong = str(error)
    return copy.iter, kept, second, wrong


def test_state_is_pickled_and_serves_one_model() -> None:
    for iterations, kept, second, wrong in spawn(resumed, 2):
        assert iterations == 9
        assert kept
        assert "one state per model" in second
        assert "PowerSGDState(process_group" in wrong


def body_attach_function(rank: int, world: int) -> None:
    from ch_powersgd import PowerSGDState, powerSGD_hook

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30)), bucket_cap_mb=0.001)
    with pytest.raises(commhooks.AttachError, match="takes its options from a state"):
        commhooks.attach(model, powerSGD_hook)
    handle = commhooks.attach(model, powerSGD_hook, state=PowerSGDState(None, 2, start_powerSGD_iter=2))
    for _ in range(4):
        model(torch.randn(3, 40)).square().sum().backward()
    assert handle.stats()["compressed_steps"] == 2  # through the engine, not as a foreign function


def test_attach_takes_the_function_with_its_state() -> None:
    spawn(body_attach_function, 2)


def body_buckets_stay(rank: int, world: int) -> tuple[bool, bool, int]:
    """Return if two steps use the same buckets, if DDP's discarded buckets are freed, and the number of buckets."""
    model = build(3, unused=False)
    handle = commhooks.attach(model, "powersgd(rank=2)")
    seen: list[commhooks.Bucket] = []
    handle.binding.on_reduced(seen.append)
    train(model, rank, 1, unused=False)
    first = [weakref.ref(bucket.storage) for bucket in seen]
    train(model, rank, 2, unused=False)
    seen.clear()
    train(model, rank, 1, unused=False)
    last = list(seen)
    seen.clear()
    train(model, rank, 1, unused=False)
    gc.collect()
    same = all(a is b for a, b in zip(last, seen, strict=True))
    return same, all(ref() is None for ref in first), len(seen)


def test_buckets_are_kept_as_long_as_ddp_keeps_them() -> None:
    for same, gone, count in spawn(body_buckets_stay, 2):
        assert same
        assert gone, "the buffers from before DDP's rebuild are still held"
        assert count > 1


def body_wrapper_gone(rank: int, world: int) -> bool:
    """Return True if the buffers of a deleted model are freed, although its hook is a plain function."""
    net, refs = Net(), []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        refs.append(weakref.ref(bucket.buffer()))
        return ch_powersgd.powerSGD_hook(state, bucket)

    model = DistributedDataParallel(net, find_unused_parameters=True)
    state = ch_powersgd.PowerSGDState(matrix_approximation_rank=2)
    model.register_comm_hook(state, hook)
    train(model, rank, 3, unused=True)
    del model
    gc.collect()
    return all(ref() is None for ref in refs)


def test_a_wrapper_that_is_gone_takes_its_buffers_along() -> None:
    assert all(spawn(body_wrapper_gone, 2))


def body_rebuilt(rank: int, world: int) -> bool:
    """A rank that resets its bucket size half way must match one that had this size from the start."""
    ends = []
    for caps in ((0.03, 0.03), (25.0, 0.03)):
        net = Net()
        handle = None
        torch.manual_seed(1 + rank)
        x = torch.randn(16, 40)
        for cap in caps:
            model = DistributedDataParallel(net, bucket_cap_mb=cap, find_unused_parameters=True)
            previous = handle.state_dict() if handle is not None else None
            handle = commhooks.attach(model, "powersgd(rank=2)")
            if previous is not None:
                handle.load_state_dict(previous)
            for _ in range(3):
                model.zero_grad()
                model(x, True).sub(x.roll(1, 0)).square().mean().backward()
                with torch.no_grad():
                    for p in net.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=0.1)
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return torch.equal(*ends)


def test_a_new_wrapper_with_other_buckets_changes_nothing() -> None:
    assert all(spawn(body_rebuilt, 2))


class SharedMuon(torch.optim.SGD):
    """Stands for public Muons that step some groups by Adam."""


def refused_under_muon(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return the errors of hooks and optimizers, and the words "changed" and "averaged" for a refusal that came too late."""
    found: dict[str, list[str]] = {}

    def attempt(name: str, hook: Any, make: Any, given: Any) -> None:
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizers = make(model)
        before, said = model.module.weight.detach().clone(), found.setdefault(name, [])
        try:
            handle = commhooks.attach(model, hook, optimizer=given(optimizers))
            said.append("attached")
            model(torch.ones(2, 64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            handle.detach()
        except commhooks.HookNotSupportedError as error:
            said.append(str(error))
        said += ["changed"] * (not torch.equal(before, model.module.weight))

    def both(model: DistributedDataParallel) -> list[torch.optim.Optimizer]:
        return [torch.optim.Muon([model.module.weight], lr=0.1), torch.optim.Adam([model.module.bias])]

    def groups(model: DistributedDataParallel) -> list[torch.optim.Optimizer]:
        return [SharedMuon([{"params": [p], "use_muon": p.ndim < 2} for p in model.parameters()], lr=0.1)]

    attempt("given", "powersgd(rank=4)", both, lambda optimizers: optimizers[0])
    attempt("found", "powersgd(rank=4)", both, lambda optimizers: lambda params: optimizers)
    attempt("first step", "warmup(powersgd(rank=4), steps=9)", both, lambda optimizers: optimizers[1])
    attempt("half", "powersgd(rank=32, min_compression_rate=0.5)", both, lambda optimizers: optimizers[0])
    attempt("policy", {"*.weight": "bf16_compress", "*": "powersgd"}, both, lambda optimizers: optimizers[0])
    attempt("by Adam", "powersgd(rank=4)", groups, lambda optimizers: optimizers[0])
    return found


def test_a_low_rank_is_refused_under_muon_before_a_parameter_changes() -> None:
    for found in spawn(refused_under_muon, 2):
        assert "most of each step would be lost" in found["given"][0] and len(found["given"]) == 1
        assert found["found"] == found["given"]
        assert found["first step"][0] == "attached" and "Muon gives all singular values" in found["first step"][1]
        assert len(found["first step"]) == 2
        for name in ("half", "policy", "by Adam"):
            assert found[name] == ["attached", "changed"]
