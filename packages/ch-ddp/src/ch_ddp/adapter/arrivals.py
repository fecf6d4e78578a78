"""Record of the parameters that got a gradient, in averaged backwards and in others."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


class Arrivals:
    """Records which parameters got a gradient since the last averaged backward, under ``no_sync()`` too.

    This is DDP's definition of a used parameter. The value of ``.grad`` proves nothing, because
    ``zero_grad(set_to_none=False)`` leaves zeros in it. It does not keep parameters alive, unless it has ``unseen``.

    Args:
        whole: True if the record starts before the first step. Otherwise it knows nothing of that step.
        began: called with the first gradient of each backward.
        unseen: called with a parameter whose gradient DDP does not see. A parameter whose ``.data`` gets another dtype or device
            also gets another accumulator of gradients, and DDP's hook stays at the old one.
    """

    def __init__(
        self,
        *,
        whole: bool,
        began: Callable[[], None] | None = None,
        unseen: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._arrived: set[int] = set()
        self.whole = whole
        self._watched: set[int] = set()
        self._accumulators: list[object] | None = [] if unseen is not None else None
        self._hooks: list[RemovableHandle] = []
        self._hook_of = _hooks_into(self._arrived, began, unseen)
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Hook parameters that are trainable. Torch refuses a hook of a frozen parameter, so call it again after a thaw."""
        for p in params:
            if not p.requires_grad or id(p) in self._watched:
                continue
            accumulator = None
            if self._accumulators is not None:
                accumulator = get_gradient_edge(p).node
                self._accumulators.append(accumulator)  # an object that hooks compare by identity has to live
            self._hooks.append(p.register_post_accumulate_grad_hook(self._hook_of(id(accumulator))))
            self._watched.add(id(p))

    def watches(self, param: torch.Tensor) -> bool:
        """Return True if the parameter has its hook."""
        return id(param) in self._watched

    def has(self, param: torch.Tensor) -> bool:
        """Return True if the parameter got a gradient in this step."""
        return id(param) in self._arrived

    def unused(self, param: torch.Tensor) -> bool:
        """Return True if the parameter has no gradient of this step."""
        return param.grad is None or (self.whole and self.watches(param) and not self.has(param))

    def begin_step(self) -> None:
        """Begin the next step. The backward of the last one was averaged."""
        self._arrived.clear()
        self.whole = True

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        _remove(self._hooks)
        self._watched.clear()


def _hooks_into(
    arrived: set[int], began: Callable[[], None] | None, unseen: Callable[[torch.Tensor], None] | None
) -> Callable[[int], Callable[[torch.Tensor], None]]:
    """Return the maker of a parameter's hook. A hook references no object that references the parameter, so both are freed."""
    current, node = torch._C._current_graph_task_id, torch._C._current_autograd_node
    backward = [-1]

    def hook_of(accumulator: int) -> Callable[[torch.Tensor], None]:
        def arrive(param: torch.Tensor) -> None:
            arrived.add(id(param))
            task = current()
            if task != backward[0]:
                backward[0] = task
                if began is not None:
                    began()
            if unseen is not None and id(node()) != accumulator:
                unseen(param)

        return arrive

    return hook_of


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
