"""The handle of a configured hook, as :func:`commhooks.create` and :func:`commhooks.attach` return it.

One class serves every kind of model. The differences between DDP, FSDP and a manager are in the
:class:`~commhooks.Binding`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ch_core import (
    AttachError,
    BucketLayout,
    Engine,
    HookNotSupportedError,
    HookState,
    Link,
    Plain,
    RankCheck,
    Reduction,
    payload_bytes,
    residual_figures,
    residual_norms,
)
from commhooks.adapters.base import Binding, leads
from commhooks.checkpoint.save_load import fit_to, load_state_dict, state_dict
from commhooks.registry.expression import Node, option_lines, unparse
from commhooks.report.live import Live
from commhooks.report.plan_table import PlanRow, plan_rows
from commhooks.report.report import Report, cautions, report

ForeignHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TraceSource:
    """What a trace records of a handle or an outer optimizer.

    Args:
        engines: engines to trace, by axis.
        hook: expression of the handle.
        groups: process groups of the handle, one for each axis of a mesh. Empty if ranks have no store to agree over.
        timeout: seconds to wait for a rank.
        model: model whose forward is traced, or ``None``.
        during: the work that hides the messages of a step: ``"backward"``, or ``"inner steps"`` of an outer optimizer.
    """

    engines: Mapping[str, Engine]
    hook: str
    groups: Sequence[dist.ProcessGroup] = ()
    timeout: float = 60.0
    model: torch.nn.Module | None = None
    during: str = "backward"

    @property
    def leads(self) -> bool:
        """True on the one rank that prints, or merges the parts of all ranks."""
        return leads(self.groups, next(iter(self.engines.values())))


class CommHook:
    """A configured hook, attached to a model or not yet.

    Args:
        node: canonical expression.
        built: reduction, or foreign function `(state, bucket) -> Future`.
        process_group: group to use if the model has none.
        state: initial state.
        full: expression with every option, and the provider and version of each level.

    Attributes:
        expr: expression, e.g. `"bf16_wrapper(powersgd(rank=4))"`.
        config: the same as a nested dict.
        state: a :class:`~commhooks.HookState`, or a foreign hook's own state. :attr:`hook_state` is typed.
        alone: True if attached in a single process, which has no peer to send to. The hook then compresses nothing and
            leaves a loaded state unchanged. See `single_process` of :func:`commhooks.attach`.
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
        self.alone = False
        self.link: Link | None = None  # set by attach(link=)
        self.weighted = self.syncs_batches = False  # set by attach(weighted=)
        self.agreement_timeout: float | None = None  # seconds; None if ranks are not compared
        self.model: Callable[[], torch.nn.Module | None] = _no_model  # a weak reference, set by attach
        self.rank_check: RankCheck | None = None  # set by attach(check_ranks_every=)
        self._binding: Binding | None = None
        self._calls_seen = 0
        self._bound_at = 0.0
        self._last: dict[str, float] | None = None  # statistics at detach

    @property
    def expr(self) -> str:
        return unparse(self.config)

    @property
    def identity(self) -> list[str]:
        """The hook's type, and every option of every level with provider and version, as lines.

        Ranks with equal lines run the same hook. :attr:`expr` is for people.
        """
        far = [f"link: {self.link}"] if self.link is not None else []
        weighted = ["weighted: True"] if self.weighted else []
        return [type(self.built).__qualname__, *option_lines(self.full), *far, *weighted]

    @property
    def hook_state(self) -> HookState | None:
        """The state of a reduction; None for a foreign hook, which may have any state."""
        return self.state if isinstance(self.state, HookState) else None

    @property
    def reduction(self) -> Reduction | None:
        """The reduction that runs: plain averaging while the handle is :attr:`alone`; None for a foreign hook."""
        if self.alone:
            return Plain()
        return self.built if isinstance(self.built, Reduction) else None

    @property
    def attached(self) -> bool:
        return self._binding is not None

    def __repr__(self) -> str:
        return f"<CommHook {self.expr}, {'attached' if self.attached else 'not attached'}>"

    def bind(self, binding: Binding) -> None:
        """Start to use a binding that an adapter made on a model.

        Raises:
            AttachError: this handle is attached already.
            StateError: the state belongs to another model. The binding is detached, which leaves plain averaging.
        """
        if self._binding is not None:
            raise AttachError(
                f"{self.expr} is attached to a model already; create another handle, or detach() this one"
            )
        try:
            if self.reduction is not None:
                self.reduction.check(binding.layout)
            if self.hook_state is not None:
                self.hook_state.identity.bind([(p.name, p.shape) for p in binding.layout.params], binding.params)
                self._fit(self.hook_state, binding)
        except Exception:
            binding.close()  # otherwise the model could neither train nor be attached to
            raise
        self._binding, self._bound_at = binding, time.perf_counter()
        self._calls_seen = binding.calls

    def _fit(self, state: HookState, binding: Binding) -> None:
        """Check a state that was loaded before the handle was attached."""
        if self.alone:  # a single process may load the state of any rank, and does not use it
            return
        if self.reduction is not None and binding.engine is not None:
            fit_to(state, self.reduction, binding.layout, binding.engine.transport.world_size)

    # -- figures

    def stats(self, *, detail: bool = False) -> dict[str, float]:
        """Return cumulative figures since attaching, or those at detach after `detach()`.

        - `payload_bytes`: tensors that the hook gave to collectives, in bytes per rank, counted exactly.
        - `wire_bytes`: modelled bytes that a rank sends, including the status (W + 1 fp32 numbers per step). A ring
          all-reduce sends `2 (W - 1) / W` of its bytes, a direct exchange `W - 1` times its bytes, and any other
          collective `(W - 1) / W`.
        - `between_bytes`: the part of them that leaves the node. 0 without a hook of two levels, which knows the nodes.
        - `rounds`: stages started, one for each piece of a large bucket.
        - `*_seconds`: host time.
        - `weight_skew`, `weight_moved`, `weightless_steps` with `attach(weighted=True)`: largest weight over the mean weight
          in the last step; the part of its average that the weights moved between ranks, from 0 to 1 - 1 / W; steps that
          were skipped because all ranks weighed 0. Weighted and plain mean are at most this part of the largest distance between
          the gradients of two ranks apart. Their distance itself would take the plain mean, a second average.

        A binding with several axes adds up the figures of all axes.

        Args:
            detail: True adds two figures for each parameter with a residual: `residual_norm/NAME` (unscaled), and
                `relative_error/NAME` = ‖residual‖ / ‖gradient + residual‖, the share of the last gradient that this
                rank did not send. The second figure needs the gradients of the last step. FSDP2 keeps them from the
                first call on, so it has the figure from the second.

        Raises:
            AttachError: the handle was never attached.
        """
        if self._binding is None and self._last is not None:
            return dict(self._last)
        engine = self._bound().engine
        figures = self._bound().stats()
        if detail and engine is not None:
            figures |= residual_figures(residual_norms(engine))
        return figures

    def plan(self) -> list[PlanRow]:
        """Return the treatment of each parameter at the current step, in model order.

        Raises:
            AttachError: not attached.
        """
        binding = self._bound()
        if self.alone:
            return [PlanRow(p.name, p.shape, "plain", "one process: nothing is sent") for p in binding.layout.params]
        reduction = self.reduction
        if reduction is None or binding.engine is None:
            name = getattr(self.built, "__name__", self.expr)
            return [PlanRow(p.name, p.shape, name) for p in binding.layout.params]
        return plan_rows(binding.treatment or reduction, binding.layout, binding.engine.state.step)

    def report(self) -> Report:
        """Return a table of the hook's treatment and figures by group of parameters.

        It prints in a terminal (`print(report)`), shows in a notebook, and converts to plain values for JSON
        (`report.to_dict()`). Figures per step are the bytes of the gradients, the bytes that this rank sends, and the ratio
        of plain averaging's bytes to them. Figures of the last step on this rank are the relative error
        ‖residual‖ / ‖gradient + residual‖ and the norm of the residual. The report warns of a hook that never compresses
        this model, and of ranks that have drifted apart (`check_ranks_every` of `attach`). It needs no other rank, so one
        rank may call it alone. The host waits for the device.

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
        binding, passed = self._bound(), time.perf_counter() - self._bound_at
        return report(self.expr, binding, self.plan(), self.reduction, self.rank_check, passed)

    def live(self, every: int | str = "10s") -> Live:
        """Print a line about the hook while it trains, on rank 0, until the result is closed or the handle is detached.

        The line has the time of a step, bytes, ratio, wait and error. It stands above the bars of tqdm, and as one line in a
        log file.

        Args:
            every: steps, or seconds as in `"10s"`.

        Raises:
            AttachError: not attached.
            HookConfigError: `every` is neither.
            HookNotSupportedError: a foreign hook, whose messages are unknown.
        """
        return Live(self.trace_source(), every)

    def trace_source(self) -> TraceSource:
        """Return what a trace records of this hook.

        Raises:
            AttachError: not attached.
            HookNotSupportedError: a foreign hook, whose messages are unknown.
        """
        binding = self._bound()
        if not binding.engines:
            raise HookNotSupportedError(
                f"{self.expr} is a foreign hook, whose messages are unknown, so it has neither a trace nor live lines. Use a "
                "hook by name"
            )
        return TraceSource(
            binding.engines, self.expr, binding.process_groups, self.agreement_timeout or 60.0, self.model()
        )

    def cautions(self, world_size: int | None = None) -> list[str]:
        """Return sentences on costs of this hook with this model. `attach` logs those for its own group.

        Args:
            world_size: number of ranks; by default the group's.
        """
        engine, treatment = self._bound().engine, self._bound().treatment or self.reduction
        if engine is None or treatment is None:
            return []
        return cautions(treatment, self._bound().layouts, world_size or engine.compressing_ranks)

    def payload_per_step(self) -> int:
        """Return the bytes given to collectives per rank in one step, computed from the shapes.

        After the first step the bytes are exact for its buckets, including the padding of buckets that all ranks share
        equally. Before, they assume one bucket for all parameters of a dtype.

        Raises:
            AttachError: not attached, or a foreign hook, whose bytes are unknown.
        """
        engine = self._bound().engine
        if engine is None:
            raise AttachError(
                f"{self.expr} is a foreign hook, whose collectives cannot be planned. Measure its bytes on the network"
            )
        plans = [engine.plan(layout) for layout in engine.step.layouts or self._bound().layouts]
        return sum(map(payload_bytes, plans))

    def assert_active(self) -> None:
        """Raise if the model has not called the hook since attaching, or since the last `assert_active()`.

        Raises:
            AttachError: the model was copied after attaching, or a framework removed the hook.
        """
        calls = self._bound().calls
        if calls == self._calls_seen:
            raise AttachError(
                f"{self.expr} has not been called since {'attach()' if calls == 0 else 'the last assert_active()'}. "
                "Call this after a backward pass that synchronises. If there was one, the training loop uses a copy of the "
                "model. Attach after the model is copied or wrapped, and check that no framework removes hooks"
            )
        self._calls_seen = calls

    def check(self) -> None:
        """Raise the exception of the hook's last failure, unless it was raised already."""
        self._bound().check()

    def verify_gradients(self, every: int = 1) -> None:
        """Compare the reduced gradients of all ranks every `every` steps from now on.

        Ranks exchange two numbers each. All ranks must make this call. It does not suit hooks that leave different
        gradients on the ranks (`noop`, local SGD).

        Args:
            every: steps between two checks; 0 stops them.

        Raises:
            RankMismatchError: later, from `backward()` on all ranks, naming the ranks that agree with one another.
            HookNotSupportedError: this kind of model does not support the check.
            ValueError: `every` is negative.
        """
        if every < 0:
            raise ValueError(f"every={every}: expected 0 or a number of steps")
        self._bound().verify_gradients(every)

    def set_loss_scale(self, scale: float) -> None:
        """Set the factor of the loss of the next backward, if `attach` got no `scaler=`.

        Residuals have the gradient's units, so they follow the scale. `state_dict()` has them unscaled.

        Raises:
            ValueError: the scale is not positive and finite.
        """
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number")
        engine = self._bound().engine
        if engine is not None:
            engine.set_loss_scale(lambda: scale)

    # -- the step

    def weigh(self, n: float | torch.Tensor, of: Literal["mean", "sum"] = "mean") -> None:
        """Set how much this rank's gradient counts in the next average, after `attach(weighted=True)`.

        Call it on every rank right before each `backward()`. The average is `sum(n_r g_r) / sum(n_r)` over the ranks r. With
        n_r tokens and g_r the gradient of rank r's mean loss over them, it is the gradient of the mean loss over all tokens.

        Weights of backwards that are averaged together, such as those under `no_sync()`, add up. Then scale each mean loss by
        its n over the n of the window, or use `of="sum"` (see the page "Batches of unequal size"). On DDP, a call while every
        `.grad` is None forgets the weights of earlier backwards, whose gradients `zero_grad()` has thrown away.

        A rank with n = 0 contributes nothing, also if its gradient is NaN. If all ranks weigh 0, the gradients are zeros, the
        hook's state stays as it was, and `stats()` counts the step as one of the `weightless_steps`.

        Args:
            n: tokens or samples of the backward, or any other weight, 0 or more and finite. A float, or a tensor of one
                element of any dtype. The host does not wait for a tensor on the device of the gradients.
            of: `"mean"` if the loss is a mean over n. `"sum"` if it is a sum. The average is then
                `sum(g_r) / sum(n_r)`.

        Raises:
            HookNotSupportedError: the hook was attached without `weighted=True`, or `of="mean"` for a model with SyncBatchNorm,
                where the gradient of each rank has parts of the losses of all.
            HookConfigError: `n` is not one number, or `of` is unknown. An `n` that is negative, infinite or NaN, and a rank
                that has not called, raise it from `backward()` on all ranks.
            AttachError: not attached.

        Example:
            >>> import commhooks, torch, torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
            >>> handle = commhooks.attach(model, "allreduce", weighted=True)
            >>> handle.weigh(4, of="sum")  # four samples
            >>> model(torch.ones(4, 2)).sum().backward()
            >>> model.module.weight.grad
            tensor([[1., 1.]])
            >>> dist.destroy_process_group()
        """
        engines = self._bound().engines.values()
        weighings = [engine.weighing for engine in engines if engine.weighing is not None]
        if not weighings:
            raise HookNotSupportedError(
                f"{self.expr} was attached without weighted=True, so all ranks count equally. Call attach(..., weighted=True) "
                "on all ranks, or remove weigh()"
            )
        if self.syncs_batches and of == "mean":
            raise HookNotSupportedError(
                f"{self.expr}: a model with SyncBatchNorm needs weigh(n, of='sum') and a loss that is a sum, because the "
                "gradient of each rank has parts of the losses of all ranks, which one weight cannot tell apart"
            )
        accumulates = self._bound().accumulates
        for weighing in weighings:
            if not accumulates:
                weighing.clear()
            weighing.add(n, of)

    def commit(self) -> bool | None:
        """Make the last step's state final now instead of at the next step.

        Returns:
            True if the state was committed, False if it was rolled back, None for a foreign hook.
        """
        engine = self._bound().engine
        return engine.resolve_step() if engine is not None else None

    def rollback(self) -> None:
        """Undo the state of the last step, because the optimizer did not use its gradients."""
        engine = self._bound().engine
        if engine is not None:
            engine.rollback()

    def detach(self) -> None:
        """Replace the hook by plain averaging. The model can be attached to again.

        Raises:
            AttachError: a backward is being averaged.
        """
        if self._binding is None:
            return
        self._last = self._binding.stats()
        self._binding.close()
        if self.hook_state is not None:
            self.hook_state.resolve_step()
            self.hook_state.identity.unbind()
        self._binding = self.rank_check = None
        self.alone = False

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values that resume this hook on this rank.

        `torch.load(weights_only=True)` reads them. Entries are keyed by parameter name. Fields that the reduction
        declares as `"local"` differ between ranks, so save the state of every rank.
        """
        return state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Load the result of :meth:`state_dict`, completely or not at all.

        On an attached handle every rank must make this call. The ranks compare step, shapes and shared fields, and if one
        rank refuses its state, no rank changes (except with `verify_ranks=False`).

        Args:
            state: this rank's own, or :func:`commhooks.checkpoint.merge` of all ranks'.
            world_change: treatment of residuals of other ranks: `"error"`; `"mean"` (`state` is merged, and every rank
                continues with the mean residual); `"reset"` (residuals are dropped).

        Raises:
            StateError: another hook, model, rank or world size made the state, or it is malformed.
            RankMismatchError: the states of the ranks do not belong together, or another rank refused its own.
        """
        load_state_dict(self, state, world_change=world_change)

    @property
    def binding(self) -> Binding | None:
        """The binding on the model; None if not attached."""
        return self._binding

    def _bound(self) -> Binding:
        if self._binding is None:
            raise AttachError(
                f"{self.expr} is not attached to a model: handle = commhooks.attach(model, {self.expr!r})"
            )
        return self._binding


def refuse_weights(handle: CommHook, layout: BucketLayout) -> None:
    """Refuse `weighted=True` for a hook without an average of its ranks.

    Raises:
        HookNotSupportedError: a foreign function, or a hook that leaves each rank its own gradients.
    """
    reduction = handle.reduction
    if reduction is None:
        raise HookNotSupportedError(
            f"weighted=True: {handle.expr} is a foreign function, whose average is its own. Give a hook by name, or omit "
            "weighted="
        )
    own = [p.name for p in layout.params if not reduction.keeps_equal(p.name)]
    if own:
        raise HookNotSupportedError(
            f"weighted=True: {handle.expr} leaves each rank its own gradient of {', '.join(own[:3])}, so there is no average "
            "to weigh. Omit weighted="
        )


def _no_model() -> None:
    return None
