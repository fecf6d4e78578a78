"""Every hook on DDP, and each kind of model with some, in a group of one rank, beside DDP without a hook.

With one rank an average is the rank's own gradient: what is exact must have DDP's bits, what is lossy must hold back what it
did not pass on (``passed on + residual = gradient``), or be near.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.rows import Rows, Skipped, Values
from ch_bench.gpu_kit.setting import Setting

STEPS = 6
NEAR = 0.05  # relative, of a sum of steps that is rounded to 8 bits at worst
IDENTITY = 1e-5  # relative, of the sum of steps: rounding of fp32
ROUNDED = 5e-3  # the same, where sums and what keeps no residual are rounded to 16 bits


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        exact = models.total(models.ddp(setting, device), setting, device, STEPS)
        for hook in models.hooks(setting):
            rows.row(f"DDP, {hook}", _one, setting, device, hook, exact, _ddp)
        for name, make in ADAPTERS.items():
            for hook in models.TELLING:
                rows.row(f"{name}, {hook}", _one, setting, device, hook, exact, make)
        for hook in models.TELLING:
            rows.row(f"ch-ft's DDP, {hook}", _managed, setting, device, hook, exact)


def _ddp(setting: Setting, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    model = models.ddp(setting, device)
    return model, models.attach(model, hook)


def _replicate(setting: Setting, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    module = models.net(setting, device)
    more: dict[str, Any] = {"device_id": device.index} if setting.cuda else {}
    replicate(module, **more)
    return module, models.attach(module, hook)


def _fsdp1(setting: Setting, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    if hook not in ("allreduce", "bf16_compress"):
        raise Skipped("FSDP1 takes the hooks of kind fsdp only")
    model = FullyShardedDataParallel(
        models.net(setting, device), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device, use_orig_params=True
    )
    return model, models.attach(model, hook)


def _shard(setting: Setting, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    if hook not in ("allreduce", "bf16_compress"):
        raise Skipped("FSDP2's shard axis takes plain averaging and casts of it")
    if dist.get_world_size() == 1:
        raise Skipped("FSDP2 does not reduce over a shard axis of one rank")
    return _fsdp2(setting, device, hook, "shard")


def _across(setting: Setting, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    return _fsdp2(setting, device, hook, "replicate")


def _fsdp2(setting: Setting, device: torch.device, hook: str, axis: str) -> tuple[nn.Module, Any]:
    module = models.net(setting, device)
    world = dist.get_world_size()
    size = (1, world) if axis == "shard" else (world, 1)
    mesh = init_device_mesh(setting.device, size, mesh_dim_names=("replicate", "shard"))
    for layer in module:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    group = mesh["replicate"].get_group() if axis == "replicate" else None
    return module, models.attach(module, hook, axis=axis, process_group=group)


ADAPTERS: dict[str, Callable[[Setting, torch.device, str], tuple[nn.Module, Any]]] = {
    "replicate()": _replicate,
    "FSDP1 NO_SHARD": _fsdp1,
    "FSDP2 shard": _shard,
    "FSDP2 replicate": _across,
}


def _one(
    setting: Setting,
    device: torch.device,
    hook: str,
    exact: torch.Tensor,
    make: Callable[[Setting, torch.device, str], tuple[nn.Module, Any]],
) -> Values:
    model, handle = make(setting, device, hook)
    found = models.total(model, setting, device, STEPS)
    handle.assert_active()
    handle.check()
    values = judged(hook, found, exact, models.kept_back(handle, model) if make is _ddp else None)
    stats = handle.stats()
    handle.detach()
    return {**values, "steps": stats["steps"], "compressed": stats["compressed_steps"], "rounds": stats["rounds"]}


def judged(hook: str, found: torch.Tensor, exact: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
    """How near a sum of steps is to DDP's, after a check of what the hook promises."""
    if not bool(found.isfinite().all()):
        raise AssertionError(f"{int((~found.isfinite()).sum())} of {found.numel()} numbers are not finite")
    error = models.distance(found, exact)
    kept = None if residual is None else models.distance(found + residual, exact)
    if hook in models.EXACT and not torch.equal(found, exact):
        raise AssertionError(f"not DDP's bits: relative distance {error:.2e}")
    if kept is not None and kept > (ROUNDED if "16" in hook else IDENTITY):
        raise AssertionError(f"passed on + residual is not the gradient: relative distance {kept:.2e}")
    if "powersgd" not in hook and "clip" not in hook and error > NEAR:
        raise AssertionError(f"relative distance {error:.2e} from DDP's sum of {STEPS} steps")
    return {"distance": error, "with residual": "-" if kept is None else kept, "same bits": torch.equal(found, exact)}


def _managed(setting: Setting, device: torch.device, hook: str, exact: torch.Tensor) -> Values:
    """Over a real Manager with one replica, NCCL between replicas where there is a GPU."""
    if find_spec("torchft") is None:
        raise Skipped("torchft is not installed")
    if hook == "quant8":
        raise Skipped("the manager carries all-reduces only")
    import torchft

    import ch_ft

    group = torchft.ProcessGroupNCCL() if setting.cuda else None
    with ch_ft.local(process_group=group, state_dict=dict, load_state_dict=lambda state: None) as local:
        model = ch_ft.DistributedDataParallel(local.manager, models.net(setting, device), hook=hook)
        sums = []
        for step in range(STEPS):
            local.manager.start_quorum()
            sums.append(models.backward(model, models.batch(setting, device, step)))
            if not local.manager.should_commit():
                raise AssertionError(f"step {step} was voted down")
        return judged(hook, torch.stack(sums).double().sum(0), exact, None)
