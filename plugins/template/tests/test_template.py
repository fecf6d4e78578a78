"""The hook and the wrapper pass the contract. Further tests check the wrapper's own behaviour."""

import pytest
import torch
from ch_template.clip import Clip
from ch_template.half import Half

import commhooks
from ch_core import simulate
from ch_testing import HookContract

pytestmark = pytest.mark.timeout(150)


class TestHalf(HookContract):
    expr = "half"


@pytest.mark.full
class TestClip(HookContract):
    expr = "clip(half, limit=1000.0)"


@pytest.mark.full
class TestClipInsideErrorFeedback(HookContract):
    expr = "error_feedback(clip(bf16_compress, limit=1000.0))"


def reduced(reduction: commhooks.Reduction, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    def body(rank: object) -> torch.Tensor:
        bucket = commhooks.Bucket.from_tensors({"w": torch.full((2, 3), value, dtype=dtype)})
        engine = rank.engine(reduction)
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.view("w")

    return simulate(2, body)[1]


def test_clip() -> None:
    assert reduced(Clip(Half(), 2.0), 5.0).eq(2.0).all()
    assert reduced(Clip(Half(), 2.0), -1.5).eq(-1.5).all()
    assert not reduced(Clip(Half(), 2.0), float("inf")).isfinite().any()


def test_a_limit_beyond_the_dtype() -> None:
    assert reduced(Clip(Half(), 1e6), 5.0, torch.float16).eq(5.0).all()  # fp16 ends at 65504
    assert not reduced(Clip(Half(), 1e6), float("inf"), torch.float16).isfinite().any()


def test_given_as_an_object() -> None:
    handle = commhooks.create(Clip(Half(), limit=2.0))
    assert handle.expr == "clip(half, limit=2.0)"
    assert handle.config == commhooks.canonical(handle.expr)
    assert handle.reduction.name == "clip(half)"


def test_a_state_serves_the_object_and_its_expression() -> None:
    by_name = commhooks.create("error_feedback(clip(bf16_compress, limit=2.0))")
    given = commhooks.create(by_name.reduction)
    assert given.full == by_name.full  # also provider and version
    given.load_state_dict(by_name.state_dict())
    by_name.load_state_dict(given.state_dict())


def test_bad_limit() -> None:
    with pytest.raises(commhooks.HookConfigError, match="limit must be"):
        commhooks.create("clip(half, limit=-1.0)")
