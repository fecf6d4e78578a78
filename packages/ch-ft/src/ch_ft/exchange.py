"""All-to-all and all-gather between the members of a quorum, over the process group that their manager was given.

A manager offers no more than an all-reduce, and made of sums an all-gather would carry W times its bytes. Its group has the
other collectives. They run there under the manager's rules: a failure is reported to it and never raised by a wait, after a
failure the attempt's further calls do nothing, and a member that heals or is a spare adds nothing.

Who contributes is asked once a backward, by one all-gather of a number each. A message is cut into as many parts as there are
contributors, and each of them owns one: what the others would send are zeros, so they send nothing, and what an owner must
remember (a residual) is never lost with a member whose state is dropped.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from ch_ft import protocols, torchft_names

KINDS = frozenset({"all_to_all", "all_gather"})
"""The kinds of requests that go over a manager's group."""


class Exchange:
    """The collectives of one member.

    Args:
        manager: to whom failures are reported.
        group: the process group given to it.

    Attributes:
        owners: the contributors' numbers in the group, in the order of their ranks; set by :meth:`meet`.
        rank: of this member among them; ``None`` if it does not contribute.
    """

    def __init__(self, manager: protocols.Group, group: protocols.MemberGroup) -> None:
        self.manager, self.group = manager, group
        self.owners: list[int] = []
        self.rank: int | None = None
        self._size = 0

    def meet(self) -> protocols.Work:
        """Ask who contributes; :meth:`met` takes the answer, when the work is done."""
        self._size = self.group.size()
        contributes = self.manager.is_participating()
        rank = self.manager.participating_rank() if contributes else None
        self._mine = torch.tensor([-1 if rank is None else rank], dtype=torch.int64, device="cpu")
        self._found = torch.full((self._size,), -1, dtype=torch.int64, device="cpu")
        return self._start(self._gather(list(self._found.split(1)), self._mine))

    def met(self) -> None:
        """Take over who contributes."""
        ranks = self._found.tolist()
        self.owners = sorted((member for member in range(self._size) if ranks[member] >= 0), key=ranks.__getitem__)
        order = [ranks[member] for member in self.owners]
        mine = int(self._mine)
        self.rank = order.index(mine) if mine >= 0 else None

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> protocols.Work:
        """Every contributor's ``input``, one row of ``output`` each, on every member."""
        rows = output.view(len(self.owners), -1)
        spare = input.new_empty(rows.shape[1]) if len(self.owners) < self._size else None
        places = dict(zip(self.owners, rows, strict=True))
        outputs = [cast(torch.Tensor, places.get(member, spare)) for member in range(self._size)]
        return self._start(self._gather(outputs, input.reshape(-1)), output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> protocols.Work:
        """Contributor r's part of every contributor's ``input``, in the order of their ranks, on contributor r.

        A member that does not contribute takes no part: its output are zeros.
        """
        part = input.numel() // len(self.owners)
        sizes = [part if member in self.owners else 0 for member in range(self._size)]
        if self.rank is None:
            output.zero_()
            sizes = [0] * self._size
        elif len(self.owners) == self._size:
            sizes = []  # equal parts
        out, sent = (output[:0], input[:0]) if self.rank is None else (output, input)
        return self._start(
            lambda: self.group.alltoall_base(out, sent, sizes, list(sizes), AllToAllOptions()), output, input
        )

    def _gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> Callable[[], Any]:
        return lambda: self.group.allgather([outputs], [mine], AllgatherOptions())

    def _start(self, collective: Callable[[], Any], *keep: torch.Tensor) -> protocols.Work:
        """Start a collective as the manager starts an all-reduce: whatever fails is reported to it."""
        if self.manager.errored() is not None:
            return _Reported(self.manager, None)
        try:
            return _Reported(self.manager, collective(), *keep)
        except Exception as error:
            self.manager.report_error(error)
            return _Reported(self.manager, None)


class _Reported:
    """A collective whose failure is reported to the manager; keeps its tensors until it is done."""

    def __init__(self, manager: protocols.Reducer, work: Any, *keep: torch.Tensor) -> None:
        self._manager, self._work, self._keep = manager, work, keep

    def wait(self) -> bool:
        work, self._work = self._work, None
        if work is None:  # there was an error before: nothing was sent
            return False
        try:
            work.wait()
        except Exception as error:
            self._manager.report_error(error)
            return False
        return True


def group_behind(manager: protocols.Group) -> Any:
    """The process group that a manager was given; ``None`` if it does not tell."""
    return getattr(manager, "process_group", None) or torchft_names.group_of(manager)


def exchange_of(manager: protocols.Group) -> "Exchange | str":
    """What goes over a manager's group, or why nothing does."""
    group = group_behind(manager)
    if group is None:
        return f"{type(manager).__name__} says nothing of its process group (an attribute process_group would do)"
    reason = torchft_names.swallows(group)
    return reason or Exchange(manager, group)
