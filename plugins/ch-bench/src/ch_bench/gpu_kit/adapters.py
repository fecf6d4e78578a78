"""Every hook on DDP, and some hooks on each kind of model, compared with DDP without a hook.

One rank: the average is the rank's own gradient. Exact hooks must return DDP's bits. Lossy hooks must keep a residual with
``passed on + residual = gradient``, or be close. Several ranks share one GPU over gloo, because NCCL needs a GPU for each.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import FINAL, Findings, Skipped, Values, append, latest
from ch_testing import WorkerError, spawn

STEPS = 6
NEAR = 0.05  # relative error of a sum of steps in 8 bits
IDENTITY = 1e-5  # relative error of a sum of steps in fp32
ROUNDED = 5e-3  # relative error of a sum of steps if sums are rounded to 16 bits


def run(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        exact = models.total(models.ddp(kit, device), kit, device, STEPS)
        for hook in models.hooks(kit):
            rows.row(f"DDP, {hook}", _one, kit, device, hook, exact, _ddp)
        for name, make in ADAPTERS.items():
            for hook in models.REPRESENTATIVE:
                rows.row(f"{name}, {hook}", _one, kit, device, hook, exact, make)
        for hook in models.REPRESENTATIVE:
            rows.row(f"ch-ft's DDP, {hook}", _managed, kit, device, hook, exact)


def _ddp(kit: KitDevice, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    model = models.ddp(kit, device)
    return model, models.attach(model, hook)


def _replicate(kit: KitDevice, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    module = models.net(kit, device)
    more: dict[str, Any] = {"device_id": device.index} if kit.cuda else {}
    replicate(module, **more)
    return module, models.attach(module, hook)


def _shard(kit: KitDevice, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    if hook not in ("allreduce", "bf16_compress"):
        raise Skipped("FSDP2's shard axis accepts plain averaging and casts")
    if dist.get_world_size() == 1:
        raise Skipped("FSDP2 does not reduce over a shard axis of one rank")
    return _fsdp2(kit, device, hook, "shard")


def _across(kit: KitDevice, device: torch.device, hook: str) -> tuple[nn.Module, Any]:
    return _fsdp2(kit, device, hook, "replicate")


def _fsdp2(kit: KitDevice, device: torch.device, hook: str, axis: str) -> tuple[nn.Module, Any]:
    module = models.net(kit, device)
    world = dist.get_world_size()
    size = (1, world) if axis == "shard" else (world, 1)
    mesh = init_device_mesh(kit.device, size, mesh_dim_names=("replicate", "shard"))
    for layer in module:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    group = mesh["replicate"].get_group() if axis == "replicate" else None
    return module, models.attach(module, hook, axis=axis, process_group=group)


ADAPTERS: dict[str, Callable[[KitDevice, torch.device, str], tuple[nn.Module, Any]]] = {
    "replicate()": _replicate,
    "FSDP2 shard": _shard,
    "FSDP2 replicate": _across,
}


def _one(
    kit: KitDevice,
    device: torch.device,
    hook: str,
    exact: torch.Tensor,
    make: Callable[[KitDevice, torch.device, str], tuple[nn.Module, Any]],
) -> Values:
    model, handle = make(kit, device, hook)
    found = models.total(model, kit, device, STEPS)
    handle.assert_active()
    handle.check()
    values = judged(hook, found, exact, models.residual_of(handle, model) if make is _ddp else None)
    stats = handle.stats()
    handle.detach()
    return {**values, "steps": stats["steps"], "compressed": stats["compressed_steps"], "rounds": stats["rounds"]}


def judged(hook: str, found: torch.Tensor, exact: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
    """Check the promise of the hook, and return the distance of a sum of steps from DDP's."""
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


def _managed(kit: KitDevice, device: torch.device, hook: str, exact: torch.Tensor) -> Values:
    """Run a real Manager with one replica, over NCCL if there is a GPU."""
    if find_spec("torchft") is None:
        raise Skipped("torchft is not installed")
    if hook == "quant8":
        raise Skipped("the manager carries only all-reduces")
    import torchft

    import ch_ft

    group = torchft.ProcessGroupNCCL() if kit.cuda else None
    with ch_ft.local(process_group=group, state_dict=dict, load_state_dict=lambda state: None) as local:
        model = ch_ft.DistributedDataParallel(local.manager, models.net(kit, device), hook=hook)
        sums = []
        for step in range(STEPS):
            local.manager.start_quorum()
            sums.append(models.backward(model, models.batch(kit, device, step)))
            if not local.manager.should_commit():
                raise AssertionError(f"step {step} was not committed")
        return judged(hook, torch.stack(sums).double().sum(0), exact, None)


# -- several ranks on one GPU

WORLDS = (2, 4)
HUNG = 25.0  # seconds of the group's collectives; after a hang the next row gets new processes
SPAWNS = 4
SHARD = "FSDP2 shard"


def run_shared(rows: Findings, kit: KitDevice) -> None:
    for world in WORLDS if not kit.tiny else WORLDS[:1]:
        for _ in range(SPAWNS):
            left = [name for name in wanted(kit) if not _known(rows, f"{world} ranks, {name}")]
            if not left:
                break
            try:
                spawn(shared_worker, world, left, str(rows.path), rows.run, kit, timeout=60.0, group_timeout=HUNG)
            except (WorkerError, TimeoutError) as error:
                _blame(rows, f"{type(error).__name__}: {error}")


def wanted(kit: KitDevice) -> list[str]:
    """Return the names of the rows without the number of ranks: hooks on DDP, and hooks between shards."""
    return [*models.hooks(kit), *(f"{SHARD}, {hook}" for hook in models.REPRESENTATIVE[:2])]


def _known(rows: Findings, name: str) -> bool:
    row = latest(rows.path).get(f"{rows.part}/{name}", {})
    return row.get("verdict") in FINAL or (row.get("verdict") == "failed" and row.get("run") == rows.run)


def _blame(rows: Findings, error: str) -> None:
    """Mark the row that was running when the processes ended as failed."""
    for row in latest(rows.path).values():
        if row["part"] == rows.part and row["verdict"] == "begun":
            append(rows.path, {**row, "verdict": "failed", "error": error[-2000:]})


def shared_worker(rank: int, world: int, names: Sequence[str], path: str, run: int, kit: KitDevice) -> None:
    """Run all hooks on one rank. Rank 0 writes the rows."""
    device = torch.device("cuda", 0) if kit.cuda else torch.device("cpu")
    if kit.cuda:
        torch.cuda.set_device(device)
    exact = models.total(models.ddp(kit, device), kit, device, STEPS, rank)
    rows = Findings(Path(path), "shared_gpu", run)
    for name in names:
        if rank == 0:
            rows.row(f"{world} ranks, {name}", _shared, kit, device, name, exact, rank)
        else:
            try:
                _shared(kit, device, name, exact, rank)
            except Exception as error:
                print(f"rank {rank}, {name}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()


def _shared(kit: KitDevice, device: torch.device, name: str, exact: torch.Tensor, rank: int) -> Values:
    if name.startswith(SHARD):
        return _sharded(kit, device, name.removeprefix(f"{SHARD}, "), exact, rank)
    model = models.ddp(kit, device)
    handle = models.attach(model, name)
    found = models.total(model, kit, device, STEPS, rank)
    handle.check()
    residual = models.residual_of(handle, model)
    if residual is not None:  # the mean of the ranks' residuals is missing from the average
        dist.all_reduce(residual)
        residual /= dist.get_world_size()
    everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found)
    same = all(torch.equal(other, found) for other in everyone)
    if not same and name != "noop":
        raise AssertionError("the ranks have different averages")
    if name == "noop":  # each rank keeps its gradient
        exact = found
    values = judged(name, found, exact, residual)
    return {**values, "ranks agree": same, "wire MB": handle.stats()["wire_bytes"] / 1e6}


def _sharded(kit: KitDevice, device: torch.device, hook: str, exact: torch.Tensor, rank: int) -> Values:
    """Compare this rank's shards with the gradients that DDP averages."""
    model, handle = ADAPTERS[SHARD](kit, device, hook)
    found = models.total(model, kit, device, STEPS, rank)
    handle.check()
    world = dist.get_world_size()
    offset, wanted = 0, []
    for p in models.net(kit, device).parameters():
        wanted.append(exact[offset : offset + p.numel()].view(p.shape).chunk(world)[rank].reshape(-1))
        offset += p.numel()
    error = models.distance(found, torch.cat(wanted))
    if not error <= NEAR:
        raise AssertionError(f"relative distance {error:.2e} from DDP's sum of {STEPS} steps")
    return {"distance": error, "wire MB": handle.stats()["wire_bytes"] / 1e6}
