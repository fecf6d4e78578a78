"""Simulate a manager's quorum: N members as threads of one process, for tests of hooks and training loops.

It reduces, heals, and lets members fail or die between two collectives. The outcome depends on the script alone, not
on timing. It survives no fault of a process or network.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from ch_core import perform
from ch_ft import Work

_OPS = {ReduceOp.AVG: "sum", ReduceOp.SUM: "sum", ReduceOp.MAX: "max"}


Post = tuple[Any, ...]
"""Tensors that a member brings to a collective."""


class SimulatedDeath(BaseException):
    """Ends a member's thread. It is no ``Exception``, so that no handler in the training loop catches it."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """One collective of one quorum."""

    number: int
    posts: dict[str, tuple[tuple[object, ...], Post]] = field(default_factory=dict)
    done: bool = False


@dataclass(slots=True, eq=False)
class _Quorum:
    """Members of one attempt, in the order of their names."""

    members: list[str]
    participants: list[str]
    step: int
    meetings: dict[int, _Meeting] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)  # member -> the first collective that it takes no part in

    def absent(self, meeting: _Meeting) -> str | None:
        """Return a member that will never take part in this collective, if there is one."""
        found = (name for name, first in self.stopped.items() if first <= meeting.number)
        return next((name for name in found if name not in meeting.posts), None)


class SimulatedCluster:
    """Members that form quorums, reduce, fail and die by a script.

    A quorum forms when every living member has asked for one. It does not wait for a dead member before the step at
    which the script lets it return.

    Args:
        min_replicas: participants that a step needs to be committed.
        async_quorum: True if a healing member contributes nothing to its step and loads the state at the end, as with
            torchft's option. False if it loads first and takes part.
        max_participants: further members are spares, which contribute nothing (torchft's ``FIXED_WITH_SPARES``).
        timeout: seconds after which a wait raises, because the script is wrong.

    Attributes:
        on_collective: called with the manager and the number of the collective within the attempt, before it is
            posted; may call :meth:`SimulatedManager.die` or :meth:`SimulatedManager.report_error`.
        history: step and participants of each quorum.

    Example:
        >>> import torch
        >>> with SimulatedCluster() as cluster:
        ...     def body(manager):
        ...         tensor = torch.full((1,), float(ord(manager.name)))
        ...         manager.start_quorum()
        ...         manager.allreduce(tensor).wait()
        ...         return tensor.item()
        ...     cluster.run({"a": body, "c": body})
        {'a': 98.0, 'c': 98.0}
    """

    def __init__(
        self,
        *,
        min_replicas: int = 1,
        async_quorum: bool = True,
        max_participants: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.min_replicas = min_replicas
        self.async_quorum = async_quorum
        self.max_participants = max_participants
        self.timeout = timeout
        self.on_collective: Callable[[SimulatedManager, int], None] | None = None
        self.history: list[tuple[int, list[str]]] = []
        self.changed = threading.Condition()
        self.closed = False
        self._members: dict[str, SimulatedManager] = {}
        self._waiting: set[str] = set()
        self._returning: dict[str, int] = {}

    def __enter__(self) -> "SimulatedCluster":
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def join(self, name: str) -> "SimulatedManager":
        """Return a new member, at step 0."""
        with self.changed:
            if name in self._members:
                raise ValueError(f"{name!r} is a member already; it must die or leave first")
            manager = self._members[name] = SimulatedManager(self, name)
            return manager

    def run(self, bodies: dict[str, Callable[["SimulatedManager"], Any]]) -> dict[str, Any]:
        """Run each body on a thread with its own manager. Return results by name, ``None`` for a member that died.

        The first exception of a body ends all bodies and is raised.
        """
        managers = {name: self.join(name) for name in bodies}
        results: dict[str, Any] = dict.fromkeys(bodies)
        errors: list[BaseException] = []

        def main(name: str) -> None:
            try:
                results[name] = bodies[name](managers[name])
                managers[name].shutdown()
            except SimulatedDeath:
                return
            except BaseException as error:
                errors.append(error)
                with self.changed:
                    self.closed = True
                    self.changed.notify_all()

        active = DistributedDataParallel._active_ddp_module
        threads = [threading.Thread(target=main, args=(name,), name=name, daemon=True) for name in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Forwards of two threads may restore it in the wrong order, and torch.compile reads it.
        DistributedDataParallel._active_ddp_module = active
        if errors:
            raise errors[0]
        return results

    # -- for the managers, under the lock

    def arrive(self, manager: "SimulatedManager") -> None:
        """Wait until the next quorum has formed with this member in it."""
        with self.changed:
            self._stop(manager)
            self._waiting.add(manager.name)
            manager.quorum = None
            self._form()
            self.wait_for(lambda: manager.quorum is not None, f"{manager.name} waits for a quorum")

    def leave(self, name: str, return_at: int | None) -> None:
        """Remove a member. Collectives that wait for it fail."""
        with self.changed:
            manager = self._members.pop(name)
            self._waiting.discard(name)
            if return_at is not None:
                self._returning[name] = return_at
            self._stop(manager)
            self._form()
            self.changed.notify_all()

    def announce(self, manager: "SimulatedManager") -> None:
        """Let the script act before a member's next collective."""
        if self.on_collective is not None:
            self.on_collective(manager, manager.number)

    def stop(self, manager: "SimulatedManager") -> None:
        """End a member's part in its attempt. Further collectives fail on its peers."""
        with self.changed:
            self._stop(manager)
            self.changed.notify_all()

    def _stop(self, manager: "SimulatedManager") -> None:
        if manager.quorum is not None:
            manager.quorum.stopped.setdefault(manager.name, manager.number)

    def post(
        self, manager: "SimulatedManager", key: tuple[object, ...], post: Post, hold: Callable[[list[Post]], None]
    ) -> _Meeting:
        """Post a member's part in the next collective of its attempt. ``hold`` carries it out when all parts are there."""
        quorum = manager.quorum
        assert quorum is not None
        with self.changed:
            number = manager.number
            manager.number += 1
            meeting = quorum.meetings.setdefault(number, _Meeting(number))
            meeting.posts[manager.name] = (key, post)
            if len(meeting.posts) == len(quorum.members):
                asked = {name: key for name, (key, _) in sorted(meeting.posts.items())}
                if len(set(asked.values())) > 1:
                    raise RuntimeError(f"the members asked for different collectives, and gloo would abort: {asked}")
                hold([meeting.posts[name][1] for name in quorum.members])
                meeting.done = True
                self.changed.notify_all()
        return meeting

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self.changed.wait_for(lambda: self.closed or condition(), self.timeout):
            raise TimeoutError(f"{what}, for more than {self.timeout:g} s")
        if not condition():
            raise TimeoutError(f"{what}, but the simulation was closed")

    def _form(self) -> None:
        arrived = [self._members[name] for name in sorted(self._waiting)]
        step = max((m.current_step() for m in arrived), default=-1)
        early = {name for name, at in self._returning.items() if at > step}
        expected = {name for name, at in self._returning.items() if at <= step}
        ready = [m for m in arrived if m.name not in early]
        if not ready or {m.name for m in ready} != (set(self._members) - early) | expected:
            return
        current = [m.name for m in ready if m.current_step() == step]
        chosen = current if self.async_quorum else [m.name for m in ready]
        quorum = _Quorum([m.name for m in ready], chosen[: self.max_participants], step)
        self.history.append((step, quorum.participants))
        behind = [m for m in ready if m.name not in current]
        snapshot = self._members[current[0]].snapshot() if behind else None
        for manager in ready:
            self._returning.pop(manager.name, None)
            manager.take(quorum, copy.deepcopy(snapshot) if manager in behind else None)
        self._waiting &= early
        self.changed.notify_all()


class SimulatedManager:
    """One member, with the methods of :class:`ch_ft.Manager`."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.quorum: _Quorum | None = None
        self._step = 0
        self._error: Exception | None = None
        self.number = 0  # of the next collective of the attempt
        self._pending: dict[str, Any] | None = None
        self._healing = False
        self._loads: dict[str, Callable[[Any], None]] = {}
        self._saves: dict[str, Callable[[], Any]] = {}
        # For collectives other than sums. A strong reference to this manager would keep it alive.
        self.process_group = SimulatedMembers(weakref.proxy(self))

    # -- Reducer

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Work:
        if self._error is None:
            self.cluster.announce(self)
        if self._error is not None:
            return _Nothing()
        if not self.is_participating():
            tensor.zero_()
        op = _OPS[reduce_op]
        key = (op, tensor.numel(), str(tensor.dtype))
        meeting = self.cluster.post(self, key, (tensor,), lambda posts: perform("all_reduce", op, posts))
        return _SimulatedWork(self, meeting, tensor if reduce_op == ReduceOp.AVG else None)

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        """Fail the attempt here: no further collective is sent.

        As over torchft, peers that wait for one of those fail at their group's time-out, here at once. Collectives that
        this member has taken part in are completed. If there is no further one, its peers commit and it heals.
        """
        self._error = e
        self.cluster.stop(self)

    # -- Membership

    def num_participants(self) -> int:
        return len(self.quorum.participants) if self.quorum is not None else 0

    def is_participating(self) -> bool:
        return self.quorum is not None and self.name in self.quorum.participants and not self._healing

    def participating_rank(self) -> int | None:
        if self.quorum is None or self.name not in self.quorum.participants:
            return None
        return self.quorum.participants.index(self.name)

    def current_step(self) -> int:
        return self._step

    # -- Transaction

    def start_quorum(self) -> None:
        self.cluster.arrive(self)
        if self._healing and not self.cluster.async_quorum:
            self._heal()

    def should_commit(self) -> bool:
        if self._healing:
            self._heal()
        committed = self._error is None and self.num_participants() >= self.cluster.min_replicas
        self._step += committed
        return committed

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self._loads[key], self._saves[key] = load_state_dict, state_dict

    def shutdown(self) -> None:
        """Leave between steps."""
        self.cluster.leave(self.name, None)

    # -- what the script does

    def die(self, return_at: int | None = None) -> None:
        """End this member where it is.

        Args:
            return_at: the step at which the others wait for a new member of this name.
        """
        self.cluster.leave(self.name, return_at)
        raise SimulatedDeath(self.name)

    # -- for the cluster

    def members(self) -> int:
        """Return the number of members of the quorum."""
        return len(self.quorum.members) if self.quorum is not None else 0

    def bring(self, key: tuple[object, ...], post: Post, hold: Callable[[list[Post]], None]) -> "_RaisingWork":
        """Take part in a collective of the process group."""
        self.cluster.announce(self)
        if self._error is not None:
            raise RuntimeError(f"{self.name} has failed in this attempt: {self._error}")
        return _RaisingWork(_SimulatedWork(self, self.cluster.post(self, key, post, hold), None))

    def snapshot(self) -> dict[str, Any]:
        """Return the state for a healing member."""
        return {key: save() for key, save in self._saves.items()}

    def take(self, quorum: _Quorum, pending: dict[str, Any] | None) -> None:
        """Enter a quorum."""
        self.quorum, self._pending, self._healing = quorum, pending, pending is not None
        self._error, self.number, self._step = None, 0, quorum.step

    def _heal(self) -> None:
        pending, self._pending, self._healing = self._pending, None, False
        for key, load in self._loads.items():
            load((pending or {})[key])


class _SimulatedWork:
    """Collective that is done when all members have posted, and failed if one never will."""

    def __init__(self, manager: SimulatedManager, meeting: _Meeting, divide: torch.Tensor | None) -> None:
        self._manager, self._meeting, self._divide = manager, meeting, divide
        self._quorum = manager.quorum

    def hold_out(self) -> None:
        """Wait. Raise ``RuntimeError``, as a process group does, if a peer is gone."""
        cluster, quorum, meeting = self._manager.cluster, self._quorum, self._meeting
        assert quorum is not None
        with cluster.changed:
            cluster.wait_for(
                lambda: meeting.done or quorum.absent(meeting) is not None, f"{self._manager.name} waits for a sum"
            )
            absent = quorum.absent(meeting)
        if not meeting.done:
            raise RuntimeError(f"{absent} died, failed or gave up before collective {meeting.number}")
        if self._divide is not None:
            self._divide.div_(len(quorum.participants))
            self._divide = None

    def wait(self) -> bool:
        try:
            self.hold_out()
        except RuntimeError as error:
            self._manager.report_error(error)
            return False
        return True


class _RaisingWork:
    """Collective of the process group. Its wait raises."""

    def __init__(self, work: _SimulatedWork) -> None:
        self._work = work

    def wait(self) -> bool:
        self._work.hold_out()
        return True


class _Nothing:
    """Work that a manager returns after an error."""

    def wait(self) -> bool:
        return True


class Member(Protocol):
    """Owner of the group."""

    def members(self) -> int: ...

    def bring(self, key: tuple[object, ...], post: Post, hold: Callable[[list[Post]], None], /) -> Any:
        """Take part in a collective. ``hold`` carries it out with all posts of this key, in the order of members."""


class SimulatedMembers:
    """All-gather and all-to-all of one quorum's members.

    Args:
        member: posts this member's part and returns the work.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def size(self) -> int:
        return self._member.members()

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any, /
    ) -> Any:
        (outputs,), (mine,) = output_tensors, input_tensors
        return self._member.bring(("all_gather", mine.numel(), str(mine.dtype)), (outputs, mine), _gather)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any, /
    ) -> Any:
        received = output.split(output_sizes or output.numel() // self.size())
        sent = input.split(input_sizes or input.numel() // self.size())
        return self._member.bring(("all_to_all", str(input.dtype)), (received, sent), _exchange)


def _gather(posts: list[Post]) -> None:
    for outputs, _ in posts:
        for output, (_, mine) in zip(outputs, posts, strict=True):
            output.copy_(mine.view(output.shape))


def _exchange(posts: list[Post]) -> None:
    for member, (received, _) in enumerate(posts):
        for part, (_, sent) in zip(received, posts, strict=True):
            if part.numel() != sent[member].numel():
                raise RuntimeError(f"{sent[member].numel()} elements sent, {part.numel()} expected: gloo would abort")
            part.copy_(sent[member])
