"""Two levels over gloo processes, with DDP, a Reducer and a bare hook: equal bits, failures, and a lost rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import CommHooksError, RankMismatchError, RemoteHookError

pytestmark = pytest.mark.full


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 8)
    )


def ddp(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=0.02, **options)  # type: ignore[arg-type]


def backward(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def same(gradient: torch.Tensor) -> bool:
    rows = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, gradient)
    return all(torch.equal(rows[0], row) for row in rows)


def trains(rank: int, world: int, expr: str) -> tuple[bool, float, dict[str, float]]:
    model = ddp()
    handle = commhooks.attach(model, expr)
    equal, applied, wanted = True, torch.zeros(()), torch.zeros(())
    for step in range(4):
        exact = backward(net(), rank, step)
        dist.all_reduce(exact)
        found = backward(model, rank, step)
        equal = equal and same(found)
        applied, wanted = applied + found, wanted + exact / world
    return equal, float((applied - wanted).norm() / wanted.norm()), handle.stats()


@pytest.mark.parametrize("expr", ["quant4", "powersgd(rank=4)", "bf16_compress", "topk(density=0.2)", "allreduce"])
def test_ddp(expr: str) -> None:
    flat = spawn(trains, 4, expr)
    two = spawn(trains, 4, f"two_level({expr}, nodes=2)")
    for equal, error, stats in two:
        assert equal
        assert error < 1.2 * flat[0][1] + 1e-5
        assert stats["between_bytes"] < stats["wire_bytes"]
        assert stats["compressed_steps"] == 4 or expr == "allreduce"


def other_ways(rank: int, world: int) -> list[bool]:
    from torch.distributed._composable.replicate import replicate

    replicated = replicate(net(), bucket_cap_mb=0.02)
    commhooks.attach(replicated, "two_level(quant4, nodes=2)")
    bare = ddp()
    bare.register_comm_hook(None, commhooks.get("two_level")(commhooks.get("quant4"), nodes=2))
    static = ddp(static_graph=True)
    commhooks.attach(static, "two_level(powersgd(rank=2), nodes=2)")
    found = [same(backward(model, rank, step)) for model in (replicated, bare, static) for step in range(3)]
    model = ddp()
    handled = commhooks.attach(model, "two_level(quant4(error_feedback=True), nodes=2)")
    with model.no_sync():
        model(torch.ones(4, 64) * rank).square().mean().backward()
    model(torch.ones(4, 64) * rank).square().mean().backward()
    found.append(same(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])))
    assert handled.stats()["steps"] == 1
    return found


def test_replicate_a_bare_hook_a_static_graph_and_accumulation() -> None:
    assert spawn(other_ways, 4) == [[True] * 10] * 4


def torchrun_tells(rank: int, world: int) -> bool:
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
    model = ddp()
    handle = commhooks.attach(model, "two_level(quant4)")
    found = same(backward(model, rank, 0))
    assert handle.stats()["between_bytes"] > 0
    assert "two_level" in str(handle.report())
    handle.detach()
    again = commhooks.attach(model, "two_level(powersgd(rank=2))")
    found = found and same(backward(model, rank, 1))
    saved = again.state_dict()
    again.load_state_dict(saved)
    return found and same(backward(model, rank, 2))


def test_torchrun_tells_the_nodes() -> None:
    assert spawn(torchrun_tells, 4) == [True] * 4


def disagree(rank: int, world: int) -> str:
    try:
        commhooks.attach(ddp(), f"two_level(quant4, nodes={2 if rank else 4})")
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_raise_at_attach() -> None:
    assert all("disagree on their nodes" in text for text in spawn(disagree, 4))


def reducer(rank: int, world: int) -> bool:
    weight = torch.full((64, 64), float(rank))
    made = commhooks.Reducer("two_level(quant8, nodes=2)", {"w": weight})
    weight = made.average({"w": weight})["w"].clone()
    return same(weight) and bool((weight - 1.5).abs().max() < 0.05)


def test_reducer() -> None:
    assert spawn(reducer, 4) == [True] * 4


def subset(rank: int, world: int) -> bool:
    groups = [dist.new_group([0, 1, 4, 5]), dist.new_group([2, 3])]
    if rank in (2, 3):
        return True
    group = groups[0]
    model = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.02)
    handle = commhooks.attach(model, "two_level(quant4, nodes=2)")
    gradient = backward(model, rank, 0)
    rows = [torch.empty_like(gradient) for _ in range(4)]
    dist.all_gather(rows, gradient, group=group)
    return handle.attached and all(torch.equal(rows[0], row) for row in rows)


def test_a_group_of_some_ranks() -> None:
    assert spawn(subset, 6) == [True] * 6


def hook_fails(rank: int, world: int) -> str:
    from ch_wrappers.two_level import TwoLevel
    from commhooks import AllReduce, Bucket, Reduction, StepContext

    class Breaks(Reduction):
        name, lossy = "breaks", True

        def run(self, bucket: Bucket, ctx: StepContext) -> commhooks.Stages:
            yield AllReduce(bucket.buffer)
            if rank == 2 and not bucket.storage.is_meta:
                raise ZeroDivisionError("between the levels")

    model = ddp()
    commhooks.attach(model, TwoLevel(Breaks(), nodes=2))
    try:
        backward(model, rank, 0)
    except (ZeroDivisionError, RemoteHookError) as error:
        return type(error).__name__
    return "nothing"


def test_an_error_between_the_levels_reaches_every_node() -> None:
    assert spawn(hook_fails, 4) == ["RemoteHookError", "RemoteHookError", "ZeroDivisionError", "RemoteHookError"]


def dies(rank: int, world: int, level: str) -> tuple[str, float]:
    model = ddp()
    handle = commhooks.attach(model, "two_level(quant4, nodes=2)", timeout=8.0)
    backward(model, rank, 0)
    assert handle.binding is not None
    assert handle.binding.engine is not None
    if rank == 3:
        transport = handle.binding.engine.transport.scoped(level)  # type: ignore[attr-defined]

        def die(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        transport.all_to_all = transport.all_gather = die  # two nodes exchange whole messages
    begun = time.monotonic()
    try:
        backward(model, rank, 1)
    except CommHooksError as error:
        dist.destroy_process_group()
        return type(error).__name__, time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
@pytest.mark.parametrize("level", ["node", "peers"])
def test_a_rank_killed_at_a_level_ends_every_rank_in_time(level: str) -> None:
    found = spawn(dies, 4, level, expect_exit={3: -signal.SIGKILL})
    for kind, seconds in found[:3]:
        assert kind in ("TransportError", "HookTimeoutError")
        assert seconds < 60.0  # a hook's deadline is 8 seconds. Without it gloo waits for 30 minutes


def wide(*, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 1024, bias), torch.nn.ReLU(), torch.nn.Linear(1024, 128, bias))


def gathers_long_parts(rank: int, world: int) -> tuple[int, bool, float]:
    """Return the number of broadcasts of a step, if all ranks have equal bits, and the distance to the exact average."""
    count, broadcast = 0, dist.broadcast

    def counting(*args: object, **options: object) -> object:
        nonlocal count
        count += 1
        return broadcast(*args, **options)  # type: ignore[arg-type]

    handled, bare = (DistributedDataParallel(wide()) for _ in range(2))
    commhooks.attach(handled, "two_level(allreduce, nodes=2)")
    bare.register_comm_hook(None, commhooks.get("two_level")(commhooks.get("allreduce"), nodes=2))
    found = []
    for model in (handled, bare):
        backward(model, rank, 0)
        dist.broadcast = counting
        found.append(backward(model, rank, 1))
        dist.broadcast = broadcast
    exact = backward(wide(), rank, 1)
    dist.all_reduce(exact)
    distance = max(float((one - exact / world).norm() / exact.norm()) for one in found)
    return count, all(same(one) for one in found), distance


@pytest.mark.cpu("gloo's long all-gathers are tested")
def test_long_gathers_inside_a_node_are_broadcasts() -> None:
    """Gloo's all-gather receives into new memory; the part of each rank is broadcast into its place instead."""
    for count, equal, distance in spawn(gathers_long_parts, 4):
        assert count == 2 * 2  # two models, two ranks of a node
        assert equal
        assert distance < 1e-6


def lost_in_a_long_gather(rank: int, world: int) -> tuple[str, float]:
    model = DistributedDataParallel(wide())
    handle = commhooks.attach(model, "two_level(quant4, nodes=2)", timeout=6.0)
    backward(model, rank, 0)
    if rank == 3:
        assert handle.binding is not None
        assert handle.binding.engine is not None
        transport = handle.binding.engine.transport.scoped("node")  # type: ignore[attr-defined]
        transport.all_gather = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        backward(model, rank, 1)
    except CommHooksError as error:
        dist.destroy_process_group()
        return type(error).__name__, time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
def test_a_rank_killed_before_a_long_gather_ends_every_rank_in_time() -> None:
    found = spawn(lost_in_a_long_gather, 4, expect_exit={3: -signal.SIGKILL})
    assert {kind for kind, _ in found[:3]} <= {"TransportError", "HookTimeoutError", "RemoteHookError"}
    assert all(seconds < 15 for _, seconds in found[:3])


def joins(rank: int, world: int, expr: str) -> tuple[int, bool]:
    """Train with uneven numbers of batches inside DDP's join; return the steps, and if all ranks end with equal weights."""
    model = ddp()
    handle = commhooks.attach(model, expr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for step in range(2 + rank):
            backward(model, rank, step)
            optimizer.step()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return int(handle.stats()["steps"]), same(weights) and bool(weights.isfinite().all())


@pytest.mark.parametrize("expr", ["quant4", "quant4(error_feedback=True)", "powersgd(rank=2)"])
def test_ranks_with_uneven_data_join(expr: str) -> None:
    assert spawn(joins, 4, f"two_level({expr}, nodes=2)") == [(5, True)] * 4


def several_dtypes(rank: int, world: int) -> list[bool]:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).double()
            self.last = torch.nn.Linear(64, 8).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(self.first(x).double())
            return self.last(x.bfloat16()).float()

    found = []
    for expr in ("two_level(quant4, nodes=2)", "two_level(powersgd(rank=2), inside=bf16_compress, nodes=2)"):
        model = DistributedDataParallel(Mixed(), bucket_cap_mb=0.02)
        commhooks.attach(model, expr)
        for step in range(3):
            torch.manual_seed(100 * step + rank)
            model.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert {g.dtype for g in gradients} == {torch.float32, torch.float64, torch.bfloat16}
            found.append(same(torch.cat([g.double().reshape(-1) for g in gradients])))
    return found


def test_parameters_of_several_dtypes() -> None:
    assert spawn(several_dtypes, 4) == [[True] * 6] * 4
