"""Figures of a run."""

import copy

from ch_outer import FixedRanks, OuterOptimizer, Schedule

from .outer_kit import adam, alone, make, train


def test_steps_that_no_other_rank_has_are_those_of_the_loaded_run() -> None:
    model = make()
    optimizer = OuterOptimizer(adam(model), model, Schedule(every=4), ranks=FixedRanks(transport=alone()))
    train(model, optimizer, 0, range(5))
    assert optimizer.report()["steps_alone"] == 1
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 0, range(5, 15))
    assert optimizer.report()["steps_alone"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer.report()["steps_alone"] == 1
    train(model, optimizer, 0, range(5, 7))
    optimizer.finish()
    resumed = make()
    later = OuterOptimizer(adam(resumed), resumed, Schedule(every=4), ranks=FixedRanks(transport=alone()))
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.report()["steps_alone"] == later.report()["steps_alone"] == 0
