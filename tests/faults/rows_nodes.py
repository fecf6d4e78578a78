"""B13: two nodes of two ranks under ``two_level``. Ranks die, freeze or raise at either level, and a link is cut."""

import os
import signal
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import kit
import torch.distributed as dist
from kit import RANKS_PER_NODE, Run, deadline, leveled, row, step_without

import commhooks
from commhooks import AllReduce, Bucket, Reduction, StepContext

VICTIM = 3


def at_level(run: Run, scope: str, kind: str, action: Callable[[], None]) -> str:
    """Run two steps, then one in which the victim does ``action`` instead of a collective of one level."""
    model = run.model()
    handle = commhooks.attach(model, leveled("quant4(error_feedback=True)"), timeout=deadline())
    for seed in range(2):
        run.step(model, seed)
    if run.rank == VICTIM:
        transport = handle.binding.engine.transport.scoped(scope)

        def instead(*args: Any, **options: Any) -> None:
            action()

        setattr(transport, kind, instead)
    return step_without(run, model, "the other ranks")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _enter(name: str, title: str, scope: str, kind: str, action: Callable[[], None]) -> None:
    @row(name, title, victims=(VICTIM,), only="two_level")
    def body(run: Run) -> str:
        return at_level(run, scope, kind, action)


for _number, (_scope, _kind, _place) in enumerate(
    [
        ("node", "all_to_all", "in the all-to-all inside its node"),
        ("peers", "all_to_all", "in the exchange between the nodes"),
        ("node", "all_gather", "in the all-gather inside its node"),
    ]
):
    _enter(f"B13.{2 * _number + 1}", f"rank killed (SIGKILL) {_place}", _scope, _kind, kill)
    _enter(f"B13.{2 * _number + 2}", f"rank frozen (SIGSTOP) {_place}", _scope, _kind, freeze)


class Breaks(Reduction):
    """Raises on one rank after its exchange between the nodes."""

    name, lossy = "breaks", True
    armed = False

    def run(self, bucket: Bucket, ctx: StepContext) -> commhooks.Stages:
        yield AllReduce(bucket.buffer)
        if self.armed and not bucket.storage.is_meta:
            raise ValueError("between the levels")


@row("B13.7", "compression raises on one rank between the two levels; then the next step", only="two_level")
def raises_between(run: Run) -> str:
    hook = Breaks()
    model = run.model()
    run.hook(model, hook)
    for seed in range(2):
        run.step(model, seed)
    hook.armed = run.rank == VICTIM

    def afterwards() -> None:
        hook.armed = False
        mean = run.mean(model, 4)
        run.expect(run.step(model, 4), mean, 1e-4)

    return kit.then(run, lambda: run.step(model, 3), afterwards)


@row("B13.8", "link of a node cut (its interface is taken down)", only="two_level", limit=40.0)
def link_cut(run: Run) -> str:
    """Each node is a network namespace. The process group begins again inside."""
    from ch_bench.links import netns  # the other rows run without ch-bench

    reason = netns.why_not()
    if reason:
        return f"right: not run, {reason}"
    names = Path(run.folder, "names")
    net = netns.Network(run.world // RANKS_PER_NODE)
    if run.rank == 0:
        net.__enter__()
        names.write_text(" ".join([*net.names, net.hub]))
    try:
        dist.barrier()
        *spaces, hub = names.read_text().split()
        dist.destroy_process_group()
        netns.Enter(spaces)(run.rank // RANKS_PER_NODE)
        store = dist.FileStore(f"{run.folder}/inside", run.world)
        limit = timedelta(seconds=kit.ROWS["B13.8"].group_timeout * kit.SLOWNESS)
        dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.world, timeout=limit)
        model = run.model()
        commhooks.attach(model, leveled("quant4(error_feedback=True)"), timeout=deadline())
        for seed in range(2):
            run.step(model, seed)
        if run.rank == 0:
            subprocess.run(["ip", "-n", hub, "link", "set", "p1", "down"], check=True)
        return step_without(run, model, "the other ranks")
    finally:
        if run.rank == 0:
            net.__exit__(None, None, None)
