"""The options of an adapter and the :class:`Binding` that it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from ch_core import Bucket, BucketLayout, Engine, HookNotSupportedError, RankCheck, Reduction


class Scaler(Protocol):
    """The methods of a ``GradScaler`` that commhooks calls."""

    def is_enabled(self) -> bool:
        """Return False if the scale is always 1."""

    def get_scale(self) -> float:
        """Return the scale of the loss. On a GPU the host waits for it."""


FindOptimizers = Callable[[Iterable[torch.Tensor]], Sequence[torch.optim.Optimizer]]
"""Returns the optimizers, so far, that hold one of the parameters."""


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """Arguments of :func:`commhooks.attach`. An adapter refuses arguments that it does not support.

    Attributes:
        process_group: group to reduce over; ``None`` for the group of the model.
        axis: axis to reduce along, for a model with several; ``None`` if the adapter chooses.
        optimizer, scaler: optimizer (or a function that finds all of them) and ``GradScaler`` that use the gradients, for
            :func:`watch_optimizer`.
        verify_ranks: True if the adapter may compare ranks. If not, it exchanges nothing before the first step.
        timeout: seconds that one collective may take.
        manager: manager of groups that join and leave, each of which holds the whole model. :func:`manager_adapter` finds
            what reduces between the groups. ``attach`` refuses a manager unless the adapter has ``takes_manager = True``.
        facts: further lines by name that all ranks must share, of a :class:`commhooks.Reducer`.
        rounds: function from the manager's committed steps to the number of steps in which the hook took part.
    """

    process_group: dist.ProcessGroup | None = None
    axis: str | None = None
    optimizer: torch.optim.Optimizer | FindOptimizers | None = None
    scaler: Scaler | None = None
    verify_ranks: bool = True
    timeout: float = 1800.0
    manager: object | None = None
    facts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounds: Callable[[int], int] | None = None


class Binding(ABC):
    """A hook in place on a model, as an adapter returns it and a :class:`~commhooks.CommHook` uses it.

    An adapter sets the attributes and implements :attr:`calls` and :meth:`detach`. The other methods have defaults for a
    model with one engine.

    Attributes:
        engine: runs the reduction; ``None`` for a foreign function.
        treatment: the reduction that ``plan()`` lists, if the adapter narrows the attached one; ``None`` otherwise.
        layout: all gradients that the hook reduces as one virtual bucket, in model order, equal on every rank of
            :attr:`group`. Its names are the keys of the hook's state, and ``plan()`` lists them. A model may have several
            dtypes, so bytes follow from :attr:`layouts`.
        params: parameters whose gradients are reduced, in model order. While they live, the state refuses to serve another
            model. Empty without a model.
        ignored: identities of parameters that the wrapper leaves alone. Ranks may differ in them.
        group: ranks that must agree on hook, options and shapes before the first step, and on a state before they load it.
            ``None`` if ranks are not compared. Groups under a manager agree in every step.
        other_axes: other groups of a mesh whose ranks load a state together with this one.
        sums: True if the model sums the ranks' gradients without a division, because its loss is divided by the tokens
            of all ranks. The weight of a residual then does not depend on the number of ranks.
    """

    engine: Engine | None = None
    treatment: Reduction | None = None
    layout: BucketLayout
    params: Sequence[torch.Tensor] = ()
    ignored: Collection[int] = ()
    group: dist.ProcessGroup | None = None
    other_axes: Sequence[dist.ProcessGroup] = ()

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by axis of a mesh; one without a name for a single axis; none for a foreign function."""
        return {} if self.engine is None else {"": self.engine}

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        """The same gradients as one virtual bucket for each dtype and device, because no bucket has several."""
        return [self.layout]

    @property
    def sums(self) -> bool:
        return False

    @property
    @abstractmethod
    def calls(self) -> int:
        """Number of calls of the hook by the model. ``assert_active()`` fails if it does not grow."""

    @abstractmethod
    def detach(self) -> None:
        """Put plain averaging in the hook's place, so that the model stays usable and can be attached again.

        ``attach`` also calls it, before :meth:`after_agreement`, if the ranks disagree.
        """

    def after_agreement(self) -> None:  # noqa: B027 - most adapters need no collective
        """Start collectives of the adapter itself. The ranks of :attr:`group` have agreed."""

    def stats(self) -> dict[str, float]:
        """Return the cumulative figures of all engines; see :meth:`commhooks.CommHook.stats`."""
        return {"calls": float(self.calls)} if self.engine is None else self.engine.counters.as_dict()

    def check(self) -> None:
        """Raise an error that ``backward()`` has not raised. On a GPU the next step tells the error of a step."""
        error = None if self.engine is None else self.engine.failure or self.engine.outcome.take_error()
        if error is not None:
            raise error

    def verify_gradients(self, every: int) -> None:
        """Compare the reduced gradients of all ranks every ``every`` steps; 0 stops it.

        Raises:
            HookNotSupportedError: the adapter does not support it.
        """
        raise HookNotSupportedError(
            f"{type(self).__name__} cannot compare gradients: verify_gradients() supports DDP models only"
        )

    def check_ranks(self, check: RankCheck) -> None:
        """Compare parameters across ranks with this check: give it the tensors, and set it on the engine of their ranks.

        A model whose ranks hold different parts calls :meth:`.RankCheck.leave`.

        Raises:
            HookNotSupportedError: the adapter does not support it.
        """
        raise HookNotSupportedError(
            f"check_ranks_every: {type(self).__name__} does not know which of its parameters are equal on all ranks. DDP and "
            "the replicate axis of FSDP2 support it"
        )

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call a function with every bucket of a backward as soon as it holds the average; ``None`` stops it.

        It runs on the thread of the backward. If it raises, ``backward()`` raises on every rank.

        Raises:
            HookNotSupportedError: the adapter does not support it.
        """
        raise HookNotSupportedError(
            f"{type(self).__name__} does not report buckets: on_reduced() supports DDP models only"
        )
