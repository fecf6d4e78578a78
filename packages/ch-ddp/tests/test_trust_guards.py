"""Hooks that fail on real gloo processes: errors on each rank, their delay, and use of the model afterwards."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_ddp.adapter.foreign_driver import Control
from ch_testing import spawn
from commhooks import AllReduce, Bucket, Reduction, StepContext

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 4))


def wrapped(**options: Any) -> DistributedDataParallel:
    """Return a model in which every parameter is a bucket after the first step."""
    return DistributedDataParallel(net(), bucket_cap_mb=0.0001, **options)


def backward(model: nn.Module, rank: int, seed: int) -> torch.Tensor:
    torch.manual_seed(1000 * seed + rank)
    model.zero_grad()
    model(torch.randn(5, 12)).pow(2).sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def outcome(action: Callable[[], object]) -> tuple[str, str, float]:
    """Return the type, text and notes of the error that ``action`` raises, and the seconds until then."""
    begun = time.monotonic()
    try:
        action()
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, text, time.monotonic() - begun
    return "", "", time.monotonic() - begun


# -- our own reductions fail at any stage on any rank, and the model keeps working


class Breaks(Reduction):
    """Runs two rounds. Raises on one rank at one stage of one bucket while armed."""

    name = "breaks"
    lossy = True

    def __init__(self) -> None:
        self.armed: tuple[int, int, int] | None = None  # rank, stage, bucket
        self.error: BaseException = ArithmeticError("boom")

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        self._maybe(ctx.rank, 0, bucket)
        count = ctx.scratch("count", (1,), device=bucket.device).fill_(1.0)
        yield AllReduce(count)
        self._maybe(ctx.rank, 1, bucket)
        bucket.buffer.mul_(count)
        yield AllReduce(bucket.buffer)
        self._maybe(ctx.rank, 2, bucket)

    def _maybe(self, rank: int, stage: int, bucket: Bucket) -> None:
        if self.armed == (rank, stage, bucket.index) and not bucket.buffer.is_meta:
            self.armed = None
            raise self.error


def own_failures(rank: int, world: int) -> list[tuple[Any, ...]]:
    found = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        model, plain, hook = wrapped(**options), wrapped(**options), Breaks()
        handle = commhooks.attach(model, hook, timeout=20.0)
        for step, where in enumerate([(0, 0, 0), (1, 1, 1), (0, 2, 2), (1, 0, 1), (1, 2, 0)]):
            bucketwise = where if step else (*where[:2], 0)  # DDP has one bucket in its first step
            hook.armed = bucketwise
            hook.error = KeyboardInterrupt() if step == 3 else ArithmeticError("boom")
            kind, text, seconds = outcome(lambda: backward(model, rank, 50 + step))  # noqa: B023
            hook.armed = None
            usual = outcome(lambda: backward(plain, rank, 50 + step))[2]  # noqa: B023
            equal = all(
                torch.equal(backward(model, rank, 100 * step + i), backward(plain, rank, 100 * step + i))
                for i in range(2)
            )
            found.append((where, kind, text, seconds - 10 * usual, equal))  # a busy machine takes longer
        handle.assert_active()
    return found


def test_an_error_of_a_reduction_is_raised_on_all_ranks_and_the_model_continues_exactly() -> None:
    results = spawn(own_failures, 2)
    assert len(results[0]) == 15
    for rank, found in enumerate(results):
        for where, kind, text, seconds, equal in found:
            own = "KeyboardInterrupt" if where == (1, 0, 1) else "ArithmeticError"
            assert kind == (own if where[0] == rank else "RemoteHookError"), (where, rank, kind, text)
            if where[0] != rank:
                assert f"rank {where[0]}" in text
                assert own in text
            assert seconds < 1.0
            assert equal, (where, rank)


# -- foreign hooks: results


def reduced(state: Any, bucket: Any) -> Any:
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def turned(state: Callable[[torch.Tensor], Any], bucket: Any) -> Any:
    """Return the reduced buffer, changed by ``state``."""
    return reduced(None, bucket).then(lambda done: state(done.value()))


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.zeros_like(x)], 1)[:, 0]


RIGHT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x,
    "list": lambda x: [x],
    "2-D": lambda x: x.view(1, -1),
    "strided": strided,
    "float64": lambda x: x.double(),
}
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "None": (lambda x: None, "holds NoneType"),
    "str": (lambda x: "x", "holds str"),
    "two": (lambda x: [x, x], "holds list"),
    "short": (lambda x: x[:3], "3 elements instead of"),
    "long": (lambda x: torch.cat([x, x]), "elements instead of"),
    "int": (lambda x: x.int(), "dtype torch.int32"),
    "bool": (lambda x: x > 0, "dtype torch.bool"),
    "complex": (lambda x: x.to(torch.complex64), "dtype torch.complex64"),
    "meta": (lambda x: x.to("meta"), "device meta"),
    "raises": (lambda x: [][1], "IndexError: list index out of range"),
}


def none_hook(state: Any, bucket: Any) -> Any:
    reduced(None, bucket).wait()


def tensor_hook(state: Any, bucket: Any) -> Any:
    return reduced(None, bucket).wait()


def work_hook(state: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), async_op=True)


def raw_future(state: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()


def raises(state: Any, bucket: Any) -> Any:
    reduced(None, bucket).wait()
    raise ValueError("boom in hook")


def results_checked(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = backward(wrapped(), rank, 1)
    for name, change in RIGHT.items():
        model = wrapped()
        commhooks.attach(model, turned, state=change, timeout=20.0)
        found["right " + name] = torch.equal(backward(model, rank, 1), plain)
    model = wrapped()
    commhooks.attach(model, raw_future, timeout=20.0)
    found["right raw"] = torch.equal(backward(model, rank, 1), plain)
    odd = {name: partial(turned, change) for name, (change, _) in WRONG.items()}
    odd |= {"hook None": none_hook, "hook tensor": tensor_hook, "hook work": work_hook, "hook raises": raises}
    for name, hook in odd.items():
        model = wrapped()
        handle = commhooks.attach(
            model,
            lambda state, bucket, hook=hook: hook(bucket) if isinstance(hook, partial) else hook(None, bucket),
            timeout=20.0,
        )
        found[name] = (outcome(lambda: backward(model, rank, 1)), outcome(handle.check)[0])  # noqa: B023
    return found


def test_every_wrong_result_is_a_typed_error_that_names_hook_and_bucket() -> None:
    for found in spawn(results_checked, 2, timeout=100):
        assert all(value is True for name, value in found.items() if name.startswith("right"))
        expected = {name: text for name, (_, text) in WRONG.items()} | {
            "hook None": "returned NoneType",
            "hook tensor": "returned Tensor",
            "hook work": "Work",
            "hook raises": "boom in hook",
        }
        kinds = {"raises": "IndexError", "hook raises": "ValueError"}
        for name, text in expected.items():
            (kind, said, seconds), again = found[name]
            assert kind == again == kinds.get(name, "HookResultError"), (name, kind, said)
            assert text.split(": ")[-1] in said, name
            assert "bucket 0" in said, name
            assert "<lambda>" in said, name
            assert seconds < 5.0, name


# -- foreign hooks that fail on one rank


def never(state: Any, bucket: Any) -> Any:
    reduced(None, bucket).wait()
    return torch.futures.Future()


def one_rank(rank: int, world: int, name: str) -> tuple[Any, ...]:
    def hook(state: Any, bucket: Any) -> Any:
        if rank == 1 and state:
            if name == "before":
                raise ValueError("boom before the collective")
            if name == "after":
                return turned(lambda x: x[:1], bucket)
            if name == "never":
                return never(None, bucket)
        return reduced(None, bucket)

    model, armed = wrapped(), []
    handle = commhooks.attach(model, hook, state=armed, timeout=3.0)
    good = torch.equal(backward(model, rank, 1), backward(wrapped(), rank, 1))
    armed.append(1)
    first = outcome(lambda: backward(model, rank, 2))
    second = outcome(lambda: backward(model, rank, 3))
    checked = outcome(handle.check)[0]
    dist.destroy_process_group()  # the error says that the group is lost
    return good, first, second, checked


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("before", "ValueError"),
        ("after", "HookResultError"),
        pytest.param(
            "never",
            "HookTimeoutError",
            marks=pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies"),
        ),
    ],
)
def test_a_foreign_hook_that_fails_on_one_rank_ends_the_step_on_all(name: str, kind: str) -> None:
    results = spawn(one_rank, 2, name, group_timeout=30)
    for rank, (good, first, second, checked) in enumerate(results):
        assert good
        assert first[0] == checked == (kind if rank == 1 else "RemoteHookError"), first
        assert first[2] < (4.0 if name == "never" else 1.0), first
        assert "Wrap the model again" in first[1]
        assert second[0] == "AttachError", second  # the model is unusable, and says so instead of hanging
        assert "Wrap the model again" in second[1]
        assert second[2] < 1.0
    assert "rank 1" in results[0][1][1]


def opens_and_closes(rank: int, world: int) -> None:
    for _ in range(100):
        Control(dist.group.WORLD, 20.0).close()


@pytest.mark.full
def test_a_control_channel_that_is_closed_at_once_breaks_no_rank_that_still_connects() -> None:
    spawn(opens_and_closes, 2, timeout=100)
