"""On the imagined GPU, hooks order all accesses to memory, and the check finds planted races.

Hooks run behind ch-ddp's driver, with two levels, on each axis of FSDP2, and in overlapped exchanges of an outer optimizer.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from programs.cost.imagined_gpu import COMPOSITIONS, ImaginedGPU, races
from programs.cost.imagined_training import fsdp2_races, outer_races
from programs.cost.stream_order import StreamOrder

import commhooks
from ch_core.device import HostCopy, SideStream, record_use
from ch_core.encoding import Encoding, Entry
from ch_core.engine.messages import Batch, Message, Messenger
from ch_core.engine.outcome import StepOutcome
from ch_fsdp.group_order import GroupOrder
from ch_fsdp.steps import Steps
from ch_outer import Schedule

Plant = Callable[[], AbstractContextManager[Any]]
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


def forget_use(tensor: torch.Tensor) -> None:
    """Do nothing. A mock would keep the tensor alive, so that its memory would never be handed back."""


@contextmanager
def on_without_wait(self: SideStream, tensor: torch.Tensor) -> Iterator[None]:
    side = self._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    with torch.cuda.stream(side):
        record_use(tensor)
        yield


def not_awaited(self: Batch, timeout: float | None, real: Any = Batch.wait) -> None:
    if not self.members:  # the status
        real(self, timeout)


def decoded_first(self: Message, tuning: Any, timeout: float | None) -> None:
    self._finish()
    tuning.wait(self._work, self._output, timeout)


def of_one_owner(self: Batch, *args: Any, real: Any = Batch.add) -> None:
    real(self, *args)
    self._owner = 0


def before(owner: type, name: str, action: Callable[[Any], None]) -> Plant:
    """Do something to an object before one of its methods runs."""
    real = getattr(owner, name)

    def run(self: Any, *args: Any, **options: Any) -> Any:
        action(self)
        return real(self, *args, **options)

    return lambda: mock.patch.object(owner, name, run)


def event_first(self: HostCopy, tensor: torch.Tensor, made: Any = HostCopy.__init__) -> None:
    event = torch.cuda.Event()
    event.record()
    made(self, tensor)
    self._event = self._event and event


def drop_message(outcome: StepOutcome) -> None:
    outcome._batch = None


def keeps_scratch(self: Messenger, real: Any = Messenger.drop) -> None:
    scratch = self.scratch
    real(self)
    self.scratch = scratch


def forget_streams(owner: Any) -> None:
    owner._streams.clear()


def nothing(*args: Any) -> None:
    """Do nothing."""


@contextmanager
def dropped(other: AbstractContextManager[Any]) -> Iterator[None]:
    """Plant a second mistake. Alone it does nothing, because the current stream waits for the messages of a dropped step."""
    with other, mock.patch.object(Message, "drop", nothing):
        yield


WITHOUT_WAIT = partial(mock.patch.object, SideStream, "_on", on_without_wait)
NOT_AWAITED = partial(mock.patch.object, Batch, "wait", not_awaited)
EARLY = partial(mock.patch.object, Message, "wait", decoded_first)
SHARED = partial(mock.patch.object, Batch, "add", of_one_owner)
PLANTS: dict[str, tuple[Plant, dict[str, Any], str]] = {
    "no wait_stream": (WITHOUT_WAIT, {}, "main"),
    "no record_stream, and dropped messages that are not waited for": (
        partial(dropped, mock.patch("ch_core.device.record_use", forget_use)),
        {"stops": True},
        "handed back",
    ),
    "a stage that is not waited for": (NOT_AWAITED, {}, "collectives"),
    "a result decoded before it has arrived": (EARLY, {}, "collectives"),
    "a status that is not waited for": (before(StepOutcome, "decide", drop_message), {}, "collectives"),
    "a host that does not wait for its copy": (
        partial(mock.patch.object, HostCopy, "tensor", lambda self: self._host),
        {},
        "host reads",
    ),
    "an event before the copy": (partial(mock.patch.object, HostCopy, "__init__", event_first), {}, "host reads"),
    "stages that share memory for casts": (SHARED, {}, "collectives"),
    "a dropped step that leaves its scratch memory, and messages that are not waited for": (
        partial(dropped, mock.patch.object(Messenger, "drop", keeps_scratch)),
        {"stops": True},
        "collectives",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_race_is_found(name: str) -> None:
    plant, how, told = PLANTS[name]
    logging.disable(logging.CRITICAL)
    try:
        with plant():
            found = [
                text
                for hook in ("bf16_wrapper(powersgd(rank=4))", "powersgd(rank=4)")
                for text in races(hook, NET, **how)
            ]
    finally:
        logging.disable(logging.NOTSET)
    assert any(told in text for text in found), found


MORE_PLANTS: dict[str, tuple[Plant, Callable[[], list[str]], str]] = {
    "two levels: a stage that is not waited for": (
        NOT_AWAITED,
        lambda: races("two_level(quant4)", NET, ranks_per_node=2),
        "collectives of peers",
    ),
    "two levels: a result decoded before it has arrived": (
        EARLY,
        lambda: races("two_level(bf16_compress)", NET, ranks_per_node=2),
        "collectives of peers",
    ),
    "two levels: stages that share memory for casts": (
        SHARED,
        lambda: races("two_level(quant4, inside=bf16_compress)", NET, ranks_per_node=2),
        "collectives of node",
    ),
    "shard axis: a stage that is not waited for": (
        NOT_AWAITED,
        lambda: fsdp2_races("quant4", "shard"),
        "collectives of",
    ),
    "shard axis: a result decoded before it has arrived": (
        EARLY,
        lambda: fsdp2_races("bf16_compress", "shard"),
        "collectives of",
    ),
    "shard axis: a status that does not wait for the reductions": (
        before(Steps, "_end", forget_streams),
        lambda: fsdp2_races("quant2", "shard", micro=2),
        "stack on stream main",
    ),
    "gather axis: a stage that is not waited for": (
        NOT_AWAITED,
        lambda: fsdp2_races("quant8", "gather"),
        "collectives of",
    ),
    "gather axis: a result decoded before it has arrived": (
        EARLY,
        lambda: fsdp2_races("bf16_compress", "gather"),
        "collectives of",
    ),
    "replicate axis: a stage that is not waited for": (
        NOT_AWAITED,
        lambda: fsdp2_races("powersgd(rank=4)", "replicate"),
        "collectives of",
    ),
    "replicate axis: a shard that is not recorded": (
        partial(mock.patch, "ch_fsdp.replicate_axis.record_use", forget_use),
        lambda: fsdp2_races("bf16_compress", "replicate", bf16=True),
        "handed back",
    ),
    "replicate axis: scratch memory that is not recorded": (
        partial(mock.patch, "ch_core.scratch.record_use", forget_use),
        lambda: fsdp2_races("topk(density=0.1)", "replicate"),
        "handed back",
    ),
    "replicate axis: a late average that does not wait for torch": (
        before(GroupOrder, "finish", forget_streams),
        lambda: fsdp2_races("powersgd(rank=4)", "replicate", seldom=True, micro=2),
        "stream main",
    ),
    "overlap: a stage that is not waited for": (NOT_AWAITED, lambda: outer_races("quant4"), "collectives"),
    "overlap: an exchange that does not wait for the inner step": (
        WITHOUT_WAIT,
        lambda: outer_races("quant4"),
        "stream main",
    ),
    "overlap: a start that moves before the average has arrived": (
        partial(mock.patch.object, SideStream, "join", nothing),
        lambda: outer_races("quant4"),
        "stream main",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MORE_PLANTS)
def test_a_planted_race_of_a_training_is_found(name: str) -> None:
    plant, check, told = MORE_PLANTS[name]
    logging.disable(logging.CRITICAL)
    try:
        with plant():
            found = check()
        clean = check()
    finally:
        logging.disable(logging.NOTSET)
    assert any(told in text for text in found), found
    assert clean == []


def test_a_bucket_read_before_its_future_is_found() -> None:
    with mock.patch("programs.cost.imagined_gpu._Future.wait", return_value=None):
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


def test_memory_of_a_hook_that_fsdp2_calls_on_two_streams_is_not_handed_back_too_early() -> None:
    """In the first step all groups are reduced on the main stream, later on the stream of FSDP2's all-reduces.

    There, a group of another size replaces scratch memory that the main stream allocated.
    """
    assert fsdp2_races("quant4", "replicate", 2) == []
    with mock.patch("ch_core.scratch.record_use", forget_use):
        found = fsdp2_races("quant4", "replicate", 2)
    assert any("a collective" in text and "handed back" in text for text in found), found


def test_entries_that_a_side_stream_converts_are_not_handed_back_too_early() -> None:
    """After a load, the first bucket of a step converts entries of another hook, whose memory the main stream allocated."""
    param = commhooks.ParamLayout("w", (4, 2), (1, 4), 0)
    for recorded in (True, False):
        use = record_use if recorded else forget_use
        with ImaginedGPU() as gpu, mock.patch("ch_core.encoding.record_use", use):
            entry = Entry(torch.zeros(4, 2, dtype=torch.float32, device="cuda"), Encoding.of(param))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                entry.convert(Encoding.of(param, in_memory=True))
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
