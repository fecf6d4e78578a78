"""The cumulative figures behind ``handle.stats()``."""

from dataclasses import dataclass, field

from commhooks.transport import Traffic


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
