"""Detection of gradients that DDP does not average. Torch stays silent about them, and the ranks drift apart."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ch_ddp.adapter.arrivals import Arrivals
from ch_ddp.adapter.layout import held_params
from commhooks import NO_BACKWARD, AttachError, HookNotSupportedError, after_backward, backward_id


class UnsyncedBackwardWatch:
    """Raises an error after a backward whose gradients DDP did not average.

    Local gradients are intended under ``no_sync()``. Otherwise each gradient that arrives is compared with DDP's averages:

    - DDP does not know a parameter that was added, replaced or thawed after it wrapped the model, or whose dtype or device has
      changed since. It never averages the gradient of such a parameter.
    - DDP averages one backward for each of its forwards. It leaves out a second backward of a retained graph, a backward of the
      first of two forwards, and a backward of a forward of ``model.module``. A static graph averages in the first backward, even
      in ``torch.autograd.grad()``, which fills no ``.grad``.
    - An optimizer that steps in hooks of the parameters uses gradients before DDP averages them. They are gone by then.

    A backward that uses parameters alone, such as that of a weight regulariser, gives equal gradients on all ranks and is
    legal. The watch recognises it because it reaches no mark: each forward leaves marks at its outputs in the autograd graph. If
    a model returns objects in which the watch finds no output, any backward that DDP leaves out may be one of that forward, and
    none is legal.

    Args:
        model: DDP model.
        params: parameters that DDP averages.
        name: hook's name, for errors.
        module: module whose forward is marked. The default is the wrapped module.

    Attributes:
        arrivals: record of the gradients of ``params``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Sequence[torch.Tensor],
        name: str,
        module: torch.nn.Module | None = None,
    ) -> None:
        module = module if module is not None else model.module
        this = weakref.ref(self)  # parameters and graphs keep the hooks, which must not keep the watch alive
        self.arrivals = Arrivals(
            whole=True, began=_weak_call(this, "_backward_begins"), unseen=_weak_call(this, "_arrived_unseen")
        )
        self._model: Callable[[], DistributedDataParallel | None] = weakref.ref(model)
        self._module = weakref.ref(module)
        self._name = name
        self._params = params
        self._known = {id(p) for p in params}
        self._others = set[
            int
        ]()  # ids of modules with parameters that replicate() leaves out. It has no names for them
        if module is not model.module:
            held = {id(p) for _, p in held_params(model)}
            self._others = {
                id(m) for m in module.modules() if any(id(p) not in held for p in m.parameters(recurse=False))
            }
        self._strangers = WeakTensorKeyDictionary()  # trainable parameter that DDP does not know -> its hook, or None
        self._step = 0  # number of averaged backwards
        self._due = False  # True if DDP has to average the next backward
        self._judged = NO_BACKWARD  # id of the last backward that is judged at its end
        self._arrived = False  # True if a gradient of the running backward must be averaged
        self._by_ddp: bool | None = None  # True if the model runs the forward, False if another DDP model does
        self._opaque = False  # True if the last forward has no output that the watch could mark
        self._marked = False  # True if the running backward goes through a forward that DDP does not average any more
        self._unseen: list[torch.Tensor] = []  # parameters of the running backward that DDP does not know
        self._hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        ]
        self.arrivals.watch(params)
        self._frozen = [p for p in params if not self.arrivals.watches(p)]
        self._at_end_of_model = weakref.finalize(model, self.close)  # the module may outlive its wrapper
        self._at_end_of_model.atexit = False

    def averaged(self) -> None:
        """Count a backward whose last bucket has arrived. DDP has not written the averages yet."""
        self._step += 1
        if not self._synchronises():  # the backward is under no_sync(), and its forward was not
            self._due = False
        if self._arrived:
            self._due = self._arrived = False
            used = [p for p in self._params if p.grad is None and self.arrivals.has(p)]
            if used:
                after_backward(partial(self._refuse, used, _USED_BEFORE))
        self.arrivals.begin_step()

    def close(self) -> None:
        """Stop watching."""
        self._at_end_of_model.detach()
        for hook in (*self._hooks, *self._strangers.values()):
            if hook is not None:
                hook.remove()
        self._hooks.clear()
        self.arrivals.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (_inactive_watch, ())  # a copied model is not watched

    # -- forwards

    def _enter(self, module: torch.nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling():
            # A forward hook on the DDP model would miss a direct call of model.forward(x).
            running = DistributedDataParallel._active_ddp_module
            self._by_ddp = None if running is None else running is self._model()

    def _leave(self, module: torch.nn.Module, inputs: object, outputs: object) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        model = self._model()
        if model is None:
            return
        self._opaque = False
        if self._by_ddp is False:
            self._due = False
            return  # another DDP model has the same module, and averages its gradients
        if not model.require_backward_grad_sync:
            return  # under no_sync() local gradients are intended
        self._arrived = self._marked = False  # a backward may have raised
        self._unseen.clear()
        self._watch_unknown(module, model)
        if self._frozen:  # some may have been thawed
            self.arrivals.watch(self._frozen)
            self._frozen = [p for p in self._frozen if not self.arrivals.watches(p)]
        step = None
        if self._by_ddp:
            self._due, step = True, self._step
        nodes = {t.grad_fn for t in _find_tensors(outputs) if t.grad_fn is not None}
        self._opaque = not nodes
        reached = _weak_call(weakref.ref(self), "_reached", step)
        for node in nodes:
            node.register_prehook(reached)

    def _watch_unknown(self, module: torch.nn.Module, model: DistributedDataParallel) -> None:
        """Hook trainable parameters that DDP does not know. It runs in each forward, so it avoids torch's slow iterators."""
        unknown, stack = list[torch.Tensor](), [module]
        while stack:
            part = stack.pop()
            stack += [child for child in part._modules.values() if child is not None]
            if id(part) not in self._others:
                params = part._parameters.values()
                unknown += [p for p in params if p is not None and id(p) not in self._known and p.requires_grad]
        # Under torch.func.functional_call() there are other tensors in the places of parameters, and not all of them are leaves.
        unknown = [p for p in unknown if p.is_leaf and p not in self._strangers]
        if not unknown:
            return
        ignored = set[int]()
        if model.parameters_to_ignore:  # by name, so a parameter in the place of an ignored one is ignored too
            ignored = {id(p) for p in module.parameters()} - {id(p) for _, p in held_params(model)}
        arrived = _weak_call(weakref.ref(self), "_arrived_unseen")
        for p in unknown:
            self._strangers[p] = None if id(p) in ignored else p.register_post_accumulate_grad_hook(arrived)

    # -- backwards

    def _reached(self, step: int | None, gradients: object) -> None:
        """Note a backward that reaches the mark of a forward.

        Args:
            step: number of averaged backwards before that forward, or None if DDP did not run the forward.
            gradients: of the forward's output.
        """
        if self._synchronises():
            if step != self._step:
                self._marked = True
            self._judge_at_end()

    def _backward_begins(self) -> None:
        """Take the first gradient of a backward, before DDP gets it."""
        if not self._synchronises():
            return
        if torch.is_grad_enabled() and (self._due or self._marked):
            # Raised later, it would leave the reducer half way through.
            raise HookNotSupportedError(
                "DDP cannot average gradients under backward(create_graph=True). Use torch.autograd.grad(..., "
                "create_graph=True) for the inner derivative, and an ordinary backward() of the final loss"
            )
        self._arrived = True
        self._judge_at_end()

    def _judge_at_end(self) -> None:
        # A nested backward, as of a reentrant checkpoint, may have all gradients, and the outer one none. So both are judged.
        if self._judged != backward_id():
            self._judged = backward_id()
            after_backward(partial(self._judge, self._step))

    def _judge(self, step: int) -> None:
        """Raise an error if a backward that began in this step has left local gradients."""
        model, nested = self._model(), torch._C._current_autograd_node() is not None
        arrived, marked = self._arrived, self._marked
        if not nested:
            self._arrived = self._marked = False
        if model is None or self._step != step or not arrived:
            return
        if self._due:
            try:
                model.reducer._check_reducer_finalized()
            except RuntimeError:
                return  # DDP waits for more gradients. Its next forward names the parameters without one
            if nested:
                return  # a static graph averages at the end of the outer backward
        elif not (self._opaque or marked):
            return
        self._arrived = self._marked = False
        raise AttachError(
            f"{self._name} was not called for this backward. DDP synchronises one backward per forward of the wrapped "
            "model, so these gradients differ between ranks. Add the losses and call backward() once, or call it inside "
            "model.no_sync() if you want local gradients. With static_graph=True, torch.autograd.grad() must not come first"
        )

    def _arrived_unseen(self, param: torch.Tensor) -> None:
        if not self._synchronises():
            return
        if not self._unseen:
            after_backward(self._refuse_unseen)
        self._unseen.append(param)

    def _refuse_unseen(self) -> None:
        unseen, self._unseen = self._unseen, []
        self._refuse(unseen, _UNKNOWN)

    def _refuse(self, params: Sequence[torch.Tensor], problem: str) -> None:
        """Raise an error that names those of the parameters that the model still has."""
        module, wanted = self._module(), {id(p) for p in params}
        names = [] if module is None else [name for name, p in module.named_parameters() if id(p) in wanted]
        if not names:
            return
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise AttachError(f"{self._name} does not average the gradient of {', '.join(names[:3])}{more}. {problem}")

    def _synchronises(self) -> bool:
        """Return True if gradients of the running backward must not stay local."""
        model = self._model()
        return bool(self._hooks) and model is not None and model.require_backward_grad_sync


_UNKNOWN = (
    "DDP averages the parameters that were trainable when it wrapped the model. Such a parameter was added, replaced or thawed "
    "afterwards, or got another dtype or device. Wrap the model again after the change, then attach"
)
_USED_BEFORE = (
    "Its gradient was gone when DDP wanted to average it, because a hook of the parameter has used it, such as an optimizer that "
    "steps in the backward. Make ch_ddp.OverlappedOptimizer(optimizer, handle) instead, or step after the backward"
)


def _weak_call(this: "weakref.ref[UnsyncedBackwardWatch]", method: str, *first: object) -> Callable[..., None]:
    """Return a function that calls a method while the watch lives."""

    def call(*args: Any) -> None:
        watch = this()
        if watch is not None:
            getattr(watch, method)(*first, *args)

    return call


def _inactive_watch() -> UnsyncedBackwardWatch:
    """Return the watch of a copied model, which watches nothing."""
    watch = UnsyncedBackwardWatch.__new__(UnsyncedBackwardWatch)
    watch._model = _no_model
    return watch


def _no_model() -> None:
    """Stand in for a weak reference to a model."""
