"""What the engine keeps of buckets under way."""

from dataclasses import dataclass, field

from commhooks.bucket import Bucket, BucketLayout
from commhooks.reduction import Stages
from commhooks.requests import Request, StagePlan, payload_bytes
from commhooks.transport import Stage

_SMALL = 16  # a gradient's bytes per byte of the later stages, from which on these are not worth hiding
# Bytes that are worth a message of their own: at 50 Mbit/s they take 5 ms, at 1 Gbit/s a quarter of one.
_ENOUGH = 1 << 15


class Course:
    """What buckets of one layout go through, and what follows from it: worked out once, not at every step.

    Args:
        plan: the stages.
        layout: of the buckets.

    Attributes:
        volumes: bytes of each stage, as ``(payload, payload times the passes it makes)``.
        waits: whether what is left after the first stage, if anything, waits for the drain (see
            :mod:`commhooks.engine`).
        gathers: whether what is asked for first may travel with what the next buckets ask for. Not where it ends with
            that, nor where it asks for much (which would be copied), nor for anything but all-reduces (which would not
            become one message).
        ends_at_once: whether nothing is left after the first stage: such an average is DDP's to the bit.
        opaque: whether what is received shows only when decoded whether it is finite.
    """

    __slots__ = ("ends_at_once", "gathers", "opaque", "plan", "volumes", "waits")

    def __init__(self, plan: tuple[StagePlan, ...], layout: BucketLayout) -> None:
        self.plan = plan
        self.volumes = [(payload_bytes((stage,)), sum(r.trip_bytes for r in stage)) for stage in plan]
        gradient, later = layout.size * layout.dtype.itemsize, payload_bytes(plan[1:])
        self.waits = layout.device.type == "cpu" and later * _SMALL <= gradient
        self.ends_at_once = len(plan) < 2
        little = not self.ends_at_once and 0 < self.volumes[0][0] < _ENOUGH
        self.gathers = self.waits and little and all(request.kind == "all_reduce" for request in plan[0])
        self.opaque = any(r.kind in ("all_gather", "all_to_all") for stage in plan for r in stage)


@dataclass(slots=True)
class Live:
    """A bucket whose generator has not ended."""

    slot: int
    bucket: Bucket
    stages: Stages
    course: Course
    stage: int = 0
    pending: Stage | None = None
    ghost: bool = False
    done: bool = False

    @property
    def due(self) -> StagePlan | None:
        """What it has to ask for next; ``None`` when it has asked for everything."""
        return self.course.plan[self.stage] if self.stage < len(self.course.plan) else None


@dataclass(slots=True)
class Asked:
    """What buckets have asked for that is not under way yet.

    Attributes:
        requests: in the order in which they were made.
        lives: who made them.
    """

    requests: list[Request] = field(default_factory=list)
    lives: list[Live] = field(default_factory=list)

    def add(self, live: Live, requests: tuple[Request, ...]) -> None:
        """What ``live`` asks for in its next stage."""
        self.requests.extend(requests)
        self.lives.append(live)
        live.stage += 1

    @property
    def enough(self) -> bool:
        """Whether these first stages are worth a message."""
        return sum(live.course.volumes[0][0] for live in self.lives) >= _ENOUGH

    def go(self, stage: Stage) -> None:
        """It travels as ``stage``, and is forgotten here."""
        for live in self.lives:
            live.pending = stage
        requests = tuple(self.requests)
        self.requests, self.lives = [], []
        stage.start(requests)
