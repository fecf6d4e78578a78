"""The documented install has no NumPy. Attach, save and load work without it."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_core.digest import checksum
from ch_testing import spawn
from commhooks import RankMismatchError

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_the_checksum_of_a_tensor_is_of_its_bits(dtype: torch.dtype) -> None:
    x = (torch.arange(24) % 5).to(dtype).view(4, 6)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    assert checksum(x) == checksum(torch.cat([x, x])[4:])  # a view that begins in the middle of its storage
    other = x.clone()
    other[3, 5] = 1 if other[3, 5] == 0 else 0
    assert checksum(x) != checksum(other)


def test_the_checksum_of_zeros_tells_their_sign_and_empty_tensors_have_one() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(0, 3))


def no_numpy(*_: object, **__: object) -> None:
    raise RuntimeError("Numpy is not available")


class Counting(commhooks.Reduction):
    """Averages and keeps a state that all ranks share."""

    name, lossy = "counting", True
    fields = {"calls": "shared"}

    def run(self, bucket: commhooks.Bucket, ctx: commhooks.StepContext) -> Any:
        for p in bucket.params:
            before = ctx.read(p.name, "calls")
            ctx.write(p.name, "calls", (1,), device=bucket.device).fill_(1.0).add_(0.0 if before is None else before)
        yield commhooks.AllReduce(bucket.storage)


def body(rank: int, world: int) -> str:
    torch.Tensor.numpy = no_numpy  # a tensor does this if NumPy is not installed
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)), bucket_cap_mb=0.001
    )
    handle = commhooks.attach(model, Counting())
    model(torch.ones(2, 40)).sum().backward()
    saved = handle.state_dict()
    handle.load_state_dict(saved)
    if rank == 1:
        next(iter(saved["entries"].values()))["calls"].add_(1.0)
    try:
        handle.load_state_dict(saved)
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_a_state_is_loaded_and_compared() -> None:
    for told in spawn(body, 2, timeout=90):
        assert "numbers that all ranks share" in told
