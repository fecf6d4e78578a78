"""Step times of hooks: predicted over a probed network, or measured over the real one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

import commhooks
from ch_bench.advise.emulated import EmulatedTransport
from ch_bench.advise.link import Network
from ch_bench.advise.probe import probe
from ch_bench.advise.replay import Note, Recorder, Replay, Sent
from ch_bench.advise.workload import Workload, slowest

HOOKS = ("allreduce", "bf16_compress", "quant8", "powersgd(rank=4)", "powersgd(rank=1)")
WARM_UP = 2  # steps: DDP rebuilds its buckets after the first
WORTH = 0.05  # a hook that changes the gradients has to save that much of a step
ALIKE = 0.03  # predictions that differ by less are the same: the gentler hook is advised
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to take with one hook.

    Attributes:
        hook: the expression.
        seconds: of a step, of the slowest rank.
        waiting: of them, seconds in which the rank waits for messages that nothing hides.
        arithmetic: of them, seconds of the hook's own work.
        payload: bytes that a step gives to collectives, per rank.
        lossy: whether the hook changes the average by more than rounding.
    """

    hook: str
    seconds: float
    waiting: float
    arithmetic: float
    payload: float
    lossy: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What `advise` found.

    Attributes:
        alone: seconds of a step without communication.
        predictions: of each hook, in the order in which they were asked for.
        recommended: the expression; ``"allreduce"`` is the advice not to compress.
        reasons: in sentences.
        network: what the probe measured.
        parameters: elements of all gradients.
        world_size: ranks.
    """

    alone: float
    predictions: tuple[Prediction, ...]
    recommended: str
    reasons: tuple[str, ...]
    network: Network
    parameters: int
    world_size: int


def advise(work: Workload, hooks: Sequence[str], *, seconds: float = 60.0, tell: Tell = lambda what: None) -> Advice:
    """Predict a step with each hook, and recommend one. Every rank makes this call.

    Args:
        work: the model.
        hooks: expressions; ``allreduce`` is added where it is missing.
        seconds: that the whole may take.
        tell: told what is being done.
    """
    hooks = list(dict.fromkeys(["allreduce", *hooks]))
    ends = time.perf_counter() + seconds
    tell("the model without communication")
    _train(work, "noop", 1)
    alone = median(slowest(_train(work, "noop", _count(work, 5, seconds / 8)), work.device))
    sent: list[Sent] = []
    for hook in hooks:
        tell(f"messages of {hook}")
        sent += _messages(work, hook)
    tell("the network")
    network = probe(sent, work.model.process_group, work.device, (ends - time.perf_counter()) * 0.4)
    predictions = []
    for number, hook in enumerate(hooks):
        tell(f"arithmetic of {hook}")
        left = max(0.0, slowest([ends - time.perf_counter()], work.device)[0])
        predictions.append(_predict(work, hook, network, left / (len(hooks) - number)))
    again = median(slowest(_train(work, "noop", _count(work, 5, seconds / 8)), work.device))
    alone = min(alone, again)  # what disturbs a machine comes and goes, and makes no step shorter
    recommended, reasons = recommend(alone, predictions)
    parameters = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
    return Advice(alone, tuple(predictions), recommended, reasons, network, parameters, dist.get_world_size())


def measure(work: Workload, hook: str, *, steps: int = 10, seconds: float = 30.0) -> list[float]:
    """Seconds of real steps with a hook, each that of the slowest rank."""
    handle = commhooks.attach(work.model, hook)
    try:
        for _ in range(WARM_UP):
            work.step()
        taken = [_timed(work)]
        count = max(2, min(steps, int(seconds / slowest(taken, work.device)[0])))
        taken += [_timed(work) for _ in range(count - 1)]
    finally:
        handle.detach()
    return slowest(taken, work.device)


def recommend(alone: float, predictions: Sequence[Prediction]) -> tuple[str, tuple[str, ...]]:
    """The hook to use, and why: the gentlest of those that are fastest, if it saves enough to be worth its errors."""
    plain = next(one for one in predictions if one.hook == "allreduce")
    exact = min((one for one in predictions if not one.lossy), key=lambda one: one.seconds)
    best = min(predictions, key=lambda one: one.seconds)
    near = [one for one in predictions if one.seconds <= best.seconds * (1 + ALIKE)]
    chosen = min(near, key=lambda one: (one.lossy, -one.payload))  # the more it sends, the less it loses
    share = max(0.0, plain.seconds - alone) / plain.seconds
    reasons = [
        f"Communication is {share:.0%} of a step with allreduce: {plain.seconds * 1e3:.1f} ms, "
        f"{alone * 1e3:.1f} ms of them without any"
        if share
        else "A step with allreduce takes no longer than one without any communication"
    ]
    if chosen.lossy and chosen.seconds > exact.seconds * (1 - WORTH):
        reasons.append(
            f"Do not compress: {chosen.hook} would save {max(0.0, 1 - chosen.seconds / exact.seconds):.0%} of a step, less "
            f"than the {WORTH:.0%} that are worth a changed gradient"
        )
        return exact.hook, tuple(reasons)
    if not chosen.lossy:
        reasons.append(
            "Do not compress: nothing here is faster than plain averaging by more than the prediction is sure of"
        )
        return chosen.hook, tuple(reasons)
    reasons.append(
        f"{chosen.hook} sends {plain.payload / max(chosen.payload, 1):.1f} times fewer bytes, and its own arithmetic "
        f"takes {chosen.arithmetic * 1e3:.0f} ms: a step of {chosen.seconds * 1e3:.0f} ms, "
        f"{plain.seconds / chosen.seconds:.1f} times as fast as with allreduce"
    )
    if chosen is not best:
        reasons.append(f"{best.hook} is as fast within {ALIKE:.0%}, and loses more")
    reasons.append("It changes the gradients: compare the loss, not the step time, before you keep it")
    return chosen.hook, tuple(reasons)


def _train(work: Workload, hook: str, count: int) -> list[float]:
    """This rank's seconds of some steps, after the warm-up."""
    handle = commhooks.attach(work.model, hook)
    try:
        for _ in range(WARM_UP):
            work.step()
        return [_timed(work) for _ in range(count)]
    finally:
        handle.detach()


def _timed(work: Workload) -> float:
    begun = time.perf_counter()
    work.step()
    return time.perf_counter() - begun


def _count(work: Workload, most: int, budget: float) -> int:
    """Steps that fit, the same number on every rank; at least 2."""
    one = max(slowest(_train(work, "noop", 1), work.device))
    return max(2, min(most, int(budget / one) - WARM_UP))


def _emulated(work: Workload, hook: str, recorder: Recorder | None) -> tuple[commhooks.CommHook, EmulatedTransport]:
    """A handle in place whose messages are not sent."""
    handle = commhooks.attach(work.model, hook)
    binding = handle.binding
    if binding is None or binding.engine is None:
        handle.detach()
        raise commhooks.HookNotSupportedError(f"{hook} is a foreign hook, whose messages nobody can predict")
    transport = EmulatedTransport(dist.get_rank(), dist.get_world_size(), recorder)
    binding.engine.move(transport)
    return handle, transport


def _messages(work: Workload, hook: str) -> list[Sent]:
    """What one step of a hook sends."""
    handle, transport = _emulated(work, hook, None)
    try:
        for _ in range(WARM_UP):
            transport.sent.clear()
            work.step()
        return list(transport.sent)
    finally:
        handle.detach()


def _predict(work: Workload, hook: str, network: Network, budget: float) -> Prediction:
    recorder = Recorder()
    handle, _ = _emulated(work, hook, recorder)
    steps: list[tuple[float, float]] = []
    own: list[float] = []
    try:
        count = WARM_UP + 1
        while len(steps) < count:
            dist.barrier()  # ranks on one machine disturb one another, as they would in training
            begun, before = time.perf_counter(), handle.stats()
            recorder.begin()
            work.step()
            notes = recorder.end()
            own.append(_own(handle.stats(), before))
            steps.append(max(Replay.of(network, _of_all_ranks(notes))))
            if len(steps) == WARM_UP + 1:  # how many more fit, on all ranks alike
                count += max(2, min(7, int(budget / slowest([time.perf_counter() - begun], work.device)[0])))
        lossy = handle.reduction is not None and handle.reduction.lossy
        payload = float(handle.payload_per_step())
    finally:
        handle.detach()
    seconds, waiting = (median(column) for column in zip(*steps[WARM_UP:], strict=True))
    arithmetic = median(slowest(own[WARM_UP:], work.device))
    return Prediction(hook, seconds, waiting, arithmetic, payload, lossy)


def _of_all_ranks(notes: list[Note]) -> list[list[Note]]:
    everyone: list[list[Note]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, notes)
    return everyone


def _own(after: dict[str, Any], before: dict[str, Any]) -> float:
    """Seconds in the hook that are not waiting, in real time: nothing is waited for here."""

    def spent(key: str) -> float:
        return float(after[key] - before[key])

    return max(0.0, spent("hook_seconds") - spent("wait_seconds"))
