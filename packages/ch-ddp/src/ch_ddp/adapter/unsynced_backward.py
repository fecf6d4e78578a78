"""Whether the gradients of a backward were synchronised at all."""

import weakref
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from commhooks import AttachError, HookNotSupportedError
from commhooks.adapters import NO_BACKWARD, after_backward, at_end_of_backward, backward_id


class UnsyncedBackwardWatch:
    """Notices gradients that DDP does not synchronise: torch says nothing, and the ranks drift apart.

    It happens when ``backward()`` runs a second time on a retained graph, for the first of two forwards, or after
    calling ``model.module`` directly. So every forward of the module is marked in its graph. A backward that comes to a
    forward after the buckets of its step have been averaged, or to one that the DDP model knows nothing of, and then to
    a parameter, is told. A backward that comes to no forward (a regulariser of the weights) gives all ranks the same.

    Args:
        model: the DDP model.
        name: of the hook, for the error.
        module: whose forward it is; by default that of the module inside.
    """

    def __init__(self, model: DistributedDataParallel, name: str, module: torch.nn.Module | None = None) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._step = 0  # number of averaged backwards
        self._ended = NO_BACKWARD  # the backward that the last of them was
        self._by_ddp = False  # whether the forward that runs is the DDP model's
        self._suspect: list[Any] = []  # hooks on the parameters, while a backward is suspected
        module = module if module is not None else model.module
        self._removable: list[Any] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        ]

    def synchronised(self) -> None:
        """The last bucket of a backward has come."""
        self._step += 1
        self._ended = backward_id()

    def close(self) -> None:
        """Stop watching."""
        for hook in (*self._removable, *self._suspect):
            hook.remove()
        self._removable.clear()
        self._suspect.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing, ())  # a copy of the model is not the model that is watched

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        # Not told by a hook on the DDP model: model.forward(x) would pass it by.
        self._by_ddp = DistributedDataParallel._active_ddp_module is self._model()

    def _leave(self, module: torch.nn.Module, inputs: object, outputs: object) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        model, step = self._model(), self._step if self._by_ddp else None
        if model is None or not model.require_backward_grad_sync:
            return  # DDP expects no backward of a forward under no_sync()
        watch = weakref.ref(self)

        def reached(gradients: object) -> None:
            alive = watch()
            if alive is not None:
                alive._reached(step)

        nodes = {t.grad_fn for t in _find_tensors(outputs) if t.grad_fn is not None}
        for node in nodes:
            node.register_prehook(reached)

    def _reached(self, step: int | None) -> None:
        """A backward has come to a forward, made before the averaging of this number; by ``None``, not the DDP model's."""
        model = self._model()
        if model is None or not model.require_backward_grad_sync or not self._removable:
            return
        graph = torch.is_grad_enabled()  # of a create_graph=True
        if (step == self._step and not graph) or backward_id() == self._ended:
            return
        # Only where gradients reach a parameter, and not under torch.autograd.grad(), are they to be synchronised.
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
        # Raised at once, before DDP's own hook of the first parameter: the reducer would fail half way through.
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
            return  # another forward in the same backward was DDP's: all has been averaged together
        raise AttachError(
            f"{self._name} was not called for this backward: DDP synchronises one backward per forward of the "
            "wrapped model, and the gradients of this one differ from rank to rank. Add the losses up and call "
            "backward() once, or run it inside model.no_sync() if local gradients are meant"
        )


def _nothing() -> UnsyncedBackwardWatch:
    """What a copied model holds in the place of its original's watch."""
    watch = UnsyncedBackwardWatch.__new__(UnsyncedBackwardWatch)
    watch._model, watch._removable, watch._suspect = _dead, [], []  # type: ignore[assignment]
    watch._step, watch._ended, watch._by_ddp = 0, NO_BACKWARD, False
    return watch


def _dead() -> None:
    """In the place of a reference to a model."""
