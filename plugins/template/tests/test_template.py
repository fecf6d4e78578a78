"""Both keep the whole contract; what is theirs alone is tested beside it."""

import pytest
import torch
from ch_template.clip import Clip
from ch_template.half import Half

import commhooks
from commhooks.simulate import simulate
from commhooks.testing import HookContract

pytestmark = pytest.mark.timeout(150)


class TestHalf(HookContract):
    expr = "half"


class TestClip(HookContract):
    expr = "clip(half(dtype='float16'), limit=1000.0)"


def reduced(reduction: commhooks.Reduction, value: float) -> torch.Tensor:
    def body(rank: object) -> torch.Tensor:
        bucket = commhooks.Bucket.from_tensors({"w": torch.full((2, 3), value)})
        engine = rank.engine(reduction)
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.view("w")

    return simulate(2, body)[1]


def test_clip() -> None:
    assert reduced(Clip(Half(), 2.0), 5.0).eq(2.0).all()
    assert reduced(Clip(Half(), 2.0), -1.5).eq(-1.5).all()
    assert not reduced(Clip(Half(), 2.0), float("inf")).isfinite().any()


def test_bad_dtype() -> None:
    with pytest.raises(commhooks.HookConfigError, match="dtype must be one of"):
        commhooks.create("half(dtype='int4')")
