"""The engine's transport over a manager: the same reductions, unchanged, over members that come and go.

A mean is made as everywhere else, by scaling with 1/n before any cast and summing; n is the number of participants of
this step, which a healing or spare member does not add to. Sums go through the manager, all-to-all and all-gather over
its process group (:mod:`ch_ft.exchange`).
"""

import torch
from torch.distributed import ReduceOp

from ch_ft import protocols
from ch_ft.exchange import KINDS, Exchange, exchange_of
from ch_ft.failfast import FailFast, summary
from commhooks import AttachError, HookNotSupportedError, Reduction, TransportError
from commhooks.adapters import Work


class ManagerTransport:
    """Collectives of one member of a quorum.

    Args:
        manager: torchft's, or a simulated one.
        fail_fast: called when a collective failed.
        exchange: for a reduction that needs more than sums.

    Attributes:
        rank: this member among the participants; 0 if it is none.
        world_size: participants of this step.
        participating: whether this member's numbers count.
    """

    elastic = True
    free = False

    def __init__(
        self, manager: protocols.Group, fail_fast: FailFast | None = None, exchange: Exchange | None = None
    ) -> None:
        self.manager, self.exchange = manager, exchange
        self.fail_fast = fail_fast if fail_fast is not None else FailFast(manager, None)
        self.rank, self.world_size, self.participating = 0, 1, True
        self._under_way: list[_ManagedWork] = []

    def begin(self) -> int:
        """Wait for the quorum and take over who is in it; returns the step, equal on all members.

        Raises:
            AttachError: no quorum was asked for.
        """
        self._under_way.clear()
        self.world_size = self.manager.num_participants()  # blocks: nothing else may be asked before
        if self.world_size < 1:
            raise AttachError(
                "there is no quorum: call optimizer.zero_grad() of ch_ft.OptimizerWrapper, or manager.start_quorum(), "
                "before the forward pass of every step"
            )
        self.participating = self.manager.is_participating()
        self.rank = (self.manager.participating_rank() or 0) if self.participating else 0
        return self.manager.current_step()

    def contributors(self, number: int) -> None:
        """So many members contribute to this step; divide by that."""
        if number < self.world_size:
            self.world_size = max(number, 1)
            self.rank = min(self.rank, self.world_size - 1)

    def meet(self) -> None:
        """Ask who contributes, where parts of messages belong to contributors.

        Raises:
            TransportError: a peer was lost.
        """
        if self.exchange is None:
            return
        self._managed(self.exchange.meet(), "an all-gather").wait(None)
        self.exchange.met()
        self.world_size, self.rank = max(len(self.exchange.owners), 1), self.exchange.rank or 0

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        work = self.manager.allreduce(tensor, reduce_op=ReduceOp.MAX if op == "max" else ReduceOp.SUM)
        return self._managed(work, "an all-reduce")

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """One row of each contributor.

        Without an exchange only the engine's own short messages come here: rows of zeros but for one's own, summed.
        """
        if self.exchange is not None:
            return self._managed(self.exchange.all_gather(output, input), "an all-gather")
        rows = output.zero_().view(self.world_size, -1)
        if self.participating:
            rows[self.rank].copy_(input.reshape(-1))
        return self.all_reduce(output, "sum")

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if self.exchange is None:
            raise TransportError("this transport was made without an exchange, and a manager has no all-to-all")
        return self._managed(self.exchange.all_to_all(output, input), "an all-to-all")

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        raise TransportError("a fault-tolerance manager has no reduce-scatter")

    def abort(self) -> None:
        """Drop everything under way and pass the failure on to the other members."""
        for work in self._under_way:
            work.drop()
        self._under_way.clear()
        self.fail_fast(None)

    def _managed(self, work: protocols.Work, what: str) -> "_ManagedWork":
        managed = _ManagedWork(self.manager, work, what)
        self._under_way.append(managed)
        return managed


class _ManagedWork:
    """A manager's work, dropped as soon as it is done or given up."""

    def __init__(self, manager: protocols.Reducer, work: protocols.Work, what: str) -> None:
        self._manager, self._what = manager, what
        self._work: protocols.Work | None = work

    def wait(self, timeout: float | None) -> None:
        """Wait as long as the manager does: its time-outs are its own."""
        failed = self._work is None or self._work.wait() is False
        self._work = None  # nor may a local variable hold it: the traceback of what is raised keeps this frame
        error = self._manager.errored()
        if failed or error is not None:
            raise TransportError(f"{self._what} over the manager failed: {summary(error)}")

    def drop(self) -> None:
        self._work = None


def exchange_for(reduction: Reduction, manager: protocols.Group) -> Exchange | None:
    """What a reduction needs besides sums; ``None`` if sums are all.

    Raises:
        HookNotSupportedError: the manager, or its process group, has not got it.
    """
    others = reduction.collectives - {"all_reduce"}
    if not others:
        return None
    reason = None
    if others - KINDS:
        reason = "a manager carries sums, all-gathers and all-to-alls"
    elif isinstance(found := exchange_of(manager), Exchange):
        return found
    else:
        reason = found
    raise HookNotSupportedError(
        f"{reduction!r} cannot run over this {type(manager).__name__}: it needs {', '.join(sorted(others))}, and {reason}. "
        "Give the manager torchft.ProcessGroupGloo or ProcessGroupNCCL, or use a hook made of all-reduces, such as "
        "powersgd, bf16_compress or fp16_compress"
    )
