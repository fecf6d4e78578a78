"""When which fragment is exchanged: from the number of inner steps alone, so that all ranks decide alike."""

from dataclasses import dataclass

from commhooks import HookConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fragment f of F starts its exchange after inner steps ``(f + 1) * every // F``, and every ``every`` steps from then on.

    Args:
        every: inner steps between two exchanges of one fragment: H.
        fragments: into how many the parameters are split: F. They take turns, evenly spread over the H steps.
        overlap: inner steps that go on while an exchange is under way: tau. 0: the step waits for it.

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
                f"fragments={self.fragments} need as many inner steps, every={self.every}: one exchange starts at a time"
            )
        if self.overlap > self.every:
            raise HookConfigError(
                f"overlap={self.overlap} is more than every={self.every}: a fragment's exchange has to arrive before its next "
                "one starts"
            )

    def due(self, count: int) -> list[int]:
        """The fragments whose exchange starts after ``count`` inner steps."""
        place = count % self.every
        return [f for f in range(self.fragments) if (f + 1) * self.every // self.fragments % self.every == place]

    def advances(self, stages: int, passed: int) -> int:
        """How many stages of an exchange of ``stages`` are waited for, ``passed`` steps after its start: evenly spread over
        the overlap, each with the same time to travel.

        >>> [Schedule(8, overlap=6).advances(2, passed) for passed in range(1, 6)]
        [0, 0, 1, 0, 0]
        """
        if not self.overlap:
            return 0
        return passed * stages // self.overlap - (passed - 1) * stages // self.overlap
