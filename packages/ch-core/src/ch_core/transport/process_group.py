"""Collectives over a ``torch.distributed`` process group, and a register of groups that must not be used again."""

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store, _world
from torch.utils.weak import WeakIdKeyDictionary

from ch_core.agreement import StoreExchange
from ch_core.errors import HookTimeoutError, TransportError
from ch_core.link import Link
from ch_core.requests import Scope
from ch_core.sizes import SIZES
from ch_core.topology import Nodes, Topology, learn
from ch_core.transport.base import SeveralWorks, Work

# torch 2.13 renames the flat collectives and warns about the old names at every call.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
# Private, as `new_group` takes no name.
_OPEN_GROUP: Any = dist.distributed_c10d._new_process_group_helper


WHERE: dict[Scope, str] = {"node": "inside the node", "peers": "between the nodes"}


def gather_pieces(nbytes: int, world_size: int) -> int:
    """Return the number of pieces of an all-gather over gloo, except inside a node.

    Args:
        nbytes: of one rank.
        world_size: number of ranks.

    >>> [gather_pieces(nbytes, 2) for nbytes in (1 << 19, 1 << 20, 1 << 23, 1 << 24)]
    [1, 2, 16, 1]
    """
    if not SIZES.pieces_from <= nbytes * world_size < SIZES.pieces_below:
        return 1
    return -(-nbytes // max(SIZES.piece_bytes // world_size, SIZES.part_bytes))


def loss_of(what: str, begun: float, timeout: float | None, error: RuntimeError) -> HookTimeoutError | TransportError:
    """Return the typed error of a work of ``torch.distributed`` whose wait raised.

    Args:
        what: the work.
        begun: ``time.monotonic()`` before the wait.
        timeout: deadline of the wait in seconds.
        error: what torch raised.
    """
    waited = time.monotonic() - begun
    if timeout is not None and waited >= 0.95 * timeout:
        return HookTimeoutError(
            f"{what} was not done after {waited:.1f} s (deadline {timeout:g} s): a rank is frozen, or does not take part in the "
            "same collectives. Raise attach(timeout=...) if ranks are merely slow"
        )
    return TransportError(f"{what} failed: {error}")


class ProcessGroupWork:
    """Work of ``torch.distributed`` with a deadline and typed errors. It keeps its tensors alive until it is done."""

    __slots__ = ("_keep", "_what", "_work")

    def __init__(self, work: dist.Work, what: str, *keep: torch.Tensor) -> None:
        self._work, self._what, self._keep = work, what, keep

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        begun = time.monotonic()
        try:
            # On a GPU the stream waits. With a timeout the host would wait for the kernel.
            if timeout is not None and self._keep[0].is_cpu:
                self._work.wait(timedelta(seconds=timeout))
            else:
                self._work.wait()
        except RuntimeError as error:
            raise loss_of(self._what, begun, timeout, error) from error

    def future(self) -> Any:
        """Return torch's future of the work."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """True if the work is done."""
        return self._work.is_completed()


class ProcessGroupTransport:
    """A transport over a ``torch.distributed`` process group.

    Args:
        group: the group; ``None`` is the default group.
        free: see :class:`Transport`. It takes effect if gloo carries the tensors of a CPU. Other backends may lack some
            collectives.
        where: ranks of the group, for error texts, such as ``"inside the node"``.

    gloo runs long all-gathers of a CPU as broadcasts inside a node, and any other of 2 to 32 MiB in pieces.

    Raises:
        TransportError: there is no process group.
    """

    elastic = False
    link: Link | None = None
    _OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}

    def __init__(self, group: dist.ProcessGroup | None = None, *, free: bool = False, where: str = "") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise TransportError(
                "no process group: call torch.distributed.init_process_group(...) first, "
                "or run over simulated ranks with ch_core.simulation"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self._gloo = _by_gloo(self.group)
        self.free = free and self._gloo
        self.topology: Topology | None = None
        self._where = f" {where}" if where else ""
        self._inside = where == WHERE["node"]
        # None stands for this transport. A reference to itself would keep the group until a garbage collection.
        self._scoped: dict[Scope, ProcessGroupTransport | None] = {"all": None}

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._start("all-reduce", dist.all_reduce, tensor, op=self._OPS[op])

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if self._gloo and output.is_cpu and self.world_size > 1:
            if self._inside and output.nbytes >= SIZES.broadcast_from:
                return self._gather_by_broadcasts(output, input)
            count = gather_pieces(input.nbytes, self.world_size)
            if count > 1:
                return self._gather_in_pieces(output, input, count)
        return self._start("all-gather", _ALL_GATHER, output, input)

    def _gather_by_broadcasts(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Broadcast the part of every rank into its place. gloo's broadcast receives into the output."""
        if output.is_complex():  # gloo has no complex numbers, and torch's broadcast does not convert them
            output, input = torch.view_as_real(output), torch.view_as_real(input)
        parts = output.view(-1).chunk(self.world_size)
        parts[self.rank].copy_(input.view(-1))
        members = dist.get_process_group_ranks(self.group)
        what = "all-gather"
        return SeveralWorks(
            [self._start(what, dist.broadcast, part, src=src) for part, src in zip(parts, members, strict=True)]
        )

    def _gather_in_pieces(self, output: torch.Tensor, input: torch.Tensor, count: int) -> Work:
        """Gather piece by piece. gloo then holds pieces in new memory, and a rank sends as many bytes as in one ring.

        A late rank sends before it announces that it can receive, now a half of a piece instead of a half of the message.
        """
        rows = output.view(self.world_size, -1).tensor_split(count, dim=1)  # (W, n / count) each
        pieces = input.view(-1).tensor_split(count)
        return SeveralWorks(
            [
                self._start("all-gather", partial(dist.all_gather, list(row.unbind())), piece)
                for row, piece in zip(rows, pieces, strict=True)
            ]
        )

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._start("all-to-all", dist.all_to_all_single, output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        return self._start("reduce-scatter", _REDUCE_SCATTER, output, input, op=self._OPS[op])

    def abort(self) -> None:
        """Refuse all further collectives over the group. Its owner destroys it."""
        for one in self._scoped.values():
            give_up((one or self).group)

    @property
    def exchanged(self) -> int:
        """0, because torch matches the collectives of a group itself."""
        return 0

    def open_levels(self, nodes: Nodes | None, timeout: float | None) -> None:
        """Learn the topology and open a group for the ranks of this node, and one for the peers.

        See :meth:`.LeveledTransport.open_levels`. The groups belong to the group of this transport, and are opened once.
        """
        assert self.group is not None  # noqa: S101 - set by __init__
        wait = timeout if timeout is not None else group_timeout(self.group)
        if self.world_size == 1:
            self.topology = Topology.given(1 if nodes is None else nodes, 1)
        else:
            self.topology = learn(nodes, self.world_size, StoreExchange(self.group, wait))
        for scope in WHERE:  # every rank opens its node's group first, so that no two ranks wait for each other
            group = sub_group(self.group, self.topology.members(self.rank, scope), WHERE[scope])
            self._scoped[scope] = None if group is self.group else self.among(group, scope)

    def among(self, group: dist.ProcessGroup, scope: Scope) -> "ProcessGroupTransport":
        """Return a transport over the ranks of a scope, which form a group."""
        return ProcessGroupTransport(group, free=self.free, where=WHERE[scope])

    def scoped(self, scope: Scope) -> "ProcessGroupTransport":
        """Return the transport among the ranks of a scope. Only ``"all"`` works without :meth:`open_levels`."""
        return self._scoped[scope] or self

    def _start(
        self, what: str, collective: Callable[..., dist.Work], *tensors: torch.Tensor, **kwargs: object
    ) -> ProcessGroupWork:
        refuse_lost(self.group)
        what += self._where
        if self.group is not None and self.group.size() != self.world_size:  # a mean would divide by the old number
            raise TransportError(
                f"the process group had {self.world_size} ranks when the hook was attached and has {self.group.size()} now. "
                "Members that come and go need a manager, which makes new groups. Give the manager, and no group of it"
            )
        try:
            work = collective(*tensors, group=self.group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise TransportError(f"{what} could not be started: {error}") from error
        return ProcessGroupWork(work, what, *tensors)


_SUB_GROUPS = WeakIdKeyDictionary()  # process group -> {(members, purpose): group}


def sub_group(group: dist.ProcessGroup, members: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    """Return the group of some ranks, opened at the first call. Only its members need to make this call.

    ``dist.new_group`` would name it by the number of groups that a rank is in. Ranks in different numbers of groups would then
    wait for each other under different names.

    Args:
        group: the whole group, which is returned if all of its ranks are members.
        members: ranks in ``group``, in ascending order. This rank is one of them.
        purpose: the same members may meet in one group for each purpose.
    """
    if len(members) == group.size():
        return group
    kept: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = _SUB_GROUPS.setdefault(group, {})
    if (members, purpose) not in kept:
        ranks = [dist.get_process_group_ranks(group)[member] for member in members]
        places = {rank: place for place, rank in enumerate(ranks)}
        name = f"{group.group_name}/{purpose}/" + hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
        made, _ = _OPEN_GROUP(
            len(ranks),
            places[dist.get_rank()],
            ranks,
            dist.Backend(dist.get_backend_config(group)),
            _get_process_group_store(group),
            name,
            timeout=timedelta(seconds=group_timeout(group)),
            device_id=group.bound_device_id,
            group_desc=f"commhooks {purpose}",
        )
        _world.pg_group_ranks[made] = places
        kept[members, purpose] = made
    return kept[members, purpose]


def _by_gloo(group: dist.ProcessGroup | None) -> bool:
    try:
        return "cpu:gloo" in dist.get_backend_config(group)
    except (KeyError, TypeError, ValueError):  # torch.distributed did not make this group
        return False


def group_timeout(group: object) -> float:
    """Return the seconds that a process group gives each of its collectives. Other objects stand for the default group."""
    if not isinstance(group, dist.ProcessGroup):
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None:
        # Private, as torch tells the timeout of a group nowhere else. Without it a short deadline of the group would be missed.
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if options is not None:
                seconds: float = options._timeout.total_seconds()
                return seconds
    return default_pg_timeout.total_seconds()


# A rank that gave up a collective continues, and a peer may match the old message with its next one. From then on ranks
# average gradients of different steps, and no number shows it. So a group with a lost collective is never used again.
_LOST = WeakIdKeyDictionary()  # process group -> True


def give_up(group: dist.ProcessGroup | None) -> None:
    """Forbid this process to use the group again."""
    if group is not None:
        _LOST[group] = True


def refuse_lost(group: dist.ProcessGroup | None) -> None:
    """Refuse a group over which a collective was lost.

    Raises:
        TransportError: a collective was lost.
    """
    if group in _LOST:
        raise TransportError(
            "an earlier collective over this process group failed or timed out. Ranks may be at different steps, so a further "
            "average could mix steps. On all ranks, make another group (dist.new_group, or destroy and initialise the "
            "default one), wrap the model over it, attach again and load one checkpoint"
        )
