"""`commhooks.Reducer`: averages tensors with any reduction, without a model or a backward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from ch_core import (
    AttachError,
    Bucket,
    BucketLayout,
    Engine,
    HookConfigError,
    HookNotSupportedError,
    Link,
    Reduction,
    SideStream,
    Transport,
    agree,
    group_timeout,
    refuse_lost,
    transport_over,
)
from commhooks.adapters.base import Binding
from commhooks.adapters.managed import ManagedAxis, manager_adapter
from commhooks.adapters.options import AttachOptions
from commhooks.api.create import as_handle
from commhooks.fingerprint import fingerprint, rows_of, verify, verify_move
from commhooks.handle import CommHook, refuse_weights


class _ReducerBinding(Binding):
    """Binding of a :class:`Reducer`: no model, one engine."""

    calls = 0
    weighs = True

    def __init__(
        self,
        engine: Engine,
        layout: BucketLayout,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        axis: ManagedAxis | None,
    ) -> None:
        self.engine, self.layout, self.group, self.axis = engine, layout, group, axis
        self._buckets = buckets

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        return [bucket.layout for bucket in self._buckets]

    def weigh_ranks(self) -> None:
        if self.axis is not None:
            raise HookNotSupportedError(
                "weighted=True: a reducer over a manager does not support weights. ch_ft.DistributedDataParallel does. Omit "
                "weighted=, and scale the tensors by this rank's weight over the mean weight"
            )
        super().weigh_ranks()

    def detach(self) -> None:
        """Release the manager if there is one. There is no model to restore."""
        if self.axis is not None:
            self.axis.close()


class PendingAverage:
    """An average in flight, from :meth:`Reducer.start`.

    Every rank must call :meth:`advance` and :meth:`wait` at the same places among its other collectives. These calls start
    the later stages of a reduction, and ranks match messages only by their order.
    """

    def __init__(self, reducer: "Reducer", error: BaseException | None = None) -> None:
        self._reducer, self._error, self._done = reducer, error, False

    @property
    def done(self) -> bool:
        """True if :meth:`wait` has returned or raised."""
        return self._done

    def advance(self) -> None:
        """Wait for the current stage and start the next. After :attr:`Reducer.stages` calls the average is complete.

        Without these calls, :meth:`wait` runs all later stages one after another.

        Raises:
            TransportError, HookTimeoutError: the group is lost.
        """
        if not self._done:
            self._reducer._advance()

    def wait(self) -> dict[str, torch.Tensor]:
        """Return the averages by name: live views of the reducer's memory, valid until the next :meth:`Reducer.start`.

        Over a manager the loss of a peer raises nothing, and the manager's vote decides if the average counts.

        Raises:
            CommHooksError: the round failed on all ranks. The state is rolled back and the reducer stays usable.
            TransportError, HookTimeoutError: the group is lost, and the reducer is unusable.
        """
        if not self._done:
            self._done = True
            self._reducer._finish(self)
        return self._reducer.tensors


class Reducer:
    """Averages a dict of tensors over the ranks of a group, with any reduction of the registry.

    It treats any tensors as a hook treats gradients: pseudo-gradients of an outer optimizer, changes of weights for
    samplers, gradients of a hand-written loop. State (residuals, PowerSGD's Q) is stored by name, written and committed as
    in training. A round that failed, or whose average was not finite, leaves the state unchanged.

    Args:
        hook: an expression, its dict form, a reduction, or an unattached handle.
        tensors: the names and shapes to average, equal and in one order on every rank. Any dense tensors of one device
            (`meta` tensors need `device`). Each dtype is one message.
        process_group: group of the ranks; by default the default group.
        transport: replaces the process group, e.g. a simulated rank's.
        manager: replaces the process group: a manager that adds and removes ranks (torchft's, with ch-ft installed). A
            round lies between its `start_quorum()` and its `should_commit()`. That vote decides if state and average
            count. The average is over the members of the round. Members are compared in every round, and the manager sends
            a new member the shared state.
        link: slowest link between two ranks, as for :func:`commhooks.attach`. Only over a process group.
        device: device of the averages, if it is not the device of `tensors`.
        timeout: seconds that one collective may take; by default the process group's. Not with a manager.
        verify_ranks: True to compare expression, versions, names and shapes over all ranks first.
        facts: further lines by name that must be equal on all ranks.
        rounds: over a manager, maps its committed steps to the rounds of this reducer, if it skips some steps. All members
            need the same function. A warm-up counts rounds.
        weighted: True to average by weights. Every rank then calls `weigh(n)` before each round.

    Attributes:
        handle: the :class:`~commhooks.CommHook`, for `stats()`, `plan()` and checkpoints.
        tensors: live views by name of the memory that is averaged in place. Fill them and call :meth:`start` without
            arguments to avoid a copy. They stay live after :meth:`abandon` and :meth:`move`, also views that you made of
            them. If messages are in flight then, all these views get other memory, so their contents are undefined, and a
            NumPy array made of them shows the old memory.

    Raises:
        HookConfigError: a bad expression, no tensors, or tensors of several devices.
        HookNotSupportedError: a foreign hook function, which needs DDP; a transport with changing members; or a reduction
            that the manager does not support.
        AttachError: no package has an adapter for this manager.
        RankMismatchError: the ranks do not agree.

    Example:
        >>> import torch
        >>> from commhooks import Plain, Reducer
        >>> from ch_core import simulate
        >>> def body(rank):
        ...     mine = {"w": torch.full((2,), float(rank.rank)), "b": torch.zeros(1)}
        ...     reducer = Reducer(Plain(), mine, transport=rank.transport)
        ...     at_once = reducer.average(mine)["w"].tolist()
        ...     pending = reducer.start(mine)  # the messages are in flight
        ...     mine["w"].zero_()  # the reducer has its own copy
        ...     return at_once, pending.wait()["w"].tolist(), reducer.stats()["steps"]
        >>> simulate(2, body)[1]
        ([0.5, 0.5], [0.5, 0.5], 2.0)
    """

    def __init__(
        self,
        hook: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
        tensors: Mapping[str, torch.Tensor],
        *,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        manager: object | None = None,
        link: str | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        verify_ranks: bool = True,
        facts: Mapping[str, Sequence[str]] | None = None,
        rounds: Callable[[int], int] | None = None,
        weighted: bool = False,
    ) -> None:
        if sum(one is not None for one in (transport, process_group, manager)) > 1:
            raise HookConfigError(
                "transport=, process_group= and manager= exclude each other, because each defines the ranks"
            )
        self.handle = as_handle(hook, process_group=process_group)
        if self.handle.reduction is None:
            raise HookNotSupportedError(
                f"{self.handle.expr} is a (state, bucket) function, which only DDP can call. Give a reduction by name"
            )
        if self.handle.attached:
            raise AttachError(f"{self.handle.expr} is attached already; create another handle for this reducer")
        if link is not None and (transport is not None or manager is not None):
            raise HookConfigError(
                "link= describes the ranks of a process group; a transport or a manager has its own messages"
            )
        self.handle.link = Link.parse(link) if link is not None else None
        self.handle.weighted = weighted
        self._buckets = _buckets(tensors, device)
        state = self.handle.hook_state
        assert state is not None  # noqa: S101 - every reduction has one
        found = {p.name: view for bucket in self._buckets for p, view in bucket.views()}
        self.tensors: dict[str, torch.Tensor] = {name: found[name] for name in tensors}
        layout = BucketLayout.of_tensors(self.tensors, _kinds(self.tensors))
        self._side = SideStream()
        self._running: PendingAverage | None = None
        axis, group = None, None
        if manager is not None:
            if timeout is not None:
                raise HookConfigError(
                    "timeout= has no effect over a manager, which has its own time-outs. Set them there"
                )
            options = AttachOptions(verify_ranks=verify_ranks, manager=manager, facts=facts or {}, rounds=rounds)
            axis = manager_adapter(manager)(self, self.handle, options, self._layouts)
            self._engine = axis.engine
        else:
            transport, group = _fixed(transport, process_group or self.handle.process_group, self.handle.link, timeout)
            if timeout is None:
                timeout = group_timeout(group) if group is not None else 60.0
            self._engine = Engine(self.handle.reduction, transport, state, timeout=timeout, status_last=True)
        self._binding = _ReducerBinding(self._engine, layout, self._buckets, group, axis)
        self.handle.bind(self._binding)
        try:
            if weighted:
                refuse_weights(self.handle, layout)
                self._binding.weigh_ranks()
            if verify_ranks and axis is None:
                self.handle.agreement_timeout = timeout
                self._verify(facts or {})
        except BaseException:
            self.handle.detach()
            raise

    @property
    def rank(self) -> int:
        """This rank among the ranks that average together."""
        return self._engine.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that average together; over a manager, in the last round."""
        return self._engine.transport.world_size

    @property
    def stages(self) -> int:
        """Number of stages of the next round. That many :meth:`PendingAverage.advance` calls complete it."""
        return max(len(self._engine.plan(bucket.layout)) for bucket in self._buckets)

    def start(
        self, tensors: Mapping[str, torch.Tensor] | None = None, *, error: BaseException | None = None
    ) -> PendingAverage:
        """Start averaging, and return while the first messages are in flight.

        Args:
            tensors: this rank's contribution, which is copied; by default the contents of :attr:`tensors`. Other names or
                shapes than the reducer's become an `error`, a HookConfigError.
            error: reason why this rank cannot contribute. The rank still takes part in the messages, and
                :meth:`PendingAverage.wait` raises on all ranks: this error here, a RemoteHookError on the peers.

        Raises:
            AttachError: over a manager, if no quorum was started.
            RuntimeError: the previous average is still in flight.
            TransportError, HookTimeoutError: the group is lost.
        """
        if self._running is not None:
            raise RuntimeError("the previous average is still in flight: call wait() on it, or abandon() on all ranks")
        if tensors is not None and error is None:
            error = self._fill(tensors)
        self._binding.calls += 1
        self._running = PendingAverage(self, error)
        try:
            with torch.no_grad():
                for bucket in self._buckets:
                    with self._side.on(bucket.storage):
                        self._engine.submit(bucket)
        except BaseException:
            self.abandon()
            raise
        return self._running

    def weigh(self, n: float | torch.Tensor, of: Literal["mean", "sum"] = "mean") -> None:
        """Set how much this rank's tensors count in the next round. See :meth:`.CommHook.weigh`.

        Example:
            >>> import torch
            >>> from commhooks import Plain, Reducer
            >>> from ch_core import simulate
            >>> def body(rank):
            ...     mine = {"w": torch.full((2,), float(rank.rank))}
            ...     reducer = Reducer(Plain(), mine, transport=rank.transport, weighted=True)
            ...     reducer.weigh([1, 3][rank.rank])
            ...     return reducer.average(mine)["w"].tolist()
            >>> simulate(2, body)[1]
            [0.75, 0.75]
        """
        self.handle.weigh(n, of)

    def average(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Call :meth:`start`, then :meth:`PendingAverage.wait`."""
        return self.start(tensors).wait()

    def abandon(self) -> None:
        """Drop the average in flight, on all ranks, e.g. after an exception in the loop around it.

        Its messages may still arrive, also much later. They write nothing into :attr:`tensors`, whose contents are
        undefined until they are filled again.
        """
        if self._engine.in_step:
            self._engine.abandon()
        if self._running is not None:
            self._running._done, self._running = True, None

    def commit(self) -> bool | None:
        """Make the state after the last round final now. See :meth:`.CommHook.commit`."""
        return self.handle.commit()

    def rollback(self) -> None:
        """Undo the state of the last round, because its average was not used."""
        self.handle.rollback()

    def stats(self) -> dict[str, float]:
        """Return cumulative figures. See :meth:`.CommHook.stats`."""
        return self.handle.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. See :meth:`.CommHook.state_dict`.

        Raises:
            RuntimeError: an average is in flight.
        """
        if self._running is not None:
            raise RuntimeError("an average is in flight, and its state is not final: call wait() on it first")
        return self.handle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Load the result of :meth:`state_dict`, on every rank. See :meth:`.CommHook.load_state_dict`."""
        self.handle.load_state_dict(state, world_change=world_change)

    def move(self, process_group: dist.ProcessGroup, *, facts: Mapping[str, Sequence[str]] | None = None) -> None:
        """Switch to another group of ranks, after a loss or a join. Every rank of the new group must make this call.

        It drops the average in flight, as :meth:`abandon` does. Each rank keeps its state, whose shared fields may now differ:
        load one state with :meth:`load_state_dict` on all ranks before the next round.

        Args:
            process_group: the new group.
            facts: further lines by name that must be equal on its ranks.

        Raises:
            HookConfigError: over a manager, which changes its ranks itself.
            RankMismatchError: ranks have another hook, link or other tensors, and nothing has changed. `verify_ranks=False`
                turns this comparison off.
            HookTimeoutError: a rank does not make this call.
        """
        if self._binding.axis is not None:
            raise HookConfigError(
                "this reducer is over a manager, which adds and removes members itself: there is no move()"
            )
        refuse_lost(process_group)
        if self.handle.agreement_timeout is not None:
            # Not this reducer's timeout: after a loss, survivors may arrive one such deadline apart.
            verify_move(self.handle, rows_of(self.tensors.items()), process_group, group_timeout(process_group), facts)
        self.abandon()
        link, timeout = self._engine.transport.link, self._engine.messenger.timeout
        self._engine.move(transport_over(process_group, link, free=True, timeout=timeout))
        self._binding.group = process_group

    def close(self) -> None:
        """Detach the handle, which may then be attached elsewhere."""
        self.abandon()
        self.handle.detach()

    def _layouts(self) -> list[BucketLayout]:
        return [bucket.layout for bucket in self._buckets]

    def _verify(self, facts: Mapping[str, Sequence[str]]) -> None:
        rows, engine, timeout = rows_of(self.tensors.items()), self._engine, self.handle.agreement_timeout
        if self._binding.group is not None and timeout is not None:
            verify(self.handle, rows, timeout, facts=facts)
        elif engine.transport.world_size > 1:

            def everyone(message: bytes) -> list[bytes]:
                mine = torch.tensor(list(message), dtype=torch.uint8, device="cpu")
                return [bytes(row) for row in engine.gather(mine).tolist()]

            agree(self.handle.expr, {**fingerprint(self.handle, rows), **facts}, everyone)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> Exception | None:
        """Copy this rank's contribution. Return an error, because raised here it would leave the peers in their round."""
        try:
            return self._copied(tensors)
        except Exception as error:  # a meta tensor, memory that ran out, an object that is not a tensor
            return error

    def _copied(self, tensors: Mapping[str, torch.Tensor]) -> HookConfigError | None:
        odd = set(tensors) ^ set(self.tensors) or {n for n, t in tensors.items() if t.shape != self.tensors[n].shape}
        if odd:
            return HookConfigError(
                f"this reducer averages {_shapes(self.tensors)}; given were {_shapes(tensors)}, which differs in "
                f"{sorted(odd)[:6]}. Make a reducer for every set of tensors"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)
        return None

    def _advance(self) -> None:
        with torch.no_grad(), self._side.on(self._buckets[-1].storage):
            self._engine.advance()

    def _finish(self, pending: PendingAverage) -> None:
        self._running = None
        storage = self._buckets[-1].storage
        with torch.no_grad(), self._side.on(storage):
            error = self._engine.finish(outside=pending._error)
        self._side.join(storage)
        if error is None and self._binding.axis is None:
            # On CUDA a backward learns of its failure in the next one. This average may be used before.
            error = self._engine.outcome.take_error()
        if error is not None:
            raise error


def _fixed(
    transport: Transport | None, group: dist.ProcessGroup | None, link: Link | None, timeout: float | None
) -> tuple[Transport, dist.ProcessGroup | None]:
    """Return a transport with fixed ranks, and its process group if it has one."""
    if transport is None:
        made = transport_over(group, link, free=True, timeout=timeout)
        refuse_lost(made.group)
        return made, made.group
    if transport.elastic:
        raise HookNotSupportedError(
            "a reducer over a transport needs fixed ranks. Over a manager, which adds and removes members, a round needs its "
            "vote. Give the manager: Reducer(..., manager=manager)"
        )
    return transport, None


def _buckets(tensors: Mapping[str, torch.Tensor], device: torch.device | str | None) -> list[Bucket]:
    """Return memory for the tensors: one bucket per dtype, in the order of the tensors."""
    if not tensors:
        raise HookConfigError("a reducer needs tensors to average, and got none: give a dict of tensors by name")
    where = {torch.device(device)} if device is not None else {t.device for t in tensors.values()}
    odd = [name for name, t in tensors.items() if t.layout != torch.strided]
    if len(where) > 1 or odd:
        raise HookConfigError(
            f"a reducer averages dense tensors of one device, got {sorted(map(str, where))}"
            + (f" and not dense: {odd[:6]}" if odd else "")
            + ". Make a reducer for each device, or give device="
        )
    place = where.pop()
    if place.type == "meta":
        raise HookConfigError("meta tensors have no device for the average: give device='cpu' or 'cuda'")
    by_dtype: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, {})[name] = tensor
    made = []
    for index, group in enumerate(by_dtype.values()):
        laid = BucketLayout.of_tensors(group, _kinds(group))
        layout = BucketLayout(laid.params, laid.numel, laid.dtype, place)
        storage = torch.zeros(layout.numel, dtype=layout.dtype, device=place)
        made.append(Bucket(layout, storage, index, index == len(by_dtype) - 1))
    return made


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: "complex" for name, t in tensors.items() if t.is_complex()}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> str:
    shown = [f"{name} {tuple(t.shape)}" for name, t in list(tensors.items())[:4]]
    return ", ".join(shown) + (", ..." if len(tensors) > 4 else "")
