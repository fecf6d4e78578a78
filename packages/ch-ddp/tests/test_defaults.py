"""No result depends on torch's default dtype and device. Both belong to the user."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ch_core import SimulatedRank, simulate
from ch_core.engine.outcome import Status
from ch_ddp.adapter.foreign_driver import Control
from ch_ddp.adapter.result_checks import gradient_checksum
from commhooks import AllReduce, Bucket, Reduction, RemoteHookError


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


class Fails(Reduction):
    """Raises on rank 1 in the second step."""

    name, lossy = "fails", True

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        if ctx.rank == 1 and ctx.step % 2 and not bucket.buffer.is_meta:
            raise ArithmeticError("in its second step")


@pytest.mark.parametrize("clock", [3000, 16382, 200_000])
def test_the_status_counts_and_tells_under_any_default_dtype(default_dtype: torch.dtype, clock: int) -> None:
    def body(rank: SimulatedRank) -> list[str]:
        engine = rank.engine(Fails())
        engine.state.step = clock
        found = []
        for _ in range(2):
            engine.submit(Bucket.from_tensors({"w": torch.ones(4, dtype=torch.float32)}))
            found.append(type(engine.finish()).__name__)
        return found

    assert simulate(2, body) == [["NoneType", RemoteHookError.__name__], ["NoneType", "ArithmeticError"]]


def test_host_tensors_are_made_on_the_host_under_any_default_device() -> None:
    asked: list[torch.device] = []

    class Private:
        def allgather(self, output: list[torch.Tensor], mine: torch.Tensor) -> Any:
            asked.extend([output[0].device, mine.device])
            raise InterruptedError

    control = Control.__new__(Control)
    control._private, control.world_size, control.timeout = [Private()], 2, 1.0  # type: ignore[list-item]
    with torch.device("meta"):
        assert gradient_checksum([torch.ones(4, device="cpu")]).device.type == "cpu"
        with pytest.raises(InterruptedError):
            control.exchange("", torch.zeros(2, dtype=torch.int64, device="cpu"))
        status = Status(0, 2, 0, 5, [], torch.device("cpu"))
    assert [device.type for device in asked] == ["cpu", "cpu"]
    assert (status.vector.device.type, status.vector.dtype) == ("cpu", torch.float32)
