"""Bugs that are planted in the library on purpose. The search must find each of them.

A plant replaces one piece of the source of one function. If the piece is not there exactly once, the plant no longer applies,
and its test fails.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

from .explorer import Fault
from .scenarios import Scenario


@dataclass(frozen=True)
class Plant:
    """One bug.

    Attributes:
        name: effect of the bug.
        module: dotted name of the module.
        target: function, or class and method, in it.
        old, new: the piece of source, and its replacement.
        scenario: the scenario that shows the bug.
        finds: part of the text of the broken rule.
        options: options of the search.
    """

    name: str
    module: str
    target: str
    old: str
    new: str
    scenario: Scenario
    finds: str
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the source while the block runs.

        Raises:
            LookupError: the plant no longer applies.
        """
        module = sys.modules[self.module]
        *owners, name = self.target.split(".")
        owner: Any = attrgetter(".".join(owners))(module) if owners else module
        original = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(original.fget if isinstance(original, property) else original))
        if source.count(self.old) != 1:
            raise LookupError(
                f"{self.name}: {self.target} has {source.count(self.old)} times {self.old!r}, expected once"
            )
        made: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), f"<planted {self.name}>", "exec"), vars(module), made)
        with ExitStack() as patches:
            users = [owner] if owners else [m for m in list(sys.modules.values()) if vars(m).get(name) is original]
            for user in users:
                patches.enter_context(mock.patch.object(user, name, made[name]))
            yield


ENGINE, RUN = "commhooks.engine.engine", "commhooks.engine.bucket_run"
OUTCOME, COLLECTIVES = "commhooks.engine.outcome", "commhooks.engine.collectives"
SCHEDULE, DRIVER, FUTURES = "commhooks.engine.schedule", "ch_ddp.adapter.driver", "ch_ddp.adapter.futures"
three = partial(Scenario, world_size=3, buckets=3)

PLANTS = [
    Plant(
        "a failed reduction stops sending",
        RUN,
        "BucketRun.advance",
        "return None if due is None else void_requests(due, self.outcome.world_size, self.bucket.device, topology)",
        "return None",
        three(raises=(0, 1, 1, 1)),
        "collective 5",
    ),
    Plant(
        "a failed reduction sends a message of half the size",
        COLLECTIVES,
        "void_requests",
        "made.append(AllReduce(void, p.op, p.wire",
        "made.append(AllReduce(void[: p.numel // 2], p.op, p.wire",
        Scenario(raises=(0, 1, 1, 1)),
        "rank 1 posts",
    ),
    Plant(
        "an interrupt leaves the hook",
        RUN,
        "BucketRun.advance",
        "except BaseException as error:",
        "except Exception as error:",
        Scenario(raises=(0, 1, 1, 1), interrupt=True),
        "wait for ever",
    ),
    Plant(
        "a failed bucket passes for an average",
        RUN,
        "BucketRun.fail",
        "self.outcome.fail_bucket(error, where, self.bucket.index)",
        "pass",
        Scenario(raises=(0, 1, 0, 2)),
        "expected an error",
    ),
    Plant(
        "a failed rank sends no status",
        ENGINE,
        "Engine._send_status",
        "and self.counters.communicated",
        "and self.counters.communicated and not self.outcome.failed",
        three(raises=(0, 2, 0, 0)),
        "collective 6",
    ),
    Plant(
        "the status is sent before the last decoding",
        ENGINE,
        "Engine._may_send_status_before_drain",
        "if not self.reduction.delivers or self._on_reduced is not None or self.transport.elastic:",
        "if False:",
        Scenario("one_stage", raises=(0, 1, 1, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "an early status although callbacks follow",
        ENGINE,
        "Engine._may_send_status_before_drain",
        " or self._on_reduced is not None",
        "",
        Scenario("plain", callback=True, callback_raises=(0, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "a lost transport is not given up",
        ENGINE,
        "Engine._lose",
        "self.transport.abort()",
        "pass",
        three(steps=1, fault=Fault("message", number=1)),
        "wait for ever",
    ),
    Plant(
        "a lost step keeps its buckets",
        ENGINE,
        "Engine._lose",
        "self.abandon()",
        "pass",
        Scenario(fault=Fault("message", number=1)),
        "is left with",
    ),
    Plant(
        "an abandoned step keeps its draft",
        ENGINE,
        "Engine.abandon",
        "if unfinished:",
        "if False:",
        Scenario(fault=Fault("die", 1)),
        "a draft of",
    ),
    Plant(
        "late errors are dropped",
        ENGINE,
        "Engine._begin",
        "late = self.outcome.take_error()",
        "late = None",
        Scenario(late=True, raises=(0, 1, 1, 1)),
        "expected an error",
    ),
    Plant(
        "buckets share scratch memory",
        ENGINE,
        "Engine._add",
        "owner=run.number",
        "owner=0",
        Scenario(),
        "in flight",
    ),
    Plant(
        "stages share memory for merged messages",
        RUN,
        "RequestBatch.start",
        "owner, newest = (first.number, first.stage), runs[-1].bucket.is_last",
        "owner, newest = 0, runs[-1].bucket.is_last",
        Scenario("cast", buckets=3),
        "in flight",
    ),
    Plant(
        "a message is decoded before it has arrived",
        COLLECTIVES,
        "Message.wait",
        "tuning.wait(self._work, self._output, timeout)",
        "self._finish()",
        three(tuning="held"),
        "in flight",
    ),
    Plant(
        "a stage is not waited for",
        RUN,
        "BucketRun._wait",
        "pending.wait(timeout)",
        "pass",
        Scenario(),
        "in flight",
    ),
    Plant(
        "NaN and Inf are committed",
        OUTCOME,
        "Status.good",
        "bad == 0 and math.isfinite(bad)",
        "True",
        Scenario(infinite=(0, 1)),
        "committed",
    ),
    Plant(
        "a failed step is committed",
        OUTCOME,
        "Status.good",
        "not self._failed and",
        "",
        Scenario(raises=(0, 1, 0, 2)),
        "committed",
    ),
    Plant(
        "the failed rank sends no text",
        OUTCOME,
        "Status.error",
        "if self.world > 1 and carry_out is not None",
        "if self.world > 1 and carry_out is not None and own is None",
        three(raises=(0, 1, 1, 1)),
        "rank",
    ),
    Plant(
        "errors between collectives are not sent",
        OUTCOME,
        "StepOutcome.send",
        "if self._error is not None else 0",
        "if self._error is not None and self._error[1] != BETWEEN else 0",
        Scenario(raises=(0, 1, 1, 1)),
        "disagree on the outcome",
    ),
    Plant(
        "ranks at different steps are not noticed",
        OUTCOME,
        "Status.error",
        "if len(set(clocks.values())) > 1",
        "if False",
        Scenario(steps=3, judged=(0, 0)),
        "expected an error",
    ),
    Plant(
        "a skipped step is committed",
        OUTCOME,
        "Commits.resolve_step",
        "and used is not False",
        "",
        Scenario(steps=3, judged=(0, -1)),
        "state",
    ),
    Plant(
        "a joined rank does not ask its peers",
        OUTCOME,
        "Commits.begin",
        "common.incomplete()",
        "common.incomplete() and self._can_judge",
        Scenario(steps=3, joined=(1, 1), judged=(-1, -1)),
        "rank",
    ),
    Plant(
        "a direct exchange adds one row too few",
        COLLECTIVES,
        "Stage._exchange_directly",
        "for row in others:",
        "for row in others[1:]:",
        three(tuning="tuned", free=True),
        "wrong average",
    ),
    Plant(
        "a bucket's own message delivers a number that is not decoded",
        DRIVER,
        "DDPDriver.__init__",
        "hook is not None and engine.reduction.delivers",
        "hook is not None",
        Scenario("one_stage", steps=1, drive="hook"),
        "before it is the average",
        {"order": "nccl", "reads": False},
    ),
    Plant(
        "the second half of a message decodes the first",
        COLLECTIVES,
        "Stage._reduce",
        "work: Work = SeveralWorks([transport.all_reduce(half, op) for half in sent.chunk(2)])",
        "ahead, sent = sent.chunk(2)\n"
        "        self._messages.append(Message(transport.all_reduce(ahead, op), ahead, lambda: None))\n"
        "        work = transport.all_reduce(sent, op)",
        Scenario("cast_once", buckets=1, steps=1, drive="hook", tuning="halved", free=True),
        "wrong average",
        {"order": "gloo", "reads": False, "limit": 150},
    ),
    Plant(
        "a dropped step shares memory with the next one",
        ENGINE,
        "StepBuckets.abandon",
        "take_back(",
        "list(",
        Scenario("plain", drive="ddp", stops_in=0),
        "in flight",
    ),
    Plant(
        "a future is completed twice",
        FUTURES,
        "Promise.complete",
        "if first:",
        "if True:",
        Scenario("plain", buckets=1, steps=1, drive="hook"),
        "",
        {"order": "nccl", "reads": False},
    ),
    Plant(
        "the error of a step is not raised",
        DRIVER,
        "DDPDriver._complete",
        "if error is not None:",
        "if False:",
        Scenario(drive="ddp", raises=(0, 1, 1, 1)),
        "expected an error",
    ),
    Plant(
        "the futures of a step are never completed",
        DRIVER,
        "DDPDriver._complete",
        "future.set_result(buffer)",
        "pass",
        Scenario("plain", drive="ddp"),
        "waits for ever for the future",
    ),
]
