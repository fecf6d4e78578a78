"""What became of the gradients of a step: used by an optimizer, skipped, or still waiting in ``.grad``.

The rule, for all synchronised backwards since the last answer together, because they add up in the same ``.grad``:

* *used*: an optimizer that holds parameters of the model has stepped or runs a closure, or, as long as none has ever
  stepped, the parameters have been changed by something else;
* *skipped*: the gradients are gone (``None`` or zero) and nothing of the above has happened;
* *waiting*: they are still there.

Any optimizer counts, not only the one given to ``attach``: torch tells of the steps of all of them. The gradients are
looked at when the next backward begins, before it adds to them, and when an optimizer of the model begins its step. One
that holds other parameters, fp32 copies, has taken the gradients over by then.

An ordinary step costs a comparison of two integers per parameter and backward, and no work on tensors but a few numbers
of one gradient, on a CPU. On CUDA the host waits for the device where a loss scale is read, where a ``GradScaler`` runs
a fused optimizer, and where gradients wait from one backward to the next.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commhooks.adapters.backward import NO_BACKWARD, backward_id
from commhooks.adapters.base import AttachOptions
from commhooks.adapters.numbers_seen import Image, hold_numbers
from commhooks.device import HostCopy
from commhooks.engine.engine import Engine
from commhooks.errors import CommHooksError, HookConfigError, StateError


class OptimizerWatch:
    """Whether the optimizer used a step: the engine's :class:`~commhooks.adapters.StepJudge`.

    A ``GradScaler`` that found Inf does not call ``optimizer.step()``, unless the optimizer is fused: that one is
    called and told by its ``found_inf``.

    Args:
        optimizer: the one given to ``attach``; it counts even if it holds other parameters (fp32 copies).
        scaler: a ``GradScaler``.
        params: the model's trainable parameters.

    Raises:
        HookConfigError: what was given is no optimizer, or no scaler.
    """

    def __init__(self, optimizer: Any, scaler: Any, params: Iterable[torch.Tensor]) -> None:
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise HookConfigError(f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise HookConfigError(f"scaler={type(scaler).__name__}: expected a torch.amp.GradScaler")
        self.scaler = scaler
        self._params = [p for p in params if p.requires_grad]
        self._ids = {id(p) for p in self._params}
        self._known: weakref.WeakSet[Any] = weakref.WeakSet([optimizer] if optimizer is not None else [])
        self._given = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._holds: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._watched: tuple[int, list[torch.Tensor]] = (-1, self._params)
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closures = 0  # that optimizers run at present
        self._behind = 0  # optimizer steps before this period
        self._steps: dict[int, int] = {}  # by optimizer
        self._task: list[int | None] = [None]  # of the backward that was looked at last
        self._image: Image | None = Image(self._params)  # until an optimizer is seen to step
        self._scale: tuple[int, int, HostCopy] | None = None  # which tensor, at which version
        self.late_error: Callable[[], BaseException | None] | None = None
        self.begin()
        this = weakref.ref(self)  # torch and the parameters must not keep alive what nobody else does
        self._removable: list[Any] = [
            register_optimizer_step_pre_hook(_relay(this, OptimizerWatch._before_step)),
            register_optimizer_step_post_hook(_relay(this, OptimizerWatch._after_step)),
        ]
        arriving = _arriving(self._task, this)
        self._removable += [p.register_hook(arriving) for p in self._params]
        weakref.finalize(self, _remove, self._removable).atexit = False  # nobody may call close()

    def scale(self) -> float:
        """The loss scale of the step that begins. On CUDA the host waits for what was started before the forward; for all
        of it where the scale has changed since, as in the first step.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        tensor = self._scale_tensor()
        if tensor is not None and self._scale is not None and self._scale[:2] == (id(tensor), tensor._version):
            return self._scale[2].values()[0]
        return float(self.scaler.get_scale())

    def forward_begins(self) -> None:
        """Send for the loss scale: by now the scaler has updated it, and what the device still has to do for this step is
        behind it.
        """
        tensor = self._scale_tensor()
        if tensor is not None and (self._scale is None or self._scale[:2] != (id(tensor), tensor._version)):
            self._scale = (id(tensor), tensor._version, HostCopy(tensor))

    def _scale_tensor(self) -> torch.Tensor | None:
        found = getattr(self.scaler, "_scale", None)
        return found if isinstance(found, torch.Tensor) else None

    # -- what the engine asks and says

    def begin(self) -> None:
        """A step begins, and those before it have been answered for."""
        self._behind = self.clock()
        self._steps = {}
        self._stepped = False  # for certain
        self._held_back: list[HostCopy] = []  # by a GradScaler that ran fused steps; 0 of each that was run
        self._had: list[torch.Tensor] = []
        self._finished = False
        self._verdict: bool | None = None
        self._doubt: CommHooksError | None = None
        if self._image is not None:
            self._image.take()

    def end(self) -> None:
        """The step has ended: its gradients are in ``.grad``, or used already."""
        self._finished = True
        self._had = [p for p in self._to_watch() if p.grad is not None]

    def used(self) -> bool | None:
        """Whether what was reduced since :meth:`begin` has been used; ``None`` while it waits in ``.grad``."""
        task = backward_id()
        if self._task[0] is None or self._task[0] != task:
            self._look(beginning=task != NO_BACKWARD)
        return self._verdict

    def doubt(self) -> CommHooksError | None:
        """Why it cannot be told, if it cannot; such steps count as skipped."""
        return self._doubt

    def clock(self) -> int:
        """Optimizer steps since attaching, equal on all ranks. Optimizers inside one another, or side by side, step
        once.
        """
        return self._behind + max(self._steps.values(), default=0)

    def follow(self, clock: int) -> None:
        """This rank took no part: the others have made so many steps."""
        self._behind = clock
        self._steps.clear()

    def also_remove(self, hook: Any) -> None:
        """:meth:`close` removes this one, too."""
        self._removable.append(hook)

    def close(self) -> None:
        """Leave optimizers and parameters alone."""
        _remove(self._removable)

    # -- what torch tells

    def _begins(self) -> None:
        """A backward is about to add its first gradient to ``.grad``."""
        if not self._closures:
            self._stepping.clear()  # a step that raised has told nobody of its end
        try:
            self._look(beginning=True)
        except Exception as error:  # raised here it would end the backward on this rank alone, while peers wait for it
            self._verdict, self._doubt = False, _cannot_tell(error)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._counts(optimizer):
            return None
        error = self.late_error() if self.late_error is not None else None
        if error is not None:  # on CUDA backward() does not wait for it; no parameter has been changed yet
            raise error
        if optimizer in self._stepping:
            self._stepping.clear()  # its last step raised
        if not self._stepping and self._holds_ours(optimizer):
            self._look_for_nothing()
        self._known.add(optimizer)
        self._stepping.add(optimizer)
        return self._with_closure(args, kwargs)

    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if not self._counts(optimizer):
            return
        self._stepping.discard(optimizer)
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        found = getattr(optimizer, "found_inf", None)  # there only while a GradScaler runs a fused step
        if not isinstance(found, torch.Tensor):
            self._stepped, self._image = True, None
        elif not self._stepped:
            self._held_back.append(HostCopy(found))

    def _counts(self, optimizer: Any) -> bool:
        return optimizer is self._given() or self._holds_ours(optimizer)

    def _holds_ours(self, optimizer: Any) -> bool:
        """Whether an optimizer holds parameters of the model; asked anew when it has been given more."""
        size = _size(optimizer)
        known = self._holds.get(optimizer)
        if known is None or known[0] != size:
            found = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            known = self._holds[optimizer] = (size, found)
        return known[1]

    def _with_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of ``step``, the closure among them counted while it runs: its backwards are used."""
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._counted(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return None

    def _counted(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._closures += 1
            try:
                return closure(*args, **kwargs)
            finally:
                self._closures -= 1

        return counted

    # -- the rule

    def _look(self, *, beginning: bool) -> None:
        """Find the verdict, if it can be found now; ``beginning``: a backward is about to add to the gradients."""
        if not self._finished or self._verdict is not None:
            return
        if self._used():
            self._verdict = True
            return
        if not self._had:
            return  # taken over, or used, before the step ended: an optimizer will tell
        gone = [p for p in self._had if p.grad is None]
        if len(gone) == len(self._had):
            self._verdict = False
        elif gone and beginning:
            self._verdict, self._doubt = False, _partly_gone(len(gone), len(self._had))
        elif not gone and (beginning or self._on_cpu()) and not hold_numbers(self._had):
            self._verdict = False

    def _look_for_nothing(self) -> None:
        """An optimizer begins its step. Zeroed before, it steps with nothing: that is no use of what was reduced."""
        if self._verdict is not None or not self._had or self._steps or self._closures:
            return
        dropped = self._had[0].grad is None and all(p.grad is None for p in self._had)
        if dropped or (self._on_cpu() and not hold_numbers(self._had)):
            self._look(beginning=False)

    def _on_cpu(self) -> bool:
        return self._had[0].device.type == "cpu"

    def _used(self) -> bool:
        if self._stepped or self._closures or self._stepping:
            return True
        if self._held_back:  # On CUDA this waits for the fused optimizer, and for nothing after it.
            if all(any(found.values()) for found in self._held_back):
                return False
            self._stepped, self._image = True, None
            return True
        return self._image is not None and self._image.differs()

    def _to_watch(self) -> list[torch.Tensor]:
        """The parameters that some optimizer holds; all, as long as none is known. Nobody zeroes the others."""
        size = sum(map(_size, self._known))
        if size != self._watched[0]:
            held = {id(p) for optimizer in self._known for group in optimizer.param_groups for p in group["params"]}
            self._watched = size, [p for p in self._params if id(p) in held] or self._params
        return self._watched[1]


def _partly_gone(gone: int, had: int) -> CommHooksError:
    return StateError(
        f"of the {had} gradients of the last step {gone} were dropped (.grad is None), the others are still there, and "
        "no optimizer has stepped: whether the step was used cannot be told, and its residuals belong to all of them. "
        "Zero or keep all gradients together, say handle.rollback() when a step is given up, or attach without "
        "optimizer= and scaler= (then every finite step counts)"
    )


def _cannot_tell(error: Exception) -> CommHooksError:
    doubt = StateError(
        f"the gradients of the last step could not be examined ({type(error).__name__}: {error}), so it is not known whether "
        "an optimizer used them. Attach without optimizer= and scaler= (then every finite step counts)"
    )
    doubt.__cause__ = error
    return doubt


def _size(optimizer: Any) -> int:
    """Number of parameters that an optimizer holds; they only ever become more."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _relay(this: "weakref.ref[OptimizerWatch]", method: Any) -> Any:
    """Calls a method of the watch while it lives; not traced by a compiled ``optimizer.step``."""

    def call(*args: Any) -> Any:
        watch = this()
        return None if watch is None else method(watch, *args)

    return torch.compiler.disable(call)


def _arriving(task: list[int | None], this: "weakref.ref[OptimizerWatch]") -> Callable[[torch.Tensor], None]:
    """The hook of every parameter; only the first of a backward does more than to compare its number."""
    current = torch._C._current_graph_task_id

    def arriving(gradient: torch.Tensor) -> None:
        now = current()
        if now != task[0]:
            task[0] = now
            watch = this()
            if watch is not None:
                watch._begins()

    return arriving


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def watch_optimizer(
    engine: Engine | None,
    options: AttachOptions,
    params: Iterable[torch.Tensor],
    module: torch.nn.Module | None = None,
) -> OptimizerWatch | None:
    """Have the optimizer and scaler given to ``attach`` decide which of an engine's steps count.

    Args:
        engine: whose steps; ``None``: nobody asks.
        options: as an adapter is given them.
        params: the model's.
        module: whose forward begins a step; given, the host does not wait for it when it asks for the loss scale.
    """
    if options.optimizer is None and options.scaler is None:
        return None
    watch = OptimizerWatch(options.optimizer, options.scaler, params)
    if engine is not None:
        engine.set_judge(watch)
        engine.set_loss_scale(watch.scale if options.scaler is not None else None)
        watch.late_error = _late_error(weakref.ref(engine))
    if module is not None and options.scaler is not None:
        begins = _relay(weakref.ref(watch), OptimizerWatch.forward_begins)
        watch.also_remove(module.register_forward_pre_hook(lambda *_: begins()))
    return watch


def _late_error(of: "weakref.ref[Engine]") -> Callable[[], BaseException | None]:
    def error() -> BaseException | None:
        engine = of()
        return engine.outcome.take_error() if engine is not None else None

    return error
