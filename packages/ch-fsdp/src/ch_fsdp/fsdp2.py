"""The adapter for FSDP2 (``fully_shard``): a handle's hook on every parameter group below the model.

Axis ``"gather"`` codes weights (:mod:`ch_fsdp.gather_axis`). Axis ``"shard"`` replaces the reduce-scatter inside the shard
mesh. Axis ``"replicate"`` reduces the shards between replicas. By default casts run on both axes of gradients, other
reductions on the replicate axis.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from ch_core import Engine, Fingerprint, ProcessGroupTransport, RankCheck, agree_along
from ch_fsdp.axes import check_groups, choose_axes, find_replicas, one_shard_group, reduction_of
from ch_fsdp.flat_sum import fits_flat, flat_layout
from ch_fsdp.gather_axis import GatherBinding
from ch_fsdp.replicate_axis import GroupOrder, ReplicateHook, broadcast, gradients_kept
from ch_fsdp.shard_axis import ShardAxis, ShardScatter
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.hsdp_mesh import disable_all_reduce, enable_all_reduce
from ch_fsdp.torch_internals.param_groups import ParamGroup, all_params, ignored_params, managed_tensors, param_groups
from commhooks import (
    AttachError,
    AttachOptions,
    Binding,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookState,
    ManagedAxis,
    ParamLayout,
    Plain,
    manager_adapter,
    watch_optimizer,
)


class FSDP2Binding(Binding):
    """A handle in place on an FSDP2 model.

    Attributes:
        engine: engine of the replicate axis if there is one, else of the shard axis.
        group: the ranks of that engine, or ``None`` with a manager, which compares members in every step.
        other_axes: other process groups whose ranks load a state together.
        groups: the parameter groups.
        reduction: the reduction on every axis.
        steps: the engines of all axes.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        for group in self.groups:
            group.reshard()
        self.ignored = ignored_params(model, self.groups)
        self.reduction = reduction_of(handle)
        self._model, self._expr, self._timeout = model, handle.expr, options.timeout
        self._shard_group, replicas, axes = self._agree(handle.identity, options)
        self._replicas = replicas if "replicate" in axes else None
        self._native = self._replicas is not None and self.groups[0].native_replicas is not None
        self._managed: ManagedAxis | None = None  # reduces between replica groups that a manager lets come and go
        if options.manager is not None:
            self._managed = manager_adapter(options.manager)(model, handle, options, self._layouts_between_groups)
        self._replicates = self._replicas is not None or self._managed is not None
        self._by_name = self._replicates or not fits_flat(self.reduction)
        self.group = None if self._managed is not None else self._replicas or self._shard_group
        self.other_axes = (self._shard_group,) if self._replicas is not None and self._shard_group is not None else ()
        self._shard: ShardAxis | None = None
        if "shard" in axes and self._shard_group is not None:
            state = None if fits_flat(self.reduction) else _state_of(handle)
            self._shard = ShardAxis(self.reduction, self._shard_group, self._timeout, state)
        engines = self._engines(handle)
        # The vote of a manager reaches the other ranks of the shard mesh without a relay.
        relay = ProcessGroupTransport(self.other_axes[0]) if self.other_axes else None
        self._order = GroupOrder(self.groups, fixed=self._managed is not None) if self._replicates else None
        self.engine: Engine = engines.get("replicate") or engines["shard"]
        self._trained = self._trainable()
        self._ready = False
        # A managed axis watches the optimizer itself, because the manager votes first.
        own = watch_optimizer(self.engine, options, self._parameters, model) if self._managed is None else None
        watch, self._watch = (own if self._managed is None else self._managed.watch), own
        arriving = watch.before_gradient if watch is not None else lambda: None
        self.steps = Steps(engines, self._inspect, relay, self._order, self._due, arriving)
        self._end = BackwardEnd(model, self.steps.end, self.steps.abandon, replicas=self._replicates)
        self._place(handle.expr)  # last, because an error after it would leave hooks in a model without a handle

    # -- the binding's interface

    @property
    def layout(self) -> BucketLayout:  # type: ignore[override]
        """The shards, whole parameters or flat gradients that the engine reduces, as one virtual bucket.

        The user may thaw and freeze parameters after attach. So this is the model as it is now, with the frozen
        parameters that have entries in the state. Otherwise saving or loading would lose these entries.
        """
        if not self._by_name:
            return unsharded_layout(self.groups)
        return (shards_layout if self._replicates else whole_layout)(self.groups, self._names_in_state())

    @property
    def params(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The parameters of :attr:`layout`, in model order."""
        kept = self._names_in_state()
        chosen = {name for group in self.groups for name in group.global_shapes(kept)}
        every = all_params(self.groups)
        return [every[name] for name in sorted(chosen, key=model_order(self.groups).__getitem__)]

    @property
    def engines(self) -> Mapping[str, Engine]:
        return self.steps.group.engines

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

    def check_ranks(self, check: RankCheck) -> None:
        replicas = self._replicas
        if replicas is None:
            check.leave("the hook reduces between ranks that hold different shards")
            return
        check.watch(lambda: all_params(self.groups).items(), lambda: dist.get_process_group_ranks(replicas))
        self.engine.rank_check = check

    def after_agreement(self) -> None:
        """Make the replicas equal, after the ranks agreed."""
        self._ready = True
        for hook in self._hooks:
            hook.keep()
        if self._replicas is not None:
            broadcast(managed_tensors(self._model, self.groups), self._replicas)

    def detach(self) -> None:
        """Give torch its reduce-scatter back, and leave plain averaging between replicas, which would drift apart.

        On a 2-D mesh torch averages between the replicas itself.

        Raises:
            AttachError: ``set_requires_all_reduce(False)`` has kept gradients.
        """
        if self._native and self._order is not None and self._order.keeps_gradients:
            raise gradients_kept(self._expr, "detach()")
        if self._watch is not None:
            self._watch.close()
        for comm in self._comms:
            comm.remove()
        self._end.close()
        if self._order is None or self._native or not self._ready:
            self._remove_hooks()
            return
        plain = self._managed.plain() if self._managed is not None else self._plain_engine()
        steps = Steps({"replicate": plain}, deferred=self._order, due=partial(getattr, self._order, "due"))
        end = BackwardEnd(self._model, steps.end, steps.abandon, replicas=True)
        for hook in self._hooks:
            hook.switch(steps, end, None)

    def _plain_engine(self) -> Engine:
        # Without a status this sends the same messages as torch without a hook.
        transport = ProcessGroupTransport(self._replicas)
        return Engine(Plain(), transport, timeout=self._timeout, sends_status=False)

    def _remove_hooks(self) -> None:
        """Leave the model as it was before attach."""
        if self._managed is not None:
            self._managed.close()
        for group, included in zip(self.groups, self._included, strict=True):
            group.includes_unused = included
        for hook in self._hooks:
            hook.remove()
            enable_all_reduce(hook.group)

    # -- attaching

    def _agree(
        self, hook: list[str], options: AttachOptions
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, tuple[str, ...]]:
        """Return shard group, replicas and axes. If one rank refuses the hook, all ranks of the mesh raise."""
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
            shapes = {name: shape for group in self.groups for name, shape in group.global_shapes().items()}
            fields: Fingerprint = {
                "hook": hook,
                "parameters": [f"{name}: {shape}" for name, shape in shapes.items()],
                "axes": axes,
                "does not fit": [str(refusal)] if refusal is not None else [],
            }
            along: list[tuple[dist.ProcessGroup, Fingerprint]] = [(shard_group, {})] if shard_group is not None else []
            if replicas is not None:  # these ranks also have the same shard of the model
                along.append((replicas, {"shard": [name for g in self.groups for name in g.shard_positions()]}))
            agree_along(self._expr, fields, along, self._timeout)
        if refusal is not None:
            raise refusal
        return shard_group, replicas, axes

    def _engines(self, handle: CommHook) -> dict[str, Engine]:
        """Return the engines in the order in which they end a step."""
        engines = {"shard": self._shard.engine} if self._shard is not None else {}
        if self._replicas is not None:
            transport = ProcessGroupTransport(self._replicas)
            engines["replicate"] = Engine(self.reduction, transport, _state_of(handle), timeout=self._timeout)
        elif self._managed is not None:
            engines["replicate"] = self._managed.engine
        return engines

    def _layouts_between_groups(self) -> list[BucketLayout]:
        """Return the buckets that a backward reduces between replica groups, in the order of :class:`GroupOrder`."""
        due = (g for g in reversed(self.groups) if g.reduces and g.all_reduces and g.trainable)
        return [g.shards(g.reduce_dtype) for g in due]

    def _place(self, expr: str) -> None:
        """Put hooks into torch's slots, of each parameter group: torch's setters refuse modules with several groups."""
        self._comms: list[ShardScatter] = []
        self._hooks: list[ReplicateHook] = []
        self._included = [group.includes_unused for group in self.groups]
        # Without it the flat tensor lacks parameters that had no gradient on this rank. A hook cannot find out which, and ranks
        # would add gradients of different parameters.
        for group in self.groups:
            group.includes_unused = True
        if self._order is not None:
            for index, group in enumerate(self.groups):
                self._hooks.append(ReplicateHook(group, index, self._order, self.steps, self._end, expr))
                disable_all_reduce(group)
        if self._shard is not None:
            self._comms = [ShardScatter(group, self._shard, self.steps, expr) for group in self.groups]
        # Over one rank torch reduce-scatters nothing and calls no hook.
        reduces = bool(self._hooks) or (self._shard_group is not None and self._shard_group.size() > 1)
        self._unverified = {group.name for group in self.groups} if reduces else set()

    # -- parameters thawed or frozen after attach

    def _parameters(self) -> Iterable[torch.Tensor]:
        return all_params(self.groups).values()

    def _names_in_state(self) -> set[str]:
        return {name for name, _ in self.engine.state.draft.newest()}

    def _trainable(self) -> list[bool]:
        return [p.requires_grad for group in self.groups for p in group.params]

    def _update_trainable(self) -> None:
        """Tell the state, which the user may save without its handle, which parameters it now belongs to."""
        trained = self._trainable()
        if trained != self._trained and self._by_name:
            self._trained = trained
            self.engine.state.identity.replace_params(tuple((p.name, p.shape) for p in self.layout.params), self.params)

    # -- the end of a step

    def _due(self) -> bool:
        return any(group.reduces and group.trainable for group in self.groups)

    def _inspect(self) -> CommHooksError | None:
        """Return an error if a group with gradients did not call the hook."""
        self._update_trainable()
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
                "were not reduced by it. The model that trains is another one, or fully_shard was called on it after "
                "attach: attach after the last fully_shard"
            )
        return None

    def _silent(self, group: ParamGroup) -> bool:
        scattered = self._shard is None or self._shard.group.size() == 1 or group.name in self._shard.called
        called = scattered and all(hook.called for hook in self._hooks if hook.group.name == group.name)
        if called or (self._order is not None and group.name in self._order.late):
            self._unverified.discard(group.name)
            return False
        return group.reduces and any(p.grad is not None for p in group.params)


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> Binding:
    """The ``commhooks_adapter`` of FSDP2."""
    return GatherBinding(model, handle, options) if options.axis == "gather" else FSDP2Binding(model, handle, options)


adapter.takes_manager = True  # type: ignore[attr-defined]  # commhooks.attach reads both
adapter.idles_alone = True  # type: ignore[attr-defined]
adapter.gathers_weights = True  # type: ignore[attr-defined]  # commhooks run --gather reads it


def _state_of(handle: CommHook) -> HookState:
    state = handle.state if handle.reduction is not None else HookState()
    if not isinstance(state, HookState):
        raise AttachError(
            f"the state of {handle.expr} is a {type(state).__name__}; FSDP2 needs a HookState: give attach(state=) the "
            "state of another handle, or leave state out"
        )
    return state


# -- layouts


def shards_layout(groups: list[ParamGroup], kept: Collection[str] = ()) -> BucketLayout:
    """Return this rank's shards of all groups, and those of frozen parameters in ``kept``, in model order."""
    order: dict[str, int] = {}
    entries: list[ParamLayout] = []
    offset = 0
    for group in groups:
        layout = group.shards(group.reduce_dtype, kept)
        entries += [ParamLayout(p.name, p.shape, p.stride, offset + p.offset) for p in layout.params]
        order |= group.shard_positions()
        offset += layout.numel
    entries.sort(key=lambda p: order[p.name])
    return BucketLayout(entries, offset, groups[0].reduce_dtype, groups[0].device)


def whole_layout(groups: list[ParamGroup], kept: Collection[str] = ()) -> BucketLayout:
    """Return the unsharded parameters of all groups, and frozen ones in ``kept``, in model order."""
    shapes = {name: shape for group in groups for name, shape in group.global_shapes(kept).items()}
    ordered = {name: shapes[name] for name in sorted(shapes, key=model_order(groups).__getitem__)}
    return BucketLayout.of_shapes(ordered, groups[0].reduce_dtype, groups[0].device)


def unsharded_layout(groups: list[ParamGroup]) -> BucketLayout:
    """Return the flat gradients of all groups."""
    return flat_layout({g.name: g.unsharded_numel() for g in groups}, groups[0].reduce_dtype, groups[0].device)


def model_order(groups: list[ParamGroup]) -> dict[str, int]:
    """Return name -> position in the model of every parameter."""
    return {name: at for group in groups for name, at in group.positions().items()}
