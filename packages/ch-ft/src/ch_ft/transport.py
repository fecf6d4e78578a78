"""The engine's transport over a manager: the same reductions, unchanged, over members that come and go.

A mean is made as everywhere else, by scaling with 1/n before any cast and summing; n is the number of participants of
this step, which a healing or spare member does not add to. A manager only all-reduces, so a reduction that needs
another collective is refused when it is attached.
"""

import torch
from torch.distributed import ReduceOp

from ch_ft import protocols
from ch_ft.failfast import FailFast, summary
from commhooks import AttachError, HookNotSupportedError, Reduction, TransportError
from commhooks.adapters import Work


class ManagerTransport:
    """Collectives of one member of a quorum.

    Args:
        manager: torchft's, or a simulated one.
        fail_fast: called when a collective failed.

    Attributes:
        rank: this member among the participants; 0 if it is none.
        world_size: participants of this step.
        participating: whether this member's numbers count.
    """

    elastic = True
    free = False

    def __init__(self, manager: protocols.Group, fail_fast: FailFast | None = None) -> None:
        self.manager = manager
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

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        work = self.manager.allreduce(tensor, reduce_op=ReduceOp.MAX if op == "max" else ReduceOp.SUM)
        managed = _ManagedWork(self.manager, work)
        self._under_way.append(managed)
        return managed

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Rows of zeros but for one's own, summed. For the engine's own short messages: W times the traffic."""
        rows = output.zero_().view(self.world_size, -1)
        if self.participating:
            rows[self.rank].copy_(input.reshape(-1))
        return self.all_reduce(output, "sum")

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        raise TransportError("a fault-tolerance manager has no all-to-all")

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        raise TransportError("a fault-tolerance manager has no reduce-scatter")

    def abort(self) -> None:
        """Drop everything under way and pass the failure on to the other members."""
        for work in self._under_way:
            work.drop()
        self._under_way.clear()
        self.fail_fast(None)


class _ManagedWork:
    """A manager's work, dropped as soon as it is done or given up."""

    def __init__(self, manager: protocols.Reducer, work: protocols.Work) -> None:
        self._manager = manager
        self._work: protocols.Work | None = work

    def wait(self, timeout: float | None) -> None:
        """Wait as long as the manager does: its time-outs are its own."""
        failed = self._work is None or self._work.wait() is False
        self._work = None  # nor may a local variable hold it: the traceback of what is raised keeps this frame
        error = self._manager.errored()
        if failed or error is not None:
            raise TransportError(f"an all-reduce over the manager failed: {summary(error)}")

    def drop(self) -> None:
        self._work = None


def refuse_unfit(reduction: Reduction) -> None:
    """Refuse what a manager cannot carry.

    Raises:
        HookNotSupportedError: the reduction asks for more than all-reduce.
    """
    others = sorted(reduction.collectives - {"all_reduce"})
    if others:
        raise HookNotSupportedError(
            f"{reduction!r} cannot run over a fault-tolerance manager: it needs {', '.join(others)}, and a manager "
            "only all-reduces, because only a sum stays right while members come and go. Use one made of all-reduces, "
            "such as powersgd, bf16_compress or fp16_compress"
        )
