"""The scenarios that are searched, in groups. The quick set is small, and the full set covers the bounds in the docs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .explorer import Fault, Found
from .scenarios import Scenario, explore

STAGES = {"plain": 1, "one_stage": 1, "feedback": 2, "moved": 2, "scattered": 2}
DRIVES = ("submit", "run", "advance")


def messages(scenario: Scenario) -> int:
    """Return the number of collectives of a run without a fault."""
    found = explore(scenario, guard=False)
    return found.states // scenario.world_size // 2


def raising(base: Scenario, ranks: tuple[int, ...]) -> Iterator[Scenario]:
    """Yield the scenario with an exception at every place of its first step."""
    for rank in ranks:
        for bucket in range(base.buckets):
            for stage in range(STAGES[base.reduction] + 1):
                yield replace(base, raises=(0, rank, bucket, stage))
    yield replace(base, raises=(0, ranks[-1], base.buckets - 1, 1), interrupt=True)


def numbers(base: Scenario) -> Iterator[Scenario]:
    """Yield the scenario with Inf, an error outside the reduction, a joined rank, and skipped and waiting steps."""
    yield replace(base, infinite=(0, 1))
    yield replace(base, outside=(0, 0))
    yield replace(base, joined=(0, 1))
    yield replace(base, joined=(0, 1), judged=(-1, -1))
    yield replace(base, judged=(0, -1))
    yield replace(base, judged=(0, 0))
    yield replace(base, judged=(-1, -1), waiting=0)


def quick() -> dict[str, list[Scenario]]:
    """Return the quick set of 2 ranks with 2 buckets, and 3 ranks with 3 buckets without a fault."""
    small = [Scenario(reduction) for reduction in STAGES]
    three = {"world_size": 3, "buckets": 3}
    return {
        "no fault": [
            Scenario(reduction, tuning=tuning, free=free, **three)
            for reduction in (*STAGES, "uneven")
            for tuning, free in (("off", False), ("held", False), ("far", True), ("tuned", True))
        ],
        "drives": [Scenario("feedback", drive=drive, late=late) for drive in DRIVES for late in (False, True)],
        "DDP's driver": [
            Scenario(reduction, drive=drive, stops_in=stops)
            for reduction in ("plain", "feedback")
            for drive in ("ddp", "hook")
            for stops in (-1, 0)
            if (reduction, drive) != ("plain", "hook")  # its futures need a search of deliveries
        ],
        "a reduction raises": [
            one
            for late in (False, True)
            for base in (Scenario("feedback", late=late), Scenario("plain", late=late))
            for one in raising(base, (1,))
        ],
        "numbers and optimizers": list(numbers(Scenario("feedback", steps=3))),
        "a rank is late": [replace(base, fault=Fault("late", 1)) for base in small],
        "a peer is lost": [
            Scenario("feedback", steps=1, fault=Fault("die", 1)),
            Scenario("plain", fault=Fault("die", 1)),
        ],
        "a message is lost": [Scenario("feedback", fault=Fault("message", number=n)) for n in range(5)],
    }


def full() -> dict[str, list[Scenario]]:
    """Return the full set with 3 ranks, 3 buckets of up to 2 stages, 2 steps and one fault."""
    three = {"world_size": 3, "buckets": 3}
    bases = [Scenario(reduction, **three) for reduction in STAGES]
    ways = [(drive, late) for drive in DRIVES for late in (False, True)]
    return {
        "no fault": [
            Scenario(reduction, drive=drive, late=late, callback=callback, tuning=tuning, free=free, **three)
            for reduction in (*STAGES, "uneven")
            for drive, late in ways
            for callback in (False, True)
            for tuning, free in (
                ("off", False),
                ("off", True),
                ("held", False),
                ("far", True),
                ("tuned", False),
                ("tuned", True),
            )
            if not late or tuning == "off"
        ],
        "a reduction raises": [
            one
            for base in bases
            for drive, late in ways
            for one in raising(replace(base, drive=drive, late=late), (0, 2) if drive == "submit" else (1,))
        ],
        "numbers and optimizers": [
            one
            for base in bases
            for drive, late in ways
            for one in numbers(replace(base, drive=drive, late=late, steps=3))
        ],
        "a rank is late": [replace(base, fault=Fault("late", rank)) for base in bases for rank in range(3)],
        "a peer is lost": [replace(base, fault=Fault("die", rank)) for base in bases for rank in range(3)],
        "a message is lost": [
            replace(base, fault=Fault("message", number=number)) for base in bases for number in range(messages(base))
        ],
    }


@dataclass
class Total:
    """Sum over the scenarios of a group."""

    scenarios: int = 0
    runs: int = 0
    states: int = 0
    orders: int = 0
    seconds: float = 0.0

    def add(self, found: Found) -> None:
        self.scenarios += 1
        self.runs += found.runs
        self.states += found.states
        self.orders += found.orders
        self.seconds += found.seconds

    def __str__(self) -> str:
        return (
            f"{self.scenarios} scenarios, {self.states} states, {self.orders} orders in {self.runs} runs, "
            f"{self.seconds:.1f} s"
        )


def search(scenarios: list[Scenario], **options: object) -> Total:
    """Search all scenarios of a group.

    Raises:
        AssertionError: a rule is broken, or a search did not end.
    """
    total = Total()
    for scenario in scenarios:
        found = explore(scenario, **options)
        for text, schedule in found.violations.items():
            raise AssertionError(f"{scenario}: {text}\n  schedule: {schedule}")
        assert found.complete, f"{scenario}: not all orders were searched"
        total.add(found)
    return total
