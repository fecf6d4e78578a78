"""Which parameters got a gradient of their own since the last average, where DDP allows for some that get none."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.layout import averaged


class Arrivals:
    """Counts a parameter as used as DDP does: a gradient has been added to its ``.grad`` since the last averaged
    backward, under ``no_sync()`` too. ``.grad`` itself cannot tell: ``zero_grad(set_to_none=False)`` leaves zeros in it.

    Args:
        model: the DDP model.
        whole: whether the first step is seen from its beginning.
    """

    def __init__(self, model: DistributedDataParallel, *, whole: bool) -> None:
        self._whole = whole
        self._arrived: set[int] = set()
        trained = [p for _, p in averaged(model) if p.requires_grad]
        self._watched = {id(p) for p in trained}
        arrive = _adder(self._arrived)
        self._hooks = [p.register_post_accumulate_grad_hook(arrive) for p in trained]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def none_of(self, param: torch.Tensor) -> bool:
        """Whether a parameter got no gradient."""
        if param.grad is None:
            return True
        return self._whole and id(param) in self._watched and id(param) not in self._arrived

    def averaged(self) -> None:
        """A backward has been averaged."""
        self._arrived.clear()
        self._whole = True

    def close(self) -> None:
        """Leave the parameters alone."""
        _remove(self._hooks)


def arrivals_of(models: Sequence[DistributedDataParallel], *, whole: bool) -> Arrivals | None:
    """Watch the model among these that may leave parameters without a gradient, if there is one.

    A static graph's parameters are used in every step or in none, and ``.grad`` tells that.
    """
    for model in models:
        if model.find_unused_parameters and not model.static_graph:
            return Arrivals(model, whole=whole)
    return None


def _adder(arrived: set[int]) -> Callable[[torch.Tensor], None]:
    """The hook of every parameter. It holds the set only: a driver that is dropped must not live on in them."""

    def arrive(param: torch.Tensor) -> None:
        arrived.add(id(param))

    return arrive


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
