"""``commhooks.Reducer``: averages tensors with any reduction, outside of any backward and without any model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.adapters.base import AttachOptions, Binding
from commhooks.adapters.managed import ManagedAxis, manager_adapter
from commhooks.agreement import agree
from commhooks.api.create import as_handle
from commhooks.bucket import Bucket, BucketLayout
from commhooks.device import SideStream
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, HookConfigError, HookNotSupportedError
from commhooks.fingerprint import fingerprint, rows_of, verify
from commhooks.handle import CommHook
from commhooks.reduction import Reduction
from commhooks.state import HookState
from commhooks.transport.base import Transport
from commhooks.transport.process_group import ProcessGroupTransport, group_timeout, refuse_lost


class _ReducerBinding(Binding):
    """A handle's reduction on the buckets of a :class:`Reducer`: no model, one engine."""

    def __init__(
        self, engine: Engine, layout: BucketLayout, group: dist.ProcessGroup | None, axis: ManagedAxis | None
    ) -> None:
        self.engine, self.layout, self.group, self.axis = engine, layout, group, axis
        self.rounds = 0

    @property
    def calls(self) -> int:
        return self.rounds

    def detach(self) -> None:
        """There is no model to leave anything to; a manager has nothing to send any more."""
        if self.axis is not None:
            self.axis.close()


class Exchange:
    """An average under way, from :meth:`Reducer.start`.

    Every rank calls :meth:`advance` and :meth:`wait` at the same places between its other collectives: what a method asks
    for after its first stage is started by the thread that calls them, and ranks match messages by their order alone.
    """

    def __init__(self, reducer: "Reducer", error: BaseException | None = None) -> None:
        self._reducer, self._error, self._done = reducer, error, False

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` has returned, or raised."""
        return self._done

    def advance(self) -> None:
        """Wait for the stage under way, and start the next. After :attr:`Reducer.stages` calls everything has come.

        Without it the later stages of a method that has several are started by :meth:`wait`, one after another.

        Raises:
            TransportError, HookTimeoutError: the group is lost.
        """
        if not self._done:
            self._reducer._advance()

    def wait(self) -> dict[str, torch.Tensor]:
        """The averages, by name: live views of the reducer's memory, valid until it is filled or started anew.

        Raises:
            CommHooksError: the exchange failed, on all ranks alike; its step is rolled back, and the reducer stays
                usable. After a TransportError or HookTimeoutError it does not: the group is lost. (Over a manager the
                loss of a peer raises nothing, and what is returned counts if the vote says so.)
        """
        if not self._done:
            self._done = True
            self._reducer._finish(self)
        return self._reducer.tensors


class Reducer:
    """Averages a dict of tensors over the ranks of a group, with any reduction of the registry.

    What a hook does to gradients in a backward, for whatever else ranks have to agree on: the pseudo-gradients of an outer
    optimizer, the changes of weights sent to samplers, a loop written by hand. State (residuals, PowerSGD's Q) is kept by
    name, staged and committed as in training: a round that failed, or whose average was not finite, leaves it as it was
    (with ``rollback=False`` it leaves none).

    Args:
        what: an expression, its dict form, a reduction, or an unattached handle.
        tensors: names and shapes of what is averaged, the same on every rank, in one order: any tensors (``meta`` ones
            need ``device``), of one device; several dtypes are several messages.
        process_group: the ranks; the default group if not given.
        transport: instead of a process group, e.g. a simulated rank's.
        manager: instead of a process group, a manager under which ranks come and go (torchft's, with ch-ft installed). A round
            lies between its ``start_quorum()`` and its ``should_commit()``, whose vote decides about state as about what
            you do with the average. The average is over the members of the round. Members are compared in every round; the
            manager sends a newcomer the shared state.
        device: where the averages are computed, if not where ``tensors`` are.
        timeout: seconds that one collective may take; those of the process group if not given. Not with a manager.
        verify_ranks: compare expression, versions, names and shapes over all ranks first.
        rollback: ``False`` keeps one copy of the state: see :func:`commhooks.attach`.
        facts: what must be the same on all ranks besides, as lines by name: it is compared with the rest.
        rounds: over a manager, whose committed steps are the hook's (a warm-up counts them): how many of so many were this
            reducer's, if it takes no part in some. The same function on all members.

    Attributes:
        handle: the :class:`~commhooks.CommHook` in place: ``stats()``, ``plan()``, checkpoints.
        tensors: by name, live views of the memory that is averaged in place: fill them and call :meth:`start` without
            arguments to save a copy.

    Raises:
        HookConfigError: a bad expression, no tensors, tensors of several devices.
        HookNotSupportedError: a foreign hook function, which needs DDP; a transport whose members come and go; a reduction
            that the manager cannot carry.
        AttachError: nothing is known of such a manager.
        RankMismatchError: the ranks do not agree.

    Example:
        >>> import torch
        >>> from commhooks import Plain, Reducer
        >>> from commhooks.simulate import simulate
        >>> def body(rank):
        ...     mine = {"w": torch.full((2,), float(rank.rank)), "b": torch.zeros(1)}
        ...     reducer = Reducer(Plain(), mine, transport=rank.transport)
        ...     at_once = reducer.average(mine)["w"].tolist()
        ...     exchange = reducer.start(mine)  # the messages are under way
        ...     mine["w"].zero_()  # the reducer has its own copy
        ...     return at_once, exchange.wait()["w"].tolist(), reducer.stats()["steps"]
        >>> simulate(2, body)[1]
        ([0.5, 0.5], [0.5, 0.5], 2.0)
    """

    def __init__(
        self,
        what: str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook,
        tensors: Mapping[str, torch.Tensor],
        *,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        manager: object | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        verify_ranks: bool = True,
        rollback: bool = True,
        facts: Mapping[str, Sequence[str]] | None = None,
        rounds: Callable[[int], int] | None = None,
    ) -> None:
        if sum(one is not None for one in (transport, process_group, manager)) > 1:
            raise HookConfigError("transport=, process_group= and manager= exclude each other: each has its ranks")
        self.handle = as_handle(what, process_group=process_group)
        if self.handle.reduction is None:
            raise HookNotSupportedError(
                f"{self.handle.expr} is a hook function (state, bucket) that only DDP can call: give a reduction by name"
            )
        if self.handle.attached:
            raise AttachError(f"{self.handle.expr} is in place already; create another handle for this reducer")
        self._buckets = _buckets(tensors, device)
        state = self.handle.state
        assert isinstance(state, HookState)  # noqa: S101 - a reduction's is
        state.keep_copies(one=not rollback)
        found = {p.name: view for bucket in self._buckets for p, view in bucket.views()}
        self.tensors: dict[str, torch.Tensor] = {name: found[name] for name in tensors}
        layout = BucketLayout.of_tensors(self.tensors, _kinds(self.tensors))
        self._side = SideStream()
        self._running: Exchange | None = None
        axis, group = None, None
        if manager is not None:
            if timeout is not None:
                raise HookConfigError(
                    "timeout= has no meaning over a manager, which has time-outs of its own: set them there"
                )
            options = AttachOptions(verify_ranks=verify_ranks, manager=manager, facts=facts or {}, rounds=rounds)
            axis = manager_adapter(manager)(self, self.handle, options, self._layouts)
            self._engine = axis.engine
        else:
            transport, group = _fixed(transport, process_group or self.handle.process_group)
            if timeout is None:
                timeout = group_timeout(group) if group is not None else 60.0
            self._engine = Engine(self.handle.reduction, transport, state, timeout=timeout)
        self._binding = _ReducerBinding(self._engine, layout, group, axis)
        self.handle.bind(self._binding)
        if verify_ranks and axis is None:
            self.handle.agreement_timeout = timeout
            try:
                self._verify(facts or {})
            except BaseException:
                self.handle.detach()
                raise

    @property
    def world_size(self) -> int:
        """Ranks that average together; over a manager those of the last round."""
        return self._engine.transport.world_size

    @property
    def stages(self) -> int:
        """How many times in a row the next round waits for messages: so many :meth:`Exchange.advance` calls complete it."""
        return max(len(self._engine.plan(bucket.layout)) for bucket in self._buckets)

    def start(
        self, tensors: Mapping[str, torch.Tensor] | None = None, *, error: BaseException | None = None
    ) -> Exchange:
        """Start averaging, and return while the first messages are under way.

        Args:
            tensors: this rank's contribution, copied; ``None``: what :attr:`tensors` hold. Other names or shapes than the
                reducer was made for are such an ``error``: a HookConfigError.
            error: why this rank cannot contribute. It takes part in the messages all the same, and :meth:`Exchange.wait`
                raises on all ranks: this error here, a RemoteHookError on the peers.

        Raises:
            AttachError: over a manager, that nobody has asked for a quorum.
            RuntimeError: the exchange before has not been waited for.
            TransportError, HookTimeoutError: the group is lost.
        """
        if self._running is not None:
            raise RuntimeError("the exchange before is still under way: wait() for it, or abandon() it on all ranks")
        if tensors is not None and error is None:
            error = self._fill(tensors)
        self._binding.rounds += 1
        self._running = Exchange(self, error)
        try:
            with torch.no_grad():
                for bucket in self._buckets:
                    with self._side.on(bucket.storage):
                        self._engine.submit(bucket)
        except BaseException:
            self.abandon()
            raise
        return self._running

    def average(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """:meth:`start`, and :meth:`Exchange.wait`."""
        return self.start(tensors).wait()

    def abandon(self) -> None:
        """Forget an exchange that will not be waited for, on all ranks: an exception has ended the loop around it."""
        if self._engine.in_step:
            self._engine.abandon()
        if self._running is not None:
            self._running._done, self._running = True, None

    def commit(self) -> bool | None:
        """Make the state after the last round final now; returns whether that round was kept."""
        return self.handle.commit()

    def rollback(self) -> None:
        """The last average was not used: the state is as if that round had never been."""
        self.handle.rollback()

    def stats(self) -> dict[str, float]:
        """Cumulative figures: see :meth:`.CommHook.stats`."""
        return self.handle.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: see :meth:`.CommHook.state_dict`. Not while an exchange is under way."""
        if self._running is not None:
            raise RuntimeError("an exchange is under way, and its state is open: wait() for it first")
        return self.handle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Go on from :meth:`state_dict`, on every rank: see :meth:`.CommHook.load_state_dict`."""
        self.handle.load_state_dict(state, world_change=world_change)

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Go on over another group of ranks, when one was lost or another joins: every rank of the new group calls this.

        What is under way is dropped. The state stays each rank's own, and may differ in what ranks share: bring them to one
        with :meth:`load_state_dict` before the next round.

        Raises:
            HookConfigError: over a manager, which moves by itself.
        """
        if self._binding.axis is not None:
            raise HookConfigError(
                "this reducer is over a manager, whose members come and go by themselves: there is no move()"
            )
        refuse_lost(process_group)
        self.abandon()
        self._engine.move(ProcessGroupTransport(process_group, free=True))
        self._binding.group = process_group

    def close(self) -> None:
        """Let go of the handle, which may then be put in place elsewhere."""
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

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> HookConfigError | None:
        """Copy this rank's contribution. Return an error, because raised here it would leave the peers in their round."""
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

    def _finish(self, exchange: Exchange) -> None:
        self._running = None
        storage = self._buckets[-1].storage
        with torch.no_grad(), self._side.on(storage):
            error = self._engine.finish(outside=exchange._error)
        self._side.join(storage)
        if error is None and self._binding.axis is None:
            # On CUDA a backward is told of its failure by the next one. Nobody may go on with this average until then.
            error = self._engine.outcome.take_error()
        if error is not None:
            raise error


def _fixed(transport: Transport | None, group: dist.ProcessGroup | None) -> tuple[Transport, dist.ProcessGroup | None]:
    """A transport whose ranks stay, and its group, if it is of one."""
    if transport is None:
        made = ProcessGroupTransport(group, free=True)
        refuse_lost(made.group)
        return made, made.group
    if transport.elastic:
        raise HookNotSupportedError(
            "a reducer over a transport averages over ranks that stay: over a manager, whose members come and go, a round needs "
            "its vote. Give the manager: Reducer(..., manager=manager)"
        )
    return transport, None


def _buckets(tensors: Mapping[str, torch.Tensor], device: torch.device | str | None) -> list[Bucket]:
    """Memory for the tensors: one bucket per dtype, in the order in which they come."""
    if not tensors:
        raise HookConfigError("a reducer averages tensors, and was given none: give a dict of name -> tensor")
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
        raise HookConfigError("meta tensors say nothing of where to average: give device='cpu' or 'cuda'")
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
