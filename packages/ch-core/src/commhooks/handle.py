"""The handle of a configured hook: what :func:`commhooks.create` and :func:`commhooks.attach` return.

One class for every kind of model. What differs between DDP, FSDP and a manager is a :class:`Binding`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from commhooks.adapters.base import Binding
from commhooks.engine.stats import residual_figures
from commhooks.errors import AttachError
from commhooks.fingerprint import levels
from commhooks.reduction import Plain, Reduction
from commhooks.registry.expression import Node, unparse
from commhooks.report.plan import PlanRow, plan_rows
from commhooks.report.report import Report, report
from commhooks.requests import payload_bytes
from commhooks.state import HookState, refuse_judge

ForeignHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class CommHook:
    """A configured hook, attached to a model or not yet.

    Args:
        node: canonical expression.
        built: a reduction, or a foreign ``(state, bucket) -> Future`` function.
        process_group: group to use where the model has none of its own.
        state: state to go on from.
        full: the expression with every option, and the provider and version of each level.

    Attributes:
        expr: the expression, e.g. ``"bf16_wrapper(powersgd(rank=4))"``.
        config: the same as a nested dict.
        state: a :class:`~commhooks.state.HookState`, or a foreign hook's own state.
        alone: attached in a single process, which has nobody to send to: nothing is compressed, and a state is kept as it
            was loaded. See ``single_process`` of :func:`commhooks.attach`.
    """

    def __init__(
        self,
        *,
        node: Node,
        built: Reduction | ForeignHook,
        process_group: dist.ProcessGroup | None = None,
        state: object | None = None,
        full: Node | None = None,
    ) -> None:
        self.config: Node = node
        self.full: Node = full if full is not None else node
        self.built = built
        self.process_group = process_group
        self.state: object | None = state
        if isinstance(built, Reduction) and state is None:
            self.state = HookState()
        self.alone = False  # attached where there is one process: gradients are left as they are
        self.agreement_timeout: float | None = None  # seconds; None: the ranks are not compared
        self._binding: Binding | None = None
        self._calls_seen = 0
        self._last: dict[str, float] | None = None  # statistics at detach

    @property
    def expr(self) -> str:
        return unparse(self.config)

    @property
    def identity(self) -> list[str]:
        """What the hook is, as data: the type of what was built, and every option of every level, with its provider and
        version. Ranks with the same lines run the same; :attr:`expr` is for people.
        """
        return [type(self.built).__qualname__, *levels(self.full)]

    @property
    def reduction(self) -> Reduction | None:
        """What is run: the reduction, or the plain average while the handle is :attr:`alone`; ``None`` for a foreign hook."""
        if self.alone:
            return Plain()
        return self.built if isinstance(self.built, Reduction) else None

    @property
    def attached(self) -> bool:
        return self._binding is not None

    def __repr__(self) -> str:
        return f"<CommHook {self.expr}, {'attached' if self.attached else 'not attached'}>"

    def bind(self, binding: Binding) -> None:
        """Take the place that an adapter has made on a model.

        Raises:
            AttachError: this handle has a place already.
            StateError: the state belongs to another model; plain averaging is left in the binding's place.
        """
        if self._binding is not None:
            raise AttachError(
                f"{self.expr} is attached to a model already; create another handle, or detach() this one"
            )
        try:
            if self.reduction is not None:
                self.reduction.check(binding.layout)
            if isinstance(self.state, HookState):
                self.state.bind_params([(p.name, p.shape) for p in binding.layout.params], binding.params)
                self._fit(binding)
        except Exception:
            binding.detach()  # the model must stay usable, and attachable
            raise
        self._binding = binding
        self._calls_seen = binding.calls

    def _fit(self, binding: Binding) -> None:
        """A state that was loaded before there was a model is checked."""
        from commhooks.checkpoint.save_load import fit_to

        if self.alone:
            return  # what was loaded is of any rank, and not used
        if isinstance(self.state, HookState) and self.reduction is not None and binding.engine is not None:
            fit_to(self.state, self.reduction, binding.layout, binding.engine.transport.world_size)

    # -- looking

    def stats(self, *, detail: bool = False) -> dict[str, float]:
        """Cumulative figures since attaching.

        ``payload_bytes`` are the tensors that the hook gave to collectives, per rank, counted exactly; ``wire_bytes`` what
        a rank sends for them and for the status (W + 1 fp32 numbers per step), as modelled: ``2 (W - 1) / W`` of what is
        all-reduced round a ring, ``W - 1`` times what is exchanged directly, ``(W - 1) / W`` of what else is sent;
        ``rounds`` the stages that were started, one for each piece of a large bucket; seconds are host time. After
        ``detach()`` those at detach. A binding with several axes adds the figures of each.

        Args:
            detail: add, for each parameter with a residual, ``residual_norm/NAME`` (unscaled) and, while the gradients
                of the last step are still there, ``relative_error/NAME`` = ‖residual‖ / ‖gradient + residual‖: the
                part of the last step's gradient that was held back on this rank. Computed when asked for; with FSDP2
                from the second call on, because only then are gradients kept for it.
        """
        if self._binding is None and self._last is not None:
            return dict(self._last)
        engine = self._bound().engine
        figures = self._bound().stats()
        if detail and engine is not None:
            figures |= residual_figures(engine.residual_norms())
        return figures

    def plan(self) -> list[PlanRow]:
        """How each parameter is treated at the present step, in model order."""
        binding = self._bound()
        if self.alone:
            return [PlanRow(p.name, p.shape, "plain", "one process: nothing is sent") for p in binding.layout.params]
        reduction = self.reduction
        if reduction is None or binding.engine is None:
            name = getattr(self.built, "__name__", self.expr)
            return [PlanRow(p.name, p.shape, name) for p in binding.layout.params]
        return plan_rows(reduction, binding.layout, binding.engine.state.step)

    def report(self) -> Report:
        """What the hook does to which parameters: a table by group, which prints in a terminal (``print(report)``), shows
        in a notebook, and is plain values for JSON (``report.to_dict()``).

        Per step: bytes of the gradients, bytes given to collectives, and how many times fewer cross the network than with
        plain averaging. Of the last step, on this rank: the relative error ‖residual‖ / ‖gradient + residual‖ and the norm
        of the residual, as :meth:`stats` has them by parameter. It warns of a hook that never compresses this model. No
        other rank is asked, so one rank may call it alone; the host waits for a GPU.

        Raises:
            AttachError: not attached.

        Example:
            >>> import commhooks, torch, torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
            >>> handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
            >>> for row in handle.report().rows:
            ...     print(row.treatment, row.names, row.payload_bytes, row.ratio, row.why)
            powersgd ('weight',) 2048 8.0
            plain ('bias',) 256 1.0 1-D
            >>> dist.destroy_process_group()
        """
        return report(self.expr, self._bound(), self.plan(), self.reduction)

    def cautions(self, world_size: int | None = None) -> list[str]:
        """What one should know before this hook runs on this model, in sentences; those of its group are logged at attach.

        Args:
            world_size: ranks to think of; by default those of the group.
        """
        engine = self._bound().engine
        if engine is None or self.reduction is None:
            return []
        return self.reduction.cautions(self._bound().layout, world_size or engine.transport.world_size)

    def payload_per_step(self) -> int:
        """Bytes given to collectives per rank in one step, from the shapes alone.

        Exactly those of the last step's buckets, where there was one (a bucket that all ranks share equally is padded);
        before, of all parameters as one bucket.
        """
        engine = self._bound().engine
        if engine is None:
            raise AttachError(f"{self.expr} is a foreign hook: its collectives are its own and cannot be planned")
        plans = [engine.plan(layout) for layout in engine.buckets.layouts or [self._bound().layout]]
        return sum(map(payload_bytes, plans))

    def assert_active(self) -> None:
        """Fail if the model has not called the hook since attaching, or since this was last asked.

        Raises:
            AttachError: the hook is not being called: the model was copied after attaching, or a framework
                dropped the hook.
        """
        calls = self._bound().calls
        if calls == self._calls_seen:
            raise AttachError(
                f"{self.expr} has not been called since {'attach()' if calls == 0 else 'the last assert_active()'}. "
                "Call this after a backward pass that synchronises. If there was one, the model that trains is not "
                "the one the hook was attached to: it was copied or wrapped anew, or a framework dropped the hook"
            )
        self._calls_seen = calls

    def check(self) -> None:
        """Raise the original exception of the hook's last failure, if it has not been raised yet."""
        self._bound().check()

    def verify_gradients(self, every: int = 1) -> None:
        """From now on, compare the reduced gradients of all ranks every ``every`` steps; 0 stops it.

        Two numbers per rank are exchanged. Call it on all ranks alike. Not for hooks that leave ranks different
        gradients on purpose (``noop``, local SGD).

        Raises:
            RankMismatchError: later, from ``backward()`` on all ranks, naming the ranks that agree with one another.
            HookNotSupportedError: this kind of model has no place for the check.
        """
        if every < 0:
            raise ValueError(f"every={every}: expected 0 or a number of steps")
        self._bound().verify_gradients(every)

    def set_loss_scale(self, scale: float) -> None:
        """Say by what the loss of the next backward is multiplied, where no ``scaler=`` was given to ``attach``.

        Residuals are kept in the gradient's units, so they follow the scale; ``state_dict()`` has them unscaled.
        """
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number")
        engine = self._bound().engine
        if engine is not None:
            engine.set_loss_scale(lambda: scale)

    # -- the step

    def commit(self) -> bool | None:
        """Make the last step's state final now instead of at the next step; returns whether it was kept."""
        engine = self._bound().engine
        return engine.resolve_step() if engine is not None else None

    def rollback(self) -> None:
        """The optimizer did not use the last step: its residual, P, Q and counters are as if it had never been.

        Raises:
            HookNotSupportedError: there is one copy of the state: attached with ``rollback=False``.
        """
        engine = self._bound().engine
        if engine is not None:
            if engine.state.in_place:
                refuse_judge("handle.rollback()")
            engine.rollback()

    def detach(self) -> None:
        """Put plain averaging in the hook's place; the model stays as it is and can be attached to again."""
        if self._binding is None:
            return
        self._last = self._binding.stats()
        self._binding.detach()
        if isinstance(self.state, HookState):
            self.state.settle()
            self.state.unbind()
        self._binding = None
        self.alone = False

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that resume this hook on this rank (``torch.load(weights_only=True)`` reads them).

        Keyed by parameter name. What is ``"local"`` in the reduction's fields differs from rank to rank: save every
        rank's.
        """
        from commhooks.checkpoint import state_dict

        return state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Go on from :meth:`state_dict`; all or nothing.

        On an attached handle every rank has to make this call: the ranks compare step, shapes and what they share, and
        if one refuses its state, none is changed (not with ``verify_ranks=False``).

        Args:
            state: this rank's own, or :func:`commhooks.checkpoint.merge` of all ranks'.
            world_change: what happens to residuals that are not this rank's own: ``"error"``; ``"mean"`` (``state`` is
                merged, every rank goes on from the mean residual); ``"reset"`` (dropped).

        Raises:
            StateError: it was made by another hook, for another model, rank or world size, or is malformed.
            RankMismatchError: the ranks were given states that do not belong together, or another rank refused its own.
        """
        from commhooks.checkpoint import load_state_dict

        load_state_dict(self, state, world_change=world_change)

    @property
    def binding(self) -> Binding | None:
        """Where the hook is in place, if it is."""
        return self._binding

    def _bound(self) -> Binding:
        if self._binding is None:
            raise AttachError(
                f"{self.expr} is not attached to a model: handle = commhooks.attach(model, {self.expr!r})"
            )
        return self._binding
