"""Several ranks on one GPU, over gloo: real sums of CUDA tensors between processes, where NCCL wants a GPU each."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.adapters import ADAPTERS, NEAR, judged
from ch_bench.gpu_kit.rows import FINAL, Rows, Values, latest, write
from ch_bench.gpu_kit.setting import Setting
from commhooks.testing import WorkerError, spawn

STEPS = 6
WORLDS = (2, 4)
HUNG = 25.0  # seconds of the group's collectives: what hangs is told, and the next row gets new processes
SPAWNS = 4
SHARD = "FSDP2 shard"


def run(rows: Rows, setting: Setting) -> None:
    for world in WORLDS if not setting.tiny else WORLDS[:1]:
        for _ in range(SPAWNS):
            left = [name for name in wanted(setting) if not _known(rows, f"{world} ranks, {name}")]
            if not left:
                break
            try:
                spawn(body, world, left, str(rows.path), rows.run, setting, timeout=60.0, group_timeout=HUNG)
            except (WorkerError, TimeoutError) as error:
                _blame(rows, f"{type(error).__name__}: {error}")


def wanted(setting: Setting) -> list[str]:
    """Names of the rows, but for the number of ranks: hooks on DDP, and what reduces between shards."""
    return [*models.hooks(setting), *(f"{SHARD}, {hook}" for hook in models.TELLING[:2])]


def _known(rows: Rows, name: str) -> bool:
    row = latest(rows.path).get(f"{rows.part}/{name}", {})
    return row.get("verdict") in FINAL or (row.get("verdict") == "failed" and row.get("run") == rows.run)


def _blame(rows: Rows, error: str) -> None:
    """What was under way when the processes ended has failed."""
    for row in latest(rows.path).values():
        if row["part"] == rows.part and row["verdict"] == "begun":
            write(rows.path, {**row, "verdict": "failed", "error": error[-2000:]})


def body(rank: int, world: int, names: Sequence[str], path: str, run: int, setting: Setting) -> None:
    """All hooks on one rank; rank 0 writes the rows."""
    device = torch.device("cuda", 0) if setting.cuda else torch.device("cpu")
    if setting.cuda:
        torch.cuda.set_device(device)
    exact = models.total(models.ddp(setting, device), setting, device, STEPS, rank)
    rows = Rows(Path(path), "shared_gpu", run)
    for name in names:
        if rank == 0:
            rows.row(f"{world} ranks, {name}", _one, setting, device, name, exact, rank)
        else:
            try:
                _one(setting, device, name, exact, rank)
            except Exception as error:
                print(f"rank {rank}, {name}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()


def _one(setting: Setting, device: torch.device, name: str, exact: torch.Tensor, rank: int) -> Values:
    if name.startswith(SHARD):
        return _sharded(setting, device, name.removeprefix(f"{SHARD}, "), exact, rank)
    hook = name
    model = models.ddp(setting, device)
    handle = models.attach(model, hook)
    found = models.total(model, setting, device, STEPS, rank)
    handle.check()
    residual = models.kept_back(handle, model)
    if residual is not None:  # each rank's own: their mean is what the average still lacks
        dist.all_reduce(residual)
        residual /= dist.get_world_size()
    everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found)
    same = all(torch.equal(other, found) for other in everyone)
    if not same and hook != "noop":
        raise AssertionError("the ranks hold different averages")
    if hook == "noop":  # each rank keeps its own
        exact = found
    values = judged(hook, found, exact, residual)
    return {**values, "ranks agree": same, "wire MB": handle.stats()["wire_bytes"] / 1e6}


def _sharded(setting: Setting, device: torch.device, hook: str, exact: torch.Tensor, rank: int) -> Values:
    """This rank's shards, of the gradients that DDP averages."""
    model, handle = ADAPTERS[SHARD](setting, device, hook)
    found = models.total(model, setting, device, STEPS, rank)
    handle.check()
    world = dist.get_world_size()
    offset, wanted = 0, []
    for p in models.net(setting, device).parameters():
        wanted.append(exact[offset : offset + p.numel()].view(p.shape).chunk(world)[rank].reshape(-1))
        offset += p.numel()
    error = models.distance(found, torch.cat(wanted))
    if not error <= NEAR:
        raise AssertionError(f"relative distance {error:.2e} from DDP's sum of {STEPS} steps")
    return {"distance": error, "wire MB": handle.stats()["wire_bytes"] / 1e6}
