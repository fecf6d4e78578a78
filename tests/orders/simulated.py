"""Simulated ranks: engines without a model, over transports whose works are late."""

from collections.abc import Callable, Collection, Sequence

import torch

import commhooks
from ch_core import SimulatedGroup, together
from ch_testing.simulated_ranks import CountingTransport, SimulatedRanks, split
from tests.orders.late import LateTransport

from .models import given, like, small_limits
from .plants import PLANTS
from .ways import Case, Seen, note, note_state
from .worker import Run

BUCKETS = 4
Transports = Callable[[SimulatedGroup, int], CountingTransport]


class FreeTransport(CountingTransport):
    """A simulated rank that exchanges directly and sends halves, as gloo's ranks do."""

    free = True


def simulated(case: Case, seed: int | None) -> list[Run]:
    """Return the run of every rank."""

    def late(group: SimulatedGroup, rank: int) -> CountingTransport:
        return LateTransport(group, rank, seed=seed or 0)

    make: Transports = late if seed is not None else FreeTransport
    with small_limits(), PLANTS[case.plant]():
        seen, transports = (_rounds if "Reducer" in case.way else _steps)(case, make)
    if seed is None:
        return [Run(None, one) for one in seen]
    found = []
    for one, transport in zip(seen, transports, strict=True):
        assert isinstance(transport, LateTransport)
        delays = transport.late
        found.append(Run(seed, one, delays.started, delays.overtaken, delays.violations))
    return found


def _rounds(case: Case, make: Transports) -> tuple[list[Seen], Sequence[CountingTransport]]:
    """Average by a ``Reducer`` whose rounds are abandoned in turn."""
    group = SimulatedGroup(case.world)
    transports = [make(group, rank) for rank in range(case.world)]

    def one(rank: int) -> Seen:
        shapes, seen = like("small"), Seen()
        reducer = commhooks.Reducer(case.expr, shapes, transport=transports[rank])
        for step in range(4):
            pending = reducer.start(given(shapes, rank, 90 + step))
            for _ in range(min(step, reducer.stages - 1)):
                pending.advance()
            reducer.abandon()
            note(seen, f"step {step}", reducer.average(given(shapes, rank, step)).items())
        note_state(seen, reducer.state_dict())
        return seen

    return together(group, one), transports


def _steps(case: Case, make: Transports) -> tuple[list[Seen], Sequence[CountingTransport]]:
    """Drive engines: steps that overlap buckets, a dropped step, a joined rank, and a step that does not count."""
    ranks = SimulatedRanks(lambda: commhooks.create(case.expr), case.world, like("small"), transport=make, timeout=60.0)
    seen: list[Seen] = [{} for _ in range(case.world)]
    _step(ranks, seen, 0)
    _step(ranks, seen, 1, advances=True)
    _step(ranks, seen, 2, drops=True)
    _step(ranks, seen, 3, joined=(1,))
    _step(ranks, seen, 4, advances=True)
    ranks.rollback()
    _step(ranks, seen, 5)
    ranks.resolve_step()
    for rank, state in enumerate(ranks.save()):
        note_state(seen[rank], state)
    return seen, ranks.transports


def _step(
    ranks: SimulatedRanks,
    seen: list[Seen],
    step: int,
    *,
    advances: bool = False,
    drops: bool = False,
    joined: Collection[int] = (),
) -> None:
    def one(rank: int) -> None:
        engine, left = ranks.engines[rank], rank in joined
        numbers = {name: torch.zeros_like(t) if left else t for name, t in given(ranks.like, rank, step).items()}
        buckets = split(numbers, BUCKETS, ranks.like)
        engine.set_participating(not left)
        for bucket in buckets[:2] if drops else buckets:
            engine.submit(bucket)
            if advances:
                engine.advance()
        if drops:
            engine.abandon()
            return
        seen[rank][f"=step {step} error"] = repr(engine.finish())
        note(seen[rank], f"step {step}", ((p.name, view) for bucket in buckets for p, view in bucket.views()))

    together(ranks.group, one)
