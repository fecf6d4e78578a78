"""Scenarios, each with a reduction, a way to drive the engine, a fault, and the rules that every order must keep.

Gradients are small integers, so that every sum is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar
from unittest import mock

import torch

from ch_core.engine import engine as engine_module
from ch_core.engine import messages as messages_module
from ch_core.engine import outcome as outcome_module
from ch_core.engine.engine import Engine
from ch_core.engine.schedule import CpuTuning
from ch_core.link import Link
from ch_ddp.adapter.driver import DDPDriver
from commhooks import (
    AllGather,
    AllReduce,
    AllToAll,
    Bucket,
    CommHooksError,
    HookState,
    HookTimeoutError,
    Plain,
    ReduceScatter,
    Reduction,
    StepContext,
    TransportError,
    Wire,
)

from .explorer import Explorer, ExplorerTransport, Fault, Found, Rank, take_back_unguarded

NUMEL = 12  # of a bucket: divisible by 2 stages and by 1, 2 and 3 ranks


class Planted(Exception):
    """The error that a reduction raises on purpose."""


class Interrupt(BaseException):
    """An exception like Ctrl-C that a reduction raises on purpose."""


class Feedback(Reduction):
    """Sends even parts of the gradient in ``stages`` all-reduces, and keeps the odd rest for the next step.

    A later stage sends its numbers plus a number that depends on the result of the first, and subtracts it again. A
    wrong or early result of the first stage makes the last one wrong. The shared field does the same from step to step.
    """

    name, lossy, stages = "feedback", True, 2
    fields: ClassVar[Any] = {"residual": "local", "basis": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        name = bucket.params[0].name
        residual, basis = ctx.read(name, "residual", (NUMEL,)), ctx.read(name, "basis", (1,))
        total = bucket.buffer + residual if residual is not None else bucket.buffer.clone()
        sent = torch.floor(total / 2) * 2
        torch.sub(total, sent, out=ctx.write(name, "residual", (NUMEL,), device=bucket.device))
        shift = basis.clone() if basis is not None else torch.zeros(1, dtype=torch.float32, device=bucket.device)
        parts = sent.chunk(self.stages)
        written = ctx.write(name, "basis", (1,), device=bucket.device)
        for number, part in enumerate(parts):
            moved = ctx.scratch(f"part {number}", (part.numel(),), device=bucket.device)
            torch.add(part, shift, out=moved)
            yield self.request(moved, ctx)
            bucket.buffer.narrow(0, number * part.numel(), part.numel()).copy_(moved.sub_(shift))
            shift = moved[:1] % 8
        written.copy_(shift)

    def request(self, moved: torch.Tensor, ctx: StepContext) -> Any:
        return AllReduce(moved)


class OneStage(Feedback):
    """One all-reduce, with code after it."""

    name, stages = "one_stage", 1


class Uneven(Feedback):
    """Buckets of one, two and three stages in turn."""

    name = "uneven"

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        inner = Feedback()
        inner.stages = (2, 1, 3)[int(bucket.params[0].name[1:]) % 3]
        return inner.run(bucket, ctx)


class Moved(Reduction):
    """Exchanges parts by all-to-all and gathers the averages. No collective sums these numbers, as with quantizers."""

    name, lossy = "moved", True
    fields: ClassVar[Any] = {"residual": "local"}
    collectives = frozenset({"all_to_all", "all_gather"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        name, world = bucket.params[0].name, ctx.world_size
        residual = ctx.read(name, "residual", (NUMEL,))
        total = bucket.buffer + residual if residual is not None else bucket.buffer.clone()
        sent, received = (
            ctx.scratch("sent", (NUMEL,), device=bucket.device),
            ctx.scratch("received", (NUMEL,), device=bucket.device),
        )
        torch.floor(total / 2, out=sent).mul_(2)
        torch.sub(total, sent, out=ctx.write(name, "residual", (NUMEL,), device=bucket.device))
        yield AllToAll(sent, received)
        mine = received.view(world, -1).mean(0)
        everything = ctx.scratch("everything", (NUMEL,), device=bucket.device)
        yield AllGather(mine, everything)
        bucket.buffer.copy_(everything)


class Cast(Reduction):
    """Two stages of integers that travel as bf16, so that each stage is cast into memory of the engine."""

    name, lossy = "cast", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        for part in bucket.buffer.chunk(2):
            yield AllReduce(part, wire=Wire(torch.bfloat16))


class CastOnce(Reduction):
    """One stage of integers that travel as bf16. The message that ends a hook's future is decoded."""

    name, lossy, delivers = "cast_once", True, True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer, wire=Wire(torch.bfloat16))


class Scattered(Moved):
    """Exchanges the same parts by reduce-scatter and all-gather."""

    name = "scattered"
    collectives = frozenset({"reduce_scatter", "all_gather"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        name, world = bucket.params[0].name, ctx.world_size
        residual = ctx.read(name, "residual", (NUMEL,))
        total = bucket.buffer + residual if residual is not None else bucket.buffer.clone()
        sent, mine = (
            ctx.scratch("sent", (NUMEL,), device=bucket.device),
            ctx.scratch("mine", (NUMEL // world,), device=bucket.device),
        )
        torch.floor(total / 2, out=sent).mul_(2)
        torch.sub(total, sent, out=ctx.write(name, "residual", (NUMEL,), device=bucket.device))
        yield ReduceScatter(sent, mine)
        everything = ctx.scratch("everything", (NUMEL,), device=bucket.device)
        yield AllGather(mine, everything)
        bucket.buffer.copy_(everything)


REDUCTIONS: dict[str, Callable[[], Reduction]] = {
    "plain": Plain,
    "one_stage": OneStage,
    "feedback": Feedback,
    "uneven": Uneven,
    "moved": Moved,
    "scattered": Scattered,
    "cast": Cast,
    "cast_once": CastOnce,
}


STATELESS = ("plain", "cast", "cast_once")


class Raising(Reduction):
    """Raises in one step, in one bucket, before its ``stage``-th collective or after the last."""

    def __init__(
        self, inner: Reduction, step: int, bucket: int, stage: int, error: Callable[[], BaseException]
    ) -> None:
        self.inner, self.at, self.error = inner, (step, bucket, stage), error
        self.name, self.lossy, self.fields, self.collectives = inner.name, inner.lossy, inner.fields, inner.collectives
        self.delivers = inner.delivers and stage == 0  # its code then runs before the first collective only
        self.now = 0

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if bucket.device.type == "meta":
            yield from self.inner.start(bucket, ctx)
            return
        stage = 0
        for requests in self.inner.start(bucket, ctx):
            self._raise(bucket, stage)
            yield requests
            stage += 1
        self._raise(bucket, stage)

    def _raise(self, bucket: Bucket, stage: int) -> None:
        if (self.now, bucket.index, stage) == self.at:
            raise self.error()


class Clock:
    """A judge whose optimizer uses the steps that ``skips`` does not name."""

    def __init__(self, skips: Sequence[int] = (), waits: Sequence[int] = ()) -> None:
        self.skips, self.waits, self.steps, self.used_steps = skips, waits, 0, 0
        self.open: list[int] = []

    def begin_period(self) -> None:
        if self.open and self.used():
            self.used_steps += 1
        self.open = []

    def finish_step(self) -> None:
        self.open.append(self.steps)
        self.steps += 1

    def used(self) -> bool | None:
        if self.open and self.open[-1] in self.waits:
            return None
        return not any(step in self.skips for step in self.open)

    def doubt(self) -> None:
        return None

    def clock(self) -> int:
        return self.used_steps + bool(self.open and self.used())

    def set_clock(self, clock: int) -> None:
        self.used_steps, self.open = clock, []


@dataclass(frozen=True)
class Scenario:
    """One scenario.

    Attributes:
        reduction: key of :data:`REDUCTIONS`.
        world_size, buckets, steps: bounds.
        drive: ``submit``, ``run`` (FSDP2, each bucket to its end), ``advance`` (other work between the buckets), ``ddp`` (the
            driver of ch_ddp in a real backward), ``hook`` (the same inside a user's hook).
        tuning: ``off``, ``tuned``, ``held`` (small first stages are sent together, nothing else), ``halved`` (each message of the
            last bucket goes in halves).
        free: True if all-reduces may become direct exchanges or halves.
        late: True if the host reads a status one step later, as on a GPU.
        callback: True if a callback uses each average at once.
        raises: step, rank, bucket and stage in which the reduction raises; step -1 for never.
        interrupt: True if it raises no ``Exception``.
        infinite: step and rank whose gradient holds infinity.
        stops_in: step whose backward raises before its last bucket, on all ranks, and is repeated; of ``ddp`` and ``hook``.
        callback_raises: step and rank whose callback raises.
        joined: step and rank that does not participate in it.
        judged: step and rank whose optimizer skips a step; rank -1 for all of them, -2 for no judge.
        waiting: step whose use is not known until the next step has ended; -1 for none.
        outside: step and rank with an error outside the reduction.
        fault: of the network.
    """

    reduction: str = "feedback"
    world_size: int = 2
    buckets: int = 2
    steps: int = 2
    drive: str = "submit"
    tuning: str = "off"
    free: bool = False
    late: bool = False
    callback: bool = False
    raises: tuple[int, int, int, int] = (-1, 0, 0, 0)
    interrupt: bool = False
    infinite: tuple[int, int] = (-1, 0)
    stops_in: int = -1
    callback_raises: tuple[int, int] = (-1, 0)
    joined: tuple[int, int] = (-1, 0)
    judged: tuple[int, int] = (-1, -2)
    waiting: int = -1
    outside: tuple[int, int] = (-1, 0)
    fault: Fault = field(default_factory=Fault)

    def __str__(self) -> str:
        plain = Scenario()
        shown = [f"{self.world_size} ranks x {self.buckets} buckets x {self.steps} steps", self.reduction]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name not in ("reduction", "world_size", "buckets", "steps") and value != getattr(plain, name):
                shown.append(f"{name}={value}" if name != "fault" else _named(value))
        return ", ".join(shown)


def _named(fault: Fault) -> str:
    return {
        "die": f"rank {fault.rank} is lost",
        "late": f"rank {fault.rank} is late",
        "message": f"message {fault.number} is lost",
        "none": "no fault",
    }[fault.kind]


def gradient(step: int, rank: int, bucket: int) -> torch.Tensor:
    """Return a rank's gradient of a bucket, in small integers."""
    generator = torch.Generator(device="cpu").manual_seed(1 + step * 1009 + rank * 101 + bucket)
    return torch.randint(-40, 40, (NUMEL,), generator=generator, dtype=torch.int64, device="cpu").to(torch.float32)


TUNINGS = {
    "off": CpuTuning.off,
    "tuned": CpuTuning,
    "held": lambda: replace(CpuTuning.off(), deferred_share=1.0, coalesced_bytes=2.0 * 4 * NUMEL),
    "far": lambda: CpuTuning.over(Link.parse("far")),
    "halved": lambda: replace(CpuTuning.off(), halved_from=2.0 * NUMEL),  # not the status
}


@dataclass
class Saw:
    """One rank's view of one step.

    Attributes:
        error: returned or raised by the engine.
        averages: the buckets afterwards; none if the transport was lost.
        kept: True if the state kept the step, ``None`` if that was open.
        count: number of committed steps after the step was resolved.
        posts: number of collectives that the rank had started.
        delivered: number of buckets that the callback received.
    """

    error: BaseException | None
    averages: list[torch.Tensor]
    kept: bool | None
    count: int
    posts: int
    delivered: int


@dataclass
class Record:
    """One rank's view of all steps, and its state at the end."""

    steps: list[Saw] = field(default_factory=list)
    entries: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    count: int = 0
    left: list[str] = field(default_factory=list)


def body(scenario: Scenario, rank: int, transport: ExplorerTransport) -> Record:
    """Run the steps of one rank."""
    inner = REDUCTIONS[scenario.reduction]()
    step, raising, bucket, stage = scenario.raises
    error = partial(Interrupt if scenario.interrupt else Planted, "planted")
    armed = Raising(inner, step if raising == rank else -1, bucket, stage, error)
    reduction: Reduction = armed if step >= 0 else inner
    engine = Engine(reduction, transport, HookState(), timeout=1.0, tuning=TUNINGS[scenario.tuning]())
    if scenario.judged[1] != -2:
        skips = [scenario.judged[0]] if scenario.judged[1] in (rank, -1) else []
        engine.set_judge(Clock(skips, [scenario.waiting] if scenario.waiting >= 0 else []))
    delivered: list[int] = []
    if scenario.callback:

        def use(bucket: Bucket) -> None:
            if scenario.callback_raises == (armed.now, rank) and bucket.is_last:
                raise Planted("callback")
            delivered.append(bucket.index)

        engine.set_on_reduced(use)
    record = Record()
    drive: Reducer | str = scenario.drive
    if drive in ("ddp", "hook"):
        drive = Reducer(engine, scenario.buckets, "users_hook" if drive == "hook" else None)
        drive.stops_in = scenario.stops_in
    for number in range(scenario.steps):
        armed.now = number
        record.steps.append(_step(scenario, engine, number, rank, transport, delivered, drive))
    engine.resolve_step()
    if engine.state.versions.tentative:
        engine.resolve_before_next_step()
    record.count = engine.state.step
    record.entries = {(name, field): tensor.clone() for name, field, tensor in engine.state.entries()}
    if engine.step.in_flight:
        record.left.append(f"{len(engine.step.in_flight)} buckets in flight")
    if engine.state.draft.written:
        record.left.append(f"a draft of {sorted(engine.state.draft.written)}")
    if engine.in_step:
        record.left.append("a running step")
    return record


def _step(
    scenario: Scenario,
    engine: Engine,
    number: int,
    rank: int,
    transport: ExplorerTransport,
    delivered: list[int],
    drive: "Reducer | str",
) -> Saw:
    joined = scenario.joined == (number, rank)
    made = []
    for index in range(scenario.buckets):
        values = gradient(number, rank, index)
        if joined:
            values.zero_()
        if scenario.infinite == (number, rank) and index == scenario.buckets - 1:
            values[0] = float("inf")
        bucket = Bucket.from_tensors({f"w{index}": values})
        made.append(Bucket(bucket.layout, bucket.storage, index, index == scenario.buckets - 1))
    if isinstance(drive, Reducer):
        return drive.step(made, number, transport, late=scenario.late)
    engine.set_participating(not joined)
    delivered.clear()
    outside = Planted("outside") if scenario.outside == (number, rank) else None
    error: BaseException | None
    try:
        for bucket in made:
            if scenario.drive == "run":
                engine.run(bucket)
            else:
                engine.submit(bucket)
                if scenario.drive == "advance":
                    engine.advance()
        error = engine.finish(outside=outside)
    except CommHooksError as lost:
        error = lost
    gone = isinstance(error, TransportError | HookTimeoutError)  # its messages may still write to the buckets
    averages = [] if gone else [bucket.storage.clone() for bucket in made]
    kept = None
    if not scenario.late and scenario.judged[1] == -2:
        kept = engine.resolve_step()
    return Saw(error, averages, kept, engine.state.step, len(transport.me.posts), len(delivered))


class _Backward(torch.autograd.Function):
    """Calls an action in a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.action()
        return gradient, None


class DDPBucket:
    """Stands in for torch's GradBucket."""

    def __init__(self, bucket: Bucket, param: torch.Tensor) -> None:
        self._bucket, self._param = bucket, param

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        return self._bucket.storage

    def parameters(self) -> list[torch.Tensor]:
        return [self._param]

    def is_last(self) -> bool:
        return self._bucket.is_last


class Reducer:
    """Acts like DDP's reducer. It calls the hook in a backward, and finishes in a callback after the last bucket."""

    def __init__(self, engine: Engine, buckets: int, hook: str | None) -> None:
        self.params = [
            torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float32, device="cpu")) for _ in range(buckets)
        ]
        for param in self.params:  # without a gradient the driver takes them for unused
            param.grad = torch.zeros_like(param)
        self.driver = DDPDriver(engine, {id(p): f"w{index}" for index, p in enumerate(self.params)}, hook=hook)
        self.driver._model_unknown = False  # no optimizer exists, and the search through all objects is slow
        self.stops_in = -1

    def step(self, made: list[Bucket], number: int, transport: ExplorerTransport, *, late: bool) -> Saw:
        run, engine = transport.run, self.driver.engine
        futures: list[Any] = []
        averages: list[torch.Tensor] = []
        early: dict[int, torch.Tensor] = {}

        def gone() -> bool:
            return engine.failure is not None or engine.outcome.failed

        def completed(index: int, future: Any) -> None:
            early[index] = future.value().clone()

        def finish() -> None:
            for index, future in enumerate(futures):
                if not future.done():
                    run.violate(f"step {number}: rank {transport.rank} waits for ever for the future of bucket {index}")
                else:
                    averages.append(future.value().clone())
                    same = torch.allclose(early[index], averages[-1], rtol=0.0, atol=0.0, equal_nan=True)
                    if not gone() and not same:
                        run.violate(f"step {number}: rank {transport.rank} completes a future before it is the average")

        def backward() -> None:
            for bucket, param in zip(made, self.params, strict=True):
                if self.stops_in == number and bucket.is_last:
                    self.stops_in = -1
                    raise Planted("the backward stops")
                future = self.driver(DDPBucket(bucket, param))
                future.add_done_callback(partial(completed, bucket.index))
                futures.append(future)
            torch.autograd.Variable._execution_engine.queue_callback(finish)

        x = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu")
        error: BaseException | None = None
        copies = [bucket.storage.clone() for bucket in made]
        for _ in range(2):
            try:
                _Backward.apply(x, backward).backward()
            except Planted as planted:
                if str(planted) == "the backward stops":
                    for bucket, copy in zip(made, copies, strict=True):
                        bucket.storage.copy_(copy)
                    futures.clear()
                    continue
                error = planted
            except (CommHooksError, Interrupt) as raised:
                error = raised
            break
        return Saw(
            error, averages, None if late else engine.resolve_step(), engine.state.step, len(transport.me.posts), 0
        )


# -- the rules


def _truth(
    scenario: Scenario, counted: Sequence[bool]
) -> tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return the exact averages of each step, and each rank's residual at the end.

    Args:
        scenario: the scenario.
        counted: for each step, True if its state was committed.
    """
    world = scenario.world_size
    residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    found = []
    stateful = scenario.reduction not in STATELESS
    for step in range(scenario.steps):
        means, after = [], [dict(r) for r in residuals]
        for index in range(scenario.buckets):
            total = torch.zeros(NUMEL, dtype=torch.float32, device="cpu")
            for rank in range(world):
                given = gradient(step, rank, index)
                if scenario.joined == (step, rank):
                    continue
                if stateful:
                    given = given + residuals[rank].get(f"w{index}", torch.zeros_like(given))
                    sent = torch.floor(given / 2) * 2
                    after[rank][f"w{index}"] = given - sent
                    given = sent
                total += given / world
            means.append(total)
        found.append(means)
        if counted[step]:
            residuals = after
    return found, residuals


def check(scenario: Scenario, ranks: Sequence[Rank]) -> Iterator[str]:
    """Yield broken rules of one complete run."""
    alive = [rank for rank in ranks if not rank.dead]
    records: list[Record] = [rank.result for rank in alive]
    for rank, record in zip(alive, records, strict=True):
        for left in record.left:
            yield f"rank {rank.number} is left with {left}"
    # A transport that is lost stays lost, on this rank.
    gone = False
    for rank, record in zip(alive, records, strict=True):
        posts, first = -1, None
        for number, saw in enumerate(record.steps):
            if first is not None:
                if not isinstance(saw.error, TransportError | HookTimeoutError):
                    yield f"rank {rank.number} went on after its transport was lost in step {first}"
                if saw.posts != posts:
                    yield f"rank {rank.number} started a collective after its transport was lost"
            elif isinstance(saw.error, TransportError | HookTimeoutError):
                first, posts, gone = number, saw.posts, True
                if saw.kept:
                    yield f"rank {rank.number} kept step {number}, whose transport was lost"
                if record.count > saw.count:
                    yield f"rank {rank.number} committed a step after its transport was lost"
    if gone and scenario.fault.kind == "none":
        yield "a transport was lost without a fault: " + "; ".join(
            f"rank {r.number}: {saw.error}" for r, record in zip(alive, records, strict=True) for saw in record.steps
        )
        return
    yield from _agreement(scenario, alive, records)


def _agreement(scenario: Scenario, alive: Sequence[Rank], records: Sequence[Record]) -> Iterator[str]:
    lost = TransportError | HookTimeoutError
    wrong = _expected_errors(scenario)
    for number in range(scenario.steps):
        saws = [record.steps[number] for record in records]
        errors = [saw.error for saw in saws if not isinstance(saw.error, lost)]
        if len({error is None for error in errors}) > 1:
            yield f"step {number}: ranks disagree on the outcome: {[type(saw.error).__name__ for saw in saws]}"
        for rank, saw in zip(alive, saws, strict=True):
            if isinstance(saw.error, lost):
                continue
            if (saw.error is not None) != (number in wrong):
                expected = "an error" if number in wrong else "no error"
                yield f"step {number}: rank {rank.number} has {saw.error!r}, expected {expected}"
            own = scenario.raises[0] >= 0 and scenario.raises[1] == rank.number
            if own and saw.error is not None and not isinstance(saw.error, Planted | Interrupt):
                yield f"step {number}: rank {rank.number} raised, and gets {saw.error!r} instead of its own error"
    if scenario.judged[1] >= 0:
        return  # one rank's optimizer skipped a step. All ranks were told, and their states differ
    failed = _failed(scenario)
    counted = [step not in failed and not _skipped(scenario, step) for step in range(scenario.steps)]
    averages, residuals = _truth(scenario, counted)
    for number in range(scenario.steps):
        if number in failed:
            continue
        for rank, record in zip(alive, records, strict=True):
            saw = record.steps[number]
            if isinstance(saw.error, lost) or (saw.error is not None and not scenario.late):
                continue
            for index, (seen, wanted) in enumerate(zip(saw.averages, averages[number], strict=True)):
                if not torch.allclose(seen, wanted, rtol=0.0, atol=1e-3):  # a third of an integer is rounded
                    yield f"step {number}: rank {rank.number} has a wrong average in bucket {index}: {seen.tolist()}"
            if scenario.callback and scenario.joined != (number, rank.number) and saw.delivered != scenario.buckets:
                yield f"step {number}: rank {rank.number} delivered {saw.delivered} of {scenario.buckets} averages"
        for one, other in pairwise(records):
            pair = (one.steps[number], other.steps[number])
            if any(isinstance(saw.error, lost) for saw in pair) or (pair[0].error is not None and not scenario.late):
                continue
            if not all(map(torch.equal, pair[0].averages, pair[1].averages)):
                yield f"step {number}: the averages of two ranks differ"
    # All ranks commit a step, or none does. If the network failed, a rank that lost it may be one step behind.
    counts = {rank.number: record.count for rank, record in zip(alive, records, strict=True)}
    exact = scenario.fault.kind == "none"
    if exact and len(set(counts.values())) > 1:
        yield f"state: ranks committed different numbers of steps: {counts}"
    if max(counts.values()) - min(counts.values()) > 1:
        yield f"state: ranks are more than one step apart: {counts}"
    if exact:
        wanted = (
            sum(counted) if scenario.reduction not in STATELESS else scenario.steps - len(failed & _raised(scenario))
        )
        for number, count in counts.items():
            if count != wanted and scenario.judged[1] == -2:
                yield f"state: rank {number} committed {count} steps instead of {wanted}"
        for rank, record in zip(alive, records, strict=True):
            for name, value in residuals[rank.number].items():
                seen = record.entries.get((name, "residual"))
                if seen is None or not torch.equal(seen, value):
                    yield f"state: rank {rank.number} has a wrong residual of {name}"
            for (name, kept), tensor in record.entries.items():
                if not bool(torch.isfinite(tensor).all()):
                    yield f"state: rank {rank.number} committed NaN or Inf in {kept} of {name}"
    for one, other in pairwise(records):
        shared = [key for key in one.entries if key[1] == "basis" and one.count == other.count]
        if any(key not in other.entries or not torch.equal(one.entries[key], other.entries[key]) for key in shared):
            yield "state: two ranks hold different shared entries"


def _raised(scenario: Scenario) -> set[int]:
    found = {scenario.raises[0], scenario.outside[0], scenario.callback_raises[0]}
    return {step for step in found if step >= 0}


def _failed(scenario: Scenario) -> set[int]:
    """Return the steps without a valid average, unless the network fails."""
    found = _raised(scenario)
    if scenario.infinite[0] >= 0:
        found.add(scenario.infinite[0])
    return found


def _skipped(scenario: Scenario, step: int) -> bool:
    return scenario.judged[0] == step and scenario.judged[1] == -1


def _expected_errors(scenario: Scenario) -> set[int]:
    """Return the steps that all ranks end with an error, unless the network fails."""
    found = _raised(scenario)
    if scenario.judged[1] >= 0:  # one rank's optimizer skipped the step before
        found = {*found, *range(scenario.judged[0] + 1, scenario.steps)}
    return {step + scenario.late for step in found if step + scenario.late < scenario.steps}


def summary(rank: Rank) -> Any:
    """Return the part of the records that runs are compared by."""
    record: Record = rank.result
    kinds = tuple("ok" if saw.error is None else type(saw.error).__name__ for saw in record.steps)
    return (*kinds, record.count)


def explore(scenario: Scenario, **options: Any) -> Found:
    """Search all orders of a scenario."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(messages_module, "take_back", take_back_unguarded))
        if scenario.late:
            for module in (engine_module, outcome_module):
                patches.enter_context(mock.patch.object(module, "is_asynchronous", return_value=True))
        return Explorer(
            scenario.world_size,
            partial(body, scenario),
            partial(check, scenario),
            summary=summary,
            fault=scenario.fault,
            free=scenario.free,
            **options,
        ).search()
