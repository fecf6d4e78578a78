"""A reduction: a compression method as a generator over a bucket.

It yields collective requests and is resumed when their tensors hold the result; when it ends, the bucket holds the
averaged gradient. It never sees a process group, a future, a stream or a callback, so the same generator runs over
DDP, FSDP2's replicate axis, a fault-tolerance manager and simulated ranks.

Control flow may depend on the layout and on ``ctx.step`` alone, never on numbers: that is what lets
:meth:`Reduction.plan` know every collective before it happens, by running the generator on meta tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any, Literal, cast

import torch

from commhooks.bucket import Bucket, BucketLayout, ParamLayout
from commhooks.combine import parallel, plain
from commhooks.encoding import Encoding, Packed
from commhooks.errors import HookConfigError, HookNotSupportedError, HookResultError
from commhooks.requests import Requests, StagePlan, as_tuple, refusal, trip_bytes
from commhooks.scratch import Scratch
from commhooks.shards import Shards, plain_scatter
from commhooks.state import HookState
from commhooks.volume import BF16_BYTES, LATER, passes_bf16

Stages = Generator[Requests, None, None]
"""What ``run`` returns. It yields requests, and is resumed when their tensors hold the results."""


class StepContext:
    """What a reduction may know about the step it is in.

    Attributes:
        rank: this rank in the group. Must not decide which collectives are requested.
        world_size: ranks in the group.
        step: number of committed steps before this one. A step that was rolled back is not counted, nor, where the
            reduction keeps state, one whose reduced numbers were not finite; a stateless one has nothing to undo, looks
            at no numbers, and counts it.
        participating: ``False`` on a rank that only joins the collectives (out of data, healing, spare): what it
            stages is dropped, but for fields that are the same on all ranks anyhow.
        sent: where to report what this rank contributed, or ``None`` when it is not asked for (see
            :attr:`Reduction.reports_sent`).
    """

    __slots__ = (
        "_absent",
        "_owner",
        "_scratch",
        "_shared",
        "_state",
        "_whole",
        "participating",
        "rank",
        "sent",
        "step",
        "world_size",
    )

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
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.rank, self.world_size, self.step, self.participating = rank, world_size, step, participating
        self.sent = sent
        self._state = state if state is not None else HookState()
        self._scratch = scratch if scratch is not None else Scratch()
        self._owner = owner
        self._shared = shared
        self._absent = absent  # parameters that this rank has no gradient for
        self._whole = participating and not absent

    def read(self, name: str, field: str, shape: Sequence[int] | None = None) -> torch.Tensor | None:
        """The committed state tensor of a parameter, or ``None``. Not to be written to.

        With ``shape`` one of another shape, which other options have left, reads as ``None`` too.

        A joined rank sends zeros and commits nothing: its local fields read as ``None`` and stay as they are. So it is
        for a single parameter that this rank has not used: DDP drops its average where no other rank has used it either.
        :meth:`as_owner` reads and stages them.
        """
        if not (self._whole or self._takes_part(name, field)):
            return None
        found = self._state.before(name, field)
        return found if found is None or shape is None or found.shape == tuple(shape) else None

    def stage(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """A tensor to fill: the parameter's new state once this step is committed. Read the old one first: it may be that."""
        if not (self._whole or self._takes_part(name, field)):
            return self._scratch.get((self._owner, name), "staged " + field, shape, dtype, torch.device(device))
        return self._state.stage(name, field, shape, dtype, device)

    def scratch(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        brief: bool = False,
    ) -> torch.Tensor:
        """An uninitialised tensor, this bucket's until the generator ends; ``brief``, every bucket's, until it yields."""
        return self._scratch.get(None if brief else self._owner, name, shape, dtype, torch.device(device))

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
            absent=self._absent,
        )

    def sends(self, name: str) -> bool:
        """Return True if this rank has a gradient of the parameter to send."""
        return self.participating and name not in self._absent

    def as_owner(self) -> "StepContext":
        """Return the same step with access to every entry of the state, also of parameters that this rank does not send.

        A rank that owns a part of the average rounds that part for all ranks. It must remember the rounding error even if
        it did not use the parameter or has joined: no other rank knows the error.
        """
        made = copy(self)
        made._whole = True
        return made

    def _takes_part(self, name: str, field: str) -> bool:
        return field in self._shared or self.sends(name)


class Reduction(ABC):
    """Base of all reductions.

    Subclasses implement :meth:`run`; most need nothing else.

    Attributes:
        name: shown in profiler ranges, errors and tables.
        granularity: ``"tensor"`` if each parameter is treated alone (then results do not depend on
            ``bucket_cap_mb``), ``"bucket"`` if the bucket is treated as one vector.
        collectives: kinds of requests it yields.
        castable: kinds of requests whose numbers a 16-bit wrapper may round. An all-gather or all-to-all is rounded only if
            it says so too (``AllGather(..., castable=True)``): the others of the same kind may carry packed bytes.
        lossy: whether the result differs from the average by more than rounding of the bucket's dtype.
        trips: how often the gradient would cross the network uncompressed: 2 for an all-reduce, 1 for a
            reduce-scatter. What a step sends is compared with it.
        fields: state fields and whether each is ``"local"`` to a rank or ``"shared"`` (the same on all ranks).
        scaled_fields: which of them follow a loss scale, and by which power: 1 for those in the gradient's units, 2 for
            those in its square's. The engine multiplies them when a ``GradScaler`` changes its scale, and
            ``state_dict()`` has them unscaled.
        memory_order_fields: those that hold a parameter as :meth:`.Bucket.matrix` shows it, in the order of its memory;
            the others have its own shape. If another reduction takes over the state, the engine converts their common
            fields; checkpoints hold the parameter's own order.
        packed_fields: those that are held in 8 bits, and how: see :class:`~commhooks.Packed`.
        reports_sent: whether :meth:`run`, when ``ctx.sent`` is a bucket (of the layout it was given), leaves in it
            what this rank contributed: in the gradient's units, before the division by W, after all rounding. The
            ``sent`` of an :class:`~commhooks.requests.AllReduce` of the gradient itself is just that. It is what
            ``error_feedback`` needs; a reduction that keeps a residual of its own leaves this ``False``.
        delivers: whether it sends the bucket as it is, by mean all-reduces in place, rounded on the wire at most: no code of
            it runs after them. A class with a :meth:`run` or :meth:`start` of its own does not inherit it.
        piece_bytes: on a CPU a larger bucket is cut between parameters into pieces of about so many bytes of gradient, each
            a bucket of its own: the arithmetic of one runs beside the messages of another. ``None``: never.

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
    castable: frozenset[str] = frozenset({"all_reduce", "reduce_scatter"})
    lossy: bool = False
    trips: int = 2
    fields: Mapping[str, Literal["local", "shared"]] = MappingProxyType({})
    scaled_fields: Mapping[str, int] = MappingProxyType({"residual": 1})
    memory_order_fields: frozenset[str] = frozenset()
    packed_fields: Mapping[str, Packed] = MappingProxyType({})
    reports_sent: bool = False
    delivers: bool = False
    piece_bytes: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__dict__.keys().isdisjoint(("run", "start")):  # its own code may run after the last collective
            cls.delivers = cls.__dict__.get("delivers", False)

    @abstractmethod
    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """Yield requests; leave the averaged gradient in ``bucket``."""

    @property
    def shared_fields(self) -> frozenset[str]:
        """State fields that are the same on all ranks: a newcomer is given them."""
        return frozenset(name for name, kind in self.fields.items() if kind == "shared")

    def memory_order(self, param: ParamLayout, step: int) -> frozenset[str]:
        """Return the :attr:`memory_order_fields` of a parameter in a step."""
        return self.memory_order_fields

    def packing(self, param: ParamLayout, step: int) -> Mapping[str, Packed]:
        """Return the :attr:`packed_fields` of a parameter in a step."""
        return self.packed_fields

    def encodings(self, layout: BucketLayout, step: int) -> Mapping[tuple[str, str], Encoding]:
        """Return the encoding of every entry that a bucket of this layout may have, by parameter name and field.

        The result is the same object for steps of the same :meth:`phase`.
        """
        cache: dict[Hashable, dict[tuple[str, str], Encoding]] = self.__dict__.setdefault("_encodings", {})
        key = (layout, self.phase(step))
        if key not in cache:
            made = cache[key] = {}
            for param in self.state_params(layout):
                in_memory, packed = self.memory_order(param, step), self.packing(param, step)
                for field in self.fields:
                    made[param.name, field] = Encoding.of(param, in_memory=field in in_memory, packed=packed.get(field))
        return cache[key]

    def state_params(self, layout: BucketLayout) -> Sequence[ParamLayout]:
        """Return the parameters whose state a bucket of this layout reads and writes."""
        return layout.params

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
            reasons = ((p.name, p.plain_only or self.route(p, step)) for p in layout.params)
            cache[key] = {name: reason for name, reason in reasons if reason}
        return cache[key]

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """The generator to drive: :meth:`run` over the parameters that fit, plain averaging over the others."""
        return self.run_with_plain(
            bucket, ctx, self.routes(bucket.layout, ctx.step) if self.lossy or self.fields else ()
        )

    def run_with_plain(self, bucket: Bucket, ctx: StepContext, plainly: Collection[str]) -> Stages:
        """:meth:`run`, and at the same time plain averaging of the parameters named in ``plainly``."""
        if not plainly:
            return self._stages(bucket, ctx)
        if len(plainly) == len(bucket.params):
            return plain(bucket, ctx.sent)
        fit = [p.name for p in bucket.params if p.name not in plainly]
        if ctx.sent is None:
            return parallel(self._stages(bucket.select(fit), ctx), plain(bucket.select(plainly)))
        inner = ctx.child("fit", sent=ctx.sent.select(fit))
        return parallel(
            self._stages(bucket.select(fit), inner), plain(bucket.select(plainly), ctx.sent.select(plainly))
        )

    def _stages(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """:meth:`run`, which is easily written without a single ``yield``."""
        stages: object = self.run(bucket, ctx)
        if not hasattr(stages, "__next__"):
            raise HookResultError(
                f"{self.name}: run() returned {type(stages).__name__}, and has to be a generator: it yields its requests, such "
                "as AllReduce(bucket.buffer), and goes on when they hold the result. One that asks for nothing ends with "
                "`yield from ()`"
            )
        return cast(Stages, stages)

    # -- where each rank keeps a part of the average

    @property
    def scatters(self) -> bool:
        """Whether it has a :meth:`run_scatter`; without, a place where each rank keeps a part refuses it by name."""
        return type(self).run_scatter is not Reduction.run_scatter

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """:meth:`run` as a reduce-scatter: yield requests; leave this rank's part of the average in ``shards.output``.

        Optional. Residuals are local, under the parameter's name and of its whole shape (:meth:`.Shards.cut`), so that the
        same state goes on under another number of ranks.
        """
        raise HookNotSupportedError(
            f"{self.name} cannot leave each rank a part of the average: it has no run_scatter()"
        )

    def start_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """The generator to drive: :meth:`run_scatter` over the parameters that fit, plain averaging over the others."""
        plainly = self.routes(shards.layout.part, ctx.step) if self.lossy or self.fields else {}
        if not plainly:
            return self.run_scatter(shards, ctx)
        exact = plain_scatter(shards.select(plainly), ctx.scratch)
        if len(plainly) == len(shards.params):
            return exact
        return parallel(self.run_scatter(shards.select({p.name for p in shards.params} - plainly.keys()), ctx), exact)

    def label(self, param: ParamLayout, step: int) -> str:
        """What treats a parameter that is not averaged plainly, for ``handle.plan()``."""
        return self.name

    def check(self, layout: BucketLayout) -> None:  # noqa: B027 - most reductions take any model
        """Refuse a model, given as one virtual bucket of all its parameters; called when a handle is attached.

        Raises:
            HookConfigError: naming the parameters.
        """

    def cautions(self, layout: BucketLayout, world_size: int) -> list[str]:
        """What one should know before this runs on a model over so many ranks, in sentences. ``attach`` logs them, and
        ``handle.cautions()`` has them.

        By default, for a reduction that gathers: that its volume grows with the number of ranks, where more crosses the
        network than ``bf16_compress`` would send. One that overrides this adds to ``super().cautions(...)``.

        Args:
            layout: all parameters, as one virtual bucket.
            world_size: ranks, of any number.
        """
        if "all_gather" not in self.collectives:
            return []

        def volume(ranks: int) -> int:
            return trip_bytes(self.plan(layout, StepContext(world_size=ranks, step=LATER)))

        first = passes_bf16(volume, layout.size, world_size)
        if first is None:
            return []
        times = volume(world_size) / (BF16_BYTES * layout.size)
        return [
            f"{self.name} gathers every rank's message, so its volume grows with the number of ranks: over {world_size} it "
            f"is {times:.2g} times that of bf16_compress, which it passes from {first} ranks on. Send less, or use a hook "
            "whose volume does not grow, such as quant8 or powersgd"
        ]

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        """Every stage's requests, from the layout alone: the generator is run on meta tensors.

        Raises:
            HookConfigError: the generator cannot be run without numbers.
            HookResultError: it asks for what no transport can carry.
        """
        meta = BucketLayout(layout.params, layout.numel, layout.dtype, "meta")
        bucket = Bucket(meta, torch.empty(layout.numel, dtype=layout.dtype, device="meta"))
        dry = StepContext(ctx.rank, ctx.world_size, ctx.step, participating=ctx.participating)
        stages: list[StagePlan] = []
        try:
            for requests in self.start(bucket, dry):
                asked = as_tuple(requests)
                for request in asked:
                    why = refusal(request, ctx.world_size)
                    if why is not None:
                        raise HookResultError(f"{self.name}, stage {len(stages)}: {why}")
                stages.append(tuple(r.plan() for r in asked))
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
    delivers = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return plain(bucket, ctx.sent)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        return plain_scatter(shards, ctx.scratch)
