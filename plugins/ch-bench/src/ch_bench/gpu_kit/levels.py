"""``two_level`` and the flat hook on two nodes of two ranks: averages, bytes that leave a node, and milliseconds of a step.

With four GPUs each rank has one, over NCCL. Otherwise the ranks share the first GPU, or the CPU, over gloo. Nodes are given
by ``nodes=``, so the rows show groups, streams and bytes, and the speed of one machine.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.adapters import STEPS, judged
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Values
from ch_core import CpuTuning, ProcessGroupTransport
from ch_testing import WorkerError, spawn
from commhooks import Topology, node_bytes

WORLD, EACH = 4, 2
HUNG = 25.0  # seconds of the group's collectives
TIMED = 8  # steps
OFF = 0.02  # of the planned bytes


def run(rows: Findings, kit: KitDevice) -> None:
    """Start four ranks, with one GPU each if there are four."""
    alone = kit.cuda and torch.cuda.device_count() >= WORLD
    backend = "nccl" if alone else "gloo"
    names = ["groups", *models.REPRESENTATIVE]
    try:
        spawn(
            worker, WORLD, names, str(rows.path), rows.run, kit, alone,
            timeout=60.0, group_timeout=HUNG, backend=backend,
        )  # fmt: skip
    except (WorkerError, TimeoutError) as error:
        message = f"{type(error).__name__}: {error}"

        def fail() -> Values:
            raise AssertionError(message)

        rows.row("all ranks end", fail)


def worker(rank: int, world: int, names: Sequence[str], path: str, number: int, kit: KitDevice, alone: bool) -> None:
    """Run all rows on one rank. Rank 0 writes them."""
    device = torch.device("cuda", rank if alone else 0) if kit.cuda else torch.device("cpu")
    if kit.cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    exact = models.total(models.ddp(kit, device), kit, device, STEPS, rank)
    rows = Findings(Path(path), "levels", number)
    for name in names:
        row = (_groups, kit, device) if name == "groups" else (_compared, kit, device, name, exact, rank)
        if rank == 0:
            rows.row(name, *row)
        else:
            try:
                row[0](*row[1:])
            except Exception as error:
                print(f"rank {rank}, {name}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()


def _two(hook: str) -> str:
    return f"two_level({hook}, nodes={EACH})"


def _groups(kit: KitDevice, device: torch.device) -> Values:
    """Open the groups of both levels, and check their members and their backend."""
    handle = models.attach(models.ddp(kit, device), _two("allreduce"))
    try:
        engine = _engine(handle)
        found: dict[str, Any] = {}
        for scope in ("node", "peers"):
            transport = engine.transport.scoped(scope)
            assert isinstance(transport, ProcessGroupTransport)
            ranks = dist.get_process_group_ranks(transport.group)
            if tuple(ranks) != Topology.even(WORLD, EACH).members(dist.get_rank(), scope):
                raise AssertionError(f"the group of scope {scope} has the ranks {ranks}")
            found[scope] = f"{ranks} over {dist.get_backend(transport.group)}"
        return found
    finally:
        handle.detach()


def _compared(kit: KitDevice, device: torch.device, hook: str, exact: torch.Tensor, rank: int) -> Values:
    """Compare averages, bytes and times of both forms of a hook."""
    flat, two = (_form(kit, device, expr, exact, rank) for expr in (hook, _two(hook)))
    if hook == "allreduce":  # sums in another order are not the same bits
        if two["distance"] > 1e-6:
            raise AssertionError(f"relative distance {two['distance']:.2e} from DDP's sum of {STEPS} steps")
    else:
        judged("powersgd" if "powersgd" in hook else "two_level", two["found"], exact, None)
    off = two["counted"] / two["planned"] - 1
    if abs(off) > OFF:
        raise AssertionError(f"a node sent {two['counted']:,.0f} bytes a step, planned {two['planned']:,.0f}")
    return {
        "distance, flat": flat["distance"],
        "distance, two levels": two["distance"],
        "node sends MB, flat, planned": flat["planned"] / 1e6,
        "node sends MB, two levels, counted": two["counted"] / 1e6,
        "off the plan": off,
        "ms, flat": flat["ms"],
        "ms, two levels": two["ms"],
    }


def _form(kit: KitDevice, device: torch.device, expr: str, exact: torch.Tensor, rank: int) -> dict[str, Any]:
    model = models.ddp(kit, device)
    handle = models.attach(model, expr)
    try:
        found = models.total(model, kit, device, STEPS, rank)
        handle.check()
        everyone = [torch.empty_like(found) for _ in range(WORLD)]
        dist.all_gather(everyone, found)
        if not all(torch.equal(other, found) for other in everyone):
            raise AssertionError(f"{expr}: the ranks have different averages")
        # DDP has rebuilt its buckets, so the layouts are those of every later step.
        before = handle.stats()["between_bytes"]
        inputs = models.batch(kit, device, 0, rank)
        times = [kit.milliseconds(lambda: models.backward(model, inputs))[0] for _ in range(TIMED)]
        counted = torch.tensor([(handle.stats()["between_bytes"] - before) / TIMED], dtype=torch.float64, device=device)
        engine = _engine(handle)
        topology = Topology.even(WORLD, EACH)
        rows = [torch.empty_like(counted) for _ in range(WORLD)]
        dist.all_gather(rows, counted)
        tuning = CpuTuning() if engine.transport.free and device.type == "cpu" else CpuTuning.off()
        planned = node_bytes(engine.reduction, engine.step.layouts, topology, engine.state.step, tuning=tuning).leaving
        node = max(sum(float(rows[member]) for member in members) for members in topology.nodes)
        return {
            "found": found,
            "distance": models.distance(found, exact),
            "counted": node,
            "planned": planned,
            "ms": median(times),
        }
    finally:
        handle.detach()


def _engine(handle: commhooks.CommHook) -> Any:
    assert handle.binding is not None
    return handle.binding.engine
