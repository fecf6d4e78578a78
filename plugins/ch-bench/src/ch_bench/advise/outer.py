"""Predicts the rounds of an outer optimizer on a probed link."""

import math
from dataclasses import dataclass

import commhooks
from commhooks import UnknownHookError

SHARE = 0.1  # part of the time that exchanges may take
SHORT = 16  # steps; shorter rounds train well without outer momentum


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of an outer optimizer.

    Attributes:
        expression: for ``commhooks run --outer``.
        every: inner steps of a round.
        seconds: duration of a step, with its part of the exchange.
        share: part of the time in exchanges.
        loss: recorded cost in loss, or an empty string.
    """

    expression: str
    every: int
    seconds: float
    share: float
    loss: str

    def sentence(self) -> str:
        """Return the advice as one sentence."""
        cost = f". Recorded cost in loss: {self.loss}" if self.loss else ""
        return (
            f"An exchange in every step takes more than {SHARE:.0%} of the time. With an outer optimizer, commhooks run --outer "
            f"'{self.expression}', a step takes {self.seconds * 1e3:.0f} ms, {self.share:.0%} of it in exchanges. It is another "
            f"training method, so compare the loss{cost}"
        )


def rounds(alone: float, exchange: float, hook: str, step: float) -> Rounds | None:
    """Return the shortest rounds whose exchanges take at most :data:`SHARE` of the time.

    Args:
        alone: seconds of a step without communication.
        exchange: seconds of one exchange of all parameters, which no step overlaps.
        hook: the exchange.
        step: seconds of the fastest step with an exchange in every step.

    Returns:
        ``None`` if an exchange in every step takes little of the time, or rounds would not be faster than ``step``. A step
        alone may have been measured as longer than one with an exchange, because other programs slowed it down.

    Example:
        >>> found = rounds(0.1, 0.1, "allreduce", step=0.2)
        >>> found.every, round(found.share, 3)
        (9, 0.1)
        >>> rounds(0.1, 0.01, "allreduce", step=0.11) is None, rounds(0.1, 0.1, "allreduce", step=0.11) is None
        (True, True)
    """
    every = math.ceil(exchange * (1 - SHARE) / (SHARE * alone) - 1e-9)
    every += -every % 10 ** max(0, len(str(every)) - 2)  # two digits, because the times are not known better
    if every < 2:
        return None
    name = "local_sgd" if every <= SHORT else "diloco"
    try:
        [spec] = commhooks.list_hooks(name, kind="outer")
    except (UnknownHookError, ValueError):  # ch-outer is not installed, or another package has the name, too
        return None
    seconds = alone + exchange / every
    if seconds >= step:
        return None
    return Rounds(f"{name}(every={every}, exchange={hook})", every, seconds, exchange / every / seconds, spec.loss)
