"""Reductions between groups of ranks that join and leave under a manager.

A model may be spread over the ranks of one group (FSDP2), while several such groups join, die and heal under a manager of
torchft. The adapter of the model does not know managers, and the package of the manager does not know the model. They meet
here, by the class of the manager.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ch_core import AttachError, BucketLayout, Engine
from commhooks.adapters.optimizer_watch import OptimizerWatch
from commhooks.adapters.options import AttachOptions
from commhooks.registry.registry import REGISTRY, class_names


class ManagedAxis(Protocol):
    """The reduction of a handle between the groups of one manager.

    Attributes:
        engine: its engine. Drive it with :meth:`Engine.run` or :meth:`Engine.submit`, then :meth:`Engine.finish`, with the
            same layouts in the same order on all members. It waits for the quorum. If a peer is lost it raises nothing. The
            rest of the attempt does nothing, and the manager drops it.
        watch: watch of the optimizer given to ``attach``, or ``None``. The axis closes it. If the wrapper writes ``.grad``
            itself, the adapter calls :meth:`OptimizerWatch.before_gradient`.
    """

    engine: Engine

    @property
    def watch(self) -> OptimizerWatch | None: ...

    def plain(self) -> Engine:
        """Release the handle. Return an engine for plain averaging in its place."""

    def close(self) -> None:
        """Release the handle. Healing members get nothing of it any more."""


Layouts = Callable[[], Sequence[BucketLayout]]
"""Returns the layouts that the next step reduces, in order. Members compare them before every step."""

ManagerAdapter = Callable[[object, Any, AttachOptions, Layouts], ManagedAxis]
"""``adapter(owner, handle, options, layouts)``. The plugin hook ``commhooks_adapter`` registers it with the name of the
manager's class. The owner is a model or a :class:`commhooks.Reducer`, for which the manager sends the handle's shared state."""


def manager_adapter(manager: object) -> ManagerAdapter:
    """Return the adapter of a manager. It is registered for the first class in the manager's MRO that has one.

    Raises:
        AttachError: no installed package registers one.
    """
    names = class_names(manager)
    found: ManagerAdapter | None = REGISTRY.adapter_of(names, f"support for {names[0]}")
    if found is not None:
        return found
    raise AttachError(
        f"manager={type(manager).__name__}: expected a manager of groups of ranks, for example "
        "torchft.manager.Manager with ch-ft installed"
    )
