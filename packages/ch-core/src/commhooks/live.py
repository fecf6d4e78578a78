"""What the engine keeps of buckets under way."""

from dataclasses import dataclass, field

from commhooks.bucket import Bucket
from commhooks.reduction import Stages
from commhooks.requests import Request, StagePlan, payload_bytes
from commhooks.transport import Stage

_SMALL = 16  # a gradient's bytes per byte of the later stages, from which on these are not worth hiding
# Bytes that are worth a message of their own: at 50 Mbit/s they take 5 ms, at 1 Gbit/s a quarter of one.
_ENOUGH = 1 << 15


@dataclass(slots=True)
class Live:
    """A bucket whose generator has not ended.

    Attributes:
        waits: whether what is left after the first stage, if anything, waits for the drain (see
            :mod:`commhooks.engine`).
        gathers: whether what it asks for first may travel with what the next buckets ask for. Not where it ends with
            that, because such an average is DDP's to the bit, nor where it asks for much (which would be copied), nor
            for anything but all-reduces (which would not become one message).
    """

    slot: int
    bucket: Bucket
    stages: Stages
    plan: tuple[StagePlan, ...]
    stage: int = 0
    pending: Stage | None = None
    ghost: bool = False
    done: bool = False
    waits: bool = field(init=False)
    gathers: bool = field(init=False)

    @property
    def opaque(self) -> bool:
        """Whether what it received shows only when decoded whether it is finite."""
        return any(r.kind in ("all_gather", "all_to_all") for stage in self.plan for r in stage)

    def __post_init__(self) -> None:
        later = payload_bytes(self.plan[1:])
        gradient = self.bucket.layout.size * self.bucket.dtype.itemsize
        self.waits = self.bucket.device.type == "cpu" and later * _SMALL <= gradient
        little = len(self.plan) > 1 and 0 < payload_bytes(self.plan[:1]) < _ENOUGH
        self.gathers = self.waits and little and all(request.kind == "all_reduce" for request in self.plan[0])


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
        return sum(payload_bytes(live.plan[:1]) for live in self.lives) >= _ENOUGH

    def go(self, stage: Stage) -> None:
        """It travels as ``stage``, and is forgotten here."""
        for live in self.lives:
            live.pending = stage
        requests = tuple(self.requests)
        self.requests, self.lives = [], []
        stage.start(requests)
