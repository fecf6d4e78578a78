"""Process of one replica. It trains a small model over a real Manager, logs every step, and may kill itself.

Lines of the log: ``{"t": monotonic seconds, "event": ..., ...}``.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ch_ft
import commhooks
from ch_core import checksum
from ch_testing import rank_device

BUCKET_CAP_MB = 0.0089  # a weight and its bias fill a bucket: three buckets of the model below


@dataclass(frozen=True)
class Task:
    """Task of a replica.

    Attributes:
        die: place in :data:`PLACES` where it kills itself once ``die_step`` steps are committed and all ``replicas``
            contribute; ``None`` to live.
        sharded: True to shard the model inside the replica, which is one rank (``fully_shard``).
        save_at: step after which it saves its state.
        resume: True to begin with the saved state.
    """

    name: str
    folder: str
    lighthouse: str
    hook: str = "powersgd(rank=2)"
    sharded: bool = False
    seed: int = 0
    die: str | None = None
    die_step: int = 8
    replicas: int = 1
    first_step: int = 0
    group_timeout: float = 30.0
    pause: float = 0.02
    async_quorum: bool = True
    min_replicas: int = 1
    quorum_timeout: float = 30.0
    save_at: int = -1
    resume: bool = False


PLACES = {"first": 0, "buckets": 2, "p_and_q": 3, "steps": None}
"""Place -> number of the collective before which the replica dies. Collective 0 compares fingerprints, then bucket 0
starts, then bucket 1 (between buckets), then the second stage of bucket 0 (between P and Q)."""

PLACES_OF_EXCHANGES = {"first": 0, "buckets": 4, "p_and_q": 6, "steps": None}
"""The same for hooks that exchange parts. Collective 1 finds the contributors. A bucket begins with two collectives: the
all-to-all of its weight and the sum of its bias."""

PLACES_OF_FSDP = {"first": 0, "buckets": 3, "p_and_q": 2, "steps": None}
"""The same for models that reduce each group of parameters at once. Its Q follows its P directly."""


class Log:
    """Log with a line per event. Each is flushed at once, because the process may be killed before the next."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def __call__(self, event: str, **fields: object) -> None:
        self.file.write(json.dumps({"t": time.monotonic(), "event": event, **fields}) + "\n")


def net(seed: int) -> torch.nn.Module:
    """Return three layers, which fill three buckets with matrices that a hook compresses."""
    torch.manual_seed(seed)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(48, 48), tanh(), linear(48, 48), tanh(), linear(48, 48))


def dying(local: Any, task: Task, log: Log) -> None:
    """Kill this process before the collective that the task names."""
    manager = local.manager
    place = places_of(task)[task.die] if task.die else None
    count = [-1, 0]

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            step = manager.current_step()
            count[:] = [step, count[1] + 1 if count[0] == step else 0]
            if place is not None and count[1] == place and complete(task, manager):
                die(log, step)
            return collective(*args, **kwargs)

        return counted

    manager.allreduce = counting(manager.allreduce)
    for name in ("alltoall_base", "allgather"):  # the process group carries all collectives but sums
        setattr(local.process_group, name, counting(getattr(local.process_group, name)))


def places_of(task: Task) -> dict[str, int | None]:
    """Return the places where the task's replica may die."""
    if task.sharded:
        return PLACES_OF_FSDP
    return PLACES_OF_EXCHANGES if task.hook.startswith("quant") else PLACES


def complete(task: Task, manager: Any) -> bool:
    """Return True if ``die_step`` steps are committed and all replicas contribute."""
    there = manager.num_participants() == task.replicas and manager.is_participating()
    return bool(manager.current_step() >= task.die_step and there)


def die(log: Log, step: int) -> None:
    log("killed", step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def build(task: Task, local: Any, module: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """Return a model with the hook and its optimizer."""
    manager, group = local.manager, local.process_group
    if task.sharded:
        module.handle = commhooks.attach(module, task.hook, manager=manager)
        return module, ch_ft.OptimizerWrapper(manager, sgd(module))
    model = ch_ft.DistributedDataParallel(
        manager,
        module,
        hook=task.hook,
        process_group=group,
        bucket_cap_mb=BUCKET_CAP_MB,
    )
    return model, ch_ft.OptimizerWrapper(manager, sgd(model))


def sharded(module: torch.nn.Module) -> torch.nn.Module:
    """Shard each layer over this rank alone, which is a replica group of one."""
    if not dist.is_initialized():
        dist.init_process_group(rank_device.backend(), store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(torch.get_default_device().type, (1,), mesh_dim_names=("shard",))
    for layer in (*module.children(), module):
        fully_shard(layer, mesh=mesh)
    return module


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(name: str, step: int) -> torch.Tensor:
    """Return the data of a replica in a step, shape (8, 48)."""
    return torch.randn(
        8,
        48,
        generator=torch.Generator().manual_seed(1000 * step + sum(name.encode())),
        dtype=torch.float32,
    )


def run(task: Task, body: Callable[[Task, Log], None] | None = None) -> None:
    """Train until the step that the file ``stop`` names. Then end the process without cleaning up.

    Args:
        task: the replica's task.
        body: training loop; by default :func:`train`.
    """
    torch.set_num_threads(1)
    with (Path(task.folder) / f"{task.name}.err").open("a") as errors:
        os.dup2(errors.fileno(), 2)  # gloo writes to stderr why it ends a process
    log = Log(Path(task.folder) / f"{task.name}.jsonl")
    log("started", seed=task.seed)
    code = 1
    try:
        (body or train)(task, log)
        code = 0
    except BaseException as error:
        log("raised", error=f"{type(error).__name__}: {error}"[:2000])
    os._exit(code)  # torchft 0.2.0 cannot stop its checkpoint server


def train(task: Task, log: Log) -> None:
    module = sharded(net(task.seed)) if task.sharded else net(task.seed)
    local = ch_ft.local(
        lighthouse=task.lighthouse,
        replica=task.name,
        min_replicas=task.min_replicas,
        group_timeout=task.group_timeout,
        timeout=task.group_timeout + 10,
        quorum_timeout=task.quorum_timeout,
        use_async_quorum=task.async_quorum,
    )
    manager = local.manager
    if task.first_step:
        manager.load_state_dict({"step": task.first_step, "batches_committed": task.first_step})
    dying(local, task, log)
    model, optimizer = build(task, local, module)
    inner = optimizer.optim
    # Once, because the manager asks during a forward, when state_dict() of FSDP2 would reshard the module that runs.
    weights = module.state_dict()
    manager.register_state_dict_fn("model", module.load_state_dict, lambda: weights)
    manager.register_state_dict_fn("optim", inner.load_state_dict, inner.state_dict)
    parts: dict[str, Any] = {"manager": manager, "model": module, "optim": inner}
    parts |= {"hook": model.handle} if getattr(model, "handle", None) is not None else {}
    disk = Path(task.folder) / f"{task.name}.pt"
    if task.resume:
        saved = torch.load(disk, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(saved[key])
    stop = Path(task.folder) / "stop"
    while True:
        time.sleep(task.pause)
        attempt(task, log, model, optimizer, manager)
        if manager.current_step() == task.save_at:
            torch.save({key: part.state_dict() for key, part in parts.items()}, disk)
        if task.die == "steps" and complete(task, manager):
            die(log, manager.current_step())
        if stop.exists() and manager.current_step() >= int(stop.read_text() or 0) > 0:
            log("finished", step=manager.current_step())
            return


def attempt(task: Task, log: Log, model: torch.nn.Module, optimizer: Any, manager: Any) -> None:
    """Run one attempt of a step, and log it."""
    before = manager.current_step()
    optimizer.zero_grad()
    model(batch(task.name, before)).pow(2).mean().backward()
    contributed = manager.is_participating()
    participants = manager.num_participants()
    optimizer.step()
    after = manager.current_step()
    committed = after > before and manager.errored() is None
    handle = getattr(model, "handle", None)
    entries = list(handle.state.entries()) if handle is not None else []
    log(
        "step",
        step=after,
        committed=committed,
        contributed=contributed,
        participants=participants,
        params=checksum(*model.parameters()),
        q=checksum(*(t for _, field, t in entries if field == "q")),
        residual=checksum(*(t for _, field, t in entries if field == "residual")),
        **counts(model),
    )


def counts(model: torch.nn.Module) -> dict[str, float]:
    """Return the number of compressed steps and the number of hook calls."""
    handle = getattr(model, "handle", None)
    if handle is None:
        return {}
    return {"compressed": handle.stats()["compressed_steps"], "calls": handle.binding.calls}
