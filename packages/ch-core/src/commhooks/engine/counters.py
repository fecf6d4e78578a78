"""The cumulative figures behind ``handle.stats()``."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """What collectives carried, per rank.

    Attributes:
        payload_bytes: of the tensors that reductions gave to collectives; exact.
        wire_bytes: what this rank sent for them and for the status, see :class:`~commhooks.engine.stage.Stage`.
        trip_bytes: the payload times the trips that it makes over the network, two for an all-reduce.
        rounds: stages that communicated.
    """

    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    trip_bytes: float = 0.0
    rounds: int = 0

    def add(self, payload_bytes: int, trip_bytes: int) -> None:
        """Some requests of a rank, as :class:`~commhooks.requests.RequestPlan` counts their bytes."""
        self.payload_bytes += payload_bytes
        self.trip_bytes += trip_bytes


@dataclass(slots=True)
class Counters:
    """Cumulative figures of one engine.

    Attributes:
        gradient_bytes: of the buckets of the present step.
        encode_seconds: host time of reductions up to their last request, and of what merges, casts and starts it.
        decode_seconds: of reductions after that.
    """

    steps: int = 0
    compressed_steps: int = 0
    hook_seconds: float = 0.0
    wait_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    gradient_bytes: float = 0.0
    _before: tuple[float, int] = (0.0, 0)

    def begin(self) -> None:
        """A step begins."""
        self.gradient_bytes, self._before = 0.0, (self.traffic.trip_bytes, self.traffic.rounds)

    @property
    def communicated(self) -> bool:
        """Whether the present step has asked for a collective."""
        return self.traffic.rounds > self._before[1]

    def end(self, trips: int) -> None:
        """The step has ended; it was compressed if it sent something, but less than ``trips`` times the gradient."""
        self.steps += 1
        self.compressed_steps += 0 < self.traffic.trip_bytes - self._before[0] < trips * self.gradient_bytes

    def as_dict(self) -> dict[str, float]:
        return {
            "steps": float(self.steps),
            "compressed_steps": float(self.compressed_steps),
            "payload_bytes": self.traffic.payload_bytes,
            "wire_bytes": self.traffic.wire_bytes,
            "rounds": float(self.traffic.rounds),
            "hook_seconds": self.hook_seconds,
            "wait_seconds": self.wait_seconds,
            "encode_seconds": self.encode_seconds,
            "decode_seconds": self.decode_seconds,
        }
