"""Models and hooks of the kit."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.gpu_kit.device import KitDevice

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


REPRESENTATIVE = ["allreduce", "bf16_compress", "powersgd(rank=4)", "quant8", "error_feedback(bf16_compress)"]
"""Representative hooks, for parts that have no time for all."""


def hooks(kit: KitDevice) -> list[str]:
    """Return every registered reduction by its example, and compositions."""
    if kit.tiny:
        return REPRESENTATIVE
    examples = [spec.example or spec.name for spec in commhooks.list_hooks(kind="reduction")]
    usable = [each for each in (*examples, *COMPOSITIONS) if _exists(each)]
    return list(dict.fromkeys(usable))


def _exists(expression: str) -> bool:
    try:
        commhooks.create(expression)
    except commhooks.CommHooksError:
        return False
    return True


def net(kit: KitDevice, device: torch.device) -> nn.Sequential:
    """Return four square layers with biases, equal at each call."""
    width = 32 if kit.tiny else 512
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)


def ddp(kit: KitDevice, device: torch.device, module: nn.Module | None = None, **more: Any) -> DistributedDataParallel:
    """Wrap the net in DDP with several buckets."""
    module = net(kit, device) if module is None else module
    bytes_of_one = max(p.numel() * p.element_size() for p in module.parameters())
    ids = [device.index] if device.type == "cuda" else None
    more = {"bucket_cap_mb": 1.5 * bytes_of_one / 2**20, "gradient_as_bucket_view": True} | more
    return DistributedDataParallel(module, device_ids=ids, **more)


def attach(model: nn.Module, hook: Any, **more: Any) -> commhooks.CommHook:
    """Attach a hook that compresses also with one rank."""
    return commhooks.attach(model, hook, single_process=True, **more)


def batch(kit: KitDevice, device: torch.device, step: int, rank: int = 0) -> torch.Tensor:
    """Return one rank's input of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 32 if kit.tiny else 512, generator=generator, dtype=torch.float32, device="cpu").to(device)


def backward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Run forward and backward, and return a copy of all gradients as one vector."""
    model.zero_grad(set_to_none=False)
    model(inputs).square().mean().backward()
    return gradients(model)


def gradients(model: nn.Module) -> torch.Tensor:
    """Return a copy of all gradients in the order of the model, as one vector."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(g, "_local_tensor", g).reshape(-1).float() for g in found])


def total(model: nn.Module, kit: KitDevice, device: torch.device, steps: int, rank: int = 0) -> torch.Tensor:
    """Return the sum of the gradients of several steps; parameters do not change."""
    return torch.stack([backward(model, batch(kit, device, step, rank)) for step in range(steps)]).double().sum(0)


def residual_of(handle: commhooks.CommHook, model: nn.Module) -> torch.Tensor | None:
    """Return the residual of error feedback in the layout of :func:`gradients`, or ``None``."""
    handle.commit()
    if handle.hook_state is None:
        return None
    held = {name: tensor for name, field, tensor in handle.hook_state.entries() if field == "residual"}
    if not held:
        return None
    named = dict(getattr(model, "module", model).named_parameters())
    return torch.cat([held[n].reshape(-1) if n in held else torch.zeros_like(p).reshape(-1) for n, p in named.items()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ``|a - b| / |b|``."""
    return float((a.double() - b.double()).norm() / b.double().norm())
