"""A reduction: a compression method as a generator over a bucket.

It yields collective requests and is resumed when their tensors hold the result; when it ends, the bucket holds the
averaged gradient. It never sees a process group, a future, a stream or a callback, so the same generator runs over
DDP, FSDP2's replicate axis, a fault-tolerance manager and simulated ranks.

Control flow may depend on the layout and on ``ctx.step`` alone, never on numbers: that is what lets
:meth:`Reduction.plan` know every collective before it happens, by running the generator on meta tensors.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch

from commhooks.bucket import Bucket, BucketLayout, ParamLayout
from commhooks.combine import parallel, plain
from commhooks.errors import HookConfigError, HookResultError
from commhooks.requests import Requests, StagePlan, as_tuple
from commhooks.scratch import Scratch
from commhooks.state import HookState

Stages = Generator[Requests, None, None]


class StepContext:
    """What a reduction may know about the step it is in.

    Attributes:
        rank: this rank in the group. Must not decide which collectives are requested.
        world_size: ranks in the group.
        step: number of committed steps before this one.
        participating: ``False`` on a rank that only keeps the others company (joined, healing, spare): what it
            stages is dropped, but for fields that are the same on all ranks anyhow.
        sent: where to report what this rank contributed, or ``None`` when nobody asks (see
            :attr:`Reduction.reports_sent`).
    """

    __slots__ = ("_owner", "_scratch", "_shared", "_state", "participating", "rank", "sent", "step", "world_size")

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        step: int = 0,
        *,
        state: HookState | None = None,
        scratch: Scratch | None = None,
        owner: Hashable = 0,
        participating: bool = True,
        shared: frozenset[str] = frozenset(),
        sent: Bucket | None = None,
    ) -> None:
        self.rank, self.world_size, self.step, self.participating = rank, world_size, step, participating
        self.sent = sent
        self._state = state if state is not None else HookState()
        self._scratch = scratch if scratch is not None else Scratch()
        self._owner = owner
        self._shared = shared

    def read(self, name: str, field: str) -> torch.Tensor | None:
        """The committed state tensor of a parameter, or ``None``. Not to be written to.

        A rank that only keeps the others company sends nothing of its own and commits nothing: what is its alone is
        not there for it, and waits.
        """
        if not self.participating and field not in self._shared:
            return None
        return self._state.read(name, field)

    def stage(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """An uninitialised tensor to fill: the parameter's new state once this step is committed."""
        if not self.participating and field not in self._shared:
            return self._scratch.get((self._owner, name), "staged " + field, shape, dtype, torch.device(device))
        return self._state.stage(name, field, shape, dtype, device)

    def scratch(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """An uninitialised tensor that belongs to this bucket until the generator ends."""
        return self._scratch.get(self._owner, name, shape, dtype, torch.device(device))

    def child(self, part: str, *, sent: Bucket | None = None) -> "StepContext":
        """The same step for a part of a composition, with scratch of its own, and its report in ``sent``."""
        return StepContext(
            self.rank,
            self.world_size,
            self.step,
            state=self._state,
            scratch=self._scratch,
            owner=(self._owner, part),
            participating=self.participating,
            shared=self._shared,
            sent=sent,
        )


class Reduction(ABC):
    """Base of all reductions.

    Subclasses implement :meth:`run`; most need nothing else.

    Attributes:
        name: shown in profiler ranges, errors and tables.
        granularity: ``"tensor"`` if each parameter is treated alone (then results do not depend on
            ``bucket_cap_mb``), ``"bucket"`` if the bucket is treated as one vector.
        collectives: kinds of requests it yields.
        lossy: whether the result differs from the average by more than rounding of the bucket's dtype.
        trips: how often the gradient would cross the network uncompressed: 2 for an all-reduce, 1 for a
            reduce-scatter. What a step sends is compared with it.
        fields: state fields and whether each is ``"local"`` to a rank or ``"shared"`` (the same on all ranks).
        reports_sent: whether :meth:`run`, when ``ctx.sent`` is a bucket (of the layout it was given), leaves in it
            what this rank contributed: in the gradient's units, before the division by W, after all rounding. The
            ``sent`` of an :class:`~commhooks.requests.AllReduce` of the gradient itself is just that. It is what
            ``error_feedback`` needs; a reduction that keeps a residual of its own leaves this ``False``.

    Example:
        >>> import torch
        >>> class SignSum(Reduction):
        ...     name, lossy = "sign_sum", True
        ...     def run(self, bucket, ctx):
        ...         bucket.buffer.sign_()
        ...         yield AllReduce(bucket.buffer)
        >>> from commhooks.requests import AllReduce
        >>> SignSum().plan(BucketLayout.of_shapes({"w": (4, 4)}), StepContext(world_size=2))[0][0].payload_bytes
        64
    """

    name: str = "reduction"
    granularity: Literal["tensor", "bucket"] = "tensor"
    collectives: frozenset[str] = frozenset({"all_reduce"})
    lossy: bool = False
    trips: int = 2
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {}
    reports_sent: bool = False

    @abstractmethod
    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """Yield requests; leave the averaged gradient in ``bucket``."""

    @property
    def shared_fields(self) -> frozenset[str]:
        """State fields that are the same on all ranks: a newcomer is given them."""
        return frozenset(name for name, kind in self.fields.items() if kind == "shared")

    def phase(self, step: int) -> Hashable:
        """Anything that changes with the step and changes the requests (a warm-up, an alternation)."""
        return ()

    def route(self, param: ParamLayout, step: int) -> str | None:
        """Why this parameter is averaged plainly instead of being given to :meth:`run`; ``None`` if it is not."""
        return None

    def routes(self, layout: BucketLayout, step: int) -> dict[str, str]:
        """Parameter name -> reason, for those that are averaged plainly."""
        cache: dict[Hashable, dict[str, str]] = self.__dict__.setdefault("_routes", {})
        key = (layout, self.phase(step))
        if key not in cache:
            reasons = ((p.name, unfit(p) or self.route(p, step)) for p in layout.params)
            cache[key] = {name: reason for name, reason in reasons if reason}
        return cache[key]

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """The generator to drive: :meth:`run` over the parameters that fit, plain averaging over the others."""
        return self.beside(bucket, ctx, self.routes(bucket.layout, ctx.step) if self.lossy or self.fields else ())

    def beside(self, bucket: Bucket, ctx: StepContext, plainly: Collection[str]) -> Stages:
        """:meth:`run`, and at the same time plain averaging of the parameters named in ``plainly``."""
        if not plainly:
            return self.run(bucket, ctx)
        if len(plainly) == len(bucket.params):
            return plain(bucket, ctx.sent)
        fit = [p.name for p in bucket.params if p.name not in plainly]
        if ctx.sent is None:
            return parallel(self.run(bucket.select(fit), ctx), plain(bucket.select(plainly)))
        inner = ctx.child("fit", sent=ctx.sent.select(fit))
        return parallel(self.run(bucket.select(fit), inner), plain(bucket.select(plainly), ctx.sent.select(plainly)))

    def label(self, param: ParamLayout, step: int) -> str:
        """What treats a parameter that is not averaged plainly, for ``handle.plan()``."""
        return self.name

    def check(self, layout: BucketLayout) -> None:  # noqa: B027 - most reductions take any model
        """Refuse a model, given as one virtual bucket of all its parameters; called when a handle is attached.

        Raises:
            HookConfigError: naming the parameters.
        """

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        """Every stage's requests, from the layout alone: the generator is run on meta tensors.

        Raises:
            HookConfigError: the generator cannot be run without numbers.
        """
        meta = BucketLayout(layout.params, layout.numel, layout.dtype, "meta")
        bucket = Bucket(meta, torch.empty(layout.numel, dtype=layout.dtype, device="meta"))
        dry = StepContext(ctx.rank, ctx.world_size, ctx.step, participating=ctx.participating)
        stages = []
        try:
            for requests in self.start(bucket, dry):
                stages.append(tuple(r.plan() for r in as_tuple(requests)))
        except HookResultError:
            raise
        except Exception as error:
            raise HookConfigError(
                f"{self.name}: its collectives could not be planned, because the generator failed on meta tensors "
                f"({type(error).__name__}: {error}). A reduction's requests must follow from the layout and the step; "
                "allocate with ctx.scratch(..., device=bucket.device) and do not read numbers, or override plan()"
            ) from error
        return tuple(stages)

    def config(self) -> dict[str, Any]:
        """Parameters that rebuild this reduction, as plain values."""
        return {}

    def node(self) -> dict[str, Any]:
        """The canonical expression node of this reduction, those inside it included."""
        return {"hook": self.name, "config": self.config()}

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in self.config().items())
        return f"{self.name}({inside})" if inside else self.name


class Plain(Reduction):
    """The exact average, in the bucket's own dtype: one in-place all-reduce."""

    name = "allreduce"
    granularity = "tensor"
    reports_sent = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return plain(bucket, ctx.sent)


def unfit(param: ParamLayout) -> str | None:
    """Why no lossy method may touch this parameter, or ``None``."""
    if param.kind != "dense":
        return param.kind
    if param.numel == 0:
        return "empty"
    return None


class FunctionReduction(Reduction):
    """A generator function ``f(bucket, ctx, **config)`` as a reduction."""

    lossy = True

    def __init__(self, function: Callable[..., Stages], /, **config: Any) -> None:
        self.function = function
        self.name = function.__name__
        self._config = config
        for attribute in ("granularity", "collectives", "lossy", "fields", "reports_sent", "route", "phase"):
            if hasattr(function, attribute):
                setattr(self, attribute, getattr(function, attribute))

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.function(bucket, ctx, **self._config)

    def config(self) -> dict[str, Any]:
        return dict(self._config)


def as_reduction(target: object, /, **config: Any) -> Reduction:
    """A :class:`Reduction` from a reduction, a class or factory of one, or a generator function.

    Raises:
        HookConfigError: ``target`` is none of these, or does not take ``config``.
    """
    if isinstance(target, Reduction):
        if config:
            raise HookConfigError(f"{target!r} is configured already; it takes no further {sorted(config)}")
        return target
    if isinstance(target, functools.partial) and not target.args:
        return as_reduction(target.func, **{**target.keywords, **config})
    if inspect.isgeneratorfunction(target):
        return FunctionReduction(target, **config)
    made = target(**config) if callable(target) else target
    if not isinstance(made, Reduction):
        raise HookConfigError(
            f"{target!r} is not a reduction: expected a generator function (bucket, ctx), a Reduction, or something "
            f"that returns one; got {type(made).__name__}"
        )
    return made
