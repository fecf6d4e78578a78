"""Figures of an outer optimizer for people: the time in exchanges, and how far ranks move apart in a round."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

ROUNDS = 4096  # of which the distances are kept
FEW = 5  # rounds whose median is compared
GROWN = 2.0  # a distance that has grown by this factor is worth a warning

log = logging.getLogger("commhooks")


class Progress:
    """Times and distances of one rank.

    Attributes:
        apart: of the latest rounds, the distance of this rank's parameters from the mean of all ranks at its arrival, divided by
            the norm of the start. A lossy exchange adds its error.
        exchanging: seconds in which steps waited for exchanges.

    Example:
        >>> progress = Progress()
        >>> for distance in [0.1] * 5 + [0.3] * 5:
        ...     progress.landed(distance)
        >>> progress.figures()["apart_growth"]
        3.0
    """

    def __init__(self) -> None:
        self.apart: deque[float] = deque(maxlen=ROUNDS)
        self.exchanging = 0.0
        self._began: float | None = None
        self._first: list[float] = []
        self._warned = False

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Count the time inside as time in an exchange."""
        begun = time.perf_counter()
        if self._began is None:
            self._began = begun
        try:
            yield
        finally:
            self.exchanging += time.perf_counter() - begun

    def began(self) -> None:
        """Start the clock of the share of time in exchanges, at the first inner step."""
        if self._began is None:
            self._began = time.perf_counter()

    def landed(self, apart: float) -> None:
        """Note the distance of one exchange, and warn once if distances have grown. It is NaN if parameters are not finite."""
        self.apart.append(apart)
        if apart != apart:
            return
        if len(self._first) < FEW:
            self._first.append(apart)
        elif not self._warned and self._growth() > GROWN:
            self._warned = True
            log.warning(
                "the ranks move %.1f times as far apart in a round as at the beginning (%.2g of the parameters' norm). Use "
                "shorter rounds or a lower inner learning rate if the loss rises",
                self._growth(),
                apart,
            )

    def _growth(self) -> float:
        """Return the median distance of the latest rounds divided by the median of the first rounds; 1 if there are too few."""
        latest = [one for one in list(self.apart)[-2 * FEW :] if one == one][-FEW:]
        usual = median(self._first) if len(self._first) == FEW else 0.0
        return median(latest) / usual if usual and len(latest) == FEW else 1.0

    def figures(self) -> dict[str, Any]:
        """Return the share of time in exchanges, and the distances."""
        whole = time.perf_counter() - self._began if self._began is not None else 0.0
        return {
            "exchange_share": self.exchanging / whole if whole else 0.0,
            "apart": [one if one == one else None for one in self.apart],
            "apart_growth": round(self._growth(), 3),
        }
