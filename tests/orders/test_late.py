"""Late collectives have torch's results, overtake each other, and show each access to memory in flight."""

import random

import pytest
import torch

from ch_core import SimulatedGroup, together
from ch_testing import spawn
from tests.orders.late import LateTransport
from tests.orders.late_ranks import compared, lost, touched

pytestmark = pytest.mark.timeout(120)


class Never(random.Random):
    """Chance that completes no work early."""

    def randint(self, a: int, b: int) -> int:
        return a


@pytest.mark.gloo
def test_every_collective_has_torchs_result_in_another_order() -> None:
    for wrong, started, overtaken, violations in spawn(compared, 2):
        assert wrong == [] and violations == []
        assert started == 5 * 8 and overtaken > 0


@pytest.mark.gloo
def test_results_are_hidden_and_accesses_in_flight_are_seen() -> None:
    for found in spawn(touched, 2):
        assert found.pop("violations") == [
            "an input of all_to_all_single 1 of 12 numbers changed in flight",
            "the output of all_to_all_single 1 of 12 numbers was written to in flight",
        ]
        assert found == {"hidden": True, "right": True, "future": True}


@pytest.mark.gloo
def test_an_error_of_the_network_is_raised() -> None:
    assert "imed out" in spawn(lost, 2, group_timeout=1.0)[0]


def simulated(seed: int) -> list[tuple[list[list[float]], int, list[str]]]:
    """Return the results, the number of works that overtook others, and the violations of every simulated rank."""
    group = SimulatedGroup(2)

    def body(rank: int) -> tuple[list[list[float]], int, list[str]]:
        transport = LateTransport(group, rank, seed=seed)
        tensors = [torch.full((2,), float(rank + index)) for index in range(6)]
        works = [transport.all_reduce(tensor, "sum") for tensor in tensors]
        for work in works:
            work.wait(None)
        return [tensor.tolist() for tensor in tensors], transport.late.overtaken, transport.late.violations

    return together(group, body)


def test_simulated_works_overtake_each_other() -> None:
    overtaken = 0
    for seed in range(5):
        for tensors, count, violations in simulated(seed):
            assert tensors == [[2.0 * index + 1.0] * 2 for index in range(6)]
            assert violations == []
            overtaken += count
    assert overtaken > 0


def test_a_simulated_rank_that_writes_to_memory_in_flight_is_seen() -> None:
    group = SimulatedGroup(1)
    transport, output, given = LateTransport(group, 0), torch.zeros(2), torch.ones(2)

    def body(rank: int) -> None:
        transport.late.random = Never()  # completes nothing before the wait
        work = transport.all_gather(output, given)
        output.fill_(5.0)
        given.zero_()
        work.wait(None)

    together(group, body)
    assert output.tolist() == [1.0, 1.0]
    assert [text.split(" of ")[0] for text in transport.late.violations] == ["an input", "the output"]
