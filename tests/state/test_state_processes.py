"""State over real gloo processes: wrapped again, through files and distributed checkpoints, as PyTorch documents."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import HookTimeoutError, RankMismatchError, StateError
from commhooks.checkpoint import dcp
from commhooks.checkpoint.world_change import merge

EXPR = "powersgd(rank=2, min_compression_rate=1)"


def wrapped(cap: float = 0.002) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))
    return DistributedDataParallel(net, bucket_cap_mb=cap)


def step(model: DistributedDataParallel, number: int) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(number * 16 + dist.get_rank())
    model(torch.randn(4, 24, generator=generator)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def entries(saved: dict[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    return {(n, f): t for n, row in saved["entries"].items() for f, t in row.items()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    x, y = entries(a), entries(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) and a["step"] == b["step"]


def train_and_save(rank: int, world: int, folder: str) -> None:
    model = wrapped()
    handle = commhooks.attach(model, EXPR)
    for number in range(4):
        step(model, number)
    assert handle.stats()["compressed_steps"] > 0
    saved = handle.state_dict()
    torch.save(saved, f"{folder}/rank{rank}.pt")
    weights = {f"model.{n}": t for n, t in model.module.state_dict().items()}
    import torch.distributed.checkpoint as torch_dcp

    torch_dcp.save({**weights, **dcp.sharded(handle)}, checkpoint_id=f"{folder}/all")
    dcp.save(handle, f"{folder}/alone", key="mine")
    own = saved["entries"]["0.weight"]["residual"]
    every = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    assert not torch.equal(every[0], every[1]), "residuals are local: this test would prove nothing"
    # wrapped again with other buckets and this rank's file, to the bit
    again = wrapped(0.01)
    other = commhooks.attach(again, EXPR)
    other.load_state_dict(torch.load(f"{folder}/rank{rank}.pt"))
    assert equal(other.state_dict(), saved)
    for number in range(4, 7):
        assert all(map(torch.equal, step(model, number), step(again, number)))
    # through a distributed checkpoint on the same number of ranks, each with its own state
    third = commhooks.attach(wrapped(), EXPR)
    for where, key in ((f"{folder}/all", "commhook"), (f"{folder}/alone", "mine")):
        dcp.load(third, where, key=key)
        assert equal(third.state_dict(), saved)
    with pytest.raises(StateError, match="no tensor"):
        dcp.load(third, f"{folder}/all", key="nothing")
    # one rank does not see the checkpoint, so no rank loads it and no rank waits
    step(model, 7)
    ahead = handle.state_dict()
    unseen = FileNotFoundError if rank else RankMismatchError
    with pytest.raises(unseen, match=r"No such file" if rank else r"rank 1 .*No such file"):
        dcp.load(handle, f"{folder}/{'nowhere' if rank else 'all'}")
    assert equal(handle.state_dict(), ahead)
    if rank:  # nor the numbers, although it sees the rest
        shutil.copytree(f"{folder}/all", f"{folder}/torn")
        for path in Path(f"{folder}/torn").glob("*.distcp"):
            path.unlink()
    with pytest.raises(StateError if rank else RankMismatchError, match="the checkpoint cannot be read"):
        dcp.load(handle, f"{folder}/{'torn' if rank else 'all'}")
    assert equal(handle.state_dict(), ahead)
    # another rank's file
    with pytest.raises(StateError, match="this is rank"):
        third.load_state_dict(torch.load(f"{folder}/rank{rank}.pt") | {"rank": 1 - rank})
    assert equal(third.state_dict(), saved)


def resume_on_three(rank: int, world: int, folder: str) -> None:
    merged = merge([torch.load(f"{folder}/rank{r}.pt") for r in range(2)])
    handle = commhooks.attach(wrapped(), EXPR)
    with pytest.raises(StateError, match="mean"):
        dcp.load(handle, f"{folder}/all")
    assert handle.state_dict()["step"] == 0
    dcp.load(handle, f"{folder}/all", world_change="mean")
    found, wanted = entries(handle.state_dict()), entries(merged)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[k], wanted[k]) for k in found), "the mean of all old ranks"
    model = wrapped()
    other = commhooks.attach(model, EXPR)
    other.load_state_dict(merged, world_change="mean")
    grads = torch.cat([g.flatten() for g in step(model, 9)])
    every = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(every, grads)
    assert all(torch.equal(every[0], g) for g in every)


def load_on_all_or_none(rank: int, world: int) -> None:
    model = wrapped()
    handle = commhooks.attach(model, EXPR)
    step(model, 0)
    early = handle.state_dict()
    step(model, 1)
    kept = handle.state_dict()

    def attempt(saved: dict[str, Any], on_rank_0: str, on_rank_1: str, error: type[Exception]) -> None:
        with pytest.raises(error if rank == 1 else RankMismatchError, match=on_rank_1 if rank == 1 else on_rank_0):
            handle.load_state_dict(saved if rank == 1 else kept)
        assert equal(handle.state_dict(), kept), "nothing was changed on any rank"

    attempt(kept | {"format": 9}, "rank 1 .*state format 9", "state format 9", StateError)
    attempt(early, "step: rank 0 2; rank 1 1", "step: rank 0 2; rank 1 1", RankMismatchError)
    name, row = next((n, row) for n, row in kept["entries"].items() if "q" in row)
    other = kept | {"entries": kept["entries"] | {name: row | {"q": row["q"] + 1}}}
    shares = f"numbers that all ranks share: rank 0 {name} q "
    attempt(other, shares, shares, RankMismatchError)
    handle.load_state_dict(kept)
    grads = torch.cat([g.flatten() for g in step(model, 2)])
    every = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(every, grads)
    assert all(torch.equal(every[0], g) for g in every), "the model stays usable"


def absent_once(rank: int, world: int) -> None:
    handle = commhooks.attach(wrapped(), EXPR, timeout=1.5)
    step(handle_model := wrapped(), 0)  # another call comes in between
    kept = handle.state_dict()
    for missing in (0, 1):
        if rank != missing:
            with pytest.raises(HookTimeoutError, match=f"ranks {missing} "):
                handle.load_state_dict(kept)
        dist.barrier()
        handle.load_state_dict(kept)  # all ranks are back in the same agreement
        dist.barrier()
    if rank == 0:
        with pytest.raises(RankMismatchError, match="different calls"):
            commhooks.attach(handle_model, EXPR)
    else:
        with pytest.raises(RankMismatchError, match="different calls"):
            handle.load_state_dict(kept)
    handle.load_state_dict(kept)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_a_rank_that_was_absent_once_is_met_again():
    spawn(absent_once, 2, timeout=60)


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_a_state_is_loaded_on_all_ranks_or_on_none():
    spawn(load_on_all_or_none, 2, timeout=60)


@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_every_rank_keeps_its_residual(tmp_path):
    spawn(train_and_save, 2, str(tmp_path), timeout=140)
    spawn(resume_on_three, 3, str(tmp_path), timeout=140)


# PyTorch's documented example ("Checkpointing of Communication Hooks"), with the imports of the hook changed, on the
# CPU, and with training steps before and after.


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def demo_serialization(rank: int, world: int, folder: str, steps: int) -> None:
    import ch_powersgd as powerSGD

    checkpoint_path = folder + "/checkpoint.pt"
    ddp_model = DistributedDataParallel(SimpleModel(), bucket_cap_mb=0.001)
    powersgd_hook = powerSGD.powerSGD_hook
    powersgd_state = powerSGD.PowerSGDState(process_group=None, start_powerSGD_iter=2, min_compression_rate=1)
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    ddp_model.register_comm_hook(powersgd_state, powersgd_hook)
    for number in range(steps):
        step(ddp_model, number)
        optimizer.step()
    state = {
        "state_dict": ddp_model.state_dict(),
        "comm_hook": powersgd_hook,
        "comm_hook_state": powersgd_state,
    }
    if rank == 0:
        torch.save(state, checkpoint_path)
    dist.barrier()
    checkpoint = torch.load(checkpoint_path, weights_only=False)  # pickles a function and an object, as documented
    new_ddp_model = DistributedDataParallel(SimpleModel(), bucket_cap_mb=0.001)
    new_ddp_model.load_state_dict(checkpoint["state_dict"])
    powersgd_hook = checkpoint["comm_hook"]
    powersgd_state = checkpoint["comm_hook_state"]
    new_ddp_model.register_comm_hook(powersgd_state, powersgd_hook)
    dist.barrier()
    if rank == 0:
        os.remove(checkpoint_path)
    assert powersgd_state.iter == steps
    for number in range(steps, steps + 4):
        grads = torch.cat([g.flatten() for g in step(new_ddp_model, number)])
        every = [torch.empty_like(grads) for _ in range(world)]
        dist.all_gather(every, grads)
        assert torch.equal(every[0], every[1])
    assert powersgd_state.iter == steps + 4
    assert powersgd_state.compression_stats()[0] > 1, "it compressed"
    names = {name for name, _, _ in powersgd_state.entries()}
    assert names == {"0:24x24", "2:12x24"}


def own_pickle(rank: int, world: int) -> None:
    """Each rank's own pickle resumes to the bit from the very first step after wrapping again."""
    import ch_powersgd

    def bare(state: Any) -> DistributedDataParallel:
        torch.manual_seed(0)
        model = DistributedDataParallel(SimpleModel(), bucket_cap_mb=0.001)
        model.register_comm_hook(state, ch_powersgd.powerSGD_hook)
        return model

    state = ch_powersgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model = bare(state)
    for number in range(5):
        step(model, number)
    again = pickle.loads(pickle.dumps(state))
    other = bare(again)
    for number in range(5, 9):
        assert all(map(torch.equal, step(model, number), step(other, number)))
    # state saved by position loads by name, and the reverse
    handle = commhooks.attach(DistributedDataParallel(SimpleModel()), "powersgd(start_iter=2, min_compression_rate=1)")
    handle.load_state_dict(commhooks.state_dict(state))
    assert {n for n, _ in entries(handle.state_dict())} == {"fc1.weight", "fc2.weight"}
    commhooks.load_state_dict(again, handle.state_dict())
    assert equal(commhooks.state_dict(again), commhooks.state_dict(state))
    state.bind(model)
    assert {n for n, _ in entries(commhooks.state_dict(state))} == {"fc1.weight", "fc2.weight"}
    again.step = state.step
    assert all(map(torch.equal, step(model, 9), step(other, 9)))


@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [0, 4])
def test_the_documented_example(tmp_path, steps):
    spawn(demo_serialization, 2, str(tmp_path), steps, timeout=140)


@pytest.mark.gloo
@pytest.mark.timeout(200)
def test_pickled_state_continues_to_the_bit():
    spawn(own_pickle, 2, timeout=140)
