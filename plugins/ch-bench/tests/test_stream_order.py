"""Every hook behind ch-ddp's driver on the imagined GPU orders all accesses to memory. The check
finds planted races.
"""

import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from ch_bench.cost.imagined_gpu import ImaginedGPU, races
from ch_bench.cost.stream_order import StreamOrder
from ch_bench.gpu_kit.models import COMPOSITIONS

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


@contextmanager
def planted(module: str, target: str, old: str, new: str) -> Iterator[None]:
    """Replace a piece of the source of one method."""
    scope = vars(sys.modules[module])
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
        (DEVICE, "SideStream._on", "tensor.record_stream(side)", "pass"),
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
