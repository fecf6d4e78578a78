"""Predicts the steps of a cluster that is described by a few numbers, without any measurement.

Links become :class:`~ch_bench.advise.network.Curve` objects, and the order in which DDP or FSDP2 computes and sends becomes
notes. :class:`~ch_bench.advise.replay.Replay` combines both, as it does with measured curves and notes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch

import commhooks
from ch_bench.advise.network import SCOPES, Curve, Message, Network, Scope
from ch_bench.advise.predict import Choice, choose, worth
from ch_bench.advise.replay import Note, Replay
from ch_bench.advise.workload import axes
from ch_bench.shapes import BUCKET, FIRST_BUCKET, filled
from ch_core import LATER, BucketLayout, Reduction, StepContext
from commhooks import HookNotSupportedError, Topology

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PASSES = {"all_reduce": 2}  # times that the parts of a message go round a ring
FORWARD = 1 / 3  # part of a step without communication; the backward is the rest
MATRICES = 96  # about as many as the larger ones of a transformer with 24 layers
UNITS = 24  # layers of an FSDP2 model, each gathered as a whole
FASTEST, SLOWEST = 1e12, 1e5  # bits per second between which break-evens are searched
FAR = 1e15  # bytes; a second point of a straight line
Shape = tuple[int, ...]
Stages = list[list[Message]]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and their links.

    Attributes:
        nodes: number of nodes.
        ranks: ranks of each node.
        bits: bits per second that a node sends to other nodes, in each direction.
        round_trip: seconds between two nodes and back.
        node_bits: bits per second that a rank sends to ranks of its node.
    """

    nodes: int
    ranks: int
    bits: float
    round_trip: float = 0.0
    node_bits: float = 900e9

    @property
    def topology(self) -> Topology:
        return Topology.even(self.nodes * self.ranks, self.ranks)

    def network(self) -> Network:
        """Return the time of every message, by scope, kind and size."""
        topology = self.topology
        curves = {
            scope: {(kind, ""): _curve(self, topology, kind, scope) for kind in KINDS} for scope in ("all", *SCOPES)
        }
        levels: dict[Scope, Network] = {scope: Network(curves[scope], lanes=1) for scope in SCOPES}
        return Network(curves["all"], levels=levels, lanes=1)


def _curve(cluster: Cluster, topology: Topology, kind: str, scope: Scope) -> Curve:
    """Return the time of one collective.

    The slower of two links decides. One carries the bytes that leave a node, the other the bytes between ranks of a node. The
    latency is half a round trip for each message between nodes that a part has to wait for.

    >>> two = Cluster(2, 1, 8e6, round_trip=0.2)  # a megabyte per second
    >>> _curve(two, two.topology, "all_reduce", "all").work(1e6)  # each rank sends two halves
    1.0
    >>> _curve(two, two.topology, "all_reduce", "all").latency, _curve(two, two.topology, "all_to_all", "all").latency
    (0.2, 0.1)
    """
    _, leaving, inside = shares(topology, kind, scope)
    slope = max(leaving * 8 / cluster.bits, inside * 8 / cluster.node_bits)
    hops = topology.size(scope) - 1
    if kind == "all_to_all":
        hops = min(1, hops)
    else:
        hops *= PASSES.get(kind, 1)
        if scope == "all":  # a part goes round all ranks, and only some of these messages leave a node
            hops = math.ceil(hops / cluster.ranks)
    crosses = cluster.nodes > 1 and scope != "node"
    latency = hops * cluster.round_trip / 2 if crosses else 0.0
    return Curve((0.0, FAR), (latency, latency + FAR * slope), (0.0, 0.0))


@cache
def shares(topology: Topology, kind: str, scope: Scope) -> tuple[float, float, float]:
    """Return the bytes that a rank sends for a byte of a message, that a node sends to others, and that a rank sends inside it.

    Codes go directly to every rank, everything else round a ring of all ranks.

    >>> shares(Topology.even(4, 2), "all_reduce", "all"), shares(Topology.even(4, 2), "all_to_all", "all")
    ((1.5, 1.5, 1.5), (0.75, 1.0, 0.25))
    """
    size = topology.size(scope)
    sent = PASSES.get(kind, 1) * (size - 1) / size
    ring = kind != "all_to_all"
    nodes = [[sent * topology.leaving(rank, scope, ring=ring) for rank in node] for node in topology.nodes]
    return sent, max(map(sum, nodes)), sent - min(map(min, nodes))


@dataclass(frozen=True, slots=True)
class Training:
    """The gradients of a model and the time of a step.

    Attributes:
        layouts: of the buckets in the order in which the backward fills them; for FSDP2, of the units in that of the forward.
        step: seconds of a step without communication.
        sharded: True for FSDP2.
    """

    layouts: tuple[BucketLayout, ...]
    step: float
    sharded: bool = False

    @property
    def parameters(self) -> int:
        """Number of elements of all gradients."""
        return sum(layout.numel for layout in self.layouts)


def imagined(parameters: float, dtype: torch.dtype, sharded: bool, cap: float = BUCKET) -> tuple[BucketLayout, ...]:
    """Return the buckets of a model of square matrices, or its units for FSDP2. The first parameter is the rest.

    >>> [layout.numel for layout in imagined(3 * 64**2 + 100, torch.float32, False)]
    [12388]
    """
    side = side_of(parameters)
    count, rest = divmod(int(parameters), side * side)
    shapes = ([(1, rest)] if rest else []) + [(side, side)] * count
    return in_units(shapes, dtype) if sharded else in_buckets(shapes, dtype, cap)


def side_of(parameters: float) -> int:
    """Return the side of the matrices of an imagined model: a power of 2, so that there are about :data:`MATRICES`."""
    return max(64, int(2 ** round(math.log2(math.sqrt(parameters / MATRICES)))))


def in_buckets(
    shapes: Sequence[Shape], dtype: torch.dtype, cap: float = BUCKET, first: float = FIRST_BUCKET
) -> tuple[BucketLayout, ...]:
    """Return the layouts of DDP's buckets for parameters in the order of the model, see :func:`.filled`."""
    by_name = {str(number): shape for number, shape in enumerate(shapes)}
    return tuple(
        # Buckets with equal shapes have equal names, so they are equal and are planned once.
        BucketLayout.of_shapes({f"{place}.weight": shape for place, shape in enumerate(one.values())}, dtype)
        for one in filled(by_name, cap, first, dtype.itemsize)
    )


def in_units(shapes: Sequence[Shape], dtype: torch.dtype) -> tuple[BucketLayout, ...]:
    """Return the layouts of FSDP2's units of about equal bytes, in the order of the forward."""
    cap = sum(map(math.prod, shapes)) * dtype.itemsize / UNITS
    return in_buckets(shapes, dtype, cap, cap)[::-1]


def stages_of(reduction: Reduction, layout: BucketLayout, topology: Topology) -> Stages:
    """Return the messages of a bucket by stage, from the plan of the reduction.

    Requests of one kind and scope travel together. On two levels the ranks of a node send different parts, so a message has
    the mean size of its ranks.
    """
    places = topology.places if reduction.levels else topology.places[:1]
    made: list[Counter[tuple[str, Scope]]] = []
    for rank in places:
        context = StepContext(rank, topology.world_size, LATER, topology=topology)
        for number, stage in enumerate(reduction.plan(layout, context)):
            if number == len(made):
                made.append(Counter())
            for request in stage:
                made[number][request.kind, request.scope] += request.payload_bytes
    return [
        [Message(kind, "", round(size / len(places)), scope) for (kind, scope), size in stage.items()] for stage in made
    ]


def scatter_and_gather(reduction: Reduction, layout: BucketLayout, topology: Topology) -> tuple[Message, Message]:
    """Return the reduce-scatter of a unit's gradients and the gather of its weights.

    An average is a scatter and a gather, so the plan of the hook's average has the sizes of both.

    Raises:
        HookNotSupportedError: the hook's average is more than these two.
    """
    stages = stages_of(reduction, layout, topology)
    found = [(one.kind, one.size) for stage in stages for one in stage]
    if [kind for kind, _ in found] == ["all_reduce"]:
        size = found[0][1]
        return Message("reduce_scatter", "", size), Message("all_gather", "", size)
    if [kind for kind, _ in found] == ["all_to_all", "all_gather"] and not reduction.levels:
        return Message("all_to_all", "", found[0][1]), Message("all_gather", "", found[1][1])
    raise HookNotSupportedError(f"{reduction.name} does not divide into a scatter and a gather, which FSDP2 needs")


class _Notes:
    """Notes of the one rank that stands for all."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.sent: list[Message] = []
        self._computed = 0.0

    def compute(self, seconds: float) -> None:
        self._computed += seconds

    def post(self, stage: Sequence[Message]) -> list[int]:
        numbers = [len(self.sent) + place for place in range(len(stage))]
        for number, message in zip(numbers, stage, strict=True):
            self._note(number, message)
            self.sent.append(message)
        return numbers

    def wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._note(number, None)

    def end(self) -> None:
        self._note(-1, None)

    def _note(self, number: int, message: Message | None) -> None:
        self.notes.append(Note(self._computed, number, message))
        self._computed = 0.0


def replicated_step(buckets: Sequence[Stages], sizes: Sequence[int], step: float) -> _Notes:
    """Return the notes of a DDP step. Each bucket lets earlier ones start their next stage, as in the engine on a GPU."""
    made, whole = _Notes(), sum(sizes)
    made.compute(step * FORWARD)
    pending: list[tuple[Stages, list[int]]] = []  # later stages, and numbers of the last stage's messages
    for stages, size in zip(buckets, sizes, strict=True):
        made.compute(step * (1 - FORWARD) * size / whole)
        new = (stages[1:], made.post(stages[0]))
        pending = [*((rest[1:], made.post(rest[0])) if rest else (rest, numbers) for rest, numbers in pending), new]
    while pending:
        for _, numbers in pending:
            made.wait(numbers)
        pending = [(rest[1:], made.post(rest[0])) for rest, _ in pending if rest]
    made.end()
    return made


def sharded_step(units: Sequence[tuple[Message, Message]], sizes: Sequence[int], step: float) -> _Notes:
    """Return the notes of an FSDP2 step. A unit is gathered while the one before it computes, and again in the backward."""
    made, whole = _Notes(), sum(sizes)
    order = [*range(len(units)), *reversed(range(len(units)))]
    gathered, scattered = made.post([units[0][0]]), list[int]()
    for place, (unit, following) in enumerate(pairwise([*order, -1])):
        waited = gathered
        gathered = made.post([units[following][0]]) if following >= 0 else []
        made.wait(waited)
        backward = place >= len(units)
        made.compute(step * (1 - FORWARD if backward else FORWARD) * sizes[unit] / whole)
        if backward:
            scattered += made.post([units[unit][1]])
    made.wait(scattered)
    made.end()
    return made


@dataclass(frozen=True, slots=True)
class Line:
    """A step with one hook.

    Attributes:
        hook: the expression.
        leaving: bytes that leave a node.
        sent: bytes that a rank sends, the mean of a node.
        link: seconds that all messages would take without computation.
        left: seconds by which the messages lengthen the step.
        seconds: duration of the step.
        lossy: see :class:`~ch_bench.advise.predict.Prediction`.
    """

    hook: str
    leaving: float
    sent: float
    link: float
    left: float
    seconds: float
    lossy: bool

    @property
    def hidden(self) -> float:
        """Seconds of messages that the computation hides."""
        return max(0.0, self.link - self.left)


def line(cluster: Cluster, training: Training, hook: str) -> Line:
    """Predict a step with a hook whose arithmetic takes no time.

    Raises:
        HookNotSupportedError: FSDP2 cannot use the hook, or it is a foreign one.
    """
    gather, reduction = (_reduction(expr) for expr in (axes(hook)[:2] if training.sharded else (hook, hook)))
    topology = cluster.topology
    layouts = set(training.layouts)  # each is planned once
    sizes = [layout.numel for layout in training.layouts]
    if training.sharded:
        pairs = {
            layout: (
                scatter_and_gather(gather, layout, topology)[1],
                scatter_and_gather(reduction, layout, topology)[0],
            )
            for layout in layouts
        }
        notes = sharded_step([pairs[layout] for layout in training.layouts], sizes, training.step)
    else:
        stages = {layout: stages_of(reduction, layout, topology) for layout in layouts}
        notes = replicated_step([stages[layout] for layout in training.layouts], sizes, training.step)
    sent, leaving = (sum(one.size * shares(topology, one.kind, one.scope)[i] for one in notes.sent) for i in (0, 1))
    network = cluster.network()
    # The second time without computation: latencies of messages in flight together pass together.
    seconds, link = (
        Replay.of(network, [[note._replace(seconds=note.seconds * share) for note in notes.notes]])[0][0]
        for share in (1, 0)
    )
    left, lossy = max(0.0, seconds - training.step), gather.lossy or reduction.lossy
    return Line(hook, leaving, sent, link, left, seconds, lossy)


def _reduction(expr: str) -> Reduction:
    found = commhooks.create(expr).reduction
    if found is None:
        raise HookNotSupportedError(f"{expr} is a foreign hook, whose messages are not planned")
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of :func:`answer`.

    Attributes:
        lines: one for each hook, ``allreduce`` first.
        choice: among the lines.
        rival: the lossy hook with the shortest step; ``None`` if every hook is exact.
        pays_below: bits per second of the link below which the rival is :func:`~ch_bench.advise.predict.worth` it, if its
            arithmetic takes no time. ``None`` if that is true of no link or of every link that is searched.
    """

    lines: tuple[Line, ...]
    choice: Choice[Line]
    rival: Line | None
    pays_below: float | None


def answer(cluster: Cluster, training: Training, hooks: Sequence[str]) -> Answer:
    """Predict a step with each hook, and recommend one by the rule for measured steps."""
    lines = tuple(line(cluster, training, hook) for hook in dict.fromkeys(["allreduce", *hooks]))
    choice = choose(lines)
    lossy = [one for one in lines if one.lossy]
    if not lossy:
        return Answer(lines, choice, None, None)
    rival = choice.chosen if choice.chosen.lossy else min(lossy, key=lambda one: (one.seconds, one.link))

    def saves(bits: float) -> bool:
        slower = replace(cluster, bits=bits)
        return worth(line(slower, training, rival.hook), line(slower, training, choice.exact.hook))

    return Answer(lines, choice, rival, _highest(saves))


def _highest(pays: Callable[[float], bool]) -> float | None:
    """Return the largest rate at which a hook pays, within 1 %; ``None`` if there is no border."""
    low, high = SLOWEST, FASTEST
    if not pays(low) or pays(high):
        return None
    while high > low * 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
