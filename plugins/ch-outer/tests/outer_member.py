"""A replica as a process: an outer optimizer over torchft's Manager, which dies on demand and logs every round."""

import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ch_ft
from ch_core import checksum
from ch_outer import Members, OuterOptimizer, Schedule
from ch_testing.torchft import member

from .outer_kit import adam, batch, make

EVERY = 3
PLACES = ("inner step", "before", "inside", "after")
INSIDE = {"allreduce": 1, "quant4": 3}
"""The collective of a round before which a replica dies: the comparison of members, then the average; with parts, who
contributes and their all-to-all lie between the two."""


def dying(local: ch_ft.Local, task: member.Task, log: member.Log, optimizer: OuterOptimizer) -> None:
    """SIGKILL this process in the middle of an exchange."""
    count = [-1, 0]
    place = next(number for name, number in INSIDE.items() if task.hook is not None and task.hook.startswith(name))

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            step = local.manager.current_step()
            count[:] = [step, count[1] + 1 if count[0] == step else 0]
            if count[1] == place and optimizer.landed == task.die_step:
                member.die(log, optimizer.landed)
            return collective(*args, **kwargs)

        return counted

    local.manager.allreduce = counting(local.manager.allreduce)
    for name in ("alltoall_base", "allgather"):
        setattr(local.process_group, name, counting(getattr(local.process_group, name)))


def rounds(task: member.Task, log: member.Log) -> None:
    """Train. The file ``stop`` names the round after which all replicas end."""
    model = make(task.seed)
    local = ch_ft.local(
        lighthouse=task.lighthouse,
        replica=task.name,
        group_timeout=task.group_timeout,
        timeout=task.group_timeout + 10,
        quorum_timeout=30,
        use_async_quorum=task.async_quorum,
    )
    optimizer = OuterOptimizer(
        adam(model), model, Schedule(every=EVERY), exchange=task.hook, ranks=Members(local.manager)
    )
    if task.die == "inside":
        dying(local, task, log, optimizer)
    folder = Path(task.folder)
    (folder / f"{task.name}.there").touch()
    while len(list(folder.glob("*.there"))) < task.replicas:  # a quorum waits for all replicas that it has heard of
        time.sleep(0.01)
    stop = folder / "stop"
    timer: threading.Timer | None = None
    while not (stop.exists() and optimizer.landed >= int(stop.read_text() or 0) > 0):
        time.sleep(0.01)
        landed, inner = optimizer.landed, optimizer.count % EVERY + 1
        now = task.die if landed == task.die_step else None
        if now == "random" and timer is None:  # by the folder's name, which is another one in each run
            delay = zlib.crc32(task.folder.encode()) % 1000 / 1000
            timer = threading.Timer(delay, lambda: member.die(log, optimizer.landed))
            timer.start()
        if (now == "inner step" and inner == 2) or (now == "before" and inner == EVERY):
            member.die(log, landed)
        optimizer.zero_grad()
        x, y = batch(task.seed, optimizer.count)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if optimizer.landed > landed or inner == EVERY:
            told(log, local.manager, optimizer, optimizer.landed > landed)
        if task.die == "after" and optimizer.landed == task.die_step + 1:
            member.die(log, optimizer.landed)
    log("finished", step=optimizer.landed)


def told(log: member.Log, manager: Any, optimizer: OuterOptimizer, committed: bool) -> None:
    """Return a line of the log with the values that all members share."""
    starts = [start for group in optimizer.outer.param_groups for start in group["params"]]
    momentum = [one["momentum_buffer"] for one in optimizer.outer.state.values()]
    log(
        "step",
        step=optimizer.landed,
        committed=committed,
        contributed=manager.is_participating(),
        participants=manager.num_participants(),
        params=" ".join(map(checksum, starts)),
        q=" ".join(map(checksum, momentum)),
        finite=all(bool(torch.isfinite(start).all()) for start in starts),
    )
