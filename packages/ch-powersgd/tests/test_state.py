"""PowerSGDState has PyTorch's names and defaults, checks values, and needs no process group."""

import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from ch_powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks import HookConfigError


def test_names_and_defaults_are_pytorchs() -> None:
    ours = inspect.signature(PowerSGDState).parameters
    for name, parameter in inspect.signature(theirs.PowerSGDState).parameters.items():
        assert name in ours
        if name != "process_group":
            assert ours[name].default == parameter.default


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_an_early_start_with_memory_is_refused_as_by_pytorch(start: int, flags: tuple[bool, bool]) -> None:
    feedback, warm = flags
    with pytest.raises(ValueError, match=f"start_powerSGD_iter={start}"):
        PowerSGDState(None, start_powerSGD_iter=start, use_error_feedback=feedback, warm_start=warm)
    PowerSGDState(None, start_powerSGD_iter=start, use_error_feedback=False, warm_start=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("matrix_approximation_rank", 0),
        ("start_powerSGD_iter", -1),
        ("min_compression_rate", -2),
        ("orthogonalization_epsilon", float("nan")),
        ("random_seed", 0.5),
        ("compression_stats_logging_frequency", 0),
        ("residual", "none"),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(HookConfigError, match=f"{field}="):
        PowerSGDState(None, **{field: value})


def test_pickles_without_a_process_group() -> None:
    state = PowerSGDState(None, matrix_approximation_rank=3, random_seed=5)
    state.draft.write(("w", "q"), (3, 4)).tensor.fill_(2.0)
    state.versions.commit()
    state.draft.write(("w", "q"), (3, 4)).tensor.fill_(9.0)  # of a step that never finished
    copy = pickle.loads(pickle.dumps(state))
    assert copy.process_group is None
    assert copy.reduction().config() == state.reduction().config()
    assert torch.equal(copy.read("w", "q"), torch.full((3, 4), 2.0))
    copy.versions.commit()  # the copy has no draft, so commit() changes nothing
    assert torch.equal(copy.read("w", "q"), torch.full((3, 4), 2.0))


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_pytorchs_state_is_refused_with_the_import_to_change(hook: Any) -> None:
    pytest.importorskip("numpy", reason="PyTorch's state draws from it")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(theirs.PowerSGDState(None, 1, start_powerSGD_iter=10), hook)
        with pytest.raises(HookConfigError, match="from ch_powersgd import PowerSGDState"):
            model(torch.ones(1, 4)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_an_option_that_was_set_later_is_checked_under_pytorchs_name() -> None:
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    assert repr(state.reduction()).startswith("powersgd(rank=2, start_iter=3, ")
    state.matrix_approximation_rank = 0
    with pytest.raises(HookConfigError, match="matrix_approximation_rank=0: expected an int >= 1"):
        state.reduction()
