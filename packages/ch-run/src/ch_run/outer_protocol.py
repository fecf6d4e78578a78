"""The methods that an outer optimizer of a plugin has for `commhooks run --outer`."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from commhooks import TraceSource


class Outer(Protocol):
    """An outer optimizer: the result of a registered target of kind "outer", called as `target(optimizer, model, **options)`.

    Options are those of its expression, and `process_group`, the ranks that exchange.

    Attributes:
        count: inner steps done.
    """

    count: int

    def follow(self, *others: torch.optim.Optimizer, finish_after: int | None = None) -> Callable[[], None]:
        """Make outer steps whenever the inner optimizer itself steps. Return a function that ends this.

        `load_state_dict` of the model then moves the start of the round to the loaded parameters.

        Args:
            others: optimizers of the same model that step before the inner one.
            finish_after: inner steps of the whole run. After them all ranks take one model.
        """

    def finish(self) -> None:
        """End the training on all ranks, which then hold one model."""

    @property
    def common(self) -> bool:
        """True if all ranks hold one model now."""

    def next_common(self) -> int | None:
        """Return the number of the next step after which all ranks hold one model; `None` if only :meth:`finish` does so."""

    def stats(self) -> dict[str, float]:
        """Return cumulative figures by name."""

    def trace_source(self) -> TraceSource:
        """Return what a trace records."""

    def report(self) -> dict[str, Any]:
        """Return figures for people: `exchange_share`, `apart` by exchange, and `apart_growth`.

        `steps_alone` counts the latest inner steps that no other rank has received yet.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, state_dict: dict[str, Any], *, world_change: str = "error") -> None:
        """Load a state on all ranks."""
