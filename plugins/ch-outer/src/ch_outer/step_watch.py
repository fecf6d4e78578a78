"""Makes outer steps when the inner optimizer's own ``step()`` is called, for scripts that hold the inner optimizer."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch.optim import Optimizer

from ch_ddp import unscale
from commhooks import HookConfigError

Loaded = Callable[[Collection[int]], None]
_NATIVE = "_step_supports_amp_scaling"


class OuterStep(Protocol):
    """The two halves of an outer optimizer's step, around the inner one."""

    def before_step(self) -> bool: ...

    def after_step(self) -> None: ...


class Followed:
    """Hooks on inner optimizers that surround each of their steps with the halves of an outer step.

    Hooks also run if a framework has stored the optimizer's ``step`` earlier, or has put another method in its place. A
    ``GradScaler`` calls no ``step()`` when it skips, so the optimizers take over its decision. A skipped step runs without
    gradients, which changes nothing, and counts. All ranks so make the same number of steps.

    Args:
        outer: surrounds each step of the last optimizer.
        optims: inner optimizers in the order of their steps. Each steps once, then the last one steps.
        after: called with no argument after each outer step.
        model: the model of the optimizers.
        loaded: called with the ids of the parameters of each module of the model that the script has loaded.
        begins: called with no argument before each step of an optimizer.

    Raises:
        HookConfigError: from a step, if the optimizers step in another order.
    """

    def __init__(
        self,
        outer: OuterStep,
        optims: Sequence[Optimizer],
        after: Callable[[], None],
        model: torch.nn.Module,
        loaded: Loaded,
        begins: Callable[[], None],
    ) -> None:
        self._outer, self._optims, self._after, self._begins = outer, list(optims), after, begins
        self._stepped: list[Optimizer] = []
        self._dropped: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._native = {id(optim): vars(optim).get(_NATIVE) for optim in self._optims}
        self._scales = {id(optim): bool(getattr(optim, _NATIVE, False)) for optim in self._optims}
        watch = LoadWatch(loaded)
        self._hooks = [part.register_load_state_dict_post_hook(watch) for part in model.modules()]
        for optim in self._optims:
            optim._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # a GradScaler then calls each step()
            for register, half in (
                (optim.register_step_pre_hook, self._before),
                (optim.register_step_post_hook, self._finished),
            ):
                self._hooks.append(register(torch.compiler.disable(half)))

    def close(self) -> None:
        """Leave the inner optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optim in self._optims:
            before = self._native[id(optim)]
            if before is None:
                vars(optim).pop(_NATIVE, None)
            else:
                optim._step_supports_amp_scaling = before  # type: ignore[attr-defined]

    def _before(self, optim: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        expected = self._optims[len(self._stepped)]
        if optim is not expected:
            names = [f"{number}. {type(one).__name__}" for number, one in enumerate(self._optims, 1)]
            called, next_one = (names[self._optims.index(one)] for one in (optim, expected))
            self._stepped.clear()
            raise HookConfigError(
                f"step() of the optimizer {called!r} was called where {next_one!r} had its turn. Under an outer optimizer the "
                f"optimizers of a model ({', '.join(names)}, in the order of their creation) step once each in an iteration. "
                "Make one optimizer with several groups of parameters, or train the parts as models of their own"
            )
        self._begins()
        drop = False
        if optim is self._optims[-1]:
            with torch.no_grad():
                drop = self._outer.before_step() and not (args[1:] or kwargs.get("closure"))
        found: torch.Tensor | None = getattr(optim, "found_inf", None)  # 0-d; a GradScaler sets both for this call
        if found is not None and not self._scales[id(optim)]:
            if found.item():
                drop = True
            else:
                unscale(optim, getattr(optim, "grad_scale", None))
            # Adam refuses both unless it is fused. The scaler deletes the attributes after the call.
            optim.grad_scale, optim.found_inf = None, None  # type: ignore[attr-defined]
        if drop:
            params = [p for group in optim.param_groups for p in group["params"] if p.grad is not None]
            self._dropped[id(optim)] = [(p, p.grad) for p in params]
            for param in params:
                param.grad = None

    def _finished(self, optim: Optimizer, args: object, kwargs: object) -> None:
        for param, grad in self._dropped.pop(id(optim), ()):
            param.grad = grad
        self._stepped.append(optim)
        if len(self._stepped) == len(self._optims):
            self._stepped.clear()
            self._outer.after_step()
            self._after()


class LoadWatch:
    """Post hook of ``load_state_dict`` of modules."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    @torch.no_grad()
    def __call__(self, module: torch.nn.Module, keys: object) -> None:
        self._loaded({id(param) for param in module.parameters(recurse=False)})

    def __reduce__(self) -> tuple[object, ...]:
        """Leave a copied or pickled model a hook that does nothing, and that every Python can load."""
        return getattr, (nullcontext(), "__exit__")
