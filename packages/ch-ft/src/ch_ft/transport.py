"""Carry the engine's collectives over a manager whose members come and go.

Reductions run unchanged. They take means as everywhere: scale by 1/n before any cast, then sum. Here n is the number
of participants of the step, without healing and spare members. Sums go through the manager, which offers nothing but
an all-reduce. All-to-all and all-gather go over the manager's process group, under the manager's rules
(:class:`MemberCollectives`).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import ReduceOp

from ch_core import Link, Work
from ch_ft import manager as managers
from ch_ft import torchft_support
from ch_ft.fail_fast import FailFast, summary
from commhooks import AttachError, HookNotSupportedError, Reduction, TransportError


class ManagerTransport:
    """Collectives of one member of a quorum.

    Args:
        manager: torchft's Manager, or a simulated one.
        fail_fast: called if a collective failed.
        members: for a reduction that needs more than sums.

    Attributes:
        rank: rank of this member among the participants; 0 if it is none.
        world_size: participants of this step.
        participating: True if this member contributes data.
    """

    elastic = True
    link: Link | None = None  # its members come and go
    exchanged = 0
    free = False

    def __init__(
        self, manager: managers.Group, fail_fast: FailFast | None = None, members: "MemberCollectives | None" = None
    ) -> None:
        self.manager, self.members = manager, members
        self.fail_fast = fail_fast if fail_fast is not None else FailFast(manager, None)
        self.rank, self.world_size, self.participating = 0, 1, True
        self._in_flight: list[_ManagedWork] = []

    def begin(self) -> int:
        """Wait for the quorum, and take over its membership.

        Returns:
            The step, equal on all members.

        Raises:
            AttachError: no quorum was started.
        """
        self._in_flight.clear()
        self.world_size = self.manager.num_participants()  # first, because it waits for the quorum
        if self.world_size < 1:
            raise AttachError(
                "there is no quorum: call optimizer.zero_grad() of ch_ft.OptimizerWrapper, or manager.start_quorum(), "
                "before the forward pass of every step"
            )
        self.participating = self.manager.is_participating()
        self.rank = (self.manager.participating_rank() or 0) if self.participating else 0
        return self.manager.current_step()

    def contributors(self, number: int) -> None:
        """Divide means by this number of contributors, if it is smaller than the number of participants."""
        if number < self.world_size:
            self.world_size = max(number, 1)
            self.rank = min(self.rank, self.world_size - 1)

    def meet(self) -> None:
        """Find out which members contribute, if the reduction gives each contributor a part of a message.

        Raises:
            TransportError: a peer was lost.
        """
        if self.members is None:
            return
        self._managed(self.members.meet(), "an all-gather").wait(None)
        self.members.met()
        self.world_size, self.rank = max(len(self.members.owners), 1), self.members.rank or 0

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        work = self.manager.allreduce(tensor, reduce_op=ReduceOp.MAX if op == "max" else ReduceOp.SUM)
        return self._managed(work, "an all-reduce")

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Gather one row of each contributor.

        Without member collectives it sums rows that are zero except for the sender's. Only the engine's short
        messages do so.
        """
        if self.members is not None:
            return self._managed(self.members.all_gather(output, input), "an all-gather")
        rows = output.zero_().view(self.world_size, -1)
        if self.participating:
            rows[self.rank].copy_(input.reshape(-1))
        return self.all_reduce(output, "sum")

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if self.members is None:
            raise TransportError("a manager has no all-to-all: make this transport with members=MemberCollectives(...)")
        return self._managed(self.members.all_to_all(output, input), "an all-to-all")

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        raise TransportError(
            "a manager has no reduce-scatter. Use a hook made of all-reduces, all-gathers and all-to-alls"
        )

    def abort(self) -> None:
        """Drop everything in flight and make the peers notice."""
        for work in self._in_flight:
            work.drop()
        self._in_flight.clear()
        self.fail_fast(None)

    def _managed(self, work: managers.Work, collective: str) -> "_ManagedWork":
        managed = _ManagedWork(self.manager, work, collective)
        self._in_flight.append(managed)
        return managed


class _ManagedWork:
    """Collective of a manager. It drops the reference to the manager's work as soon as the work is done or dropped."""

    def __init__(self, manager: managers.Reducer, work: managers.Work, collective: str) -> None:
        self._manager, self._collective = manager, collective
        self._work: managers.Work | None = work

    def wait(self, timeout: float | None) -> None:
        """Wait until the manager's own time-out. ``timeout`` is ignored."""
        failed = self._work is None or self._work.wait() is False
        self._work = None  # no local variable may hold it either: the traceback of the error keeps this frame
        error = self._manager.errored()
        if failed or error is not None:
            raise TransportError(f"{self._collective} over the manager failed: {summary(error)}")

    def drop(self) -> None:
        self._work = None


class MemberCollectives:
    """All-to-all and all-gather between the members of a quorum, over their manager's process group.

    An all-gather made of a manager's sums would carry W times its bytes, so these collectives use the process group. They
    follow the rules of a manager. A failure is reported to the manager, and no wait raises it. After a failure, further
    calls of the attempt do nothing. A healing or spare member adds nothing.

    Once per backward an all-gather of one number finds the contributors. A message has one part for each contributor, which
    owns that part. Other members send nothing. So the loss of a member's state loses no residual of an owner.

    Args:
        manager: learns of failures.
        group: process group of the manager.

    Attributes:
        owners: numbers of the contributors in the group, in the order of their ranks. :meth:`met` sets it.
        rank: rank of this member among them; ``None`` if it does not contribute.
    """

    kinds = frozenset({"all_to_all", "all_gather"})

    def __init__(self, manager: managers.Group, group: managers.MemberGroup) -> None:
        self.manager, self.group = manager, group
        self.owners: list[int] = []
        self.rank: int | None = None
        self._size = 0

    def meet(self) -> managers.Work:
        """Start the all-gather of contributors. Call :meth:`met` when it is done."""
        self._size = self.group.size()
        contributes = self.manager.is_participating()
        rank = self.manager.participating_rank() if contributes else None
        self._mine = torch.tensor([-1 if rank is None else rank], dtype=torch.int64, device="cpu")
        self._found = torch.full((self._size,), -1, dtype=torch.int64, device="cpu")
        return self._start(self._gather(list(self._found.split(1)), self._mine))

    def met(self) -> None:
        """Take over the contributors."""
        ranks = self._found.tolist()
        self.owners = sorted((member for member in range(self._size) if ranks[member] >= 0), key=ranks.__getitem__)
        order = [ranks[member] for member in self.owners]
        mine = int(self._mine)
        self.rank = order.index(mine) if mine >= 0 else None

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> managers.Work:
        """Gather every contributor's ``input`` (n,) as rows of ``output`` (contributors, n), on every member."""
        rows = output.view(len(self.owners), -1)
        spare = input.new_empty(rows.shape[1]) if len(self.owners) < self._size else None
        places = dict(zip(self.owners, rows, strict=True))
        outputs = [cast(torch.Tensor, places.get(member, spare)) for member in range(self._size)]
        return self._start(self._gather(outputs, input.reshape(-1)), output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> managers.Work:
        """Send part r of every contributor's ``input`` to contributor r, in the order of ranks.

        A member that does not contribute takes no part, and its output becomes zero.
        """
        part = input.numel() // len(self.owners)
        sizes = [part if member in self.owners else 0 for member in range(self._size)]
        if self.rank is None:
            output.zero_()
            sizes = [0] * self._size
        elif len(self.owners) == self._size:
            sizes = []  # means equal parts
        out, sent = (output[:0], input[:0]) if self.rank is None else (output, input)
        return self._start(
            lambda: self.group.alltoall_base(out, sent, sizes, list(sizes), AllToAllOptions()), output, input
        )

    def _gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> Callable[[], Any]:
        return lambda: self.group.allgather([outputs], [mine], AllgatherOptions())

    def _start(self, collective: Callable[[], Any], *keep: torch.Tensor) -> managers.Work:
        """Start a collective as the manager starts an all-reduce, and report its failure to the manager."""
        if self.manager.errored() is not None:
            return _Reported(self.manager, None)
        try:
            return _Reported(self.manager, collective(), *keep)
        except Exception as error:
            self.manager.report_error(error)
            return _Reported(self.manager, None)


class _Reported:
    """Collective whose failure is reported to the manager. It keeps its tensors alive until it is done."""

    def __init__(self, manager: managers.Reducer, work: Any, *keep: torch.Tensor) -> None:
        self._manager, self._work, self._keep = manager, work, keep

    def wait(self) -> bool:
        work, self._work = self._work, None
        if work is None:  # nothing was sent after an error
            return False
        try:
            work.wait()
        except Exception as error:
            self._manager.report_error(error)
            return False
        return True


def group_of_manager(manager: managers.Group) -> Any:
    """Return the process group of a manager; ``None`` if the manager does not show it."""
    return getattr(manager, "process_group", None) or torchft_support.group_of(manager)


def collectives_for(reduction: Reduction, manager: managers.Group) -> MemberCollectives | None:
    """Return the collectives that a reduction needs in addition to sums; ``None`` if sums suffice.

    Raises:
        HookNotSupportedError: the manager or its process group lacks one of them.
    """
    others = reduction.collectives - {"all_reduce"}
    if not others:
        return None
    group = group_of_manager(manager)
    if others - MemberCollectives.kinds:
        reason: str | None = "a manager carries sums, all-gathers and all-to-alls"
    elif group is None:
        reason = f"{type(manager).__name__} shows no process group (an attribute process_group would do)"
    else:
        reason = torchft_support.swallows(group)
    if reason is None:
        return MemberCollectives(manager, group)
    raise HookNotSupportedError(
        f"{reduction!r} cannot run over this {type(manager).__name__}: it needs {', '.join(sorted(others))}, and {reason}. "
        "Give the manager torchft.ProcessGroupGloo or ProcessGroupNCCL, or use a hook made of all-reduces, such as "
        "powersgd, bf16_compress or fp16_compress"
    )
