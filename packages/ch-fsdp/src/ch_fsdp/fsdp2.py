"""The adapter for FSDP2 (``fully_shard``): a handle's hook on every parameter group below the model.

Axes: ``"shard"`` replaces the reduce-scatter inside the shard mesh, ``"replicate"`` reduces the shards between
replicas. By default casts are put on both, other reductions on the replicate axis.
"""

from collections.abc import Collection
from functools import partial

import torch
import torch.distributed as dist

from ch_fsdp.axis_selection import check_groups, choose_axes, find_replicas, one_shard_group, reduction_of
from ch_fsdp.flat_reduction import fits_flat, flat_layout
from ch_fsdp.native_mesh import hand_back, take_over
from ch_fsdp.private_ends import BackwardEnds
from ch_fsdp.replicate_axis import ReplicateHook, broadcast, kept_back
from ch_fsdp.shard_axis import ShardAxis, ShardScatter
from ch_fsdp.step_boundary import Steps
from ch_fsdp.torch_internals import ParamGroup, param_groups
from ch_fsdp.turns import Turns
from commhooks import AttachError, BucketLayout, CommHook, CommHooksError, HookState, ParamLayout, Plain
from commhooks.adapters import (
    AttachOptions,
    Binding,
    Engine,
    Fingerprint,
    ManagedAxis,
    ProcessGroupTransport,
    agree_along,
    manager_adapter,
    watch_optimizer,
)


class FSDP2Binding(Binding):
    """A handle in place on an FSDP2 model.

    Attributes:
        engine: the replicate axis's engine if there is one, else the shard axis's.
        group: the ranks of that engine.
        other_axes: further groups whose ranks load a state together.
        holder: the expression, ``None`` when detached.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        for group in self.groups:
            group.reshard()
        self.reduction = reduction_of(handle)
        self.holder: str | None = handle.expr
        self._model, self._expr, self._timeout = model, handle.expr, options.timeout
        self._shard_group, replicas, axes = self._agreed(handle.identity, options)
        self._replicas = replicas if "replicate" in axes else None
        self._native = self._replicas is not None and self.groups[0].native_replicas is not None
        self._managed = self._between_groups(handle, options)
        self._replicates = self._replicas is not None or self._managed is not None
        # Members of other replica groups are compared in every step: they come and go.
        self.group = None if self._managed is not None else self._replicas or self._shard_group
        self.other_axes = (self._shard_group,) if self._replicas is not None and self._shard_group is not None else ()
        self._shard: ShardAxis | None = None
        if "shard" in axes and self._shard_group is not None:
            state = None if fits_flat(self.reduction) else self._state_of(handle)
            self._shard = ShardAxis(self.reduction, self._shard_group, self._timeout, state)
        engines: dict[str, Engine] = {}
        if self._shard is not None:
            engines["shard"] = self._shard.engine
        if self._replicas is not None:
            engines["replicate"] = self._replicate_engine(handle, self._replicas)
        elif self._managed is not None:  # its vote tells the other ranks of the shard mesh, without a relay
            engines["replicate"] = self._managed.engine
        relay = ProcessGroupTransport(self.other_axes[0]) if self.other_axes else None
        self._turns = Turns(self.groups, fixed=self._managed is not None) if self._replicates else None
        self.steps = Steps(engines, self._inspect, relay, self._turns, self._due)
        self.engine: Engine | None = engines.get("replicate") or engines["shard"]
        self._named = not self._replicates and not fits_flat(self.reduction)
        self._trained = self._trainable()
        self._ready = False
        # A managed axis asks the optimizer itself: the manager's vote comes before.
        self._watch = (
            watch_optimizer(self.engine, options, model.parameters(), model) if self._managed is None else None
        )
        self._ends = BackwardEnds(model, self.steps.end, self.steps.abandon, replicas=self._replicates)
        self._place(handle)  # last: nothing after it can fail, and leave hooks in a model that has no handle

    @property
    def layout(self) -> BucketLayout:  # type: ignore[override]
        """What the engine reduces: this rank's shards, whole parameters, or flat gradients.

        Parameters may be thawed and frozen after attach. So this is the model as it is now, with the frozen parameters
        that have entries in the state: neither saving nor loading may lose these.
        """
        if not (self._replicates or self._named):
            return unsharded_layout(self.groups)
        return (shards_layout if self._replicates else whole_layout)(self.groups, self._kept())

    @property
    def params(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The parameters of :attr:`layout`, in model order."""
        kept = self._kept()
        chosen = {name: None for group in self.groups for name in group.global_shapes(kept)}
        held = {name: p for group in self.groups for name, p in group.sharded_params().items() if name in chosen}
        order = model_order(self.groups)
        return [held[name] for name in sorted(held, key=order.__getitem__)]

    def _kept(self) -> set[str]:
        return {name for name, _ in self.engine.state.held()} if self.engine is not None else set()

    def _trainable(self) -> list[bool]:
        return [p.requires_grad for group in self.groups for p in group.params]

    def _follow_trainable(self) -> None:
        """Tell the state, which may be saved without its handle, that parameters were thawed or frozen."""
        trained = self._trainable()
        if trained != self._trained and self.engine is not None and (self._replicates or self._named):
            self._trained = trained
            self.engine.state.follow(tuple((p.name, p.shape) for p in self.layout.params), self.params)

    @property
    def sums(self) -> bool:
        return self._native and all(group.sums_replicas for group in self.groups)

    @property
    def calls(self) -> int:
        return self.steps.calls

    def stats(self) -> dict[str, float]:
        return self.steps.group.stats()

    def check(self) -> None:
        self.steps.group.check()

    def ready(self) -> None:
        """The ranks have agreed: make the replicas equal."""
        self._ready = True
        for hook in self._hooks:
            hook.stay()
        if self._replicas is not None:
            broadcast(self._model, self._replicas)

    def detach(self) -> None:
        """Torch's own reduce-scatter again; between replicas plain averaging, or they would drift apart.

        On a 2-D mesh that is torch's own again, too.

        Raises:
            AttachError: there are gradients that ``set_requires_all_reduce(False)`` has kept back.
        """
        if self._native and self.steps.keeps_back:
            raise kept_back(self._expr, "detach()")
        self.holder = None
        if self._watch is not None:
            self._watch.close()
        for comm in self._comms:
            comm.remove()
        if self._named:
            for group, included in zip(self.groups, self._included, strict=True):
                group.includes_unused = included
        self._ends.close()
        if self._turns is None:
            return
        if self._native or not self._ready:
            if self._managed is not None:
                self._managed.close()
            self._put_back()
            return
        steps = Steps({"replicate": self._plain_engine()}, turns=self._turns, due=partial(getattr, self._turns, "due"))
        ends = BackwardEnds(self._model, steps.end, steps.abandon, replicas=True)
        for hook in self._hooks:
            hook.point(steps, ends, None)

    def _plain_engine(self) -> Engine:
        if self._managed is not None:
            return self._managed.plain()
        transport = ProcessGroupTransport(self._replicas)
        # Without a status the messages are exactly those of torch without a hook.
        return Engine(Plain(), transport, timeout=self._timeout, sends_status=False)

    def _put_back(self) -> None:
        """As if nothing had been attached: torch reduces between replicas itself, or the ranks did not agree."""
        for hook, group, included in zip(self._hooks, self.groups, self._included, strict=True):
            group.includes_unused = included
            hook.put_back()
            hand_back(group)

    # -- attaching

    def _agreed(
        self, hook: list[str], options: AttachOptions
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, tuple[str, ...]]:
        """Shard group, replicas and axes; what one rank refuses is known to all ranks of the mesh."""
        shard_group = one_shard_group(self.groups)
        replicas: dist.ProcessGroup | None = None
        axes: tuple[str, ...] = ()
        refusal: CommHooksError | None = None
        try:
            replicas = find_replicas(self.groups, options)
            axis = options.axis if shard_group is not None else "replicate"
            axes = choose_axes(self.reduction, axis, replicas is not None or options.manager is not None)
            check_groups(self.groups, axes, self.reduction)
        except CommHooksError as error:
            refusal = error
        if options.verify_ranks:
            fit = {"axes": axes, "does not fit": [str(refusal)] if refusal is not None else []}
            along: list[tuple[dist.ProcessGroup, Fingerprint]] = [(shard_group, {})] if shard_group is not None else []
            if replicas is not None:  # along this axis all have the same shard of the model too
                along.append((replicas, {"shard": [name for group in self.groups for name in group.order()]}))
            agree_along(self._expr, {**self._identity(hook), **fit}, along, self._timeout)
        if refusal is not None:
            raise refusal
        return shard_group, replicas, axes

    def _identity(self, hook: list[str]) -> Fingerprint:
        shapes = {name: shape for group in self.groups for name, shape in group.global_shapes().items()}
        return {"hook": hook, "parameters": [f"{name}: {shape}" for name, shape in shapes.items()]}

    def _between_groups(self, handle: CommHook, options: AttachOptions) -> ManagedAxis | None:
        """What reduces between replica groups that a manager lets come and go."""
        if options.manager is None:
            return None
        return manager_adapter(options.manager)(self._model, handle, options, self._layouts)

    def _layouts(self) -> list[BucketLayout]:
        """What a backward reduces between the groups, in the order of :class:`Turns`."""
        due = (g for g in reversed(self.groups) if g.reduces and g.all_reduces and g.trainable)
        return [g.shards(g.reduce_dtype) for g in due]

    def _replicate_engine(self, handle: CommHook, replicas: dist.ProcessGroup) -> Engine:
        return Engine(self.reduction, ProcessGroupTransport(replicas), self._state_of(handle), timeout=self._timeout)

    def _state_of(self, handle: CommHook) -> HookState:
        state = handle.state if handle.reduction is not None else HookState()
        if not isinstance(state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(state).__name__}")
        return state

    def _place(self, handle: CommHook) -> None:
        """Put comms and hooks into torch's slots. Several groups in a module need no setter, only their own."""
        self._comms: list[ShardScatter] = []
        self._hooks: list[ReplicateHook] = []
        if self._replicates:
            place = (self.steps, self._ends, handle.expr)
            self._hooks = [ReplicateHook(group, index, *place) for index, group in enumerate(self.groups)]
            self._included = [group.includes_unused for group in self.groups]
            # Without it the flat shard lacks the parameters that had no gradient, and which ones cannot be told.
            for group in self.groups:
                group.includes_unused = True
                take_over(group)
        if self._named:  # which parameters had no gradient could not be told, as above
            self._included = [group.includes_unused for group in self.groups]
            for group in self.groups:
                group.includes_unused = True
        if self._shard is not None:
            self._comms = [ShardScatter(g, self._shard, self.steps, handle.expr) for g in self.groups]
        # torch reduce-scatters nothing over one rank, and calls nobody.
        reduces = bool(self._hooks) or (self._shard_group is not None and self._shard_group.size() > 1)
        self._unverified = {g.name for g in self.groups} if reduces else set()

    # -- is it being called

    def _due(self) -> bool:
        return any(group.reduces and group.trainable for group in self.groups)

    def _inspect(self) -> CommHooksError | None:
        """At the end of a step: has every group called that has gradients?"""
        self._follow_trainable()
        placed: list[ShardScatter | ReplicateHook] = [*self._comms, *self._hooks]
        lost = [one.group.name for one in placed if not one.in_place]
        if lost:
            return AttachError(
                f"{self._expr} is no longer in place on {', '.join(sorted(set(lost)))}: set_custom_reduce_scatter or "
                "set_all_reduce_hook was called after attach. Those setters act on one module only; attach again "
                "instead of calling them"
            )
        silent = [g.name for g in self.groups if g.name in self._unverified and self._silent(g)]
        if silent:
            return AttachError(
                f"{self._expr} was never called by {', '.join(silent)} in a backward that gave it gradients, so they "
                "were not reduced by it. The model that trains is not the one attached to, or it was sharded anew: "
                "attach after the last fully_shard"
            )
        return None

    def _silent(self, group: ParamGroup) -> bool:
        called = (self._shard is None or self._shard.group.size() == 1 or group.name in self._shard.called) and all(
            hook.called for hook in self._hooks if hook.group.name == group.name
        )
        if called or group.name in self.steps.given:
            self._unverified.discard(group.name)
            return False
        return group.reduces and any(p.grad is not None for p in group.params)


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> FSDP2Binding:
    """The ``commhooks_adapter`` of FSDP2."""
    return FSDP2Binding(model, handle, options)


adapter.takes_manager = True  # type: ignore[attr-defined]  # commhooks.attach asks for both
adapter.idles_alone = True  # type: ignore[attr-defined]


def shards_layout(groups: list[ParamGroup], kept: Collection[str] = ()) -> BucketLayout:
    """Return this rank's shards of all groups, and those of frozen parameters in ``kept``, as one virtual bucket."""
    order: dict[str, int] = {}
    entries: list[ParamLayout] = []
    offset = 0
    for group in groups:
        layout = group.shards(group.reduce_dtype, kept)
        entries += [ParamLayout(p.name, p.shape, p.stride, offset + p.offset) for p in layout.params]
        order |= group.order()
        offset += layout.numel
    entries.sort(key=lambda p: order[p.name])
    return BucketLayout(entries, offset, groups[0].reduce_dtype, groups[0].device)


def unsharded_layout(groups: list[ParamGroup]) -> BucketLayout:
    """Return the flat gradients of all groups as one virtual bucket."""
    return flat_layout({g.name: g.unsharded_numel() for g in groups}, groups[0].reduce_dtype, groups[0].device)


def whole_layout(groups: list[ParamGroup], kept: Collection[str] = ()) -> BucketLayout:
    """Return the unsharded parameters of all groups, and frozen ones in ``kept``, as one virtual bucket."""
    shapes = {name: shape for group in groups for name, shape in group.global_shapes(kept).items()}
    order = model_order(groups)
    ordered = {name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}
    return BucketLayout.of_shapes(ordered, groups[0].reduce_dtype, groups[0].device)


def model_order(groups: list[ParamGroup]) -> dict[str, int]:
    """Return name -> position in the model of every parameter."""
    return {name: at for group in groups for name, at in group.positions().items()}
