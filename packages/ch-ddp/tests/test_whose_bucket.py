"""Buckets reach one hook in unusual ways: after a backward, through several hooks, and while a caller waits."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook as torchs_fp16
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_ddp.hook_function import as_hook
from ch_testing import spawn
from commhooks import AllReduce, Bucket, HookState, Plain, Reduction, StepContext

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]


class Twice(Reduction):
    """Averages in two rounds, of which the second needs the first. It counts its steps for each parameter."""

    name = "twice"
    lossy = True
    fields = {"seen": "local"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        one = ctx.scratch("one", (1,), bucket.dtype, bucket.device).fill_(1.0)
        yield AllReduce(one)
        for param in bucket.params:
            before = ctx.read(param.name, "seen")
            seen = ctx.write(param.name, "seen", (1,), device=bucket.device)
            seen.copy_(before) if before is not None else seen.zero_()
            seen.add_(1.0)
        yield AllReduce(bucket.buffer.mul_(one))


twice_hook = as_hook(Twice(), "twice_hook")


class Net(nn.Module):
    """Linear layers of two dtypes, one of them unused, and an embedding whose gradient may be sparse."""

    def __init__(self, dtypes: bool, sparse: bool, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = unused
        self.embedding = nn.Embedding(9, 8, sparse=sparse)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8).to(torch.float64 if dtypes else torch.float32)
        self.third = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.embedding(x))
        h = self.second(h.to(self.second.weight.dtype)).float()
        return h if self.unused else self.third(h)


def gradients(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randint(0, 9, (5,))).pow(2).sum().backward()
    return [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]


# -- a static graph's first iteration


def static(rank: int, world: int) -> list[str]:
    wrong = []
    for net in ((True, False, False), (False, True, False), (True, True, False), (True, False, True)):
        for name, place in PLACES.items():

            def wrapped() -> DistributedDataParallel:
                return DistributedDataParallel(Net(*net), static_graph=True, bucket_cap_mb=0.0001)  # noqa: B023

            plain, model = wrapped(), wrapped()
            place(model)
            for step in range(4):
                want, have = gradients(plain, rank, step), gradients(model, rank, step)
                tolerance = 0.0 if name.endswith("allreduce") and world == 2 else 2e-3
                if len(want) != len(have) or not all(
                    torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(want, have, strict=True)
                ):
                    wrong.append(f"{net} {name} step {step}")
    return wrong


PLACES: dict[str, Callable[[DistributedDataParallel], object]] = {
    "attached allreduce": lambda model: commhooks.attach(model, "allreduce"),
    "attached twice": lambda model: commhooks.attach(model, Twice()),
    "attached foreign": lambda model: (
        None
        if any(getattr(m, "sparse", False) for m in model.modules())  # torch's hook supports no sparse gradients
        else commhooks.attach(model, torchs_fp16)
    ),
    "bare allreduce": lambda model: model.register_comm_hook(None, ch_ddp.allreduce_hook),
    "bare twice": lambda model: model.register_comm_hook(None, twice_hook),
    "bare twice with a state": lambda model: model.register_comm_hook(HookState(), twice_hook),
}


@pytest.mark.full
def test_a_static_graphs_first_iteration_ends_without_a_last_bucket() -> None:
    assert spawn(static, 2, timeout=150.0) == [[], []]


def static_stats(rank: int, world: int) -> list[Any]:
    model = DistributedDataParallel(Net(True, True, False), static_graph=True, bucket_cap_mb=0.0001)
    handle = commhooks.attach(model, Twice())
    for step in range(3):
        gradients(model, rank, step)
    assert isinstance(handle.state, HookState)
    handle.commit()
    seen = {float(tensor) for _, field, tensor in handle.state.entries() if field == "seen"}
    return [handle.stats()["steps"], handle.state.step, seen]


def test_all_buckets_of_a_static_graphs_first_iteration_are_one_step() -> None:
    assert spawn(static_stats, 2) == [[3.0, 3, {3.0}]] * 2


# -- a user's hook that calls ours


def hooks_of_users(group: list[dist.ProcessGroup]) -> dict[str, Callable[[Any, Any], Any]]:
    """Return code that users write around a hook function. All of it works with PyTorch's hooks."""
    plain, half = ch_ddp.allreduce_hook, ch_ddp.fp16_compress_hook

    def waits(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = plain(None, bucket)
        future.wait()
        return future

    def waits_for_half(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ours = half(None, bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(ours.wait())
        return done

    def then(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return plain(None, bucket).then(lambda future: future.value())

    def waits_for_what_follows(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = half(None, bucket).then(lambda done: done.value().mul(1.0))
        future.wait()
        return future

    def two_rounds_and_what_follows(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return twice_hook(None, bucket).then(lambda one: one.value()).then(lambda two: two.value().mul(1.0))

    def by_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return plain(None, bucket) if bucket.is_last() else half(None, bucket)

    def by_size(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return half(None, bucket) if bucket.buffer().numel() > 100 else plain(None, bucket)

    def by_group(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return plain(group[bucket.index() % 2], bucket)

    def two_rounds(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return plain(None, bucket) if bucket.is_last() else twice_hook(None, bucket)

    def two_rounds_by_size(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return twice_hook(None, bucket) if bucket.buffer().numel() > 100 else plain(None, bucket)

    kept = HookState()

    def two_rounds_with_a_state(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return plain(None, bucket) if bucket.index() == 0 else twice_hook(kept, bucket)

    return {name: hook for name, hook in locals().items() if callable(hook) and hook not in (plain, half)}


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)], nn.Linear(12, 3))


def step_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 12)).pow(2).sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def used_by_hooks(rank: int, world: int) -> list[str]:
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    wrong = []
    for name, hook in hooks_of_users(groups).items():
        for unused in (False, True):  # DDP then also all-reduces a map on the same group
            plain, model = (
                DistributedDataParallel(deep(), bucket_cap_mb=0.0001, find_unused_parameters=unused) for _ in range(2)
            )
            model.register_comm_hook(None, hook)
            for step in range(4):
                with model.no_sync() if step == 2 else nullcontext():
                    have = step_of(model, rank, step)
                if step != 2:
                    want = step_of(plain, rank, step)
                    if not torch.allclose(want, have, rtol=4e-3, atol=4e-3):
                        wrong.append(f"{name} unused={unused} step {step}: {(want - have).abs().max()}")
    return wrong


@pytest.mark.full
def test_hooks_of_users_may_wait_and_may_send_buckets_to_several_hooks() -> None:
    assert spawn(used_by_hooks, 2, timeout=120.0) == [[], []]


WAYS: dict[str, Callable[[torch.futures.Future[Any]], Any]] = {
    "wait": lambda future: future.wait(),
    "then, wait": lambda future: future.then(lambda done: done.value()).wait(),
    "then, then, wait": lambda future: future.then(lambda done: done.value()).then(lambda done: done.value()).wait(),
}


def waited_for(rank: int, world: int) -> list[str]:
    return [_waited_for(twice_hook, wait) for wait in WAYS.values()]


def _waited_for(hook: Callable[..., Any], wait: Callable[[torch.futures.Future[Any]], Any]) -> str:
    def waits(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(None, bucket)
        wait(future)
        return future

    model = DistributedDataParallel(deep(), bucket_cap_mb=0.0001)
    model.register_comm_hook(None, waits)
    try:
        for step in range(2):
            step_of(model, dist.get_rank(), step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_waiting_for_a_bucket_that_only_the_last_completes_is_an_error() -> None:
    for texts in spawn(waited_for, 2):
        for text in texts:
            assert text.startswith("HookNotSupportedError: your hook waits for a future of twice_hook")
            assert "instead of waiting" in text


class NoPlan(Plain):
    """Plain averaging that fails before its first message if the model has several buckets."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if bucket.buffer.is_meta and bucket.buffer.numel() < 200:
            raise ArithmeticError("as told")
        yield from super().run(bucket, ctx)


def waited_for_a_failure(rank: int, world: int) -> list[str]:
    return [_waited_for(as_hook(NoPlan(), "no_plan"), wait) for wait in WAYS.values()]


def test_waiting_for_a_failed_bucket_raises_the_error_of_its_step() -> None:
    for texts in spawn(waited_for_a_failure, 2):
        assert len(texts) == 3
        assert all("ArithmeticError: as told" in text for text in texts), texts


def followed_by_an_error(rank: int, world: int) -> list[str]:
    def fails(done: torch.futures.Future[Any]) -> torch.Tensor:
        raise ArithmeticError("as told")

    found = []
    for hook in (ch_ddp.allreduce_hook, twice_hook):

        def follows(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return hook(None, bucket).then(fails)  # noqa: B023

        model = DistributedDataParallel(deep(), bucket_cap_mb=0.0001)
        model.register_comm_hook(None, follows)
        try:
            step_of(model, rank, 0)
        except Exception as error:
            found.append(str(error))
    return found


def test_a_callback_of_a_bucket_may_raise() -> None:
    for texts in spawn(followed_by_an_error, 2):
        assert len(texts) == 2
        assert all("as told" in text for text in texts)


# -- names of parameters without given names


class Crossed(nn.Module):
    """Defines equal layers in one order and uses them in another. With ``mixed`` one of them has another dtype."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.b.to(torch.float64 if mixed else torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.c(self.a(x)).to(self.b.weight.dtype))


def positions(rank: int, world: int) -> list[list[str]]:
    found = []
    for mixed in (False, True):
        for late in (0, 3):
            model = DistributedDataParallel(Crossed(mixed), bucket_cap_mb=0.0001)
            state = HookState()
            for step in range(5):
                if step == late:
                    model.register_comm_hook(state, twice_hook)
                model.zero_grad()
                model(torch.ones(2, 6)).sum().backward()
            names = state.identity.names()
            found.append([names[id(p)] for p in model.parameters()])
    return found


def test_positions_follow_the_model_for_all_buckets() -> None:
    assert spawn(positions, 2) == [[["0:6x6", "1:6x6", "2:6x6"]] * 4] * 2
