"""The adapter for FSDP2 (``fully_shard``): a handle's hook on every parameter group below the model.

Axis ``"gather"`` codes weights (:mod:`ch_fsdp.gather_axis`). Axis ``"shard"`` replaces the reduce-scatter inside the shard
mesh (:mod:`ch_fsdp.shard_axis`). Axis ``"replicate"`` reduces the shards between replicas (:mod:`ch_fsdp.replicate_axis`). By
default casts run on both axes of gradients, other reductions on the replicate axis.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ch_core import Engine, Fingerprint, ProcessGroupTransport, RankCheck
from ch_fsdp.axes import (
    agree_on_axes,
    check_groups,
    choose_axes,
    find_replicas,
    one_shard_group,
)
from ch_fsdp.axis import Axis, reduction_of, weighted_sums
from ch_fsdp.gather_axis import GatherAxis
from ch_fsdp.layouts import model_order, trainable_shapes
from ch_fsdp.replicate_axis import ReplicateAxis
from ch_fsdp.shard_axis import ShardAxis
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup, all_params, ignored_params, param_groups
from commhooks import (
    AttachError,
    AttachOptions,
    Binding,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookConfigError,
    HookNotSupportedError,
    watch_optimizer,
)


class FSDP2Binding(Binding):
    """A handle in place on one or two axes of an FSDP2 model.

    Attributes:
        groups: the parameter groups.
        axes: in the order in which their engines end a step. The last one has the handle's state.
        steps: the engines of all axes.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        for group in self.groups:
            group.reshard()
        self.ignored = ignored_params(model, self.groups)
        self._model, self._expr = model, handle.expr
        if options.axis == "gather":
            self.axes: Sequence[Axis] = [GatherAxis(self.groups, handle, options)]
        else:
            self.axes = gradient_axes(model, self.groups, handle, options)
        self._main = main = self.axes[-1]
        self.engine: Engine = main.engine
        self.treatment = main.treatment
        self.group, self.other_axes = main.group, tuple(main.other_groups)
        # The manager votes first, so its axis has a watch of its own.
        own = watch_optimizer(self.engine, options, self._parameters, model) if main.managed is None else None
        self.watch = own if main.managed is None else main.managed.watch
        self._trained = self._trainable()
        self._unverified = {group.name for group in self.groups}  # groups that torch may never have given to the hook
        engines = {name: engine for axis in self.axes for name, engine in axis.engines.items()}
        relay = ProcessGroupTransport(main.relay) if main.relay is not None else None
        arriving = self.watch.before_gradient if self.watch is not None else lambda: None
        self.steps = Steps(engines, self._inspect, relay, main.order, self._due, arriving)
        self._end = BackwardEnd(model, self.steps.end, self.steps.abandon, replicas=main.order is not None)
        self._included = [(group, group.includes_unused) for group in self.groups if main.of_gradients]
        # Without it the flat tensor lacks parameters that had no gradient on this rank. A hook cannot find out which, and
        # ranks would add gradients of different parameters.
        for group, _ in self._included:
            group.includes_unused = True
        for axis in self.axes:  # last, because an error after it would leave hooks in a model without a handle
            axis.place(self.steps, self._end, handle.expr)

    # -- the binding's interface

    @property
    def layout(self) -> BucketLayout:  # type: ignore[override]
        """The shards, whole parameters or flat gradients that the engine reduces, as one virtual bucket.

        The user may thaw and freeze parameters after attach. So this is the model as it is now, with the frozen
        parameters that have entries in the state. Otherwise saving or loading would lose these entries.
        """
        return self._main.layout(self._names_in_state())

    @property
    def params(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The parameters of :attr:`layout`, in model order."""
        every, order = all_params(self.groups), model_order(self.groups)
        names = trainable_shapes(self.groups, self._names_in_state()) if self._main.of_gradients else every
        return [every[name] for name in sorted(names, key=order.__getitem__)]

    @property
    def engines(self) -> Mapping[str, Engine]:
        return self.steps.group.engines

    @property
    def sums(self) -> bool:
        return self._main.sums

    @property
    def calls(self) -> int:
        return self.steps.calls

    def stats(self) -> dict[str, float]:
        return self.steps.group.stats()

    def check(self) -> None:
        self.steps.group.check()

    def check_ranks(self, check: RankCheck) -> None:
        if not self._main.of_gradients:
            super().check_ranks(check)
        replicas = self._main.replicas
        if replicas is None:
            check.leave("the hook reduces between ranks that hold different shards")
            return
        check.watch(lambda: all_params(self.groups).items(), lambda: dist.get_process_group_ranks(replicas))
        self.engine.rank_check = check

    def weigh_ranks(self) -> None:
        """Weigh the ranks of the only axis.

        Raises:
            HookNotSupportedError: weights of the model, a manager, several axes, or gradients that are sums.
        """
        main, reason = self._main, ""
        sharded = main.relay is not None and main.relay.size() > 1
        if not main.of_gradients:
            reason = "the hook codes weights, not gradients"
        elif main.managed is not None:
            reason = "members of a manager join and leave between the averages of a step"
        elif main.replicas is not None and sharded:
            reason = "the average goes over shards and replicas, one after the other. Use a 1-D mesh"
        if reason:
            raise HookNotSupportedError(
                f"weighted=True does not work here: {reason}. Otherwise omit weighted=, and scale the loss by this rank's tokens "
                "over the mean tokens of all ranks"
            )
        for sums in map(weighted_sums, self.groups):
            if sums is not None:
                raise sums
        self.engine.set_weighted()

    def after_agreement(self) -> None:
        for axis in self.axes:
            axis.after_agreement()

    def detach(self) -> None:
        """Give torch its own collectives back. Between replicas plain averaging stays, unless torch averages there itself.

        Raises:
            AttachError: ``set_requires_all_reduce(False)`` has kept gradients.
        """
        gone = [axis.remove() for axis in reversed(self.axes)]  # the replicate axis first, because it may refuse
        self._end.close()
        if all(gone):  # plain averaging between replicas also needs the parameters without a gradient
            for group, included in self._included:
                group.includes_unused = included

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
        if trained != self._trained:
            self._trained = trained
            self.engine.state.identity.replace_params(tuple((p.name, p.shape) for p in self.layout.params), self.params)

    # -- the end of a step

    def _due(self) -> bool:
        """Return True if this backward is a step even if torch called no slot."""
        if not self._main.of_gradients:
            return bool(self._lost())
        return any(group.reduces and group.trainable for group in self.groups)

    def _lost(self) -> set[str]:
        """Return the parameter groups whose slot the user has filled."""
        return {slot.group.name for axis in self.axes for slot in axis.slots if not slot.in_place}

    def _inspect(self) -> CommHooksError | None:
        """Return an error if a slot was filled, a group with gradients did not call the hook, or a weight came too late."""
        self._update_trainable()
        main, lost = self._main, self._lost()
        if lost:
            return AttachError(
                f"{self._expr} is no longer in place on {main.lost_from}{', '.join(sorted(lost))}: {main.setters} was called "
                "after attach. Those setters act on one module only; attach again instead of calling them"
            )
        silent = [g.name for g in self.groups if g.name in self._unverified and self._silent(g)]
        if silent:
            return AttachError(
                f"{self._expr} was never called by {', '.join(silent)} in a backward that gave it gradients, so they "
                "were not reduced by it. The model that trains is another one, or fully_shard was called on it after "
                "attach: attach after the last fully_shard"
            )
        weighing = self.engine.weighing
        if weighing is not None and weighing.weight is not None and self.engine.in_step:
            return HookConfigError(
                f"{self._expr}: weigh() was called after FSDP2 had reduced the first gradients of this step. Call it once "
                "before each backward, and let each backward end its step"
            )
        return None

    def _silent(self, group: ParamGroup) -> bool:
        order, slots = self._main.order, [slot for axis in self.axes for slot in axis.slots if slot.group is group]
        if all(slot.called for slot in slots) or (order is not None and group.name in order.late):
            self._unverified.discard(group.name)
            return False
        return group.reduces and any(p.grad is not None for p in group.params)


def gradient_axes(
    model: torch.nn.Module, groups: list[ParamGroup], handle: CommHook, options: AttachOptions
) -> list[Axis]:
    """Return the axes of a handle's gradients. If one rank refuses the hook, all ranks of the mesh raise."""
    reduction, shard_group = reduction_of(handle), one_shard_group(groups)
    replicas: dist.ProcessGroup | None = None
    names: tuple[str, ...] = ()
    refusal: CommHooksError | None = None
    try:
        replicas = find_replicas(groups, options)
        axis = options.axis if shard_group is not None else "replicate"
        names = choose_axes(reduction, axis, replicas is not None or options.manager is not None)
        check_groups(groups, names, reduction)
    except CommHooksError as error:
        refusal = error
    along: list[tuple[dist.ProcessGroup, Fingerprint]] = [(shard_group, {})] if shard_group is not None else []
    if replicas is not None:  # these ranks also have the same shard of the model
        along.append((replicas, {"shard": [name for g in groups for name in g.shard_positions()]}))
    agree_on_axes(handle, options, trainable_shapes(groups), names, along, refusal)
    axes: list[Axis] = []  # the replicate axis ends a step last, because the relay passes its error on along the shards
    if "shard" in names and shard_group is not None:
        axes.append(ShardAxis(groups, handle, options, shard_group))
    if "replicate" in names:
        axes.append(ReplicateAxis(model, groups, handle, options, replicas, shard_group))
    return axes


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> Binding:
    """The ``commhooks_adapter`` of FSDP2."""
    return FSDP2Binding(model, handle, options)


adapter.takes_manager = True  # type: ignore[attr-defined]  # commhooks.attach reads both
adapter.idles_alone = True  # type: ignore[attr-defined]
adapter.gathers_weights = True  # type: ignore[attr-defined]  # commhooks run --gather reads it
