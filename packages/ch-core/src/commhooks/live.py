"""What the engine keeps of a bucket under way."""

from dataclasses import dataclass, field

from commhooks.bucket import Bucket
from commhooks.reduction import Stages
from commhooks.requests import StagePlan
from commhooks.transport import Stage

_SMALL = 16  # a gradient's bytes per byte of the later stages, from which on these are not worth hiding


@dataclass(slots=True)
class Live:
    """A bucket whose generator has not ended.

    Attributes:
        waits: whether what is left after the first stage, if anything, waits for the drain (see
            :mod:`commhooks.engine`).
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

    def __post_init__(self) -> None:
        later = sum(request.payload_bytes for stage in self.plan[1:] for request in stage)
        gradient = self.bucket.layout.size * self.bucket.dtype.itemsize
        self.waits = self.bucket.device.type == "cpu" and later * _SMALL <= gradient
