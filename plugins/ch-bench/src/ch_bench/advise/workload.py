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
from ch_core import Link
from commhooks import HookConfigError

WRAPPER = """Return a module whose module(*batch) is the loss, or
a tensor whose mean replaces it. For a module that returns predictions, return
(module, (inputs, target), loss), as in

return model, (x, y), torch.nn.functional.cross_entropy

or put the loss into the module:

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
        loss: ``loss(model(*inputs), target)`` if the model returns predictions. The target is the last part of the batch.
        link: with which hooks are attached, if the ranks are far apart.
    """

    model: DistributedDataParallel | FSDPModule
    batch: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    device: torch.device
    loss: Callable[..., Any] | None = None
    link: Link | None = None

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
            return AttachedHooks([commhooks.attach(self.model, hook, link=self._link_text)])
        made = AttachedHooks([])
        try:
            for axis, expr in zip(AXES, axes(hook), strict=True):
                if axis == "replicate" and not self.replicated:
                    continue
                made.handles.append(commhooks.attach(self.model, expr, axis=axis, link=self._link_text))
        except BaseException:
            made.detach()
            raise
        return made

    @property
    def _link_text(self) -> str | None:
        return None if self.link is None else str(self.link)

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        assert isinstance(self.model, nn.Module)
        try:
            *inputs, target = self.batch if self.loss is not None else (*self.batch, None)
            found = self.model(*inputs)
            found = found if self.loss is None else self.loss(found, target)
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


def made_by(name: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], Sequence[Callable[..., Any]]]:
    """Return the module, the batch and the functions behind it that a model's function made.

    Raises:
        HookConfigError: it is not ``(module, batch)``, with a loss or an optimizer or both behind it.
    """
    legal = isinstance(made, Sequence) and 2 <= len(made) <= 4 and isinstance(made[0], nn.Module)
    if not legal or not all(map(callable, made[2:])):
        raise HookConfigError(
            f"model {name!r} returned {type(made).__name__}: return (module, batch), (module, batch, loss) or (module, batch, "
            "optimizer), where module(*batch) or loss(module(*batch[:-1]), batch[-1]) is the loss and optimizer(parameters) "
            "makes an optimizer"
        )
    return made[0], made[1] if isinstance(made[1], tuple) else (made[1],), made[2:]


def optimizer_of(function: Callable[..., Any], module: nn.Module) -> torch.optim.Optimizer | None:
    """Return the optimizer that a function makes from the parameters of a module; ``None`` if the function is a loss.

    A loss wants predictions and a target. With parameters instead it raises, or returns something without ``step``.

    Raises:
        HookConfigError: a class raised, which cannot be a loss.

    >>> layer = nn.Linear(2, 2)
    >>> [optimizer_of(f, layer) is None for f in (nn.MSELoss(), torch.nn.functional.cross_entropy, torch.optim.SGD)]
    [True, True, False]
    """
    if isinstance(function, nn.Module):
        return None
    try:
        made: Any = function(module.parameters())
    except Exception as error:
        if isinstance(getattr(function, "func", function), type):  # a partial of a class counts as the class
            raise HookConfigError(f"the optimizer {function} raised {type(error).__name__}: {error}") from error
        return None
    return made if callable(getattr(made, "step", None)) else None


def load(name: str, device: torch.device, bucket_cap_mb: float | None = None) -> Workload:
    """Make the model that ``module:callable`` names.

    Args:
        name: of a function without arguments that returns ``(module, batch)``, and behind it a loss, an optimizer, or both.
            It may shard the module with ``fully_shard``. ``module(*batch)`` is the loss, or a tensor whose mean replaces it, and
            ``optimizer(parameters)`` makes an optimizer, plain SGD by default.
        device: of model and batch.
        bucket_cap_mb: of DDP.

    Raises:
        HookConfigError: the function cannot be imported, or returns something else.
    """
    module, batch, functions = made_by(name, find(name)())
    sharded = isinstance(module, FSDPModule)
    if not sharded:
        module.to(device)  # before an optimizer reads the parameters
    made = [(function, optimizer_of(function, module)) for function in functions]
    losses = [function for function, optimizer in made if optimizer is None]
    optimizers = [optimizer for _, optimizer in made if optimizer is not None]
    if len(losses) > 1 or len(optimizers) > 1:
        raise HookConfigError(f"model {name!r} returned two losses or two optimizers: return one of each")
    if losses and len(batch) < 2:
        raise HookConfigError(
            f"model {name!r} returned a loss and a batch without a target: return (module, (x, y), loss)"
        )
    batch = tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in batch)
    ids = [device.index] if device.type == "cuda" else None
    options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    model: Any = module if sharded else DistributedDataParallel(module, device_ids=ids, **options)
    optimizer = optimizers[0] if optimizers else torch.optim.SGD(model.parameters(), lr=1e-6)
    return Workload(model, batch, optimizer, device, losses[0] if losses else None)


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over the ranks of each number."""
    worst = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return [float(one) for one in worst.tolist()]
