"""On the imagined GPU, hooks order all accesses to memory, and the check finds planted races.

Hooks run behind ch-ddp's driver, with two levels, on each axis of FSDP2, and in overlapped exchanges of an outer optimizer.
"""

import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from ch_bench.cost.imagined_gpu import ImaginedGPU, races
from ch_bench.cost.imagined_training import fsdp2_races, outer_races
from ch_bench.cost.stream_order import StreamOrder
from ch_bench.gpu_kit.models import COMPOSITIONS
from ch_outer import Schedule
from commhooks.device import record_use
from commhooks.encoding import Encoding, Entries

NET = [{f"{i}.weight": (64, 64), f"{i}.bias": (64,)} for i in range(3)]
HOOKS = list(
    dict.fromkeys([*(spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")), *COMPOSITIONS])
)


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_has_a_race(hook: str) -> None:
    assert races(hook, NET[:2], 3) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["frees", "stops"])
def test_no_hook_has_a_race_with_buckets_that_are_freed(how: str) -> None:
    for hook in HOOKS:
        assert races(hook, NET, 4, **{how: True}) == [], hook


def reductions() -> Iterator[tuple[str, commhooks.Reduction]]:
    for hook in HOOKS:
        reduction = commhooks.create(hook).reduction
        assert reduction is not None
        yield hook, reduction


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_hook_has_a_race_with_two_levels() -> None:
    checked = 0
    for hook, _ in reductions():
        try:
            commhooks.create(f"two_level({hook})")
        except commhooks.HookConfigError:  # for example a hook that has two levels already
            continue
        for inside in ("allreduce", "bf16_compress", "quant8"):
            assert races(f"two_level({hook}, inside={inside})", NET, 3, ranks_per_node=2) == [], (hook, inside)
        checked += 1
    assert checked >= 20


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("axis", ["shard", "replicate", "gather"])
def test_no_hook_has_a_race_with_fsdp2(axis: str) -> None:
    checked = 0
    for hook, reduction in reductions():
        try:
            assert fsdp2_races(hook, axis) == [], hook
            assert fsdp2_races(hook, axis, bf16=True, seldom=axis == "replicate", micro=2) == [], hook
        except commhooks.HookNotSupportedError:
            continue
        checked += reduction.lossy
    assert checked >= 3


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "schedule",
    [Schedule(4, 2, 2), Schedule(4, 2, 2, mix=0.5), Schedule(4, 2, 2, mix="carry"), Schedule(4, overlap=4)],
    ids=["drop", "mix", "carry", "one fragment"],
)
def test_no_hook_has_a_race_in_an_outer_exchange(schedule: Schedule) -> None:
    for hook in HOOKS:
        assert outer_races(hook, schedule=schedule) == [], hook


@contextmanager
def planted(module: str, target: str, old: str, new: str) -> Iterator[None]:
    """Replace a piece of the source of one method."""
    scope = vars(importlib.import_module(module))
    owner_name, name = target.split(".")
    owner = scope[owner_name]
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{target} has {source.count(old)} times {old!r}: the plant no longer applies"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "<planted>", "exec"), scope, made)
    with mock.patch.object(owner, name, made[name]):
        yield


DEVICE, COLLECTIVES, RUN = "commhooks.device", "commhooks.engine.collectives", "commhooks.engine.bucket_run"
OUTCOME = "commhooks.engine.outcome"
PLANTS = {
    "no wait_stream": (
        (DEVICE, "SideStream._on", "side.wait_stream(module.current_stream(device))", "pass"),
        {},
        "main",
    ),
    "no record_stream": (
        (DEVICE, "SideStream._on", "record_use(tensor)", "pass"),
        {"stops": True},
        "handed back",
    ),
    "a stage that is not waited for": (
        (RUN, "BucketRun._wait", "pending.wait(timeout)", "pass"),
        {},
        "collectives",
    ),
    "a result decoded before it has arrived": (
        (
            COLLECTIVES,
            "Stage.wait",
            "self.tuning.wait(work, output, timeout)\n        if decode is not None:\n            decode()",
            "if decode is not None:\n            decode()\n        self.tuning.wait(work, output, timeout)",
        ),
        {},
        "collectives",
    ),
    "a status that is not waited for": (
        (OUTCOME, "StepOutcome.decide", "stage.wait(timeout)", "pass"),
        {},
        "collectives",
    ),
    "a host that does not wait for its copy": (
        (DEVICE, "HostCopy.tensor", "self._event.synchronize()", "pass"),
        {},
        "host reads",
    ),
    "an event before the copy": (
        (
            DEVICE,
            "HostCopy.__init__",
            "self._host.copy_(tensor, non_blocking=True)\n    self._event = "
            "torch.get_device_module(tensor.device).Event()\n    self._event.record()",
            "self._event = torch.get_device_module(tensor.device).Event()\n    self._event.record()\n    "
            "self._host.copy_(tensor, non_blocking=True)",
        ),
        {},
        "host reads",
    ),
    "stages that share memory for casts": (
        (RUN, "RequestBatch.start", "owner, newest = (first.number, first.stage),", "owner, newest = 0,"),
        {},
        "collectives",
    ),
    "an abandoned step that leaves its scratch memory": (
        (COLLECTIVES, "Sender.forget", "self.scratch = Scratch()", "pass"),
        {"stops": True},
        "collectives",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_race_is_found(name: str) -> None:
    change, how, told = PLANTS[name]
    logging.disable(logging.CRITICAL)
    try:
        with planted(*change):
            found = [
                text
                for hook in ("bf16_wrapper(powersgd(rank=4))", "powersgd(rank=4)")
                for text in races(hook, NET, **how)
            ]
    finally:
        logging.disable(logging.NOTSET)
    assert any(told in text for text in found), found


WAIT = (RUN, "BucketRun._wait", "pending.wait(timeout)", "pass")
EARLY = PLANTS["a result decoded before it has arrived"][0]
REPLICATE = "ch_fsdp.replicate_axis"
MORE_PLANTS: dict[str, tuple[tuple[str, str, str, str], Callable[[], list[str]], str]] = {
    "two levels: a stage that is not waited for": (
        WAIT,
        lambda: races("two_level(quant4)", NET, ranks_per_node=2),
        "collectives of peers",
    ),
    "two levels: a result decoded before it has arrived": (
        EARLY,
        lambda: races("two_level(bf16_compress)", NET, ranks_per_node=2),
        "collectives of peers",
    ),
    "two levels: stages that share memory for casts": (
        PLANTS["stages that share memory for casts"][0],
        lambda: races("two_level(quant4, inside=bf16_compress)", NET, ranks_per_node=2),
        "collectives of node",
    ),
    "shard axis: a stage that is not waited for": (WAIT, lambda: fsdp2_races("quant4", "shard"), "collectives of"),
    "shard axis: a result decoded before it has arrived": (
        EARLY,
        lambda: fsdp2_races("bf16_compress", "shard"),
        "collectives of",
    ),
    "shard axis: a status that does not wait for the reductions": (
        (
            "ch_fsdp.steps",
            "Steps._end",
            "torch.cuda.current_stream(stream.device).wait_stream(stream)",
            "pass",
        ),
        lambda: fsdp2_races("quant2", "shard", micro=2),
        "stack on stream main",
    ),
    "gather axis: a stage that is not waited for": (WAIT, lambda: fsdp2_races("quant8", "gather"), "collectives of"),
    "gather axis: a result decoded before it has arrived": (
        EARLY,
        lambda: fsdp2_races("bf16_compress", "gather"),
        "collectives of",
    ),
    "replicate axis: a stage that is not waited for": (
        WAIT,
        lambda: fsdp2_races("powersgd(rank=4)", "replicate"),
        "collectives of",
    ),
    "replicate axis: a shard that is not recorded": (
        (
            REPLICATE,
            "ReplicateHook.__call__",
            "record_use(shard)",
            "pass",
        ),
        lambda: fsdp2_races("bf16_compress", "replicate", bf16=True),
        "handed back",
    ),
    "replicate axis: scratch memory that is not recorded": (
        ("commhooks.scratch", "Scratch.get", "record_use(found)", "pass"),
        lambda: fsdp2_races("topk(density=0.1)", "replicate"),
        "handed back",
    ),
    "replicate axis: a late average that does not wait for torch": (
        (
            REPLICATE,
            "GroupOrder.finish",
            "torch.cuda.current_stream(stream.device).wait_stream(stream)",
            "pass",
        ),
        lambda: fsdp2_races("powersgd(rank=4)", "replicate", seldom=True, micro=2),
        "stream main",
    ),
    "overlap: a stage that is not waited for": (WAIT, lambda: outer_races("quant4"), "collectives"),
    "overlap: an exchange that does not wait for the inner step": (
        PLANTS["no wait_stream"][0],
        lambda: outer_races("quant4"),
        "stream main",
    ),
    "overlap: a start that moves before the average has arrived": (
        (
            DEVICE,
            "SideStream.join",
            "torch.get_device_module(tensor.device).current_stream(tensor.device).wait_stream(side)",
            "pass",
        ),
        lambda: outer_races("quant4"),
        "stream main",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MORE_PLANTS)
def test_a_planted_race_of_a_training_is_found(name: str) -> None:
    change, check, told = MORE_PLANTS[name]
    logging.disable(logging.CRITICAL)
    try:
        with planted(*change):
            found = check()
        clean = check()
    finally:
        logging.disable(logging.NOTSET)
    assert any(told in text for text in found), found
    assert clean == []


def test_a_bucket_read_before_its_future_is_found() -> None:
    with mock.patch("ch_bench.cost.imagined_gpu._Future.wait", return_value=None):
        assert any("stream main" in text for text in races("allreduce", NET))


def test_memory_used_on_another_stream_is_handed_back_too_early() -> None:
    for recorded in (False, True):
        with ImaginedGPU() as gpu:
            side = torch.cuda.Stream()
            made = torch.zeros(4, dtype=torch.float32, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                made.add_(1.0)
                if recorded:
                    made.record_stream(side)
            del made
            assert gpu.order.races == []
            again = torch.zeros(4, dtype=torch.float32, device="cuda")
            assert bool(gpu.order.races) is not recorded
            torch.cuda.current_stream().wait_stream(side)
            gpu.order.races.clear()
            again = torch.zeros(4, dtype=torch.float32, device="cuda")
            assert again.is_cuda and gpu.order.races == []


def forget_use(tensor: torch.Tensor) -> None:
    """Do nothing. A mock would keep the tensor alive, so that its memory would never be handed back."""


def test_memory_of_a_hook_that_fsdp2_calls_on_two_streams_is_not_handed_back_too_early() -> None:
    """In the first step all groups are reduced on the main stream, later on the stream of FSDP2's all-reduces.

    There, a group of another size replaces scratch memory that the main stream allocated.
    """
    assert fsdp2_races("quant4", "replicate", 2) == []
    with mock.patch("commhooks.scratch.record_use", forget_use):
        found = fsdp2_races("quant4", "replicate", 2)
    assert any("a collective" in text and "handed back" in text for text in found), found


def test_entries_that_a_side_stream_converts_are_not_handed_back_too_early() -> None:
    """After a load, the first bucket of a step converts entries of another hook, whose memory the main stream allocated."""
    param = commhooks.ParamLayout("w", (4, 2), (1, 4), 0)
    for recorded in (True, False):
        use = record_use if recorded else forget_use
        with ImaginedGPU() as gpu, mock.patch("commhooks.encoding.record_use", use):
            entries = Entries({("w", "residual"): torch.zeros(4, 2, dtype=torch.float32, device="cuda")})
            entries.encodings["w", "residual"] = Encoding.of(param)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                assert entries.read_as({("w", "residual"): Encoding.of(param, in_memory=True)})
            assert gpu.order.races == []
            torch.zeros(4, dtype=torch.float32, device="cuda")
            assert bool(gpu.order.races) is not recorded


def test_ranges_of_one_storage_do_not_conflict() -> None:
    order, memory = StreamOrder(), torch.empty(8, device="meta")
    order.access("one", memory[:4], "a kernel", writes=True)
    order.access("two", memory[4:], "a kernel", writes=True)
    assert order.races == []
    order.access("two", memory[3:5], "a kernel", writes=False)
    assert len(order.races) == 1


def test_an_event_orders_two_streams() -> None:
    order, memory = StreamOrder(), torch.empty(8, device="meta")
    order.access("one", memory, "a kernel", writes=True)
    order.join("two", order.stamp("one"))
    order.access("two", memory, "a kernel", writes=True)
    assert order.races == []
    order.access("one", memory, "a kernel", writes=False)
    assert len(order.races) == 1
