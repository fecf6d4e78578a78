"""The default outer step, and the warning of too few rounds for a momentum."""

import warnings
from typing import Any

import pytest
import torch

from ch_outer import FixedRanks, OuterOptimizer, Schedule, diloco, nesterov, plain_sgd
from ch_outer.outer_sgd import momentum_of, rounds_needed

from .outer_kit import adam, alone, by_options, make, train


def test_the_default_has_little_momentum() -> None:
    model = make()
    optimizer = OuterOptimizer(adam(model), model, Schedule(every=8), ranks=FixedRanks(transport=alone()))
    group = optimizer.outer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (1.0, 0.3, True)


@pytest.mark.parametrize("steps", [None, 32])
@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, False), ({"outer": plain_sgd(1.0)}, False), ({"outer": nesterov(0.7, 0.9)}, True)],
    ids=["default", "plain", "nesterov"],
)
def test_too_few_rounds_for_the_momentum_are_warned_of(options: Any, warns: bool, steps: int | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=alone()), every=8, steps=steps, **options)
        early = len(caught)
        train(model, optimizer, 0, range(32))
        optimizer.finish()
    assert [str(one.message)[:34] for one in caught] == ["4 rounds are few for an outer mome"] * warns
    assert early == (warns and steps is not None)


def test_a_preset_keeps_the_paper_s_momentum_and_warns() -> None:
    model = make()
    with pytest.warns(UserWarning, match=r"3 rounds are few for an outer momentum of 0\.9, which needs about 540"):
        optimizer = diloco(adam(model), model, steps=1500, transport=alone())
    assert (optimizer.outer.param_groups[0]["lr"], momentum_of(optimizer.outer)) == (0.7, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diloco(adam(model), model, steps=500 * rounds_needed(0.9), transport=alone())


def test_the_first_beta_of_adam_is_its_momentum() -> None:
    assert momentum_of(torch.optim.Adam([torch.zeros(1)], betas=(0.8, 0.9))) == 0.8
