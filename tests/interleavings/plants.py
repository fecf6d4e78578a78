"""Bugs that are planted in the library on purpose. The search must find each of them.

A plant replaces methods while a search runs. If a method has gone, `mock.patch.object` raises, and the test of the plant fails.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from ch_core.engine import engine as engine_module
from ch_core.engine import outcome
from ch_core.engine import step as step_module
from ch_core.engine.commits import Commits
from ch_core.engine.engine import Engine
from ch_core.engine.messages import Batch, Message
from ch_core.engine.outcome import BETWEEN, Status, StepOutcome
from ch_core.engine.step import BucketRun
from ch_core.transport.base import SeveralWorks
from ch_ddp.adapter.driver import DDPDriver
from ch_ddp.adapter.futures import Promise
from commhooks import AllReduce

from .explorer import ExplorerTransport, Fault
from .scenarios import Scenario

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Plant:
    """One bug.

    Attributes:
        name: effect of the bug.
        planted: puts the bug into the library while a block runs.
        scenario: the scenario that shows the bug.
        finds: part of the text of the broken rule.
        options: options of the search.
    """

    name: str
    planted: Callable[[], Patch]
    scenario: Scenario
    finds: str
    options: dict[str, Any] = field(default_factory=dict)


def replaced(owner: object, name: str, make: Callable[[Any], Any]) -> Callable[[], Patch]:
    """Replace an attribute of a class or module by ``make(attribute)``."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def without(owner: type, method: str, call: str) -> Callable[[], Patch]:
    """Let a method run without one of the calls in it, as ``transport.abort`` of the object."""
    *path, last = call.split(".")

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **options: Any) -> Any:
            called = self
            for name in path:
                called = getattr(called, name)
            with mock.patch.object(called, last, return_value=None):
                return real(self, *args, **options)

        return run

    return replaced(owner, method, make)


# -- plants that need more than a line


def stops_sending(real: Any) -> Any:
    def advance(self: BucketRun, *args: Any) -> Any:
        requests = real(self, *args)
        return None if self.failed else requests

    return advance


def half_as_long(real: Any) -> Any:
    def void_requests(*args: Any) -> Any:
        made = real(*args)
        return tuple(
            AllReduce(r.tensor[: r.tensor.numel() // 2], r.op, r.wire, scope=r.scope) if isinstance(r, AllReduce) else r
            for r in made
        )

    return void_requests


def lets_interrupts_pass(real: Any) -> Any:
    def fail(self: BucketRun, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        real(self, error)

    return fail


def silent_if_failed(real: Any) -> Any:
    def send_status(self: Engine) -> None:
        with mock.patch.object(self, "_sends_status", self._sends_status and not self.outcome.failed):
            real(self)

    return send_status


def drops_late_errors(real: Any) -> Any:
    def begin(self: Engine, *args: Any) -> None:
        self.outcome.take_error()
        real(self, *args)

    return begin


def before_the_last_decoding(_: Any) -> Any:
    return lambda self: all(run.due is None for run in self.step.in_flight)


def despite_callbacks(_: Any) -> Any:
    return lambda self: (
        self.reduction.delivers and not self.transport.elastic and all(run.due is None for run in self.step.in_flight)
    )


def of_one_owner(real: Any) -> Any:
    return lambda *args, owner, **options: real(*args, owner=0, **options)


def of_one_batch(real: Any) -> Any:
    def add(self: Batch, *args: Any) -> None:
        real(self, *args)
        self._owner = 0

    return add


def never_waited_for(real: Any) -> Any:
    def wait(self: Batch, timeout: float | None) -> None:
        if not self.members:  # the status
            real(self, timeout)

    return wait


def keeps_to_itself_what_lies_between(real: Any) -> Any:
    def send(self: StepOutcome, *args: Any) -> None:
        error = self._error
        if error is not None and error[1] == BETWEEN:
            self._error = None
        real(self, *args)
        self._error = error

    return send


def with_one_row_too_few(real: Any) -> Any:
    def exchange(self: Batch, number: int, flat: Any, transport: Any, scope: Any, decode: Any) -> None:
        def decode_less() -> None:
            flat.sub_(message._output[-1])
            if decode is not None:
                decode()

        real(self, number, flat, transport, scope, decode_less)
        message = self._messages[-1]

    return exchange


def always_delivers(real: Any) -> Any:
    def init(self: DDPDriver, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self._delivers = self._hook is not None

    return init


def without_futures(real: Any) -> Any:
    def complete(self: DDPDriver, error: BaseException | None) -> None:
        self._futures.clear()
        real(self, error)

    return complete


def drops_no_loans(real: Any) -> Any:
    def drop(self: Batch) -> list[Any]:
        real(self)
        return []

    return drop


@contextmanager
def the_last_half_stands_for_both() -> Iterator[None]:
    """Complete a message that two works carry with the second work."""
    with mock.patch.object(SeveralWorks, "future", lambda self: self._works[-1].future()):
        yield


three = partial(Scenario, world_size=3, buckets=3)

PLANTS = [
    Plant(
        "a failed reduction stops sending",
        replaced(BucketRun, "advance", stops_sending),
        three(raises=(0, 1, 1, 1)),
        "collective 5",
    ),
    Plant(
        "a failed reduction sends a message of half the size",
        replaced(step_module, "void_requests", half_as_long),
        Scenario(raises=(0, 1, 1, 1)),
        "rank 1 posts",
    ),
    Plant(
        "an interrupt leaves the hook",
        replaced(BucketRun, "fail", lets_interrupts_pass),
        Scenario(raises=(0, 1, 1, 1), interrupt=True),
        "wait for ever",
    ),
    Plant(
        "a failed bucket passes for an average",
        replaced(StepOutcome, "fail_bucket", lambda _: lambda *args: None),
        Scenario(raises=(0, 1, 0, 2)),
        "expected an error",
    ),
    Plant(
        "a failed rank sends no status",
        replaced(Engine, "_send_status", silent_if_failed),
        three(raises=(0, 2, 0, 0)),
        "collective 6",
    ),
    Plant(
        "the status is sent before the last decoding",
        replaced(Engine, "_may_send_status_in_drain", before_the_last_decoding),
        Scenario("one_stage", raises=(0, 1, 1, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "an early status although callbacks follow",
        replaced(Engine, "_may_send_status_in_drain", despite_callbacks),
        Scenario("plain", callback=True, callback_raises=(0, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "a lost transport is not given up",
        replaced(ExplorerTransport, "abort", lambda _: lambda self: None),
        three(steps=1, fault=Fault("message", number=1)),
        "wait for ever",
    ),
    Plant(
        "a lost step keeps its buckets",
        without(Engine, "_lose", "abandon"),
        Scenario(fault=Fault("message", number=1)),
        "is left with",
    ),
    Plant(
        "an abandoned step keeps its draft",
        without(Engine, "abandon", "state.versions.abandon"),
        Scenario(fault=Fault("die", 1)),
        "a draft of",
    ),
    Plant(
        "late errors are dropped",
        replaced(Engine, "_begin", drops_late_errors),
        Scenario(late=True, raises=(0, 1, 1, 1)),
        "expected an error",
    ),
    Plant(
        "buckets share scratch memory",
        replaced(engine_module, "StepContext", of_one_owner),
        Scenario(),
        "in flight",
    ),
    Plant(
        "batches share memory for merged messages",
        replaced(Batch, "add", of_one_batch),
        Scenario("cast", buckets=3),
        "in flight",
    ),
    Plant(
        "a message is decoded before it has arrived",
        replaced(Message, "wait", lambda _: lambda self, tuning, timeout: self._finish()),
        three(tuning="held"),
        "in flight",
    ),
    Plant(
        "a batch is not waited for",
        replaced(Batch, "wait", never_waited_for),
        Scenario(),
        "in flight",
    ),
    Plant(
        "NaN and Inf are committed",
        replaced(Status, "good", lambda _: lambda self: not self.failed and len(set(self.clocks.values())) <= 1),
        Scenario(infinite=(0, 1)),
        "committed",
    ),
    Plant(
        "a failed step is committed",
        replaced(Status, "good", lambda real: lambda self: real(self) or bool(self.failed)),
        Scenario(raises=(0, 1, 0, 2)),
        "committed",
    ),
    Plant(
        "the failed rank sends no text",
        replaced(
            Status,
            "error",
            lambda real: lambda self, name, own, carry_out: real(self, name, own, carry_out if own is None else None),
        ),
        three(raises=(0, 1, 1, 1)),
        "rank",
    ),
    Plant(
        "errors between collectives are not sent",
        replaced(StepOutcome, "send", keeps_to_itself_what_lies_between),
        Scenario(raises=(0, 1, 1, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "ranks at different steps are not noticed",
        replaced(outcome, "_out_of_step", lambda _: lambda *args: None),
        Scenario(steps=3, judged=(0, 0)),
        "expected an error",
    ),
    Plant(
        "a skipped step is committed",
        replaced(Commits, "_used", lambda real: lambda self: None if real(self) is None else True),
        Scenario(steps=3, judged=(0, -1)),
        "state",
    ),
    Plant(
        "a joined rank does not ask its peers",
        replaced(
            Commits,
            "_exchange_answers",
            lambda real: lambda self, *args: real(self, *args) if self._can_judge else None,
        ),
        Scenario(steps=3, joined=(1, 1), judged=(-1, -1)),
        "rank",
    ),
    Plant(
        "a direct exchange adds one row too few",
        replaced(Batch, "_exchange_directly", with_one_row_too_few),
        three(tuning="tuned", free=True),
        "wrong average",
    ),
    Plant(
        "a bucket's own message delivers a number that is not decoded",
        replaced(DDPDriver, "__init__", always_delivers),
        Scenario("one_stage", steps=1, drive="hook"),
        "before it is the average",
        {"order": "nccl", "reads": False},
    ),
    Plant(
        "the second half of a message decodes the first",
        the_last_half_stands_for_both,
        Scenario("cast_once", buckets=1, steps=1, drive="hook", tuning="halved", free=True),
        "wrong average",
        {"order": "gloo", "reads": False, "limit": 150},
    ),
    Plant(
        "a dropped step shares memory with the next one",
        replaced(Batch, "drop", drops_no_loans),
        Scenario("plain", drive="ddp", stops_in=0),
        "in flight",
    ),
    Plant(
        "a future is completed twice",
        replaced(Promise, "complete", lambda _: lambda self: self.future.set_result(self.buffer)),
        Scenario("plain", buckets=1, steps=1, drive="hook"),
        "",
        {"order": "nccl", "reads": False},
    ),
    Plant(
        "the error of a step is not raised",
        replaced(DDPDriver, "_complete", lambda real: lambda self, error: real(self, None)),
        Scenario(drive="ddp", raises=(0, 1, 1, 1)),
        "expected an error",
    ),
    Plant(
        "the futures of a step are never completed",
        replaced(DDPDriver, "_complete", without_futures),
        Scenario("plain", drive="ddp"),
        "waits for ever for the future",
    ),
]
