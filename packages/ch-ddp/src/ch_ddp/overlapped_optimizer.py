"""Optimizer overlap: updates a bucket's parameters as soon as the bucket is reduced, during the backward.

Early buckets then need no update after the backward. Each update is the wrapped optimizer's own ``step`` on the
parameters of one bucket, so the result equals a separate optimizer step to the bit.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ch_ddp.adapter.binding import DDPBinding
from ch_ddp.optimizer_base import WrappedOptimizer, needs_closure
from commhooks import Bucket, CommHook, HookConfigError, HookNotSupportedError


class OverlappedOptimizer(WrappedOptimizer):
    """An optimizer that updates each bucket's parameters inside ``backward()``.

    The training loop needs no change. :meth:`step` updates all remaining parameters (those outside the model, and those
    without a gradient on this rank), runs the step hooks once, and starts the next step. Backwards under ``no_sync()``
    update nothing. Every hook works. With a foreign hook all updates happen at the end of the backward.

    Gradient clipping between backward and step has no effect. If ``backward()`` raises, some parameters may be updated
    and others not, differently on each rank. Continue from a checkpoint then. A second synchronised backward before
    :meth:`step` is an error for the same reason.

    Args:
        optim: optimizer that treats each parameter separately, as all of ``torch.optim`` except ``LBFGS`` do.
        handle: handle attached to a DDP model.

    Raises:
        HookConfigError: ``optim`` needs a closure, or has no parameter of the model.
        HookNotSupportedError: the handle is not attached to a DDP model, or a ``GradScaler`` steps this optimizer. The
            scaler would have to unscale gradients before their use.

    Example:
        >>> import commhooks, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        >>> handle = commhooks.attach(model, "allreduce")
        >>> optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), handle)
        >>> _ = torch.nn.init.zeros_(model.module.weight)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.module.weight.detach()  # already
        tensor([[-1., -1.]])
        >>> optimizer.step()
        >>> model.module.weight.detach()
        tensor([[-1., -1.]])
        >>> dist.destroy_process_group()
    """

    def __init__(self, optim: Optimizer, handle: CommHook) -> None:
        super().__init__(optim)
        if needs_closure(optim):
            raise HookConfigError(
                f"{type(optim).__name__} needs a closure at every step, so it cannot overlap. Give an optimizer without one"
            )
        binding: object = handle.binding
        if not isinstance(binding, DDPBinding):
            raise HookNotSupportedError(
                f"{handle!r} is not attached to a DistributedDataParallel model. Attach it first, then make the optimizer"
            )
        self._names: Mapping[int, str] = binding.names
        self._updated: set[int] = set()
        if not self._by_name():
            raise HookConfigError(
                "the optimizer has no parameter of the model. Give it parameters of the attached model"
            )
        binding.on_reduced(self._reduced)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the remaining parameters and end the step. Return the result of ``closure``, which runs first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated, self._updated = self._updated, set()
        with self._only(lambda p: id(p) not in updated):
            self.optim.step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a ``GradScaler``, whose ``step`` reads this property."""
        raise HookNotSupportedError(
            "OverlappedOptimizer uses gradients before GradScaler can unscale them. Train in bf16, which needs no scaler, "
            "or use the optimizer without overlap"
        )

    def _by_name(self) -> dict[str, torch.Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return {self._names[id(p)]: p for p in params if id(p) in self._names}

    def _reduced(self, bucket: Bucket) -> None:
        """Update the parameters of a bucket that holds the average.

        :meth:`step` updates a parameter that this rank did not use, because DDP knows only at the end of the backward
        if another rank used it.
        """
        known = self._by_name()
        chosen = {p.name: known[p.name] for p in bucket.params if p.name in known}
        ready = {name: p for name, p in chosen.items() if p.grad is not None and not p.grad.is_sparse}
        again = sorted(name for name, p in ready.items() if id(p) in self._updated)
        if again:
            raise HookConfigError(
                f"{again[0]!r} was already updated in an earlier backward of this step. Accumulate gradients under "
                "model.no_sync(), or call step() after each backward"
            )
        kept = [(p, p.grad) for p in ready.values()]
        try:
            for name, p in ready.items():
                view = bucket.view(name)
                p.grad = torch.view_as_complex(view) if p.is_complex() and not view.is_complex() else view
            numbers = {id(p) for p in ready.values()}
            with self._only(lambda p: id(p) in numbers), torch.no_grad():
                _without_hooks(self.optim)
            self._updated |= numbers
        finally:
            for p, grad in kept:
                p.grad = grad

    @contextmanager
    def _only(self, keep: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Restrict the wrapped optimizer to some of its parameters. Its state is keyed by parameter."""
        groups = self.optim.param_groups
        parts = ({**group, "params": [p for p in group["params"] if keep(p)]} for group in groups)
        self.optim.param_groups = [part for part in parts if part["params"]]
        try:
            yield
        finally:
            self.optim.param_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        raise HookNotSupportedError("an OverlappedOptimizer cannot be copied or pickled. Save its state_dict() instead")


def _without_hooks(optim: Optimizer) -> None:
    """Run ``step()`` without step hooks, which must run once per step instead of once per bucket."""
    step = type(optim).step
    if getattr(step, "hooked", False):  # torch's wrapper runs the hooks
        step = inspect.getattr_static(step, "__wrapped__")
    step(optim)
