"""A saved run that resumes in another process has the same bits as an uninterrupted run."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_ddp.adapter.saved_buckets import SavedBuckets
from ch_testing import spawn
from commhooks import Bucket, BucketLayout, HookState, ParamLayout

HOOKS = (  # every hook whose results depend on the buckets
    "quant4(error_feedback=True)",
    "quant8(error_feedback=True)",
    "quant4(error_feedback=True, residual='int8')",
    "quant4(rounding='stochastic')",
    "quant2",
    "sign",
    "batched_powersgd(rank=2, min_compression_rate=1)",
    "bf16_wrapper(batched_powersgd(rank=2, min_compression_rate=1))",
    "policy({'4.*': 'allreduce', '*': 'quant2'})",
    "warmup(quant2, steps=1)",
)
OTHERS = ("allreduce", "powersgd(rank=2, min_compression_rate=1)", "quant4", "topk(density=0.1)")
SAVED, LAST = 4, 8


class Branches(nn.Module):
    """Uses its layers in another order than it defines them. DDP's second buckets therefore differ from its first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (3, 0, 4, 1, 2):
            x = torch.tanh(self.layers[number](x))
        return x


def model(options: dict[str, Any]) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Branches(), bucket_cap_mb=0.009, **options)


def train(ddp: DistributedDataParallel, steps: range, rank: int) -> None:
    for step in steps:
        ddp.zero_grad()
        ddp(torch.randn(8, 32, generator=torch.Generator().manual_seed(64 * step + rank))).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p.sub_(0.5 * p.grad)  # type: ignore[operator]


def saves(rank: int, world: int, folder: str, hooks: tuple[str, ...], options: dict[str, Any]) -> list[int]:
    counts = []
    for number, hook in enumerate(hooks):
        ddp = model(options)
        handle = commhooks.attach(ddp, hook)
        train(ddp, range(SAVED), rank)
        torch.save([ddp.module.state_dict(), handle.state_dict()], f"{folder}/{number}-{rank}.pt")
        train(ddp, range(SAVED, LAST), rank)
        torch.save([ddp.module.state_dict(), handle.state_dict()], f"{folder}/{number}-{rank}-end.pt")
        counts.append(len(handle.state_dict()["buckets"]))
    return counts


def goes_on(rank: int, world: int, folder: str, hooks: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    differ = []
    for number, hook in enumerate(hooks):
        weights, state = torch.load(f"{folder}/{number}-{rank}.pt", weights_only=True)
        ddp = model(options)
        ddp.module.load_state_dict(weights)
        handle = commhooks.attach(ddp, hook)
        handle.load_state_dict(state)
        train(ddp, range(SAVED, LAST), rank)
        weights, state = torch.load(f"{folder}/{number}-{rank}-end.pt", weights_only=True)
        found = handle.state_dict()
        same = [torch.equal(t, weights[name]) for name, t in ddp.module.state_dict().items()]
        for name, row in state["entries"].items():
            same += [torch.equal(found["entries"][name][field], t) for field, t in row.items()]
        if not all(same) or found["buckets"] != state["buckets"]:
            differ.append(hook)
    return differ


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.full),
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_continues_to_the_bit(tmp_path: Any, options: dict[str, Any], world: int) -> None:
    hooks = HOOKS + OTHERS if world == 2 else HOOKS
    ((counts, *_)) = spawn(saves, world, str(tmp_path), hooks, options)
    assert all(count > 1 for count in counts[: len(HOOKS)])
    assert spawn(goes_on, world, str(tmp_path), hooks, options) == [[]] * world


def bucket(params: str, index: int = 0) -> Bucket:
    layout = BucketLayout(
        [ParamLayout(name, (2,), (1,), 2 * i) for i, name in enumerate(params)], 2 * len(params), torch.float32
    )
    return Bucket(layout, torch.cat([torch.full((2,), float(ord(name))) for name in params]), index)


def names(buckets: list[Bucket]) -> list[str]:
    return ["".join(p.name for p in one.params) for one in buckets]


def test_the_first_step_runs_on_the_saved_buckets_and_the_next_on_its_own() -> None:
    state = HookState()
    state.identity.buckets = (("a",), ("c", "b"), ("d",))
    saved = SavedBuckets(state)
    given = [bucket("a"), bucket("bd", 1), bucket("c", 2)]
    given[1].unused = frozenset({"b"})
    saved.begin()
    assert [saved.hold(one) for one in given] == [False, True, True]
    made = saved.release()
    assert names(made) == ["cb", "d"]
    assert [(one.index, one.is_last, set(one.unused)) for one in made] == [(1, False, {"b"}), (2, True, set())]
    for one in made:
        one.buffer.neg_()
    saved.finish()
    assert torch.equal(given[1].buffer, -bucket("bd").buffer)
    assert torch.equal(given[2].buffer, -bucket("c").buffer)
    assert state.identity.buckets == (("a",), ("c", "b"), ("d",))
    saved.begin()
    assert [saved.hold(one) for one in given] == [False] * 3
    assert saved.release() == []
    saved.finish()
    assert state.identity.buckets == (("a",), ("b", "d"), ("c",))


def test_buckets_of_other_parameters_run_as_they_are() -> None:
    state = HookState()
    state.identity.buckets = (("a", "x"), ("b",))
    saved = SavedBuckets(state)
    saved.begin()
    given = [bucket("b"), bucket("a", 1)]
    assert [saved.hold(one) for one in given] == [True, True]
    assert saved.release() == given
    saved.finish()
    assert state.identity.buckets == (("b",), ("a",))


def test_a_load_in_mid_run_does_not_hide_the_buckets_of_later_steps() -> None:
    state = HookState()
    saved = SavedBuckets(state)
    given = [bucket("a"), bucket("b", 1)]
    for loads in (False, True, False):
        if loads:
            state.replace({}, 0, buckets=(("b",), ("a",)))
        saved.begin()
        assert [saved.hold(one) for one in given] == [False, False]
        saved.finish()
        assert state.identity.buckets == (("a",), ("b",))
