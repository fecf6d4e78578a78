"""The :class:`Binding` that an adapter returns: the base of all adapters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ch_core import (
    Bucket,
    BucketLayout,
    Engine,
    HookNotSupportedError,
    Plain,
    ProcessGroupTransport,
    RankCheck,
    Reduction,
)
from commhooks.adapters.optimizer_watch import OptimizerWatch


class Binding(ABC):
    """A hook in place on a model, as an adapter returns it and a :class:`~commhooks.CommHook` uses it.

    An adapter sets the attributes and implements :attr:`calls` and :meth:`detach`. The other methods have defaults for a
    model with one engine.

    Attributes:
        engine: runs the reduction; ``None`` for a foreign function.
        watch: the result of :func:`watch_optimizer`, which ends with the binding; ``None`` if nothing is watched.
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
        weighs: True if all engines can average by weights.
    """

    engine: Engine | None = None
    watch: OptimizerWatch | None = None
    treatment: Reduction | None = None
    layout: BucketLayout
    params: Sequence[torch.Tensor] = ()
    ignored: Collection[int] = ()
    group: dist.ProcessGroup | None = None
    other_axes: Sequence[dist.ProcessGroup] = ()
    weighs: bool = False

    @property
    def process_groups(self) -> Sequence[dist.ProcessGroup]:
        """:attr:`group` and :attr:`other_axes`. Empty if ranks are not compared."""
        return [group for group in (self.group, *self.other_axes) if group is not None]

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
    def accumulates(self) -> bool:
        """False if no parameter has a gradient, so that the weights of earlier backwards belong to gradients that are gone."""
        return True

    @property
    @abstractmethod
    def calls(self) -> int:
        """Number of calls of the hook by the model. ``assert_active()`` fails if it does not grow."""

    @abstractmethod
    def detach(self) -> None:
        """Put plain averaging in the hook's place, so that the model stays usable and can be attached again.

        ``attach`` also calls it, before :meth:`after_agreement`, if the ranks disagree.
        """

    def close(self) -> None:
        """Call :meth:`detach`, and end the watch of the optimizer. The handle calls it, once."""
        self.detach()
        if self.watch is not None:
            self.watch.close()

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

    def weigh_ranks(self) -> None:
        """Average by the weights of :meth:`commhooks.CommHook.weigh` from now on.

        Raises:
            HookNotSupportedError: the adapter does not support it.
        """
        if not self.weighs:
            raise HookNotSupportedError(
                f"weighted=True: {type(self).__name__} does not support weights. DDP, replicate() and commhooks.Reducer do. "
                "Omit weighted=, and scale the loss by this rank's tokens over the mean tokens of all ranks"
            )
        for engine in self.engines.values():
            engine.set_weighted()

    def on_reduced(self, callback: Callable[[Bucket], None] | None) -> None:
        """Call a function with every bucket of a backward as soon as it holds the average; ``None`` stops it.

        It runs on the thread of the backward. If it raises, ``backward()`` raises on every rank. With ``weighted=True`` all ranks
        set a callback, or none does, because weights then travel before the first average.

        Raises:
            HookNotSupportedError: the adapter does not support it.
        """
        raise HookNotSupportedError(
            f"{type(self).__name__} does not report buckets: on_reduced() supports DDP models only"
        )


def leads(groups: Sequence[dist.ProcessGroup], engine: Engine | None) -> bool:
    """True on the one rank that prints for all ranks of a model, the lowest one of its groups.

    Args:
        groups: all axes of a mesh. Rank 0 of one axis alone would print once for each place on the other axes.
        engine: whose transport knows the rank if there are no groups. It changes under a manager.
    """
    if not groups:
        return (engine.transport.rank if engine is not None else dist.get_rank()) == 0
    return dist.get_rank() == min(rank for group in groups for rank in dist.get_process_group_ranks(group))


def plain_engine(group: dist.ProcessGroup | None, timeout: float) -> Engine:
    """Return an engine that averages plainly, for the time after :meth:`Binding.detach`.

    It sends no status, so its messages are those that torch sends without a hook.
    """
    return Engine(Plain(), ProcessGroupTransport(group), timeout=timeout, sends_status=False)
