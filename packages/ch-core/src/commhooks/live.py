"""What the engine keeps of a bucket under way."""

from dataclasses import dataclass

from commhooks.bucket import Bucket
from commhooks.reduction import Stages
from commhooks.requests import StagePlan
from commhooks.transport import Stage

_SMALL = 16  # a gradient's bytes per byte of the later stages, from which on these are not worth hiding


@dataclass(slots=True)
class Live:
    """A bucket whose generator has not ended."""

    slot: int
    bucket: Bucket
    stages: Stages
    plan: tuple[StagePlan, ...]
    stage: int = 0
    pending: Stage | None = None
    ghost: bool = False
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether what is left after the first stage, if anything, waits for the drain (see :mod:`commhooks.engine`)."""
        later = sum(request.payload_bytes for stage in self.plan[1:] for request in stage)
        gradient = self.bucket.layout.size * self.bucket.dtype.itemsize
        return self.bucket.device.type == "cpu" and later * _SMALL <= gradient
