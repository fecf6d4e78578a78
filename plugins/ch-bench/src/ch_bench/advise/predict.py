"""Step times with hooks: predicted over a probed network, or measured over the real one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

import commhooks
from ch_bench.advise.network import Message, Network, pair_link, probe, used_by_others
from ch_bench.advise.outer import rounds
from ch_bench.advise.replay import EmulatedTransport, Note, Recorder, Replay
from ch_bench.advise.workload import AttachedHooks, Workload, slowest
from ch_bench.links.link import FAR_APART
from ch_bench.links.link import Link as LinkWords
from ch_core import ProcessGroupTransport
from commhooks import Topology, node_bytes

HOOKS = ("allreduce", "bf16_compress", "quant8", "quant4", "powersgd(rank=4)")
SHARDED_HOOKS = ("allreduce", "bf16_compress", "quant8", "quant8 / quant4")
"""For FSDP2: weight gathers / gradients."""
LEVELED = ("bf16_compress", "quant8", "quant4", "powersgd(rank=4)")
"""Hooks that are also predicted inside ``two_level``, on several nodes of several ranks."""
WARM_UP = 2  # steps; DDP rebuilds its buckets after the first one
WORTH = 0.05  # share of a step that a hook must save
FASTER = 0.1  # share by which a measured rate may exceed the link's
BUSY = 0.5  # share of the cores that other programs use, from which on times say little
ALIKE = 0.03  # predictions within this share are equal; the hook with the smaller error wins
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step with one hook.

    Attributes:
        hook: the expression.
        seconds: duration of a step on the slowest rank.
        waiting: seconds of the step in which the rank waits for messages.
        arithmetic: seconds of the hook's own work.
        sent: bytes that one rank sends in a step, by the plan, if all-reduces go round a ring.
        lossy: True if the hook changes the average by more than rounding.
        leaving: bytes that leave a node in a step, by the plan; ``None`` if no hook has two levels.
        model: seconds of the model's own work while no message travels. A hook does not change them, but other programs do.
    """

    hook: str
    seconds: float
    waiting: float
    arithmetic: float
    sent: float
    lossy: bool
    leaving: float | None = None
    model: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of :func:`advise`.

    Attributes:
        alone: seconds of a step without communication.
        predictions: one for each hook, in the order of the request.
        recommended: an expression; ``"allreduce"`` means do not compress.
        reasons: sentences.
        network: result of the probe.
        parameters: number of elements of all gradients.
        world_size: number of ranks.
        ranks_per_node: number of ranks of a node; ``None`` if no hook has two levels.
    """

    alone: float
    predictions: tuple[Prediction, ...]
    recommended: str
    reasons: tuple[str, ...]
    network: Network
    parameters: int
    world_size: int
    ranks_per_node: int | None = None


def advise(
    work: Workload,
    hooks: Sequence[str],
    *,
    seconds: float = 60.0,
    tell: Tell = lambda what: None,
    local: bool = False,
    told: LinkWords | None = None,
) -> Advice:
    """Predict a step with each hook and recommend one. Every rank must call this.

    Args:
        work: the model.
        hooks: expressions; ``allreduce`` is added if it is missing.
        seconds: time limit of the whole probe.
        tell: called with the name of each stage.
        local: True if all ranks share one machine. Then there is no link for which an outer optimizer would be worth it.
        told: the link between the ranks, as the user describes it.
    """
    hooks = list(dict.fromkeys(["allreduce", *hooks]))
    ends = time.perf_counter() + seconds
    load = used_by_others(work.device)
    tell("the round trip between two ranks")
    pair = pair_link(work.process_group, work.device)
    if pair is not None and pair.round_trip >= FAR_APART and not local:  # a busy machine is slow, not far
        work = replace(work, link=pair)
    tell("the model without communication")
    _alone(work, 1)
    alone = median(slowest(_alone(work, _count(work, 5, seconds / 8)), work.device))
    sent: list[Message] = []
    leveled: ProcessGroupTransport | None = None
    for hook in hooks:
        tell(f"messages of {hook}")
        found, transport = _messages(work, hook)
        sent += found
        leveled = transport or leveled
    tell("the network")
    budget = (ends - time.perf_counter()) * 0.4
    network = replace(probe(sent, work.process_group, work.device, budget, leveled, work.link), pair=pair, load=load)
    predictions = []
    for number, hook in enumerate(hooks):
        tell(f"arithmetic of {hook}")
        left = max(0.0, slowest([ends - time.perf_counter()], work.device)[0])
        predictions.append(_predict(work, hook, network, left / (len(hooks) - number)))
    again = median(slowest(_alone(work, _count(work, 5, seconds / 8)), work.device))
    alone = min(alone, again)  # disturbances only make a step longer
    recommended, reasons = recommend(alone, predictions)
    best = min(predictions, key=lambda one: one.seconds)
    if work.link is not None:
        reasons = (
            *reasons,
            f"Every hook was attached with link='{work.link}', because a round trip takes that long. Give it to attach, or to "
            "commhooks run --link",
        )
    if told is not None and told.rate and pair is not None and pair.rate > told.rate * (1 + FASTER):
        reasons = (
            f"Measured {pair.rate / 1e6:.0f} Mbit/s on a link of {told.text}: something lets short bursts pass, such as a token "
            "bucket, so steps with many bytes will take longer than predicted",
            *reasons,
        )
    if load > BUSY:
        reasons = (
            f"This machine is busy: before the probe, other programs used {load:.0%} of its cores. Idle ones are faster",
            *reasons,
        )
    if local:
        reasons = (
            "All ranks share this machine, so this is not your network: start it on your machines by torchrun, or shape a link "
            "with --link RATE",
            *reasons,
        )
    elif outer := rounds(alone, max(best.seconds - alone, best.waiting + best.arithmetic), best.hook, best.seconds):
        reasons = (*reasons, outer.sentence())
    parameters = sum(p.numel() for p in work.parameters() if p.requires_grad)
    each = None if network.topology is None else network.topology.ranks_per_node
    return Advice(alone, tuple(predictions), recommended, reasons, network, parameters, dist.get_world_size(), each)


def leveled_hooks(work: Workload, hooks: Sequence[str]) -> list[str]:
    """Return the hooks, each with its form on two levels if the ranks lie on several nodes of several ranks.

    Every rank must call this, because the ranks learn their nodes from each other.

    Args:
        work: the model.
        hooks: expressions; only those of :data:`LEVELED` have two forms.
    """
    if work.sharded or dist.get_world_size() < 4:
        return list(hooks)
    try:
        handle = work.attach("two_level(allreduce)")
    except commhooks.HookNotSupportedError:
        return list(hooks)  # nodes of different sizes
    transport = _transport(handle)
    handle.detach()
    topology = None if transport is None else transport.topology
    if topology is None or topology.ranks_per_node == 1 or len(topology.nodes) == 1:
        return list(hooks)
    made: list[str] = []
    for hook in hooks:
        made += [hook, f"two_level({hook})"] if hook in LEVELED else [hook]
    return made


def measure(work: Workload, hook: str, *, steps: int = 10, seconds: float = 30.0) -> list[float]:
    """Return the seconds of real steps with a hook, each on the slowest rank, as :func:`in_pairs`."""
    handle = work.attach(hook)
    try:
        for _ in range(WARM_UP):
            work.step()
        taken = [_timed(work)]
        count = max(3, min(steps, int(seconds / slowest(taken, work.device)[0])))
        taken += [_timed(work) for _ in range(count - 1)]
    finally:
        handle.detach()
    return slowest(in_pairs(taken), work.device)


def in_pairs(seconds: Sequence[float]) -> list[float]:
    """Return the mean of each step and the next one.

    A rank that starts a step late does not wait for its peer, ends early, and starts the next step early by as much. Ranks that
    are far apart take such turns for ever, so the longer step of the two ranks is up to half a round trip too long.

    >>> in_pairs([0.06, 0.04, 0.06])
    [0.05, 0.05]
    """
    return [(one + other) / 2 for one, other in pairwise(seconds)]


class Step(Protocol):
    """A predicted step, as :func:`choose` compares it."""

    @property
    def hook(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def sent(self) -> float: ...
    @property
    def lossy(self) -> bool: ...


S = TypeVar("S", bound=Step)


@dataclass(frozen=True, slots=True)
class Choice(Generic[S]):
    """Result of :func:`choose`.

    Attributes:
        best: the fastest step.
        tried: the one with the smallest error among the fastest ones.
        exact: the fastest one of an exact hook.
        base: ``exact`` if it is worth it, otherwise ``allreduce``.
        chosen: ``tried`` if it is worth it, otherwise ``base``.
    """

    best: S
    tried: S
    exact: S
    base: S
    chosen: S


def choose(steps: Sequence[S]) -> Choice[S]:
    """Choose among steps, one of them with ``allreduce``, which stays unless another hook is :func:`worth` it.

    Lossy hooks are compared with the fastest exact one.
    """
    plain = next(one for one in steps if one.hook == "allreduce")
    exact = min((one for one in steps if not one.lossy), key=lambda one: one.seconds)
    best = min(steps, key=lambda one: one.seconds)
    near = [one for one in steps if one.seconds <= best.seconds * (1 + ALIKE)]
    tried = exact if exact in near else min(near, key=lambda one: -one.sent)  # more bytes mean less error
    base = exact if worth(exact, plain) else plain
    return Choice(best, tried, exact, base, tried if tried.lossy and worth(tried, exact) else base)


def worth(step: Step, other: Step) -> bool:
    """True if a step saves at least :data:`WORTH` of another one."""
    return step.seconds <= other.seconds * (1 - WORTH)


def recommend(alone: float, predictions: Sequence[Prediction]) -> tuple[str, tuple[str, ...]]:
    """Return the recommended hook and the reasons."""
    plain = next(one for one in predictions if one.hook == "allreduce")
    found = choose(predictions)
    base, tried, exact = found.base, found.tried, found.exact
    without = max(alone, plain.model)  # other programs may have slowed one of the two down
    share = max(0.0, plain.seconds - without) / plain.seconds
    reasons = [
        f"Communication is {share:.0%} of a step with allreduce: {plain.seconds * 1e3:.1f} ms, "
        f"{without * 1e3:.1f} ms of them without any"
        if share
        else "A step with allreduce takes no longer than one without communication"
    ]
    if not tried.lossy:
        reasons.append("Do not compress: no lossy hook is faster by more than the error of the prediction")
        return base.hook, tuple(reasons)
    if found.chosen is base:
        reasons.append(
            f"Do not compress: {tried.hook} would save {max(0.0, 1 - tried.seconds / exact.seconds):.0%} of a step. A "
            f"lossy hook is worth it from {WORTH:.0%}"
        )
        return base.hook, tuple(reasons)
    noise = max(one.model for one in predictions) - min(one.model for one in predictions)
    if exact.seconds - tried.seconds < noise:
        reasons.append(
            f"Too noisy to tell: the model's own work took up to {noise * 1e3:.1f} ms longer with one hook than with another. "
            f"{tried.hook} would save {(exact.seconds - tried.seconds) * 1e3:.1f} ms. Run it again on an idle machine, or with "
            "a larger --seconds"
        )
        return base.hook, tuple(reasons)
    before, after, where = plain.sent, tried.sent, ""
    if plain.leaving is not None and tried.leaving is not None:
        before, after, where = plain.leaving, tried.leaving, " from node to node"
    reasons.append(
        f"{tried.hook} sends {before / max(after, 1):.1f} times fewer bytes{where}, and its arithmetic takes "
        f"{tried.arithmetic * 1e3:.0f} ms. A step takes {tried.seconds * 1e3:.0f} ms, which is "
        f"{plain.seconds / tried.seconds:.1f} times as fast as with allreduce"
    )
    if tried is not found.best:
        reasons.append(f"{found.best.hook} is as fast within {ALIKE:.0%} and has a larger error")
    loss = recorded_loss(tried.hook)
    reasons.append(f"It changes the gradients. Recorded cost in loss: {loss}" if loss else "It changes the gradients")
    reasons.append("Compare the loss on your own model, not only the step time, before you keep it")
    return tried.hook, tuple(reasons)


def recorded_loss(hook: str) -> str:
    """Return the cost in loss that the outermost hook of an expression declares, or an empty string."""
    if " / " in hook:
        return ""
    found = {spec.loss for spec in commhooks.list_hooks(hook.partition("(")[0]) if spec.kind != "fsdp"}
    return found.pop() if len(found) == 1 else ""


def _alone(work: Workload, count: int) -> list[float]:
    """Return this rank's seconds of ``count`` steps without communication, after the warm-up.

    FSDP2 cannot compute without the shards of its peers. Its messages are emulated and take no time.
    """
    handle = _emulated(work, "allreduce", None)[0] if work.sharded else work.attach("noop")
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
    """Return the number of steps that fit into the budget, at least 2 and equal on all ranks."""
    one = max(slowest(_alone(work, 1), work.device))
    return max(2, min(most, int(budget / one) - WARM_UP))


def _transport(handle: AttachedHooks) -> ProcessGroupTransport | None:
    """Return a transport of the handle that knows the nodes of its ranks, if its hook has two levels."""
    for one in handle.handles:
        engines = one.binding.engines if one.binding is not None else {}
        for engine in engines.values():
            transport = engine.transport
            if (
                engine.reduction.levels
                and isinstance(transport, ProcessGroupTransport)
                and transport.topology is not None
            ):
                return transport
    return None


def _emulated(work: Workload, hook: str, recorder: Recorder | None) -> tuple[AttachedHooks, list[Message]]:
    """Attach a hook whose messages are only noted. Return the list that collects them, too."""
    handle = work.attach(hook)
    sent: list[Message] = []
    for one in handle.handles:
        engines = one.binding.engines if one.binding is not None else {}
        if not engines:
            handle.detach()
            raise commhooks.HookNotSupportedError(
                f"{hook} is a foreign hook, whose messages cannot be predicted: measure it with commhooks bench"
            )
        for engine in engines.values():
            ranks = engine.transport
            topology = getattr(ranks, "topology", None)
            transport = EmulatedTransport(ranks.rank, ranks.world_size, recorder, topology, ranks.link)
            transport.sent = sent
            engine.move(transport)
    return handle, sent


def _messages(work: Workload, hook: str) -> tuple[list[Message], ProcessGroupTransport | None]:
    """Return the messages of one step of a hook, and its transport if the hook has two levels."""
    handle = work.attach(hook)
    leveled = _transport(handle)
    handle.detach()
    handle, sent = _emulated(work, hook, None)
    try:
        for _ in range(WARM_UP):
            sent.clear()
            work.step()
        return list(sent), leveled
    finally:
        handle.detach()


def _predict(work: Workload, hook: str, network: Network, budget: float) -> Prediction:
    recorder = Recorder()
    handle, _ = _emulated(work, hook, recorder)
    steps: list[tuple[float, float]] = []
    own: list[float] = []
    computed: list[float] = []
    try:
        count = WARM_UP + 1
        while len(steps) < count:
            dist.barrier()  # ranks on one machine disturb each other, as in training
            begun, before = time.perf_counter(), handle.stats()
            recorder.begin()
            work.step()
            notes = recorder.end()
            own.append(_own(handle.stats(), before))
            everyone = _of_all_ranks(notes)
            steps.append(max(Replay.of(network, everyone)))
            computed.append(max(sum(note.seconds for note in each) for each in everyone))
            if len(steps) == WARM_UP + 1:  # add as many steps as fit, equal on all ranks
                count += max(2, min(7, int(budget / slowest([time.perf_counter() - begun], work.device)[0])))
        lossy = any(one.reduction is not None and one.reduction.lossy for one in handle.handles)
        sent = float(sum(one.report().total.wire_bytes or 0 for one in handle.handles))
        leaving = None if network.topology is None else _leaving(handle, network.topology)
    finally:
        handle.detach()
    seconds, waiting = (median(column) for column in zip(*steps[WARM_UP:], strict=True))
    arithmetic = median(slowest(own[WARM_UP:], work.device))
    model = max(0.0, median(computed[WARM_UP:]) - arithmetic)
    return Prediction(hook, seconds, waiting, arithmetic, sent, lossy, leaving, model)


def _leaving(handle: AttachedHooks, topology: Topology) -> float:
    """Return the planned bytes that leave a node in a step."""
    made = 0.0
    for one in handle.handles:
        engines = one.binding.engines if one.binding is not None else {}
        for engine in engines.values():
            made += node_bytes(engine.reduction, engine.step.layouts, topology, engine.state.step).leaving
    return made


def _of_all_ranks(notes: list[Note]) -> list[list[Note]]:
    everyone: list[list[Note]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, notes)
    return everyone


def _own(after: dict[str, Any], before: dict[str, Any]) -> float:
    """Return the seconds that the hook spent on its own work."""

    def spent(key: str) -> float:
        return float(after[key] - before[key])

    return max(0.0, spent("hook_seconds") - spent("wait_seconds"))
