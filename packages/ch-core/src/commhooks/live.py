"""What the engine keeps of a bucket under way, and what it counts."""

from dataclasses import dataclass, field

from commhooks.bucket import Bucket
from commhooks.reduction import Stages
from commhooks.requests import StagePlan
from commhooks.transport import Stage, Traffic


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


@dataclass(slots=True)
class Counters:
    """Cumulative figures of one engine."""

    steps: int = 0
    compressed_steps: int = 0
    hook_seconds: float = 0.0
    wait_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def as_dict(self) -> dict[str, float]:
        return {
            "steps": float(self.steps),
            "compressed_steps": float(self.compressed_steps),
            "payload_bytes": self.traffic.payload_bytes,
            "wire_bytes": self.traffic.wire_bytes,
            "rounds": float(self.traffic.rounds),
            "hook_seconds": self.hook_seconds,
            "wait_seconds": self.wait_seconds,
        }
