"""Between groups of ranks that come and go: what an adapter asks of the package that knows their manager.

A model may be spread over the ranks of one group (FSDP2), while groups that each hold all of it join, die and heal under a
manager (torchft's). The adapter of the model knows nothing of managers, and who knows the manager nothing of the model:
they meet here, by the manager's class.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from commhooks.adapters.base import AttachOptions
from commhooks.bucket import BucketLayout
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError
from commhooks.registry.by_class import class_names, offered_for
from commhooks.registry.known_names import KNOWN_MANAGERS
from commhooks.registry.registry import manager_adapters


class ManagedAxis(Protocol):
    """A handle's reduction between the groups of one manager.

    Attributes:
        engine: driven with :meth:`Engine.run` or :meth:`Engine.submit`, and :meth:`Engine.finish`, the same layouts in the same
            order on all members. It waits for the quorum by itself. A lost peer raises nothing: what is left of the
            attempt does nothing, and the manager drops it.
    """

    engine: Engine

    def plain(self) -> Engine:
        """Let go of the handle; an engine that averages plainly in its place."""

    def close(self) -> None:
        """Let go of the handle: nothing of it is sent to a healing member any more."""


Layouts = Callable[[], Sequence[BucketLayout]]
"""What the next step reduces, in order: members compare it before every step."""

ManagerAdapter = Callable[[object, Any, AttachOptions, Layouts], ManagedAxis]
"""``adapter(owner, handle, options, layouts)``, named with the manager's class by the plugin hook ``commhooks_manager``. The
owner, a model or a :class:`commhooks.Reducer`, is what the manager sends the handle's shared state for."""


def manager_adapter(manager: object) -> ManagerAdapter:
    """What reduces between the groups of a manager: that of the first class in its MRO that has one.

    Raises:
        AttachError: none has, or its package is not installed.
    """
    known = manager_adapters()
    what = f"what reduces over {class_names(manager)[0]}"
    found: ManagerAdapter | None = offered_for(manager, known, KNOWN_MANAGERS, what)
    if found is not None:
        return found
    raise AttachError(
        f"manager={type(manager).__name__}: expected a manager of groups of ranks; known here: "
        f"{', '.join(sorted(known)) or 'none (install ch-ft)'}"
    )
