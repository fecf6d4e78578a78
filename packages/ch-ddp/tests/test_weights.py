"""Weighted averages of DDP models over gloo processes: equal to one process on the concatenated batch."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_core import checksum
from ch_testing import spawn
from commhooks import HookConfigError, HookNotSupportedError, RankMismatchError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(200)]

ROWS = [5, 1, 17, 2]
Grads = dict[str, torch.Tensor]


def net(width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)] if width > 24 else []
    return nn.Sequential(nn.Linear(24, width), nn.Tanh(), *wide, nn.Linear(width, 3))


def batch(rank: int, seed: int = 0) -> torch.Tensor:
    """Return this rank's rows, a different number on each."""
    return torch.randn(ROWS[rank], 24, generator=torch.Generator().manual_seed(100 * seed + rank))


def loss(model: nn.Module, x: torch.Tensor, of: str = "mean") -> torch.Tensor:
    rows = model(x).square().sum(1)
    return rows.mean() if of == "mean" else rows.sum()


def grads(model: nn.Module) -> Grads:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def alone(parts: list[torch.Tensor], width: int = 24) -> Grads:
    """Return the gradient of one process on the concatenated batch."""
    model = net(width)
    loss(model, torch.cat(parts)).backward()
    return grads(model)


def far(found: Grads, wanted: Grads) -> float:
    gap = math.fsum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted)
    return math.sqrt(gap / math.fsum(float(one.double().square().sum()) for one in wanted.values()))


# -- plain loops


def plain_loops(rank: int, world: int) -> dict[str, float]:
    wanted, found = alone([batch(r) for r in range(world)]), {}
    for case in ("mean", "sum", "static graph", "link", "replicate", "view", "unweighted"):
        model: Any = net()
        if case == "replicate":
            replicate(model)
        else:
            options = {"static graph": {"static_graph": True}, "view": {"gradient_as_bucket_view": True}}.get(case, {})
            model = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
        options = {"link": "far"} if case == "link" else {}
        handle = commhooks.attach(model, "allreduce", weighted=case != "unweighted", **options)
        for _ in range(3):  # DDP rebuilds its buckets after the first
            model.zero_grad()
            if case != "unweighted":
                handle.weigh(ROWS[rank], of="sum" if case == "sum" else "mean")
            loss(model, batch(rank), case if case == "sum" else "mean").backward()
            found[case] = max(found.get(case, 0.0), far(grads(model), wanted))
        handle.detach()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_with_unequal_batches_equal_one_process(world: int) -> None:
    for found in spawn(plain_loops, world, timeout=150):
        assert found.pop("unweighted") > 0.05
        assert max(found.values()) <= 1e-6, found


def large(rank: int, world: int) -> tuple[dict[str, float], dict[str, str]]:
    width, found, bits = 1500, {}, {}
    wanted = alone([batch(r) for r in range(world)], width)
    for hook in ("allreduce", "bf16_compress", "quant8"):
        model = DistributedDataParallel(net(width), bucket_cap_mb=9)
        handle = commhooks.attach(model, hook, weighted=True)
        for _ in range(2):
            model.zero_grad()
            handle.weigh(ROWS[rank])
            loss(model, batch(rank)).backward()
        engine = handle.binding.engine
        sizes = [layout.size * 4 for layout in engine.step.layouts]
        assert len(sizes) >= 2 and max(sizes) > 8 << 20, sizes
        found[hook], bits[hook] = far(grads(model), wanted), checksum(*grads(model).values())
        handle.detach()
    return found, bits


def test_buckets_above_8_mib_are_weighted_and_equal_on_all_ranks() -> None:
    ranks = spawn(large, 2, timeout=180)
    assert ranks[0][1] == ranks[1][1]
    for hook, bound in (("allreduce", 1e-6), ("bf16_compress", 1e-2), ("quant8", 5e-2)):
        assert ranks[0][0][hook] <= bound, hook


# -- accumulation, join, scaler, overlapped optimizer


def accumulated(rank: int, world: int) -> list[float]:
    wanted, found = alone([batch(r, seed) for r in range(world) for seed in range(3)][: 3 * world]), []
    for of in ("mean", "sum"):
        model = DistributedDataParallel(net())
        handle = commhooks.attach(model, "allreduce", weighted=True)
        for micro in range(3):
            with nullcontext() if micro == 2 else model.no_sync():
                part = loss(model, batch(rank, micro), of)
                handle.weigh(ROWS[rank], of=of)
                (part / 3 if of == "mean" else part).backward()  # each micro-batch has a third of the window's rows
        found.append(far(grads(model), wanted))
    return found


def test_weights_under_no_sync_add_up() -> None:
    for found in spawn(accumulated, 2, timeout=100):
        assert max(found) <= 1e-6


def thrown_away(rank: int, world: int) -> dict[str, float]:
    wanted, found = alone([batch(r) for r in range(world)]), {}
    for case in ("no_sync", "raised", "attached again", "attached again with the state"):
        model = DistributedDataParallel(net())
        handle = commhooks.attach(model, "allreduce", weighted=True)
        handle.weigh(100.0 if rank else 1.0)
        with model.no_sync(), pytest.raises(ZeroDivisionError) if case == "raised" else nullcontext():
            out = loss(model, batch(rank, 1))
            if case == "raised":
                out.register_hook(lambda gradient: 1 / 0)
            out.backward()
        if case.startswith("attached"):
            handle.detach()
            again = "allreduce" if "state" in case else handle
            handle = commhooks.attach(model, again, weighted=True, state=handle.state)
        model.zero_grad()
        handle.weigh(ROWS[rank])
        loss(model, batch(rank)).backward()
        found[case] = far(grads(model), wanted)
    return found


def test_weights_of_gradients_that_were_thrown_away_do_not_count() -> None:
    for found in spawn(thrown_away, 2, timeout=100):
        assert max(found.values()) <= 1e-6, found


def attached_in_a_window(rank: int, world: int) -> list[float]:
    wanted, found = alone([batch(r, seed) for r in range(world) for seed in range(2)]), []
    for other in (False, True):
        model = DistributedDataParallel(net())
        handle = commhooks.attach(model, "allreduce", weighted=True)
        handle.weigh(ROWS[rank], of="sum")
        with model.no_sync():
            loss(model, batch(rank), "sum").backward()
        handle.detach()
        handle = commhooks.attach(model, "allreduce" if other else handle, weighted=True, state=handle.state)
        handle.weigh(ROWS[rank], of="sum")
        loss(model, batch(rank, 1), "sum").backward()
        found.append(far(grads(model), wanted))
    return found


def test_attach_inside_a_window_keeps_the_weights_of_its_earlier_backwards() -> None:
    for found in spawn(attached_in_a_window, 2, timeout=100):
        assert max(found) <= 1e-6


def joined(rank: int, world: int) -> list[Grads]:
    """Rank 0 has one batch, rank 1 three. Return rank 1's averages."""
    model, found = DistributedDataParallel(net(), bucket_cap_mb=0.002), []
    handle = commhooks.attach(model, "quant4(error_feedback=True)", weighted=True)
    with model.join():
        for step in range(1 + 2 * rank):
            model.zero_grad()
            handle.weigh(ROWS[rank])
            loss(model, batch(rank, step)).backward()
            found.append(grads(model))
    assert handle.hook_state is not None
    handle.commit()
    assert handle.hook_state.step == 3
    return found


def test_a_joined_rank_weighs_0() -> None:
    ranks = spawn(joined, 2, timeout=100)
    for step in (1, 2):
        assert far(ranks[1][step], alone([batch(1, step)])) < 0.5  # 4 bits, and a residual of the steps before


def scaled(rank: int, world: int) -> tuple[float, list[float]]:
    """Rank 1 overflows in step 2. Every rank skips it, and the residual follows the scale."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    handle = commhooks.attach(model, "quant4(error_feedback=True)", weighted=True, optimizer=optimizer, scaler=scaler)
    wanted = {n: torch.zeros_like(g) for n, g in alone([batch(0)]).items()}
    applied, total = copy.deepcopy(wanted), sum(ROWS[:world])
    for step in range(5):
        optimizer.zero_grad()
        handle.weigh(ROWS[rank])
        part = loss(model, batch(rank, step)) * (math.inf if step == 2 and rank == 1 else 1.0)
        scaler.scale(part).backward()
        scaler.unscale_(optimizer)
        if step != 2:
            exact = alone([batch(r, step) for r in range(world)])
            for name, one in grads(model).items():
                wanted[name] += exact[name]
                applied[name] += one
        scaler.step(optimizer)
        scaler.update()
    handle.commit()
    assert handle.hook_state is not None and handle.hook_state.step == 4
    reference = handle.hook_state.versions.reference
    assert reference is not None
    gap = 0.0
    for name, field, residual in handle.hook_state.entries():
        if field == "residual":
            owed = residual.view_as(wanted[name]) * reference / total
            torch.distributed.all_reduce(owed)
            gap = max(gap, float((wanted[name] - applied[name] - owed).abs().max()))
    return gap, [float(scaler.get_scale())]


def test_with_a_scaler_no_gradient_is_lost() -> None:
    for gap, scale in spawn(scaled, 2, timeout=100):
        assert scale == [512.0]
        assert gap < 1e-5


def overlapped(rank: int, world: int) -> float:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
    handle = commhooks.attach(model, "allreduce", weighted=True)
    optimizer = ch_ddp.OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), handle)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    optimizer.zero_grad()
    handle.weigh(ROWS[rank])
    loss(model, batch(rank)).backward()
    optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.module.named_parameters()}
    return far(moved, alone([batch(r) for r in range(world)]))


def test_an_optimizer_inside_the_backward_gets_the_weighted_average() -> None:
    assert max(spawn(overlapped, 2, timeout=100)) <= 1e-5  # read from the move of the parameters, which rounds


# -- errors and refusals


def forgets(rank: int, world: int) -> list[str]:
    model, texts = DistributedDataParallel(net()), []
    handle = commhooks.attach(model, "powersgd(rank=2, min_compression_rate=1)", weighted=True)
    for step, weight in enumerate((4.0, None, 4.0, math.nan)):
        if rank == 0 or weight is not None:
            handle.weigh(4.0 if rank == 0 else weight)  # type: ignore[arg-type]
        try:
            loss(model, batch(rank, step)).backward()
            texts.append("")
        except HookConfigError as error:
            texts.append(str(error))
    return texts


def test_a_forgotten_or_wrong_weight_is_one_error_on_all_ranks() -> None:
    first, second = spawn(forgets, 2, timeout=100)
    assert first == second
    assert [bool(text) for text in first] == [False, True, False, True]
    assert "rank 1 has not called weigh()" in first[1] and "rank 1 weighs nan" in first[3]


def refusals(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(RankMismatchError, match="weighted"):
        commhooks.attach(model, "allreduce", weighted=rank == 0)
    with pytest.raises(HookNotSupportedError, match="a foreign function"):
        commhooks.attach(model, lambda state, bucket: ch_ddp.allreduce_hook(None, bucket), weighted=True)
    with pytest.raises(HookNotSupportedError, match="its own gradient"):
        commhooks.attach(model, "noop", weighted=True)
    handle = commhooks.attach(model, "allreduce")  # the model is still free
    with pytest.raises(HookNotSupportedError, match="without weighted=True"):
        handle.weigh(1)


def test_ranks_agree_on_weights_and_hooks_without_an_average_are_refused() -> None:
    spawn(refusals, 2, timeout=100)


def synced_batches(rank: int, world: int) -> str:
    model = replicate(nn.Sequential(nn.Linear(24, 8), nn.SyncBatchNorm(8)))
    handle = commhooks.attach(model, "allreduce", weighted=True)
    handle.weigh(ROWS[rank], of="sum")
    with pytest.raises(HookNotSupportedError) as refused:
        handle.weigh(ROWS[rank])
    return str(refused.value)


def test_means_are_refused_with_synchronised_batches() -> None:
    """The gradient of each rank has parts of the losses of all ranks. torch synchronises batches on GPUs only."""
    assert all("SyncBatchNorm" in text for text in spawn(synced_batches, 2, timeout=100))
