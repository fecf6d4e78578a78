"""What an adapter is given, and what it makes: a :class:`Binding`, the hook in place on one model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commhooks.bucket import Bucket, BucketLayout
from commhooks.engine.engine import Engine
from commhooks.errors import HookNotSupportedError


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """The arguments of :func:`commhooks.attach` that an adapter may need. It refuses those that it cannot honour.

    Attributes:
        process_group: the group to reduce over; ``None``: the model's own.
        axis: of a model that reduces along several; ``None``: the adapter's choice.
        optimizer, scaler: who uses the gradients, for :func:`watch_optimizer`.
        verify_ranks: whether ranks may be compared: an adapter that exchanges anything itself asks this first.
        timeout: seconds that one collective may take.
        manager: of groups of ranks that come and go, each of which holds the whole model: what reduces between them is
            made by :func:`manager_adapter`. ``attach`` refuses it where the adapter has no ``takes_manager = True``.
        facts: what must be the same on all ranks besides, as lines by name (of a :class:`commhooks.Reducer`).
        rounds: committed steps of the manager -> how many of them were this hook's, if it takes no part in some.
    """

    process_group: dist.ProcessGroup | None = None
    axis: str | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: object | None = None
    verify_ranks: bool = True
    timeout: float = 1800.0
    manager: object | None = None
    facts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounds: Callable[[int], int] | None = None


class Binding(ABC):
    """A hook in place on a model: what an adapter makes, and all that a :class:`~commhooks.CommHook` asks of it.

    An adapter sets the attributes, and writes :attr:`calls` and :meth:`detach`; the rest has a default that suits a model
    with one engine.

    Attributes:
        engine: what runs the reduction; ``None`` for a foreign function.
        layout: everything that the hook reduces as one virtual bucket, in model order, the same on every rank of
            :attr:`group`. Its names are the keys of the hook's state; ``plan()`` lists them.
        params: the parameters whose gradients are reduced, in model order. The state is theirs: it refuses to serve
            another model while they live. Empty where there is no model.
        group: the ranks that must agree on hook, options and shapes before the first step, and on a state before it is
            loaded. ``None``: nobody is asked (ranks that come and go agree in every step).
        other_axes: further groups whose ranks load a state together with this one (a mesh).
        sums: the model adds up what the ranks of :attr:`group` have, and never divides by their number (the loss is
            divided by the tokens of all ranks): what a residual weighs then does not depend on how many ranks there are.
    """

    engine: Engine | None = None
    layout: BucketLayout
    params: Sequence[torch.Tensor] = ()
    group: dist.ProcessGroup | None = None
    other_axes: Sequence[dist.ProcessGroup] = ()

    @property
    def sums(self) -> bool:
        return False

    @property
    @abstractmethod
    def calls(self) -> int:
        """How often the model has called the hook: ``assert_active()`` fails if it does not grow."""

    @abstractmethod
    def detach(self) -> None:
        """Leave plain averaging in the hook's place, so that the model stays usable and can be attached to again.

        Called as well when the ranks do not agree, before :meth:`ready`.
        """

    def ready(self) -> None:  # noqa: B027 - most have nothing to do
        """The ranks of :attr:`group` have agreed: the first place for a collective of the adapter's own."""

    def stats(self) -> dict[str, float]:
        """Cumulative figures, those of all engines together; see :meth:`commhooks.CommHook.stats`."""
        return {"calls": float(self.calls)} if self.engine is None else self.engine.counters.as_dict()

    def check(self) -> None:
        """Raise what could not be raised from ``backward()``: on CUDA a step's error is known when the next begins."""
        error = None if self.engine is None else self.engine.failure or self.engine.outcome.take_error()
        if error is not None:
            raise error

    def verify_gradients(self, every: int) -> None:
        """Compare the reduced gradients of all ranks every ``every`` steps; 0 stops it.

        Raises:
            HookNotSupportedError: this kind of model has no place for it.
        """
        raise HookNotSupportedError(
            f"{type(self).__name__} cannot compare gradients: verify_gradients() is there for DDP models only"
        )

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Have ``callback`` called with every bucket of a backward as soon as it holds the average, on the thread that
        runs the backward; ``None`` stops it. What it raises is raised from ``backward()`` on every rank.

        Raises:
            HookNotSupportedError: this kind of model has no place for it.
        """
        raise HookNotSupportedError(
            f"{type(self).__name__} tells nobody of its buckets: on_reduced() is there for DDP models only"
        )
