"""A Lightning callback that attaches a hook. Needs Lightning; nothing else imports this module.

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers a hook on CUDA only, and drops it without a word elsewhere
(2.6). A callback sees the wrapped model on every device.
"""

from collections.abc import Callable, Mapping
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # said when one is made: tools that look at every module can import this one
    Callback = object

import commhooks
from commhooks import CommHook, Reduction


class CommHookCallback(Callback):
    """Attaches a hook when fitting starts, and again to the new model that every further ``fit`` wraps.

    Args:
        what: as for :func:`commhooks.attach`.
        options: further arguments of :func:`commhooks.attach`.

    Attributes:
        handle: the attached hook, from the start of the first ``fit`` on. Lightning writes the callbacks of rank 0
            only: save each rank's ``handle.state_dict()`` yourself.

    ``Trainer(strategy="ddp", callbacks=[CommHookCallback("powersgd(rank=4)")])``
    """

    def __init__(
        self, what: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook, **options: Any
    ) -> None:
        if Callback is object:
            raise ImportError("CommHookCallback needs Lightning: pip install 'lightning>=2.2'")
        self.what, self.options = what, options
        self.handle: CommHook | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.handle is not None and self.handle.attached:
            self.handle.detach()
        again = self.what if self.handle is None else self.handle
        self.handle = commhooks.attach(trainer.strategy.model, again, **self.options)
