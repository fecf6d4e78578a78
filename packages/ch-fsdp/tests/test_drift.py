"""The drift alarm in FSDP2 and HSDP: replicas of one shard are compared, and ranks with other shards are not."""

from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from ch_testing import spawn
from commhooks import HookNotSupportedError, RankMismatchError, RemoteHookError

from .fsdp_kit import batch, gpt, line, shard2, square
from .test_replicated import replicated

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]
POWERSGD = "powersgd(rank=2, min_compression_rate=1)"


class Loop:
    def __init__(self, model: Any, rank: int, hook: str, every: int, **options: Any) -> None:
        self.rank, self.model = rank, model
        self.handle = commhooks.attach(model, hook, check_ranks_every=every, **{"on_drift": "raise", **options})
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, number: int) -> str:
        self.optimizer.zero_grad()
        try:
            self.model(*batch(number, self.rank)).backward()
        except (RankMismatchError, RemoteHookError) as error:
            return str(error)
        self.optimizer.step()
        return ""


@torch.no_grad()
def flip(param: torch.Tensor) -> None:
    param.to_local().view(-1).view(torch.int32)[0] ^= 1 << 7


def parameter(model: nn.Module, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name]


def hsdp(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for hook in ("bf16_compress", POWERSGD, "quant8"):
        loop = Loop(shard2(gpt(), square()), rank, hook, every=2)
        errors = [loop.step(number) for number in range(3)]
        if rank == 3:  # replica 1 of shard 1
            flip(parameter(loop.model, "blocks.1.up.weight"))
        found[hook] = [*errors, loop.step(3), loop.step(4)]
    loop = Loop(shard2(gpt(), square()), rank, POWERSGD, every=10)
    found["clean"] = [loop.step(number) for number in range(100)], loop.handle.rank_check.checks
    return found


@pytest.mark.full
def test_hsdp_names_the_parameter_and_the_ranks() -> None:
    for rank, found in enumerate(spawn(hsdp, 4)):
        for hook in ("bf16_compress", POWERSGD, "quant8"):
            assert found[hook][:4] == [""] * 4, hook
            assert "blocks.1.up.weight is not equal on all ranks" in found[hook][4], (rank, found[hook][4])
            assert "rank 1 and rank 3 differ from each other" in found[hook][4]
        assert found["clean"] == ([""] * 100, 10)


def thousand(rank: int, world: int) -> dict[str, Any]:
    models = {"hsdp": lambda: shard2(gpt(), square()), "shards": lambda: shard2(gpt(), line(world))}
    loops = {
        f"{kind}, {hook}": Loop(models[kind](), rank, hook, every=100)
        for kind, hook in (("hsdp", POWERSGD), ("hsdp", "quant4(error_feedback=True)"), ("shards", "bf16_compress"))
    }
    errors = {name for number in range(1000) for name, loop in loops.items() if loop.step(number)}
    return {"errors": errors, "checks": {name: loop.handle.rank_check.checks for name, loop in loops.items()}}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_clean_steps_raise_no_alarm() -> None:
    for found in spawn(thousand, 4, timeout=800):
        assert found["errors"] == set()
        assert list(found["checks"].values()) == [10, 10, 0]  # ranks with other shards compare nothing


def fsdp(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    loop = Loop(replicated(), rank, POWERSGD, every=1)
    errors = [loop.step(number) for number in range(2)]
    if rank == 1:
        flip(parameter(loop.model, "blocks.0.qkv.bias"))
    found["replicate"] = [*errors, loop.step(2)]
    loop = Loop(shard2(gpt(), line(world)), rank, "bf16_compress", every=1)
    found["shards"] = [loop.step(number) for number in range(3)], loop.handle.report().rank_checks
    with pytest.raises(HookNotSupportedError, match="check_ranks_every"):
        Loop(shard2(gpt(), line(world)), rank, "bf16_compress", axis="gather", every=1)
    return found


def test_replicated_models_are_compared_and_shards_are_not() -> None:
    for found in spawn(fsdp, 2):
        assert found["replicate"][:2] == ["", ""] and "blocks.0.qkv.bias is not equal" in found["replicate"][2]
        assert found["shards"][0] == ["", "", ""] and "hold different shards" in found["shards"][1]
