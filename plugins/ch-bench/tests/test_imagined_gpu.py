"""Whole steps of every hook on an imagined GPU. No step may wait for its queue or add launches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs.cost.imagined_gpu import COMPOSITIONS, ImaginedGPU, steps

import commhooks
from ch_core import simulate
from commhooks import AllReduce, Bucket, HookResultError, HookState, Reduction, StepContext

NET = [{f"{i}.weight": (256, 256), f"{i}.bias": (256,)} for i in range(3)]  # three layers, each a bucket
MOST = {  # launches of a step, with messages and the engine's own operations, counted once
    "noop": 4,
    "allreduce": 11,
    "bf16_compress": 14,
    "fp16_compress": 14,
    "warmup(powersgd(rank=4), steps=2)": 195,  # its first step with PowerSGD makes the views of the scratch memory
    "batched_powersgd(rank=4)": 195,
    "powersgd(rank=1)": 135,
    "powersgd(rank=4)": 183,
    "powersgd(rank=4, residual='averaged')": 180,
    "powersgd(rank=4, warm_start=False)": 183,
    "bf16_wrapper(powersgd(rank=4))": 189,
    "fp16_wrapper(powersgd(rank=4))": 189,
    "error_feedback(bf16_compress)": 45,
    "bf16_compress(accumulate='fp32')": 33,
    "quant(rotation='hadamard')": 236,
    "quant2": 453,
    "quant4(error_feedback=True)": 363,
    "quant8(error_feedback=True)": 249,
    "quantize_per_channel": 254,
    "quantize_per_tensor": 254,
    "sign": 648,
    "randomk": 120,
    "topk(density=0.01, bits=2)": 606,
}
HOOKS = list(
    dict.fromkeys([*(spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")), *COMPOSITIONS])
)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_step_waits_for_nothing_but_the_last_ones_status(hook: str) -> None:
    """The first step may copy tables to the GPU."""
    first, *others = steps(hook, NET, 4)
    assert first.events == []
    for seen in others:
        assert seen.waits == []
        assert seen.events == [0], "nothing lies between the status and the event behind it"
        assert seen.launches <= MOST[hook], seen.operations


@pytest.mark.parametrize("hook", ["allreduce", "quant4(error_feedback=True)"])
def test_a_weight_on_the_gpu_is_never_waited_for(hook: str) -> None:
    """The host reads the weights before the first step, which finds the reference."""
    first, *others = steps(hook, NET, 4, weighted=True)
    assert first.waits
    for seen in others:
        assert seen.waits == []


class Looks(Reduction):
    """Does things that a GPU's host should not do."""

    name, lossy = "looks", True

    def __init__(self, look: Any) -> None:
        self.look = look

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[AllReduce]:
        if bucket.device.type != "meta":
            self.look(bucket.buffer)
        yield AllReduce(bucket.buffer)


@pytest.mark.parametrize(
    ("look", "told"),
    [
        (torch.Tensor.tolist, "a copy to pageable memory"),
        (lambda x: x.cpu(), "a copy to pageable memory"),
        (lambda x: x.to("cpu", non_blocking=True), "a copy to pageable memory"),
        (lambda x: x.add_(torch.ones(x.shape).to(x.device)), "a copy from pageable memory"),
        (lambda x: x.copy_(torch.ones(x.shape)), "a copy from pageable memory"),
    ],
)
def test_a_copy_that_waits_is_found(look: Any, told: str) -> None:
    assert [seen.waits for seen in steps(Looks(look), NET[:1], 2)] == [[told], [told]]


@pytest.mark.parametrize("look", [torch.Tensor.item, torch.nonzero, lambda x: bool(x.any())])
def test_a_number_that_the_host_asks_for_is_refused(look: Any) -> None:
    with pytest.raises(HookResultError, match="looks raised"):
        steps(Looks(lambda x: look(x[:1])), NET[:1], 1)


def test_a_copy_from_pinned_memory_waits_for_nothing() -> None:
    [seen] = steps(Looks(lambda x: x.copy_(torch.ones(x.shape).pin_memory(), non_blocking=True)), NET[:1], 1)
    assert seen.waits == []


@pytest.mark.parametrize("hook", ["powersgd(rank=4)", "error_feedback(bf16_compress)", "quant4(error_feedback=True)"])
def test_a_state_that_was_loaded_to_the_host_is_brought_to_the_gradients(hook: str) -> None:
    """Covers ``torch.load(..., map_location="cpu")`` and pickles, over ``attach`` and over ``register_comm_hook``
    alone.
    """

    def body(rank: Any) -> HookState:
        reduction = commhooks.create(hook).reduction
        assert reduction is not None
        engine = rank.engine(reduction)
        for _ in range(2):
            engine.submit(Bucket.from_tensors({name: torch.ones(shape) for name, shape in NET[0].items()}))
            assert engine.finish() is None
        engine.resolve_step()
        return engine.state

    state = simulate(2, body)[0]
    assert all(tensor.device.type == "cpu" for _, _, tensor in state.entries())
    first, second = steps(hook, NET[:1], 2, state=state)
    assert set(first.waits) == {"a copy from pageable memory"}
    assert second.waits == []


def test_it_is_gone_afterwards() -> None:
    with ImaginedGPU():
        assert torch.empty(2, device="cuda").is_cuda
    assert torch.empty(2, device="meta").is_meta
