"""The drift alarm over simulated ranks: the named parameter and ranks, and failures of one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core import Bucket, HookConfigError, Plain, RankMismatchError, RemoteHookError, SimulatedRank, simulate
from ch_core.engine import drift
from ch_core.engine.drift import RankCheck


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element."""
    raw = tensor.view(-1).view(torch.uint8)
    raw[index * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)


class Model:
    """Parameters of one simulated rank, trained by SGD with equal averages."""

    def __init__(self, rank: SimulatedRank, every: int, on_drift: str = "raise") -> None:
        generator = torch.Generator().manual_seed(0)
        self.rank, self.engine = rank, rank.engine(Plain())
        self.params = {f"layer.{i}": torch.randn(5, generator=generator) for i in range(7)}
        self.check = RankCheck(every, on_drift)
        self.check.watch(lambda: self.params.items(), lambda: range(rank.world_size))
        self.engine.rank_check = self.check
        self.outside: Exception | None = None  # error of this rank outside of the reduction

    def step(self, number: int) -> BaseException | None:
        torch.manual_seed(100 * number + self.rank.rank)
        for index, name in enumerate(self.params):
            grad = Bucket.from_tensors({name: torch.randn(5)})
            grad = Bucket(grad.layout, grad.buffer, index, index == 6)
            self.engine.submit(grad)
            if index == 6:
                error = self.engine.finish(outside=self.outside)
            for other in self.params:
                if other == name:
                    self.params[other] = self.params[other] * 0.9
        return error


def run(world: int, steps: int, every: int, change: Callable[[int, Model], None], on_drift: str = "raise") -> list[Any]:
    def body(rank: SimulatedRank) -> list[Any]:
        model = Model(rank, every, on_drift)
        found = []
        for number in range(steps):
            change(number, model)
            found.append(model.step(number))
        return [found, model.check]

    return simulate(world, body)


def nothing(number: int, model: Model) -> None:
    return None


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(0, 5), st.integers(0, 6), st.integers(0, 31), st.integers(0, 4)
)
def test_one_flipped_bit_is_named_in_the_next_check_on_all_ranks(
    world: int, every: int, at: int, param: int, bit: int, rank: int
) -> None:
    odd = rank % world
    named = -(-at // every) * every  # first step from `at` on that is due

    def change(number: int, model: Model) -> None:
        if number == at and model.rank.rank == odd:
            flip(model.params[f"layer.{param}"], 3, bit)

    for errors, check in run(world, named + 1, every, change):
        assert errors[:-1] == [None] * named
        assert isinstance(errors[-1], RankMismatchError)
        assert check.drift.name == f"layer.{param}" and check.drift.step == named
        assert f"layer.{param} is not equal" in str(errors[-1])
        if world > 2:
            assert check.drift.groups[1:] == ((odd,),) and f"rank {odd} differs from" in str(errors[-1])
        else:
            assert "rank 0 and rank 1 differ from each other" in str(errors[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_negated_parameter_in_64_bits_is_seen(dtype: torch.dtype) -> None:
    """An even number of sign bits of 64-bit integers cancels under any odd weights modulo 2**64."""

    def change(number: int, model: Model) -> None:
        model.params["layer.3"] = torch.ones(4, dtype=dtype) * (-1 if model.rank.rank else 1)

    for _, check in run(2, 1, 1, change, "warn"):
        assert check.drift is not None and check.drift.name == "layer.3"


def test_the_first_of_several_differences_is_named() -> None:
    def change(number: int, model: Model) -> None:
        if number == 0 and model.rank.rank:
            for name in ("layer.6", "layer.2", "layer.4"):
                model.params[name] = model.params[name] + model.rank.rank

    for _, check in run(3, 1, 1, change):
        assert check.drift.name == "layer.2" and sorted(check.drift.groups) == [(0,), (1,), (2,)]


@pytest.mark.full
def test_a_thousand_clean_steps_raise_no_alarm() -> None:
    for errors, check in run(2, 1000, 100, nothing):
        assert errors == [None] * 1000
        assert check.checks == 10 and check.drift is None


def test_a_warning_continues(caplog: pytest.LogCaptureFixture) -> None:
    def change(number: int, model: Model) -> None:
        if number == 2 and model.rank.rank == 1:
            flip(model.params["layer.1"], 0, 0)

    for errors, check in run(3, 6, 2, change, "warn"):
        assert errors == [None] * 6
        assert check.checks == 3 and check.drift.step == 4
    assert "step 2: layer.1 is not equal" in caplog.text


def test_a_digest_that_raises_on_one_rank_fails_the_step_on_all_and_no_peer_waits() -> None:
    def change(number: int, model: Model) -> None:
        if model.rank.rank == 1:
            model.check._tensors = (lambda: 1 / 0) if number == 2 else lambda: model.params.items()

    results = run(3, 4, 2, change)
    assert isinstance(results[1][0][2], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(results[rank][0][2], RemoteHookError) and "ZeroDivisionError" in str(results[rank][0][2])
    for errors, check in results:
        assert errors[3] is None and check.drift is None


def test_ranks_with_other_tensors_are_told() -> None:
    def change(number: int, model: Model) -> None:
        if number == 0 and model.rank.rank == 1:
            model.check._tensors = lambda: list(model.params.items())[:-1]

    for _, check in run(2, 1, 1, change):
        assert check.drift is not None and check.drift.name in ("layer.6", "tensor 6")


def test_a_rank_without_input_compares_nothing() -> None:
    def change(number: int, model: Model) -> None:
        if model.rank.rank == 2 and number >= 2:  # it has run out of input, and its optimizer steps no more
            model.engine.set_participating(False)
            model.params["layer.0"] = model.params["layer.0"] + 1.0

    for errors, check in run(3, 6, 1, change):
        assert errors == [None] * 6 and check.checks == 6


def test_on_a_device_the_host_learns_of_a_difference_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "is_asynchronous", lambda device: True)

    def change(number: int, model: Model) -> None:
        if number == 2 and model.rank.rank == 0:
            flip(model.params["layer.5"], 1, 30)

    for errors, check in run(3, 4, 2, change):
        assert errors[:3] == [None] * 3
        assert isinstance(errors[3], RankMismatchError) and check.drift.step == 2 and check.drift.name == "layer.5"


def test_another_group_counts_from_its_first_step() -> None:
    check = RankCheck(3)
    assert [check._counts() for _ in range(4)] == [True, False, False, True]
    check.restart()
    assert check._counts()


@pytest.mark.parametrize(("every", "on_drift"), [(0, "warn"), (True, "warn"), (1.5, "warn"), (3, "stop")])
def test_illegal_options_are_refused(every: Any, on_drift: str) -> None:
    with pytest.raises(HookConfigError, match="expected"):
        RankCheck(every, on_drift)


def test_a_difference_of_a_step_that_fails_for_another_reason_is_not_raised_in_the_next_one() -> None:
    def change(number: int, model: Model) -> None:
        model.outside = ValueError("of one rank") if number == 1 and model.rank.rank else None
        if model.rank.rank:  # other parameters in step 1 only
            for param in model.params.values():
                param.mul_({1: 2.0, 2: 0.5}.get(number, 1.0))

    for found, check in run(2, 4, 1, change):
        assert check.drift is not None and check.drift.step == 1
        assert [isinstance(error, ValueError | RemoteHookError) for error in found] == [False, True, False, False]
        assert found[0] is found[2] is found[3] is None
