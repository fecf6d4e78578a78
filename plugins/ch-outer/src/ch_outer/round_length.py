"""Length of the rounds of ranks with unequal speed: seconds, or tokens of all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass

from commhooks import HookConfigError


@dataclass(frozen=True, slots=True)
class Pace:
    """Length of a round, and how late a rank may be.

    Args:
        seconds: length of a round; 0 if `tokens` decides.
        tokens: tokens (or samples) of all ranks together in a round; 0 if `seconds` decides. The ranks' speeds in earlier rounds
            turn them into seconds.
        grace: part of a round's length for which the others wait for a late rank.
        late: number of rounds in a row that may end without a rank. The next round waits for it.

    Raises:
        HookConfigError: a number is out of range, or both or none of `seconds` and `tokens` are given.

    Example:
        >>> Pace(tokens=300).length([10.0, 20.0])
        10.0
    """

    seconds: float = 0.0
    tokens: int = 0
    grace: float = 0.1
    late: int = 1

    def __post_init__(self) -> None:
        for name in ("seconds", "tokens", "grace", "late"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise HookConfigError(f"{name}={value!r}: expected a number of at least 0")
        if bool(self.seconds) == bool(self.tokens):
            raise HookConfigError(
                f"seconds={self.seconds} and tokens={self.tokens}: give exactly one of them as the length of a round"
            )

    def length(self, speeds: Sequence[float]) -> float | None:
        """Return the seconds of the next round, or ``None`` if the speed of a rank is not known yet.

        Args:
            speeds: tokens per second of each rank, 0 if unknown.
        """
        if self.seconds:
            return float(self.seconds)
        return self.tokens / sum(speeds) if speeds and min(speeds) > 0 else None
