"""What the parts train: a net in several buckets, and shapes without arithmetic; and every hook that there is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.gpu_kit.setting import Setting

LAYERS = 4
COMPOSITIONS = [
    "powersgd(rank=1)",
    "powersgd(rank=4, residual='averaged')",
    "powersgd(rank=4, warm_start=False)",
    "bf16_wrapper(powersgd(rank=4))",
    "bf16_compress(accumulate='fp32')",
    "bf16_compress(rounding='stochastic')",
    "fp16_wrapper(powersgd(rank=4))",
    "error_feedback(bf16_compress)",
    "warmup(powersgd(rank=4), steps=2)",
]
EXACT = ("allreduce", "noop")


TELLING = ["allreduce", "bf16_compress", "powersgd(rank=4)", "quant8", "error_feedback(bf16_compress)"]
"""Those that stand for the others where all would take too long."""


def hooks(setting: Setting) -> list[str]:
    """Every registered reduction by its example, and compositions of them."""
    if setting.tiny:
        return TELLING
    examples = [spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")]
    usable = [each for each in (*examples, *COMPOSITIONS) if _exists(each)]
    return list(dict.fromkeys(usable))


def _exists(expression: str) -> bool:
    try:
        commhooks.create(expression)
    except commhooks.CommHooksError:
        return False
    return True


def net(setting: Setting, device: torch.device) -> nn.Sequential:
    """Four square layers with biases, the same at each call."""
    width = 32 if setting.tiny else 512
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)


def ddp(
    setting: Setting, device: torch.device, module: nn.Module | None = None, **more: Any
) -> DistributedDataParallel:
    """The net in DDP, in several buckets."""
    module = net(setting, device) if module is None else module
    bytes_of_one = max(p.numel() * p.element_size() for p in module.parameters())
    ids = [device.index] if device.type == "cuda" else None
    more = {"bucket_cap_mb": 1.5 * bytes_of_one / 2**20, "gradient_as_bucket_view": True} | more
    return DistributedDataParallel(module, device_ids=ids, **more)


def attach(model: nn.Module, hook: Any, **more: Any) -> commhooks.CommHook:
    """:func:`commhooks.attach`, which compresses with one rank as well."""
    return commhooks.attach(model, hook, single_process=True, **more)


def batch(setting: Setting, device: torch.device, step: int, rank: int = 0) -> torch.Tensor:
    """One rank's input of a step, whatever it is for."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 32 if setting.tiny else 512, generator=generator).to(device)


def backward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """One forward and backward; a copy of all gradients in one vector."""
    model.zero_grad(set_to_none=False)
    model(inputs).square().mean().backward()
    return gradients(model)


def gradients(model: nn.Module) -> torch.Tensor:
    """Of all parameters in model order, one vector, copied."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(g, "_local_tensor", g).reshape(-1).float() for g in found])


def total(model: nn.Module, setting: Setting, device: torch.device, steps: int, rank: int = 0) -> torch.Tensor:
    """The gradients of some steps, added up; parameters stay as they are."""
    return torch.stack([backward(model, batch(setting, device, step, rank)) for step in range(steps)]).double().sum(0)


def kept_back(handle: commhooks.CommHook, model: nn.Module) -> torch.Tensor | None:
    """What error feedback holds, as :func:`gradients` has it; ``None`` where a hook keeps no residual."""
    handle.commit()
    if not isinstance(handle.state, commhooks.HookState):
        return None
    held = {name: tensor for name, field, tensor in handle.state.entries() if field == "residual"}
    if not held:
        return None
    named = dict(getattr(model, "module", model).named_parameters())
    return torch.cat([held[n].reshape(-1) if n in held else torch.zeros_like(p).reshape(-1) for n, p in named.items()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """``|a - b| / |b|``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


class ShapesOnly(nn.Module):
    """Parameters of given shapes whose backward only hands gradients over: a step of it costs what its hook costs.

    Args:
        gradients: one per parameter, handed over at each backward.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros_like(g) for g in gradients)
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = _Given.apply(self.gradients, *self.params)  # type: ignore[no-untyped-call]
        return found


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)


def made_up(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """A gradient of every shape: random, in the size of a gradient."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(tuple(s), generator=generator, device=device).mul_(1e-3).to(dtype) for s in shapes.values()]


def register_torch(model: DistributedDataParallel, name: str) -> None:
    """Put one of PyTorch's hooks in place."""
    if name.startswith("powersgd"):
        rank = int(name.removesuffix(")").rpartition("=")[2])
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        return
    model.register_comm_hook(None, _TORCH[name])


def _bf16(group: dist.ProcessGroup, bucket: commhooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP refuses PyTorch's own by its name without NCCL, although gloo reduces bf16 correctly."""
    return default_hooks.bf16_compress_hook(group, bucket)


_TORCH: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "bf16_compress": _bf16,
    "fp16_compress": default_hooks.fp16_compress_hook,
}
PYTORCHS = ["powersgd(rank=4)", "powersgd(rank=1)", "bf16_compress", "fp16_compress", "allreduce"]
"""Hooks of ours that PyTorch has, too. Its quantising ones fail in a group of one rank."""
