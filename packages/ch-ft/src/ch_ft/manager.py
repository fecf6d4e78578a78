"""Protocols of a manager, each needed only where it is used. Imports no torch.

torchft's ``Manager`` satisfies all of them, in 0.2.0 and in nightly builds. ch-ft calls only these methods, and no
private attribute. Hooks that need more than sums use the manager's process group (:class:`MemberGroup`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Work(Protocol):
    """All-reduce in flight. Its tensor has the result after :meth:`wait`."""

    def wait(self) -> object:
        """Wait for it. ``False`` means that it failed. For any other value ask :meth:`Reducer.errored` too."""


class Reducer(Protocol):
    """All-reduce that never raises for a lost peer. Plain averaging needs nothing else."""

    def allreduce(self, tensor: "torch.Tensor", *args: Any, **kwargs: Any) -> Work:
        """Reduce in place over the quorum, by default to the mean over the participants.

        The keyword ``reduce_op``, a ``torch.distributed.ReduceOp``, asks for another operation. For a member that
        does not participate the tensor is set to zero first, and then receives the participants' result. After a
        failure, further calls of the step do nothing.
        """

    def errored(self) -> Exception | None:
        """Return the failure of the current step, if there is one."""

    def report_error(self, e: Exception) -> None:
        """Fail the current step. It will not be committed here."""


class Membership(Protocol):
    """Members of the step. Hooks that scale or have state need it."""

    def num_participants(self) -> int:
        """Return the number of contributing members, the divisor of every mean. Waits for the quorum."""

    def is_participating(self) -> bool:
        """Return False on a spare, and on a member that heals in this step. Does not wait for the quorum."""

    def participating_rank(self) -> int | None:
        """Return a number below :meth:`num_participants` that no other participant has."""

    def current_step(self) -> int:
        """Return the number of committed steps, equal on all members after the quorum. Control flow follows it."""


class Transaction(Protocol):
    """Commits or drops steps, and transfers state to healing members."""

    def start_quorum(self) -> None:
        """Begin a step, and agree on its members."""

    def should_commit(self) -> bool:
        """Vote. Return True if the step counts. Members may disagree. A member that misses the commit heals later."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add to the state that a healing member receives."""


class Group(Reducer, Membership, Protocol):
    """Methods that a transport needs."""


class Manager(Reducer, Membership, Transaction, Protocol):
    """All methods: torchft's ``Manager``, or :class:`ch_testing.SimulatedManager`."""


class MemberGroup(Protocol):
    """Process group of a manager, one of torchft's or torch's own, for collectives other than sums.

    All members of the quorum are in it, healing ones and spares too. Their numbers have no meaning outside it.
    """

    def size(self) -> int:
        """Return the number of members of the quorum."""

    def allgather(
        self, output_tensors: "list[list[torch.Tensor]]", input_tensors: "list[torch.Tensor]", opts: Any, /
    ) -> Any:
        """Gather as torch does, into one output for each member."""

    def alltoall_base(
        self,
        output: "torch.Tensor",
        input: "torch.Tensor",
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
        /,
    ) -> Any:
        """Exchange as torch does. A size may be 0. Empty lists mean equal parts."""


class Abortable(Protocol):
    """Process group that can be closed at once, such as any of torchft's."""

    def abort(self) -> None:
        """Close every connection. Pending collectives of this member and of its peers fail."""
