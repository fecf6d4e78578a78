"""The model to measure: ``module:callable``, or one of the three here."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.gpt import GPT
from commhooks import HookConfigError

WRAPPER = """Return a module whose module(*batch) is the loss, or
a tensor whose mean replaces it. Around a module that returns predictions:

class WithLoss(torch.nn.Sequential):
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(super().forward(x), y)

return WithLoss(model), (x, y)"""


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that a training step needs.

    Attributes:
        model: wrapped in DDP, or sharded by its function with FSDP2.
        batch: ``model(*batch)`` returns the loss, or a tensor whose mean replaces it.
        optimizer: of the model's parameters.
        device: of model and batch.
    """

    model: DistributedDataParallel | FSDPModule
    batch: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    device: torch.device

    @property
    def sharded(self) -> bool:
        """True for FSDP2."""
        return isinstance(self.model, FSDPModule)

    @property
    def replicated(self) -> bool:
        """True for FSDP2 on a 2-D mesh, which also averages between replicas."""
        meshes = [p.device_mesh for p in self.parameters() if isinstance(p, DTensor)]
        return self.sharded and any(mesh.ndim > 1 for mesh in meshes)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks of the probe."""
        if isinstance(self.model, DistributedDataParallel):
            group: dist.ProcessGroup = self.model.process_group
            return group
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def parameters(self) -> list[torch.nn.Parameter]:
        assert isinstance(self.model, nn.Module)
        return list(self.model.parameters())

    def attach(self, hook: str) -> "AttachedHooks":
        """Attach a hook; with FSDP2 to every axis, see :func:`axes`."""
        assert isinstance(self.model, nn.Module)
        if not self.sharded:
            return AttachedHooks([commhooks.attach(self.model, hook)])
        made = AttachedHooks([])
        try:
            for axis, expr in zip(AXES, axes(hook), strict=True):
                if axis == "replicate" and not self.replicated:
                    continue
                made.handles.append(commhooks.attach(self.model, expr, axis=axis))
        except BaseException:
            made.detach()
            raise
        return made

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        assert isinstance(self.model, nn.Module)
        try:
            found = self.model(*self.batch)
            loss = found if isinstance(found, torch.Tensor) else getattr(found, "loss", found[0])
        except commhooks.CommHooksError:
            raise
        except Exception as error:
            raise HookConfigError(f"module(*batch) raised {type(error).__name__}: {error}. {WRAPPER}") from error
        (loss if loss.dim() == 0 else loss.float().mean()).backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


AXES = ("gather", "shard", "replicate")


@dataclass(frozen=True, slots=True)
class AttachedHooks:
    """The hooks of a model: one with DDP, one of each axis with FSDP2."""

    handles: list[commhooks.CommHook]

    def stats(self) -> dict[str, float]:
        """Return the sums of their figures."""
        total: dict[str, float] = {}
        for handle in self.handles:
            for key, value in handle.stats().items():
                total[key] = total.get(key, 0.0) + value
        return total

    def detach(self) -> None:
        for handle in reversed(self.handles):
            handle.detach()


def axes(hook: str) -> tuple[str, str, str]:
    """Return the expressions of weight gathers, reduce-scatters and averages of replicas.

    >>> axes("quant8 / quant4"), axes("allreduce")
    (('quant8', 'quant4', 'quant4'), ('allreduce', 'allreduce', 'allreduce'))
    """
    parts = [part.strip() for part in hook.split(" / ")]
    if len(parts) > 3:
        raise HookConfigError(
            f"{hook!r}: give at most three hooks, as in 'quant8 / quant4 / quant4' (gather / shard / replicate)"
        )
    gather, *gradients = parts
    shard, *rest = gradients or [gather]
    return gather, shard, (rest or [shard])[0]


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a GPT of 10.7 M parameters in 3 buckets, and a batch of 128 symbols."""
    torch.manual_seed(0)
    x = torch.randint(0, 65, (1, 129), dtype=torch.int64, device="cpu")
    return GPT(65, 128, 384, 6, 6), (x[:, :-1], x[:, 1:])


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return wide layers and a small batch: 6.3 M parameters with little arithmetic each."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(16, 1024, dtype=torch.float32, device="cpu"),)


def convnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return convolutions over 64 x 64 images: 1.1 M parameters, each used thousands of times."""
    torch.manual_seed(0)

    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1), nn.GroupNorm(8, b), nn.ReLU()]

    body = [*block(3, 64, 1), *block(64, 128, 2), *block(128, 128, 1), *block(128, 256, 2), *block(256, 256, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)]
    return nn.Sequential(*body, *head), (torch.randn(2, 3, 64, 64, dtype=torch.float32, device="cpu"),)


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "mlp": mlp, "convnet": convnet}


def check(model: str, hooks: Sequence[str]) -> None:
    """Find the model's function and create every hook, before any process is started.

    Raises:
        HookConfigError: no such model.
        UnknownHookError: no such hook.
    """
    find(model)
    for hook in hooks:
        for part in axes(hook):
            commhooks.create(part)


def find(name: str) -> Callable[[], Any]:
    """Return the function that ``module:callable`` or a name of :data:`MODELS` stands for.

    Raises:
        HookConfigError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    legal = f"write module:callable, or one of {', '.join(MODELS)}"
    if not attribute:
        if name not in MODELS:
            raise HookConfigError(f"unknown model {name!r}: {legal}")
        return MODELS[name]
    if "" not in sys.path and os.getcwd() not in sys.path:
        raise HookConfigError(
            f"model {name!r}: modules of this folder cannot be imported. Start it with "
            f"python -m commhooks advise --model {name}"
        )
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookConfigError(f"unknown model {name!r} ({error}): {legal}") from error
    if not callable(found):
        raise HookConfigError(f"model {name!r} is a {type(found).__name__}, not a function: {legal}")
    return found


def made_by(name: str, made: object) -> Sequence[Any]:
    """Return what a model's function made, after a check.

    Raises:
        HookConfigError: it is neither ``(module, batch)`` nor ``(module, batch, optimizer)``.
    """
    if not isinstance(made, Sequence) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise HookConfigError(
            f"model {name!r} returned {type(made).__name__}: return (module, batch) or (module, batch, optimizer), where "
            "module(*batch) is the loss and optimizer(parameters) makes an optimizer"
        )
    return made


def load(name: str, device: torch.device, bucket_cap_mb: float | None = None) -> Workload:
    """Make the model that ``module:callable`` names.

    Args:
        name: of a function without arguments that returns ``(module, batch)`` or ``(module, batch, optimizer)``.
            It may shard the module with ``fully_shard``. ``module(*batch)`` is the loss, or a tensor whose mean replaces it, and
            ``optimizer(parameters)`` makes an optimizer, plain SGD by default.
        device: of model and batch.
        bucket_cap_mb: of DDP.

    Raises:
        HookConfigError: the function cannot be imported, or returns something else.
    """
    module, batch, *rest = made_by(name, find(name)())
    batch = batch if isinstance(batch, tuple) else (batch,)
    batch = tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
    ids = [device.index] if device.type == "cuda" else None
    options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    sharded = isinstance(module, FSDPModule)
    model = module if sharded else DistributedDataParallel(module.to(device), device_ids=ids, **options)
    optimizer = rest[0](model.parameters()) if rest else torch.optim.SGD(model.parameters(), lr=1e-6)
    return Workload(model, batch, optimizer, device)


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over the ranks of each number."""
    worst = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return [float(one) for one in worst.tolist()]
