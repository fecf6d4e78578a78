"""The part that every rank runs: each case plainly once, then late by every seed."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist

from commhooks import CommHooksError
from tests.orders.late import late_collectives

from . import ways
from .models import small_limits
from .plants import PLANTS
from .ways import WAYS, Case, Seen

LONGEST = {"small": 0.004, "ordinary": 0.03}  # seconds of a delay


@dataclass
class Run:
    """One run of a case on one rank.

    Attributes:
        seed: of the delays; ``None`` for the plain run.
        seen: digests.
        started, overtaken, violations: see :class:`~tests.orders.late.LateCollectives`.
    """

    seed: int | None
    seen: Seen
    started: int = 0
    overtaken: int = 0
    violations: list[str] = field(default_factory=list)


def worker(rank: int, world: int, cases: Sequence[Case], seeds: Sequence[int]) -> list[list[Run]]:
    """Return the runs of every case. After an error the process group may be unusable, so the remaining cases are left out."""
    found: list[list[Run]] = []
    for case in cases:
        found.append([])
        for seed in (None, *seeds):
            dist.barrier()
            run = one_run(case, rank, seed)
            found[-1].append(run)
            if "=error" in run.seen:
                return found
    return found


def one_run(case: Case, rank: int, seed: int | None) -> Run:
    with ExitStack() as around:
        around.enter_context(PLANTS[case.plant]())
        if case.size == "small":
            around.enter_context(small_limits())
        late = late_collectives(seed, longest=LONGEST[case.size]) if seed is not None else nullcontext()
        with late as network:
            ways.network = network
            try:
                seen = WAYS[case.way](case, rank)
            except CommHooksError as error:  # typed errors come on all ranks
                seen = {"=error": f"{type(error).__name__}: {error}"}
    if network is None:
        return Run(None, seen)
    return Run(seed, seen, network.started, network.overtaken, network.violations)
