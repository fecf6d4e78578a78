"""What the engine keeps of a bucket under way."""

from dataclasses import dataclass

from commhooks.bucket import Bucket
from commhooks.reduction import Stages
from commhooks.requests import StagePlan
from commhooks.transport import Stage


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
