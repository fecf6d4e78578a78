"""Runs cases on the ranks of one gloo group: real steps, the reference, and the same steps on simulated ranks."""

import os
import random
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import commhooks
from ch_core import together
from ch_core.param_table import position_name
from ch_testing import SimulatedRanks, spawn
from commhooks import Bucket, BucketLayout, HookState

from . import reference as ref
from .hooks import ATTACH, BY_EXPR, FAR, LINK, REDUCER, REGISTER, Row
from .models import Gradients, Shape, buckets, draw, wrapped
from .plants import PLANTS

SLICE = 1 << 18
"""Elements that the reference treats at a time, if the method allows it."""
JITTER = 0.004
"""Seconds by which a rank begins a step later than the others at most."""
TIMEOUT = 300.0
"""Seconds of one collective. Ranks wait for each other while one compares a large part."""

Message = tuple[str, int]
"""Kind and elements of a collective, as gloo gets it."""


@dataclass(frozen=True)
class Case:
    """One training run, which follows from these values alone.

    Attributes:
        hook: expression of a row.
        way: of attaching.
        world: number of ranks.
        size: name of a drawn model; with ``shapes`` a label.
        seed: of the model, the gradients and the delays.
        shapes: the parameters, if they are not drawn.
        steps: number of steps; 0 for the row's own.
        traced: True to note the messages of the last step.
    """

    hook: str
    way: str
    world: int
    size: str
    seed: int
    shapes: tuple[Shape, ...] = ()
    steps: int = 0
    traced: bool = False

    def __str__(self) -> str:
        return f"{self.hook} by {self.way}, {self.world} ranks, {self.size}, seed {self.seed}"

    @property
    def row(self) -> Row:
        return BY_EXPR[self.hook]

    @property
    def count(self) -> int:
        return self.steps or self.row.steps

    def parameters(self) -> Sequence[Shape]:
        return self.shapes or draw(random.Random(self.seed), self.size)


@dataclass
class Outcome:
    """What one rank saw of a case.

    Attributes:
        wrong: one line for each wrong result.
        messages: of the first rank in the last step, if they are traced.
        seconds: of the processors of all ranks, without simulated ones.
    """

    case: Case
    wrong: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    seconds: float = 0.0


def run(
    cases: Sequence[Case], world: int, *, simulated: bool = True, plant: str = "", timeout: float = 600.0
) -> list[Outcome]:
    """Run cases one after another in one set of processes. Return an outcome for each, joined over the ranks.

    Args:
        cases: of this number of ranks.
        world: number of ranks.
        simulated: True to repeat cases on simulated ranks, where these add in the same order.
        plant: name of a mistake in :data:`.plants.PLANTS` that all ranks make.
        timeout: seconds for all cases.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints lines of its own otherwise
    every = spawn(_rank, world, list(cases), simulated, plant, timeout=timeout, group_timeout=TIMEOUT)
    joined = []
    for outcomes in zip(*every, strict=True):
        first: Outcome = outcomes[0]
        lines = dict.fromkeys(line for one in outcomes for line in one.wrong)
        joined.append(Outcome(first.case, list(lines), first.messages, sum(one.seconds for one in outcomes)))
    return joined


def _rank(rank: int, world: int, cases: Sequence[Case], simulated: bool, plant: str) -> list[Outcome]:
    if plant:
        PLANTS[plant][0]()
    own = dist.new_group()  # for the messages of the test, so that they never match those of a hook
    outcomes, runs = [], []
    for case in cases:
        outcome = Outcome(case)
        outcomes.append(outcome)
        begun = time.process_time()
        try:
            runs.append(_Run(case, rank, own).all_steps(outcome))
        except Exception:
            outcome.wrong.append(f"rank {rank} raised\n{traceback.format_exc()}")
        if any(_exchanged([bool(outcome.wrong and "raised" in outcome.wrong[-1])], own)):
            outcome.wrong.append("later cases of this group did not run")
            outcomes += [Outcome(later, ["did not run"]) for later in cases[len(outcomes) :]]
            return outcomes
        outcome.seconds = time.process_time() - begun
    for number, (done, outcome) in enumerate(zip(runs, outcomes, strict=True)):
        row = done.case.row
        comparable = row.equal and (world == 2 or (row.in_rank_order and done.case.way != FAR))
        if simulated and comparable and number % world == rank:
            outcome.wrong += _simulated(done)
    return outcomes


def _exchanged(mine: Sequence[object], group: dist.ProcessGroup) -> list[object]:
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=group)
    return [one for row in every for one in row]  # type: ignore[attr-defined]


# -- the ways of attaching


def _nothing() -> None:
    """Leave a hook to the end of its model."""


@dataclass
class Attached:
    """A hook on tensors of the given shapes.

    Attributes:
        names: of the parameters, as the hook knows them.
        average: averages one gradient for each parameter, of the parameter's shape.
        buckets: returns the numbers of the parameters in each bucket of the last step.
        state: of the hook, if it can be read.
        close: ends the use of the hook.
    """

    names: list[str]
    average: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    buckets: Callable[[], list[list[int]]]
    state: HookState | None
    close: Callable[[], None] = _nothing


def attached(row: Row, way: str, world: int, shapes: Sequence[Shape]) -> Attached:
    """Put a hook on a model, or on tensors, in one of the ways."""
    names = [f"w.{number}" for number in range(len(shapes))]
    if way == REDUCER:
        like = {name: shape.of(torch.zeros(shape.numel)) for name, shape in zip(names, shapes, strict=True)}
        reducer = commhooks.Reducer(row.expression(world), like)

        def average(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(reducer.average(dict(zip(names, gradients, strict=True))).values())

        everything = [list(range(len(shapes)))]
        return Attached(names, average, lambda: everything, reducer.handle.hook_state, reducer.close)
    model = wrapped(shapes)
    state: object
    close = _nothing
    if way in (ATTACH, FAR):
        handle = commhooks.attach(model, row.expression(world), link=LINK if way == FAR else None)
        state, close = handle.hook_state, handle.detach
    else:
        assert way == REGISTER
        hook, state = row.registered(world)
        model.register_comm_hook(state, hook)
        names = [position_name(number, shape.shape) for number, shape in enumerate(shapes)]

    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        model(gradients).backward()
        return [p.grad for p in model.module.w]

    return Attached(names, backward, lambda: buckets(model), state if isinstance(state, HookState) else None, close)


# -- one case on one rank


class _Run:
    """A case on this rank.

    Attributes:
        checks: of each step, a checksum of each parameter's average.
        laid: of each step, the buckets.
    """

    def __init__(self, case: Case, rank: int, own: dist.ProcessGroup) -> None:
        self.case, self.rank, self.own = case, rank, own
        self.shapes = case.parameters()
        self.gradients = Gradients(self.shapes, case.world, case.seed)
        self.method = case.row.method(case.world)
        self.checks: list[list[int]] = []
        self.laid: list[list[list[int]]] = []
        self.names: list[str] = []
        self._mine: dict[int, torch.Tensor] = {}  # parameter -> this rank's residual after the last step
        self._shared: dict[int, dict[str, torch.Tensor]] = {}

    def all_steps(self, outcome: Outcome) -> "_Run":
        case = self.case
        hook = attached(case.row, case.way, case.world, self.shapes)
        self.names = hook.names
        self.params = [
            ref.Param(name, shape.memory, shape.numel) for name, shape in zip(hook.names, self.shapes, strict=True)
        ]
        delay = random.Random(f"{case.seed} {self.rank}")
        for step in range(case.count):
            given = [shape.of(self.gradients.of(self.rank, step, number)) for number, shape in enumerate(self.shapes)]
            time.sleep(delay.random() * JITTER)
            if case.traced and step == case.count - 1:
                with torch.autograd.profiler.profile(record_shapes=True) as profile:
                    found = hook.average(given)
                gloo = [event for event in profile.function_events or () if event.name.startswith("gloo:")]
                outcome.messages = [(event.name.removeprefix("gloo:"), event.input_shapes[0][0]) for event in gloo]
            else:
                found = hook.average(given)
            del given
            if hook.state is not None:
                hook.state.resolve_step()
            flat = [shape.flat(tensor.detach()) for shape, tensor in zip(self.shapes, found, strict=True)]
            self.laid.append(hook.buckets())
            self.checks.append([_checksum(one) for one in flat])
            outcome.wrong += [f"step {step}: {line}" for line in self._compared() + self._step(step, flat, hook.state)]
        hook.close()
        return self

    def _compared(self) -> list[str]:
        """Return the parameters whose averages differ between ranks."""
        every = _exchanged([self.checks[-1]], self.own)
        if not self.case.row.equal:
            return []
        differ = [number for number, row in enumerate(zip(*every, strict=True)) if len(set(row)) > 1]  # type: ignore[call-overload]
        return [f"ranks differ in {[(self.names[n], self.shapes[n].memory) for n in differ]}"] if differ else []

    def _step(self, step: int, found: list[torch.Tensor], state: HookState | None) -> list[str]:
        """Compare this rank's share of the parts with the reference. If ranks get different numbers, it compares all."""
        parts = ref.groups(self.method, self.params, self.laid[-1], step)
        owner = _shares([sum(self.params[n].numel for n in numbers) for _, numbers in parts], self.case.world)
        ranks = {n: rank for (_, numbers), rank in zip(parts, owner, strict=True) for n in numbers}
        before = self._gathered(self._mine, ranks)
        self._mine = {}
        for number, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            if state is not None and (name, "residual") in state.draft.found:
                self._mine[number] = shape.flat(state.draft.found[name, "residual"].decoded()).clone()
        after = self._gathered(self._mine, ranks)
        wrong = []
        for (method, numbers), rank in zip(parts, owner, strict=True):
            if self.rank == rank or not self.case.row.equal:
                wrong += self._part(step, method, numbers, found, before, after, state)
        if state is not None:
            held = {number: state.read(name, "q") for number, name in enumerate(self.names)}
            self._shared = {number: {"q": q.clone()} for number, q in held.items() if q is not None}
        return wrong

    def _gathered(self, mine: Mapping[int, torch.Tensor], ranks: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Return the residuals of all ranks, ``(world, numel)``, of the parameters that this rank compares."""
        made = {}
        somewhere = set(_exchanged(list(mine), self.own))
        for number, rank in sorted(ranks.items()):
            if number in somewhere:
                numel = self.shapes[number].numel
                every = [torch.empty(numel) for _ in range(self.case.world)] if self.rank == rank else None
                dist.gather(mine.get(number, torch.zeros(numel)), every, dst=rank, group=self.own)
                if every is not None:
                    made[number] = torch.stack(every)
        return made

    def _part(
        self,
        step: int,
        method: ref.Method,
        numbers: tuple[int, ...],
        found: list[torch.Tensor],
        earlier: Mapping[int, torch.Tensor],
        later: Mapping[int, torch.Tensor],
        state: HookState | None,
    ) -> list[str]:
        params = tuple(self.params[n] for n in numbers)
        total = sum(p.numel for p in params)
        length = max(SLICE // method.grain, 1) * method.grain if method.grain and len(params) == 1 else total
        where = f"{params[0].name} {params[0].memory}" + (f" and {len(params) - 1} more" if len(params) > 1 else "")
        checks = {what: _Check(f"{where}: {what}") for what in ("average", "residual", "sent + residual", "q")}
        zeros = {n: torch.zeros(1, 1).expand(self.case.world, self.params[n].numel) for n in numbers}
        for begin in range(0, total, max(length, 1)):
            end = min(begin + length, total)

            def of(tensors: Mapping[int, torch.Tensor], begin: int = begin, end: int = end) -> torch.Tensor:
                if len(numbers) == 1:
                    return tensors[numbers[0]][..., begin:end].double()
                return torch.cat([tensors[n] for n in numbers], -1).double()

            pieces = (
                [(numbers[0], begin, end)] if len(numbers) == 1 else [(n, 0, self.params[n].numel) for n in numbers]
            )
            gradients = torch.cat([self.gradients.stacked(step, *piece) for piece in pieces], 1)
            before = of({**zeros, **earlier}) if not earlier.keys().isdisjoint(numbers) else None
            shared = {field: q.double() for field, q in self._shared.get(numbers[0], {}).items()}
            answer = method(ref.Part(params, gradients, before, shared, step, begin, whole=self.case.way == FAR))
            applied = of(dict(enumerate(found)))
            self._check(
                answer, applied, gradients, before, of({**zeros, **later}) if state is not None else None, checks
            )
            if answer.shared and state is not None and (q := state.read(params[0].name, "q")) is not None:
                wanted = answer.shared["q"]
                tolerance = ref.TOLERANCES[answer.tolerance](self.case.world)
                checks["q"].add((q.double() - wanted).abs(), wanted.abs().max(), tolerance)
        return [line for check in checks.values() if (line := check.verdict())]

    def _check(
        self,
        answer: ref.Answer,
        applied: torch.Tensor,
        gradients: torch.Tensor,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
        checks: Mapping[str, "_Check"],
    ) -> None:
        world = self.case.world
        error = applied - (answer.mean if answer.mean.dim() == 1 else answer.mean[self.rank])
        if answer.turn is not None:
            pad = -len(error) % len(answer.turn)
            rows = torch.nn.functional.pad(error, (0, pad)).view(-1, len(answer.turn))
            error = (rows @ answer.turn.t()).view(-1)[: len(error)]
        gap = torch.minimum(error.abs(), (error - answer.others).abs().view(-1, len(error)).amin(0))
        checks["average"].add(gap, answer.unit, ref.TOLERANCES[answer.tolerance](world))
        if after is None or answer.owed is None:
            return
        if answer.kept:
            gaps = torch.stack([(after - one).abs() for one in answer.kept]).amin(0)
            checks["residual"].add(gaps, answer.kept_unit, ref.TOLERANCES[answer.kept_tolerance](world))
        # Input = sent + residual, but for the rounding of the sum over ranks, which no rank knows, and fp32's of all terms.
        gap = (answer.owed.mean(0) - applied - after.mean(0)).abs()
        size = (gradients.abs() + after.abs() + (before.abs() if before is not None else 0.0)).mean(0) + applied.abs()
        law = ref.TOLERANCES["law"](world).bound
        allowed = ((world - 1) * answer.rounding + law) * size + answer.forgotten
        checks["sent + residual"].add(gap, allowed, ref.Tolerance(1.0))


class _Check:
    """Errors of a part, in units of the tolerance."""

    def __init__(self, where: str) -> None:
        self.where, self.numel, self.over, self.off, self.worst = where, 0, 0, 0, 0.0
        self.tolerance = ref.Tolerance(0.0)

    def add(self, error: torch.Tensor, unit: torch.Tensor, tolerance: ref.Tolerance) -> None:
        self.tolerance = tolerance
        self.numel += error.numel()
        within = error <= tolerance.bound * unit  # False for NaN
        self.over += int((~within).sum())
        if tolerance.usual is not None:
            self.off += int((~(error <= tolerance.usual * unit)).sum())
        self.worst = max(self.worst, float((error / unit).nan_to_num(0.0).max())) if error.numel() else self.worst

    def verdict(self) -> str:
        """Return a line if numbers are wrong."""
        tolerance = self.tolerance
        if self.over:
            most = f"{self.worst:.3g} units, allowed {tolerance.bound:.3g}"
            return f"{self.where}: {self.over} of {self.numel} numbers are off by up to {most}"
        if self.off > tolerance.few + tolerance.share * self.numel:
            usual = f"{tolerance.usual:.3g} units, up to {self.worst:.3g}"
            return f"{self.where}: {self.off} of {self.numel} numbers are off by more than {usual}"
        return ""


def _shares(sizes: Sequence[int], world: int) -> list[int]:
    """Return the rank that compares each part: the largest part first, each to the rank with the least work."""
    load, owner = [0] * world, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owner[number] = min(range(world), key=load.__getitem__)
        load[owner[number]] += sizes[number]
    return owner


def _checksum(flat: torch.Tensor) -> int:
    return zlib.crc32(memoryview(flat.contiguous().view(torch.uint8).numpy()))


# -- the same on simulated ranks


def _simulated(done: _Run) -> list[str]:
    """Repeat a run on simulated ranks, with the same buckets, and return the parameters whose bits differ."""
    case, shapes = done.case, done.shapes
    like = {name: shape.of(torch.zeros(shape.numel)) for name, shape in zip(done.names, shapes, strict=True)}
    levels = commhooks.create(case.row.expression(case.world)).reduction
    nodes = levels.nodes if levels is not None else None
    ranks = SimulatedRanks(lambda: commhooks.create(case.row.expression(case.world)), case.world, like, nodes=nodes)
    wrong = []
    for step, (laid, wanted) in enumerate(zip(done.laid, done.checks, strict=True)):

        def one(rank: int, step: int = step, laid: list[list[int]] = laid) -> list[int]:
            made = []
            for index, numbers in enumerate(laid):
                layout = BucketLayout.of_tensors({done.names[n]: like[done.names[n]] for n in numbers})
                storage = torch.cat([done.gradients.of(rank, step, n) for n in numbers])
                made.append(Bucket(layout, storage, index, index == len(laid) - 1))
            for bucket in made:
                ranks.engines[rank].submit(bucket)
            error = ranks.engines[rank].finish()
            if error is not None:
                raise error
            flat = {p.name: bucket.matrix(p).view(-1) for bucket in made for p in bucket.params}
            return [_checksum(flat[name]) for name in done.names]

        # More ranks than two add the parameters that a method leaves exact around a ring.
        ring = set[int]()
        if case.world > 2 and not isinstance(done.method, ref.Exact):
            ring = {n for n, param in enumerate(done.params) if isinstance(done.method.of(param, step), ref.Exact)}
        for rank, checks in enumerate(together(ranks.group, one)):
            differ = [n for n, (a, b) in enumerate(zip(checks, wanted, strict=True)) if a != b and n not in ring]
            if differ:
                odd = [(done.names[n], shapes[n].memory) for n in differ]
                wrong.append(f"step {step}: simulated rank {rank} has other bits in {odd}")
    return wrong
