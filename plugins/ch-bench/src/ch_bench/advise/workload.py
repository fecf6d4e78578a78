"""The model that is measured: `module:callable`, or one of those here."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks import HookConfigError

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step is made of.

    Attributes:
        model: wrapped.
        batch: ``model(*batch)`` gives the loss, or a tensor whose mean stands for it.
        optimizer: of the model's parameters.
        device: of all that.
    """

    model: DistributedDataParallel
    batch: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    device: torch.device

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        found = self.model(*self.batch)
        loss = found if isinstance(found, torch.Tensor) else getattr(found, "loss", found[0])
        (loss if loss.dim() == 0 else loss.float().mean()).backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def load(name: str, device: torch.device, bucket_cap_mb: float | None = None) -> Workload:
    """Make the model that ``module:callable`` names.

    Args:
        name: of a function without arguments that gives ``(module, batch)`` or ``(module, batch, optimizer)``, where
            ``module(*batch)`` is the loss and ``optimizer(parameters)`` makes an optimizer (else plain SGD).
        device: where to.
        bucket_cap_mb: DDP's.

    Raises:
        HookConfigError: it cannot be imported, or gives something else.
    """
    build = _found(name)
    made = build()
    if not isinstance(made, Sequence) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise HookConfigError(
            f"{name} gave {type(made).__name__}; it has to return (module, batch) or (module, batch, optimizer), where "
            "module(*batch) is the loss and optimizer(parameters) makes an optimizer"
        )
    module, batch, *rest = made
    batch = batch if isinstance(batch, tuple) else (batch,)
    batch = tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
    ids = [device.index] if device.type == "cuda" else None
    options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    model = DistributedDataParallel(module.to(device), device_ids=ids, **options)
    optimizer = rest[0](model.parameters()) if rest else torch.optim.SGD(model.parameters(), lr=1e-6)
    return Workload(model, batch, optimizer, device)


def _found(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    if not attribute:
        module, attribute = "ch_bench.advise.models", name
    if module != "ch_bench.advise.models" and "" not in sys.path and os.getcwd() not in sys.path:
        raise HookConfigError(f"{name}: start this with python -m, so that modules of this folder can be imported")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise HookConfigError(
            f"no model {name!r} ({error}): write module:callable, or one of ch_bench's: gpt, mlp, convnet"
        ) from error
    build: Callable[[], Any] = found
    return build


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Of each figure, that of the slowest rank."""
    worst = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return [float(one) for one in worst.tolist()]
