"""Optimizer overlap: a bucket's parameters are updated as soon as the bucket is reduced, during the backward.

The update of early buckets then costs no time after the backward, and on a GPU runs beside it. It is the wrapped
optimizer's own ``step`` on the parameters of one bucket, so the result is that of the separate optimizer, to the bit.
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

    The training loop stays as it is: :meth:`step` updates what no bucket has brought (parameters outside the model,
    those without a gradient on this rank until the end of the backward), runs the step hooks once, and starts the next
    step. Backward passes under ``no_sync()`` update nothing. Works over every hook; over a foreign one, whose results
    are checked together, the updates come at the end of the backward.

    Args:
        optim: any optimizer that treats parameters one by one, as all of ``torch.optim`` but ``LBFGS`` do.
        handle: the hook, attached to a DDP model.

    Raises:
        HookConfigError: ``optim`` needs a closure, or has no parameter of the model.
        HookNotSupportedError: the handle is not attached to a DDP model. A ``GradScaler`` raises it too: gradients
            would have to be unscaled before they are used.

    What changes gradients between backward and step (clipping) comes too late. When ``backward()`` raises, some
    parameters may have been updated and others not, differently on each rank: go on from a checkpoint. A second
    synchronised backward before :meth:`step` is an error for the same reason.

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
            raise HookConfigError(f"{type(optim).__name__} needs a closure at every step, and so cannot be overlapped")
        binding: object = handle.binding
        if not isinstance(binding, DDPBinding):
            raise HookNotSupportedError(
                f"{handle!r}: an optimizer overlaps with a hook that is attached to DistributedDataParallel"
            )
        self._names: Mapping[int, str] = binding.names
        self._updated: set[int] = set()
        if not self._by_name():
            raise HookConfigError("none of the optimizer's parameters is a parameter of the model")
        binding.on_reduced(self._reduced)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step: update the remaining parameters; returns what ``closure``, called first, did."""
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
        """Asked by ``GradScaler.step``, the one place where a scaler can be told."""
        raise HookNotSupportedError(
            "OverlappedOptimizer has used the gradients before GradScaler could unscale them: train in bf16, which "
            "needs no scaler, or use the optimizer without overlap"
        )

    def _by_name(self) -> dict[str, torch.Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return {self._names[id(p)]: p for p in params if id(p) in self._names}

    def _reduced(self, bucket: Bucket) -> None:
        """Update the parameters of a bucket with the average it holds.

        One without a gradient of its own (unused on this rank) is left to :meth:`step`: only at the end of the
        backward does DDP know whether another rank used it.
        """
        known = self._by_name()
        chosen = {p.name: known[p.name] for p in bucket.params if p.name in known}
        ready = {name: p for name, p in chosen.items() if p.grad is not None and not p.grad.is_sparse}
        again = sorted(name for name, p in ready.items() if id(p) in self._updated)
        if again:
            raise HookConfigError(
                f"{again[0]!r} was updated in an earlier backward and step() has not been called since: accumulate "
                "gradients under model.no_sync()"
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
        """Let the wrapped optimizer see some of its parameters only; their state is found by the parameter."""
        groups = self.optim.param_groups
        parts = ({**group, "params": [p for p in group["params"] if keep(p)]} for group in groups)
        self.optim.param_groups = [part for part in parts if part["params"]]
        try:
            yield
        finally:
            self.optim.param_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        raise HookNotSupportedError("OverlappedOptimizer belongs to a model's hook; copy or save its state_dict()")


def _without_hooks(optim: Optimizer) -> None:
    """One ``step()`` that runs no step hooks: they run once a step, not once a bucket."""
    step = type(optim).step
    if getattr(step, "hooked", False):  # torch has wrapped it in what runs the hooks
        step = inspect.getattr_static(step, "__wrapped__")
    step(optim)
