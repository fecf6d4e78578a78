"""What is asked of a manager: three small protocols, each needed only where it is used.

torchft's ``Manager`` satisfies all three as it is, in 0.2.0 and in the nightly builds. Only these methods are ever
called, and no private attribute. Hooks that need more than sums ask the manager's process group for two collectives
(:class:`MemberGroup`), which torchft's groups share with torch's own.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Work(Protocol):
    """An all-reduce under way; its result is in the tensor once :meth:`wait` has returned."""

    def wait(self) -> object:
        """``False`` says that it failed. Anything else says nothing: ask :meth:`Reducer.errored` too."""


class Reducer(Protocol):
    """All-reduce that never raises for a lost peer. Enough for plain averaging."""

    def allreduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        """Reduce in place over the members of the quorum, by default to the mean over the participants.

        ``reduce_op`` (keyword, a ``torch.distributed.ReduceOp``) asks for something else. A member that does not
        participate has its tensor set to zero and receives what the others made. After a failure the rest of the
        step's calls do nothing.
        """

    def errored(self) -> Exception | None:
        """The failure of the present step, if there was one."""

    def report_error(self, e: Exception) -> None:
        """Make the present step fail: it will not be committed here."""


class Membership(Protocol):
    """Who takes part. What a hook with state, or with a mean of its own, needs besides."""

    def num_participants(self) -> int:
        """How many contribute to this step: the divisor of every mean. Returns when the quorum is final."""

    def is_participating(self) -> bool:
        """``False`` on a spare, and on a member that heals in this step. Does not wait for the quorum."""

    def participating_rank(self) -> int | None:
        """A number below :meth:`num_participants` that no other participant has."""

    def current_step(self) -> int:
        """Committed steps, the same on every member once the quorum is final: all control flow hangs on it."""


class Transaction(Protocol):
    """Steps that are kept or dropped, and the state that a healing member receives."""

    def start_quorum(self) -> None:
        """Begin a step: agree on the members."""

    def should_commit(self) -> bool:
        """Vote; ``True`` if the step counts. Members may differ: the one left behind heals."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add to what a healing member is sent."""


class Group(Reducer, Membership, Protocol):
    """What a transport needs."""


class Manager(Reducer, Membership, Transaction, Protocol):
    """All of it: torchft's ``Manager``, or :class:`ch_ft.SimulatedManager`."""


class MemberGroup(Protocol):
    """A manager's process group, for collectives that are no sums: one of torchft's, or torch's own. Its members are all
    of the quorum, those that heal and spares included; their numbers are nobody's business outside of it.
    """

    def size(self) -> int:
        """Members of the present quorum."""

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any, /
    ) -> Any:
        """As torch's: one output for each member."""

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any, /
    ) -> Any:
        """As torch's; a size may be 0, and no sizes mean equal parts."""


class Abortable(Protocol):
    """A process group that can be given up at once: any of torchft's."""

    def abort(self) -> None:
        """Close every connection; pending collectives of this member and of its peers fail."""
