"""Detection of backwards whose gradients DDP does not synchronise."""

import weakref
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle

from commhooks import AttachError, HookNotSupportedError
from commhooks.adapters import NO_BACKWARD, after_backward, at_end_of_backward, backward_id


class UnsyncedBackwardWatch:
    """Raises an error for gradients that DDP leaves unsynchronised. torch stays silent, and the ranks drift apart.

    DDP skips synchronisation in three cases: a second ``backward()`` on a retained graph, a ``backward()`` of the first
    of two forwards, and a forward of ``model.module`` instead of ``model``. The watch marks the outputs of every
    forward in the autograd graph. It reports a backward that reaches a mark after the step's buckets were averaged, or
    a mark of a forward outside DDP, and then reaches a parameter. A backward that reaches no mark (a weight
    regulariser) gives equal gradients on all ranks and is legal.

    Args:
        model: DDP model.
        name: hook's name, for the error.
        module: module whose forward is marked. The default is the wrapped module.
    """

    def __init__(self, model: DistributedDataParallel, name: str, module: torch.nn.Module | None = None) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._step = 0  # number of averaged backwards
        self._ended = NO_BACKWARD  # id of the last averaged backward
        self._by_ddp = False  # True while the DDP model runs the forward
        self._suspect: list[RemovableHandle] = []  # parameter hooks of a suspected backward
        module = module if module is not None else model.module
        self._removable: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        ]

    def synchronised(self) -> None:
        """Count a backward whose last bucket has arrived."""
        self._step += 1
        self._ended = backward_id()

    def close(self) -> None:
        """Stop watching."""
        for hook in (*self._removable, *self._suspect):
            hook.remove()
        self._removable.clear()
        self._suspect.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return (_inactive_watch, ())  # a copied model is not watched

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        # A forward hook on the DDP model would miss a direct call of model.forward(x).
        self._by_ddp = DistributedDataParallel._active_ddp_module is self._model()

    def _leave(self, module: torch.nn.Module, inputs: object, outputs: object) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        model, step = self._model(), self._step if self._by_ddp else None
        if model is None or not model.require_backward_grad_sync:
            return  # under no_sync() local gradients are intended
        watch = weakref.ref(self)

        def reached(gradients: object) -> None:
            alive = watch()
            if alive is not None:
                alive._reached(step)

        nodes = {t.grad_fn for t in _find_tensors(outputs) if t.grad_fn is not None}
        for node in nodes:
            node.register_prehook(reached)

    def _reached(self, step: int | None) -> None:
        """Handle a backward that reached the mark of a forward.

        Args:
            step: number of averaged backwards before that forward, or None if DDP did not run the forward.
        """
        model = self._model()
        if model is None or not model.require_backward_grad_sync or not self._removable:
            return
        graph = torch.is_grad_enabled()  # True under create_graph=True
        if (step == self._step and not graph) or backward_id() == self._ended:
            return
        # Only gradients that reach a parameter need synchronisation. Under torch.autograd.grad() none does.
        self._forget()
        arrived = self._graph_arrived if step == self._step else partial(self._arrived, self._step)
        trained = [p for p in model.module.parameters() if p.requires_grad]
        self._suspect = [p.register_post_accumulate_grad_hook(arrived) for p in trained]
        at_end_of_backward(self._forget)

    def _forget(self) -> None:
        for hook in self._suspect:
            hook.remove()
        self._suspect.clear()

    def _graph_arrived(self, param: torch.Tensor) -> None:
        # Raise before DDP's own hook of the first parameter. Otherwise the reducer fails half way through.
        self._forget()
        raise HookNotSupportedError(
            "DDP cannot average gradients under backward(create_graph=True). Use torch.autograd.grad(..., "
            "create_graph=True) for the inner derivative, and an ordinary backward() of the final loss"
        )

    def _arrived(self, step: int, param: torch.Tensor) -> None:
        self._forget()
        after_backward(partial(self._ended_so, step))

    def _ended_so(self, step: int) -> None:
        if self._step != step:
            return  # the same backward also reached a forward of DDP, which averaged everything
        raise AttachError(
            f"{self._name} was not called for this backward. DDP synchronises one backward per forward of the wrapped "
            "model, so these gradients differ between ranks. Add the losses and call backward() once, or call it inside "
            "model.no_sync() if you want local gradients"
        )


def _inactive_watch() -> UnsyncedBackwardWatch:
    """Return the watch of a copied model, which watches nothing."""
    watch = UnsyncedBackwardWatch.__new__(UnsyncedBackwardWatch)
    watch._model, watch._removable, watch._suspect = _no_model, [], []  # type: ignore[assignment]
    watch._step, watch._ended, watch._by_ddp = 0, NO_BACKWARD, False
    return watch


def _no_model() -> None:
    """Stand in for a weak reference to a model."""
