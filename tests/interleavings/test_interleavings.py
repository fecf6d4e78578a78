"""All orders of arrival and completion of real engines keep every rule."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from .explorer import Fault
from .matrix import full, quick, search
from .plants import PLANTS, Plant
from .scenarios import Scenario, explore

FAULTS = [
    Fault(),
    Fault("die", 1),
    Fault("late", 1),
    Fault("late", 0),
    *(Fault("message", number=number) for number in range(3)),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("group", quick())
def test_quick_set_breaks_no_rule(group: str) -> None:
    print(search(quick()[group]))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", ["no fault", "a reduction raises", "numbers and optimizers"])
def test_full_set_breaks_no_rule(group: str) -> None:
    print(search(full()[group]))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", ["a rank is late", "a peer is lost", "a message is lost"])
def test_full_set_with_a_broken_network_breaks_no_rule(group: str) -> None:
    """The guard is off, because it has seen every operation of these steps in the other groups."""
    print(search(full()[group], guard=False))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("reduction", ["plain", "one_stage"])
def test_reduced_search_finds_every_outcome_of_the_unreduced_search(reduction: str, fault: Fault) -> None:
    scenario = Scenario(reduction, steps=1, fault=fault)
    reduced, complete = explore(scenario, guard=False), explore(scenario, guard=False, reduced=False)
    assert set(reduced.outcomes) == set(complete.outcomes)
    assert reduced.orders < complete.orders
    assert not complete.violations and complete.complete


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault", [*FAULTS, Fault("die", 0), *(Fault("message", number=n) for n in range(3, 10))], ids=str
)
def test_reduced_search_finds_every_outcome_of_two_steps(fault: Fault) -> None:
    scenario = Scenario("feedback", fault=fault)
    reduced, complete = explore(scenario, guard=False), explore(scenario, guard=False, reduced=False)
    assert set(reduced.outcomes) == set(complete.outcomes)
    assert not complete.violations and complete.complete


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reduction", ["plain", "feedback", "moved"])
def test_every_order_of_three_ranks_without_reduction(reduction: str) -> None:
    found = explore(Scenario(reduction, world_size=3, buckets=3, steps=1), guard=False, reduced=False)
    assert not found.violations and found.complete
    assert len(found.outcomes) == 1
    print(found.states, found.orders)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_ranks_and_a_lost_peer_without_reduction() -> None:
    for fault in (Fault("die", 1), Fault("late", 1), Fault("message", number=2)):
        scenario = Scenario("plain", world_size=3, buckets=2, steps=1, fault=fault)
        reduced, complete = explore(scenario, guard=False), explore(scenario, guard=False, reduced=False)
        assert set(reduced.outcomes) == set(complete.outcomes)


def test_a_fault_gives_more_than_one_outcome() -> None:
    """Otherwise the search would explore faults that no rank notices."""
    for fault in (Fault("die", 1), Fault("late", 1), Fault("message", number=1)):
        found = explore(replace(Scenario("plain"), fault=fault), guard=False)
        assert len(found.outcomes) > 1, fault


@pytest.mark.full
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    before = explore(plant.scenario, **plant.options)
    assert not before.violations
    with plant.planted():
        found = explore(plant.scenario, **plant.options)
    assert any(plant.finds in text for text in found.violations), found.violations
    assert all("rank" in schedule for schedule in found.violations.values())


@pytest.mark.full
@pytest.mark.parametrize("order", ["gloo", "nccl"])
def test_every_delivery_to_a_users_hook(order: str) -> None:
    """The network's threads complete futures, between any two calls of a rank."""
    for fault in (Fault(), Fault("message", number=0)):
        scenario = Scenario("plain", buckets=1, steps=1, drive="hook", fault=fault)
        found = explore(scenario, order=order, reads=False)
        assert not found.violations and found.complete


@pytest.mark.full
@pytest.mark.parametrize("reduction", ["plain", "cast_once"])
def test_some_deliveries_of_halves_to_a_users_hook(reduction: str) -> None:
    """A search of all of them takes hours. The planted bug of halves is found within as many runs."""
    for fault in (Fault(), Fault("message", number=0), Fault("message", number=1)):
        scenario = Scenario(reduction, buckets=1, steps=1, drive="hook", tuning="halved", free=True, fault=fault)
        assert not explore(scenario, order="gloo", reads=False, limit=150).violations


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ["gloo", "nccl"])
def test_every_read_and_delivery(order: str) -> None:
    """The same outcomes as if each result arrived when it is waited for."""
    for reduction, buckets in (("plain", 1), ("one_stage", 1), ("feedback", 1), ("one_stage", 2)):
        scenario = Scenario(reduction, buckets=buckets, steps=1)
        found = explore(scenario, order=order)
        assert not found.violations and found.complete
        assert set(found.outcomes) == set(explore(scenario).outcomes)
        print(scenario, order, found.states, found.orders)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ["gloo", "nccl"])
def test_every_delivery_of_two_buckets_to_a_users_hook(order: str) -> None:
    for number in (-1, 0, 1, 2):
        fault = Fault("message", number=number) if number >= 0 else Fault()
        found = explore(Scenario("plain", steps=1, drive="hook", fault=fault), order=order, reads=False)
        assert not found.violations and found.complete
