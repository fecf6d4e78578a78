"""The drift alarm in DDP, over gloo processes: a flipped bit is named, and legal differences are not reported."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn
from commhooks import HookConfigError, HookNotSupportedError, RankMismatchError

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]
HOOKS = ("allreduce", "bf16_compress", "powersgd(rank=2, min_compression_rate=1)", "quant4", "topk(density=0.3)")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 8)
        self.frozen, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(x)))
        return self.expert(self.frozen(hidden)).square().mean()


def ddp(rank: int) -> DistributedDataParallel:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
    with torch.no_grad():
        net.expert.weight += rank  # each rank has its own expert
    return DistributedDataParallel(net, bucket_cap_mb=0.002)


class Loop:
    def __init__(self, rank: int, hook: Any, every: int, on_drift: str = "raise", **options: Any) -> None:
        self.rank, self.model = rank, ddp(rank)
        self.handle = commhooks.attach(self.model, hook, check_ranks_every=every, on_drift=on_drift, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> str:
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        self.optimizer.zero_grad()
        try:
            self.model(torch.randn(6, 24, generator=generator)).backward()
        except RankMismatchError as error:
            return str(error)
        self.optimizer.step()
        return ""


@torch.no_grad()
def flip(param: torch.Tensor) -> None:
    param.view(-1).view(torch.int32)[-1] ^= 1


def named(rank: int, world: int) -> dict[str, list[Any]]:
    found = {}
    for hook in HOOKS:
        loop = Loop(rank, hook, every=3)
        errors = [loop.step(0)]
        if rank == 1:
            flip(loop.model.module.down.weight)  # one bit, one rank
        errors += [loop.step(number) for number in range(1, 4)]
        found[hook] = [*errors, loop.handle.report().to_dict()]
    loop = Loop(rank, "allreduce", every=1)
    loop.step(0)
    if rank == 0:
        flip(loop.model.module.frozen.bias)
    found["frozen"] = [loop.step(1)]
    loop = Loop(rank, HOOKS[2], every=1)
    for number in range(3):
        loop.step(number)
    loop.handle.commit()
    if rank == 2:
        flip(loop.handle.hook_state.read("up.weight", "q"))
    found["state"] = [loop.step(3)]
    return found


def test_a_flipped_bit_of_one_parameter_on_one_rank_is_named_on_all_ranks() -> None:
    for found in spawn(named, 3):
        for hook in HOOKS:
            *errors, report = found[hook]
            assert errors[:3] == ["", "", ""], hook
            assert (
                "down.weight is not equal on all ranks" in errors[3] and "rank 1 differs from ranks 0, 2" in errors[3]
            )
            assert "down.weight" in report["warnings"][0] and "2 times" in report["rank_checks"]
        assert "frozen.bias" in found["frozen"][0] and "rank 0 differs from ranks 1, 2" in found["frozen"][0]
        assert "up.weight (q of the hook's state)" in found["state"][0] and "rank 2 differs" in found["state"][0]


def thousand(rank: int, world: int) -> list[Any]:
    loops = [Loop(rank, hook, every=100) for hook in HOOKS[1:3]]
    for number in range(1000):
        for loop in loops:
            assert not loop.step(number)
    return [(loop.handle.rank_check.checks, loop.handle.report().rank_checks) for loop in loops]


@pytest.mark.full
def test_a_thousand_clean_steps_raise_no_alarm() -> None:
    for found in spawn(thousand, 2):
        assert found == [(10, "parameters compared across ranks 10 times, every 100 steps: equal")] * 2


def torchs(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(state, bucket)


def legal(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    loop = Loop(rank, torchs, every=2)
    found["foreign"] = [loop.step(number) for number in range(2)]
    if rank == 0:
        flip(loop.model.module.up.bias)
    found["foreign"] += [loop.step(2), loop.step(3), loop.handle.rank_check.checks]

    loop = Loop(rank, "post_local_sgd(start_iter=3, subgroup_size=1)", every=1)
    found["local sgd"] = [loop.step(number) for number in range(6)]
    found["local sgd apart"] = float(loop.model.module.up.weight.sum())
    found["local sgd checks"] = loop.handle.rank_check.checks, loop.handle.report().rank_checks

    loop = Loop(rank, "noop", every=1)
    found["noop"] = [loop.step(number) for number in range(3)], loop.handle.report().rank_checks
    policy = {"down.*": "noop", "*": "allreduce"}
    loop = Loop(rank, policy, every=1)
    found["policy"] = [loop.step(number) for number in range(3)]
    if rank == 0:
        flip(loop.model.module.up.weight)
    found["policy"].append(loop.step(3))

    model = ddp(rank)
    try:
        commhooks.attach(model, "allreduce", check_ranks_every=100 + rank)
    except RankMismatchError as error:
        found["options"] = str(error)
    return found


def test_legal_differences_are_not_reported_and_ranks_agree_on_the_options() -> None:
    results = spawn(legal, 2)
    for found in results:
        assert found["foreign"][:2] == ["", ""] and "up.bias is not equal" in found["foreign"][2]
        assert found["foreign"][3:] == ["", 2]
        assert found["local sgd"] == [""] * 6
        assert found["local sgd checks"][0] == 2 and "local SGD" in found["local sgd checks"][1]
        assert found["noop"][0] == [""] * 3 and "noop leaves each rank its own gradients" in found["noop"][1]
        assert found["policy"][:3] == [""] * 3 and "up.weight is not equal" in found["policy"][3]
        assert "check_ranks_every" in found["options"] and "101, warn" in found["options"]
    assert results[0]["local sgd apart"] != results[1]["local sgd apart"]


def test_a_single_process_and_illegal_options() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(HookConfigError, match="expected a number of steps"):
            commhooks.attach(model, "allreduce", check_ranks_every=0)
        handle = commhooks.attach(model, "allreduce", check_ranks_every=1, single_process=True)
        model(torch.ones(1, 4)).sum().backward()
        assert "1 time" in handle.report().rank_checks
        handle.detach()
        assert handle.rank_check is None
    finally:
        dist.destroy_process_group()


def test_an_adapter_without_the_check_refuses_it() -> None:
    from ch_core import RankCheck
    from commhooks import Binding

    class Bare(Binding):
        calls = 0

        def detach(self) -> None:
            pass

    with pytest.raises(HookNotSupportedError, match="Bare does not know"):
        Bare().check_ranks(RankCheck(1))
