"""Finds out if an optimizer used the gradients of a step.

A hook that keeps state must not commit a step whose gradients were dropped. A ``GradScaler`` skips steps with Inf, and a
training loop may zero gradients without a step. torch does not report either, so the watch collects evidence:

==============================  ==============================================================================
evidence                        source
==============================  ==============================================================================
an optimizer has stepped        torch's global hooks before and after ``step()`` of every optimizer
an optimizer runs a closure     the hook before ``step()`` wraps the closure
a fused optimizer was skipped   its ``found_inf``, which a ``GradScaler`` sets; copied after ``step()``
parameters have changed         a :class:`.ParameterSnapshot`, until an optimizer steps for the first time
gradients are gone              ``.grad`` is ``None`` or zero
==============================  ==============================================================================

All synchronised backwards since the last answer share one answer, because they add up in the same ``.grad``:

- *used* (True): an optimizer that holds parameters of the model has stepped or runs a closure. Until an optimizer steps for
  the first time, changed parameters count too.
- *skipped* (False): the gradients are gone, and nothing above has happened.
- *waiting* (``None``): the gradients are still there.

Any optimizer counts, not only the one given to ``attach``. If ``attach`` got a function that finds optimizers, parameters
that change without any optimizer are an error, because a few of their elements are too weak an evidence for residuals.

The watch reads gradients when the next backward begins, before it adds to them, and when an optimizer of the model begins its
step. An optimizer of other parameters, such as fp32 copies, has copied the gradients by then.

Hooks of the parameters report the beginning of a backward. They do not run if a wrapper writes ``.grad`` itself, as FSDP2
does for its shards. The adapter of such a wrapper calls :meth:`OptimizerWatch.before_gradient`.

An ordinary step compares two integers for each parameter and backward, and reads a few elements of one gradient on a CPU. On
a GPU the host waits if it reads a loss scale, if a ``GradScaler`` runs a fused optimizer, and if gradients wait from one
backward to the next.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ch_core import CommHooksError, Engine, HookConfigError, StateError, is_asynchronous
from commhooks.adapters.backward import NO_BACKWARD, backward_id
from commhooks.adapters.change_detection import ParameterSnapshot, any_nonzero_gradient, finite_gradients
from commhooks.adapters.loss_scale import LossScale
from commhooks.adapters.model_optimizers import ModelOptimizers, Params
from commhooks.adapters.optimizer_steps import OptimizerSteps, remove_hooks, weak_call
from commhooks.adapters.options import AttachOptions, FindOptimizers, Scaler, finds_optimizers


class OptimizerWatch:
    """Tells an engine if an optimizer used a step. It is a :class:`~ch_core.StepJudge`.

    A ``GradScaler`` that found Inf does not call ``optimizer.step()``. It does call the step of a fused optimizer, which then
    reads ``found_inf`` itself.

    Args:
        optimizer: the optimizer given to ``attach``; ``None`` to watch those that hold parameters of the model. A function
            finds them, and at least one has to exist when the parameters change.
        scaler: a ``GradScaler``, or ``None``.
        params: returns the present parameters of the model, such as ``model.parameters``.
        late_error: returns an error that ``backward()`` could not raise on a GPU. The optimizer's step raises it.

    Raises:
        HookConfigError: an argument is not an optimizer, or not a scaler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | FindOptimizers | None,
        scaler: Scaler | None,
        params: Params,
        *,
        late_error: Callable[[], BaseException | None] | None = None,
    ) -> None:
        self._find = optimizer if finds_optimizers(optimizer) else None
        self._params = params
        given: Any = None if self._find is not None else optimizer
        if given is not None and not hasattr(given, "param_groups"):
            raise HookConfigError(f"optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise HookConfigError(f"scaler={type(scaler).__name__}: expected a torch.amp.GradScaler")
        self._loss_scale = LossScale(scaler)
        self._optimizers = ModelOptimizers(given, params)
        this = weakref.ref(self)  # optimizers and parameters keep the hooks, which must not keep the watch alive
        self._steps = OptimizerSteps(self._optimizers, weak_call(this, OptimizerWatch._examine_before_step), late_error)
        self._backward: list[int | None] = [None]  # the backward that began last; shared with the hooks
        self._snapshot: ParameterSnapshot | None = ParameterSnapshot(params)  # until an optimizer has stepped
        self.begin_period()
        self._arriving = _gradient_hook(self._backward, this)
        self._hooked: dict[int, torch.Tensor] = {}  # id -> parameter with the hook
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, remove_hooks, self._hooks).atexit = False  # a user may never call close()

    def scale(self) -> float:
        """Return the loss scale of the step that begins."""
        return self._loss_scale.read()

    def prefetch_scale_at_forward(self, module: torch.nn.Module) -> None:
        """Copy the loss scale to the host whenever the module's forward begins."""
        self._hooks.append(module.register_forward_pre_hook(_Prefetch(self._loss_scale)))

    def refuse(self, refusal: Callable[[torch.optim.Optimizer], BaseException | None]) -> None:
        """Raise the error that a function returns for an optimizer of the model, here or before the optimizer's first step."""
        self._steps.refusal = refusal
        for optimizer in self._optimizers.known if self._find is None else self._find(self._params()):
            if (error := refusal(optimizer)) is not None:
                raise error

    # -- StepJudge

    def begin_period(self) -> None:
        """Begin a period. All earlier steps have been answered."""
        self._steps.begin_period()
        self._with_gradient: list[torch.Tensor] = []  # parameters that had a gradient when the last step ended
        self._ended = False
        self._answer: bool | None = None
        self._doubt: CommHooksError | None = None
        if self._steps.ever:
            self._snapshot = None
        if self._snapshot is not None:
            self._snapshot.take()

    def finish_step(self) -> None:
        """End a step. Its gradients are in ``.grad``, or already used."""
        self._ended = True
        held = self._optimizers.held_params()
        self._with_gradient = [p for p in held if p.grad is not None and p.requires_grad]
        for p in self._with_gradient:  # not earlier, because the user may have thawed them since attach
            if id(p) not in self._hooked:
                self._hooked[id(p)] = p
                self._hooks.append(p.register_hook(self._arriving))

    def used(self) -> bool | None:
        """See :meth:`.StepJudge.used`."""
        backward = backward_id()
        if self._backward[0] is None or self._backward[0] != backward:
            self._examine(backward_begins=backward != NO_BACKWARD)
        return self._answer

    def doubt(self) -> CommHooksError | None:
        """See :meth:`.StepJudge.doubt`."""
        return self._doubt

    def clock(self) -> int:
        """See :meth:`.StepJudge.clock`."""
        return self._steps.clock()

    def set_clock(self, clock: int) -> None:
        """See :meth:`.StepJudge.set_clock`."""
        self._steps.set_clock(clock)

    # -- the end

    def close(self) -> None:
        """Remove all hooks from optimizers, parameters and modules.

        Gradients that wait count as used, because nothing sees from now on if an optimizer uses them. A ``GradScaler`` has
        skipped, or will skip, gradients that are not finite.
        """
        self._steps.close()
        remove_hooks(self._hooks)
        if self.used() is None:
            self._answer = finite_gradients(self._with_gradient)

    # -- events from torch

    def before_gradient(self) -> None:
        """Examine the last step's gradients if a new backward is about to add its first gradient to ``.grad``.

        An adapter calls it if its wrapper writes ``.grad`` itself, before each write. It raises nothing.
        """
        backward = backward_id()
        if backward == NO_BACKWARD or backward != self._backward[0]:
            if backward != NO_BACKWARD:
                self._backward[0] = backward
            self._backward_begins()

    def _backward_begins(self) -> None:
        """A backward is about to add its first gradient to ``.grad``."""
        self._steps.backward_begins()
        try:
            self._examine(backward_begins=True)
        except Exception as error:  # raised here, it would end the backward on this rank alone while peers wait for it
            self._answer, self._doubt = False, _cannot_examine(error)

    # -- the rule

    def _examine(self, *, backward_begins: bool) -> None:
        """Set the answer if the evidence suffices.

        Args:
            backward_begins: True if a backward is about to add to the gradients. Later, nothing tells old from new ones.
        """
        if not self._ended or self._answer is not None:
            return
        if self._optimizer_used_them():
            self._answer = True
            return
        params = self._with_gradient
        if not params:
            return  # an optimizer took the gradients before the step ended; its step will answer
        gone = [p for p in params if p.grad is None]
        if len(gone) == len(params):
            self._answer = False
        elif gone and backward_begins:
            self._answer, self._doubt = False, _partly_gone(len(gone), len(params))
        elif not gone and (backward_begins or self._reads_cheaply()) and not any_nonzero_gradient(params):
            self._answer = False

    def _examine_before_step(self) -> None:
        """If gradients are zero or missing when an optimizer begins its step, the step uses nothing."""
        params = self._with_gradient
        if self._answer is not None or not params or self._steps.begun:
            return
        missing = params[0].grad is None and all(p.grad is None for p in params)
        if missing or (self._reads_cheaply() and not any_nonzero_gradient(params)):
            self._examine(backward_begins=False)

    def _reads_cheaply(self) -> bool:
        return not is_asynchronous(self._with_gradient[0].device)

    def _optimizer_used_them(self) -> bool:
        used = self._steps.used()
        if used is not None:
            return used
        changed = self._snapshot is not None and not self._steps.ever and self._snapshot.differs()
        if changed and self._find is not None and not self._find(self._params()):
            self._doubt = _no_optimizer()
        return changed


def watch_optimizer(
    engine: Engine | None,
    options: AttachOptions,
    params: Params,
    module: torch.nn.Module | None = None,
) -> OptimizerWatch | None:
    """Let the optimizer and scaler given to ``attach`` decide which steps of an engine count.

    Args:
        engine: the engine; ``None`` for a foreign hook, which has none.
        options: options of the adapter.
        params: returns the present parameters of the model, such as ``model.parameters``.
        module: its forward begins a step. With it, the host does not wait for a GPU when it reads the loss scale.

    Returns:
        A watch that the adapter must close; ``None`` if ``attach`` got neither optimizer nor scaler.
    """
    if options.optimizer is None and options.scaler is None:
        return None
    late_error = _late_error_of(weakref.ref(engine)) if engine is not None else None
    watch = OptimizerWatch(options.optimizer, options.scaler, params, late_error=late_error)
    if engine is not None:
        engine.set_judge(watch)
        engine.set_loss_scale(watch.scale if options.scaler is not None else None)
    if module is not None and options.scaler is not None:
        watch.prefetch_scale_at_forward(module)
    return watch


def _late_error_of(engine_ref: "weakref.ref[Engine]") -> Callable[[], BaseException | None]:
    def late_error() -> BaseException | None:
        engine = engine_ref()
        return engine.outcome.take_error() if engine is not None else None

    return late_error


def _partly_gone(gone: int, had: int) -> CommHooksError:
    return StateError(
        f"of the {had} gradients of the last step {gone} were dropped (.grad is None), the others are still there, and no "
        "optimizer has stepped. So it is not known whether the step was used, and its residuals belong to all gradients. "
        "Zero or keep all gradients together, call handle.rollback() if you drop a step, or attach without optimizer= and "
        "scaler= (then every finite step counts)"
    )


def _no_optimizer() -> CommHooksError:
    return StateError(
        "the parameters have changed, and no torch.optim optimizer holds them, so it cannot be seen which gradients are used. "
        "Gradients that are not would stay in the residuals of this hook. Use a hook that keeps none, such as bf16_compress or "
        "quant8, or attach the hook in the script: commhooks.attach(model, hook, optimizer=...) with the optimizer of the fp32 "
        "copies of the parameters. Without optimizer= every finite step counts"
    )


def _cannot_examine(error: Exception) -> CommHooksError:
    doubt = StateError(
        f"the gradients of the last step could not be examined ({type(error).__name__}: {error}), so it is not known whether "
        "an optimizer used them. Attach without optimizer= and scaler= (then every finite step counts)"
    )
    doubt.__cause__ = error
    return doubt


class _Prefetch:
    """Hook of a module's forward. In a copied or pickled module it does nothing."""

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        # Not a decorator of the method, which would import torch's compiler with this module.
        self._prefetch = torch.compiler.disable(loss_scale.prefetch) if loss_scale is not None else None

    def __call__(self, *_: object) -> None:
        if self._prefetch is not None:
            self._prefetch()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Prefetch, ())


def _gradient_hook(seen: list[int | None], this: "weakref.ref[OptimizerWatch]") -> Callable[[torch.Tensor], None]:
    """Return the hook of every parameter. After the first call of a backward, it only compares two integers."""
    current = torch._C._current_graph_task_id  # `backward_id()`, without a call in Python for each parameter

    def arriving(gradient: torch.Tensor) -> None:
        now = current()
        if now != seen[0]:
            seen[0] = now
            watch = this()
            if watch is not None:
                watch._backward_begins()

    return arriving
