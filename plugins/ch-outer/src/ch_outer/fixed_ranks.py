"""Rounds of ranks that stay: every ``every`` inner steps, all ranks of a group exchange, and all of them raise or move."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from ch_core import Transport
from ch_outer.fragment import Fragment
from ch_outer.new_group import broadcast_newest, join
from ch_outer.parameters import reshard
from ch_outer.rounds import Rounds
from ch_outer.shared_model import SharedModel


@dataclass(frozen=True, slots=True)
class FixedRanks:
    """Ranks of one group from the beginning to the end, with equal parameters at the beginning.

    Args:
        process_group: the ranks, by default all. With DDP or FSDP2 inside groups, the ranks of equal place in each group.
        transport: instead of a process group, for example the transport of a simulated rank.
        link: slowest link between two ranks, such as ``"200mbit,80ms"``, as for :func:`commhooks.attach`. Only over a process
            group of CPU tensors. All ranks need the same.
        timeout: seconds that one collective may take; by default those of the process group.
        verify_ranks: True to compare options, shapes and starts over the ranks first.
    """

    process_group: dist.ProcessGroup | None = None
    transport: Transport | None = None
    link: str | None = None
    timeout: float | None = None
    verify_ranks: bool = True

    @property
    def fixed(self) -> bool:
        return True

    def reducer_options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def turns(self, fragment: int, fragments: int) -> None:
        return None

    def rounds(self, shared: SharedModel) -> "FixedRounds":
        return FixedRounds(shared)


class FixedRounds(Rounds):
    """Rounds of :class:`FixedRanks`. The steps alone decide which fragment is exchanged, and no rank votes."""

    def open(self, due: int) -> int | None:
        return due

    def close(self) -> bool:
        return True

    def lose(self, fragment: Fragment) -> None:
        if fragment.waiting:  # only the buffers failed, and all ranks have the average
            self.move_start(fragment)
            fragment.settled = None  # the buffers are not equal

    def exchange_rest(self) -> None:
        """Exchange the fragments with an inner step since their last exchange.

        A further round of the others would only repeat the outer momentum.
        """
        for index, fragment in enumerate(self.shared.fragments):
            if fragment.settled != self.count:
                self.exchange(index)

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Continue over another process group. See :meth:`.OuterOptimizer.move`."""
        fragments = self.shared.fragments
        with torch.no_grad():
            for fragment in sorted(fragments, key=lambda f: f.since or 0):
                if fragment.waiting:
                    self.move_start(fragment)
                fragment.drop()
        self.shared.move(process_group)
        device = next(iter(fragments[0].starts.values())).device
        given = broadcast_newest(self.state_dict(), (self.landed, self.count), process_group, device)
        behind = self.landed < given["landed"] or self.count == 0
        self.shared.outer.load_state_dict(given["outer"])
        self.continue_from(given)
        with torch.no_grad():
            join(self.shared, given, behind=behind)
        reshard(self.shared.model)
