"""Decides which fragment is exchanged after which inner step. Only the count of steps matters, so all ranks decide equally."""

from dataclasses import dataclass

from commhooks import HookConfigError

CARRY = "carry"  # a value of mix=


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times of all exchanges, and the parameters of a rank after an arrival.

    Fragment f of F starts its first exchange after ``(f + 1) * every // F`` inner steps, and another one every ``every`` steps.

    Args:
        every: inner steps between two exchanges of one fragment (H in the papers).
        fragments: number of fragments of equal size (F). They take turns, evenly spread over the H steps.
        overlap: inner steps between the start of an exchange and its arrival. At 0 the step waits for the exchange.
        mix: share of a rank's own parameters that stays on arrival. 0 takes the new start, and loses the inner steps of the
            overlap. 0.5 is Streaming DiLoCo's. ``"carry"`` adds the inner steps of the overlap to the new start.

    Raises:
        HookConfigError: a number is out of range.

    Example:
        >>> schedule = Schedule(every=6, fragments=2, overlap=2)
        >>> [(count, schedule.due(count)) for count in range(1, 10) if schedule.due(count)]
        [(3, [0]), (6, [1]), (9, [0])]
    """

    every: int
    fragments: int = 1
    overlap: int = 0
    mix: float | str = 0.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("every", self.every, 1),
            ("fragments", self.fragments, 1),
            ("overlap", self.overlap, 0),
        ):
            if type(value) is not int or value < least:
                raise HookConfigError(f"{name}={value!r}: expected an integer of at least {least}")
        if self.fragments > self.every:
            raise HookConfigError(
                f"fragments={self.fragments} is more than every={self.every}. Only one exchange starts after each inner step, so "
                "use at most as many fragments as inner steps"
            )
        if self.overlap > self.every:
            raise HookConfigError(
                f"overlap={self.overlap} is more than every={self.every}. An exchange must arrive before the next one of its "
                "fragment starts, so use overlap <= every"
            )
        if self.mix != CARRY and (isinstance(self.mix, str) or not 0.0 <= self.mix <= 1.0):
            raise HookConfigError(
                f"mix={self.mix!r}: expected a share of a rank's own parameters, 0 to 1, or {CARRY!r}"
            )

    def due(self, count: int) -> list[int]:
        """Return the fragments whose exchange starts after ``count`` inner steps."""
        place = count % self.every
        return [f for f in range(self.fragments) if (f + 1) * self.every // self.fragments % self.every == place]

    def last(self, fragment: int, count: int) -> int:
        """Return the number of inner steps at the start of a fragment's last exchange; 0 if it has had none.

        Args:
            fragment: its index.
            count: inner steps so far.

        >>> [Schedule(every=6, fragments=2).last(1, count) for count in (5, 6, 11, 13)]
        [0, 6, 6, 12]
        """
        first = (fragment + 1) * self.every // self.fragments
        return first + (count - first) // self.every * self.every if count >= first else 0

    def common(self, count: int) -> int | None:
        """Return the first step, ``count`` or a later one, after which all ranks are at the start and hold one model.

        ``None`` if there is none, because fragments take turns, or a rank's own parameters stay on arrival.

        >>> [Schedule(every=6, overlap=1).common(count) for count in (0, 7, 8)], Schedule(every=6, mix=0.5).common(0)
        ([7, 7, 13], None)
        """
        if self.fragments > 1 or not (self.mix == 0.0 or (self.mix == CARRY and not self.overlap)):
            return None
        return max(1, -((self.overlap - count) // self.every)) * self.every + self.overlap

    def advances(self, stages: int, passed: int) -> int:
        """Return how many stages of an exchange to complete at one inner step.

        The stages are spread evenly over the overlap, so that each has the same time to travel.

        Args:
            stages: stages of the exchange.
            passed: inner steps since its start.

        >>> [Schedule(8, overlap=6).advances(2, passed) for passed in range(1, 6)]
        [0, 0, 1, 0, 0]
        """
        if not self.overlap:
            return 0
        return passed * stages // self.overlap - (passed - 1) * stages // self.overlap
