"""The adapter for FSDP2 (``fully_shard``): a handle's hook on every parameter group below the model.

Axes: ``"shard"`` replaces the reduce-scatter inside the shard mesh, ``"replicate"`` reduces the shards between
replicas. By default casts are put on both, other reductions on the replicate axis.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ch_fsdp.choosing import check_groups, choose_axes, one_shard_group, reduction_of
from ch_fsdp.flat import flat_layout
from ch_fsdp.private import ParamGroup, param_groups
from ch_fsdp.replicas import replica_group
from ch_fsdp.replicate import ReplicateHook, broadcast, hooks_of
from ch_fsdp.shard import ShardAxis, ShardScatter
from ch_fsdp.steps import Steps
from commhooks.agreement import Fingerprint, agree_along
from commhooks.attaching import AttachOptions
from commhooks.bucket import BucketLayout, ParamLayout
from commhooks.engine import Engine
from commhooks.errors import AttachError, CommHooksError
from commhooks.handle import CommHook
from commhooks.reduction import Plain
from commhooks.state import HookState
from commhooks.trampoline import watch_outcome
from commhooks.transport import ProcessGroupTransport


class FSDP2Binding:
    """A handle in place on an FSDP2 model.

    Attributes:
        engine: the replicate axis's engine if there is one, else the shard axis's.
        layout: what that engine reduces: this rank's shards, or the flat gradients.
        group: the ranks of that engine.
        other_axes: further groups whose ranks load a state together.
        holder: the expression, ``None`` when detached.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        self.reduction = reduction_of(handle)
        self.holder: str | None = handle.expr
        self._model, self._expr, self._timeout = model, handle.expr, options.timeout
        self._shard_group, axes = self._agreed(options)
        self._replicas = self._find_replicas(options) if "replicate" in axes else None
        self.group = self._replicas or self._shard_group
        self.other_axes = (self._shard_group,) if self._replicas is not None else ()
        self._shard = ShardAxis(self.reduction, self._shard_group, self._timeout) if "shard" in axes else None
        engines: dict[str, Engine] = {}
        if self._shard is not None:
            engines["shard"] = self._shard.engine
        if self._replicas is not None:
            engines["replicate"] = self._replicate_engine(handle, self._replicas)
        relay = ProcessGroupTransport(self._shard_group) if self._replicas is not None else None
        self.steps = Steps(engines, self._inspect, relay)
        self.engine: Engine | None = engines.get("replicate") or engines["shard"]
        self._outcome = watch_outcome(self.engine, options)
        self._ready = False
        self._place(handle)
        self.layout = shards_layout(model, self.groups) if self._hooks else unsharded_layout(self.groups)

    @property
    def calls(self) -> int:
        return self.steps.calls

    def stats(self) -> dict[str, float]:
        return self.steps.stats()

    def check(self) -> None:
        self.steps.check()

    def ready(self) -> None:
        """The ranks have agreed: make the replicas equal."""
        self._ready = True
        if self._replicas is not None:
            broadcast(self._model, self._replicas)

    def detach(self) -> None:
        """Torch's own reduce-scatter again; between replicas plain averaging, or they would drift apart."""
        self.holder = None
        self._watching.remove()
        if self._outcome is not None:
            self._outcome.close()
        for comm in self._comms:
            comm.remove()
        if self._replicas is None:
            return
        plain = Engine(Plain(), ProcessGroupTransport(self._replicas), timeout=self._timeout)
        plain.sends_status = False  # the messages are exactly those of torch without a hook
        steps = Steps({"replicate": plain})
        for hook in self._hooks:
            hook.point(steps, None)
            if not self._ready:  # the ranks did not agree: as if nothing had been attached
                hook.remove()

    # -- attaching

    def _agreed(self, options: AttachOptions) -> tuple[dist.ProcessGroup, tuple[str, ...]]:
        """The shard group and the axes; a refusal on one rank is known to all ranks of the shard group."""
        shard_group = one_shard_group(self.groups)
        has_replicas = options.process_group is not None or dist.get_world_size() > shard_group.size()
        axes: tuple[str, ...] = ()
        refusal: CommHooksError | None = None
        try:
            axes = choose_axes(self.reduction, options.axis, has_replicas)
            check_groups(self.groups, axes, options)
        except CommHooksError as error:
            refusal = error
        if options.verify_ranks:
            fit = {"axes": axes, "does not fit": [str(refusal)] if refusal is not None else []}
            agree_along(self._expr, {**self._identity(), **fit}, [(shard_group, {})], self._timeout)
        if refusal is not None:
            raise refusal
        return shard_group, axes

    def _identity(self) -> Fingerprint:
        shapes = {name: shape for group in self.groups for name, shape in group.global_shapes().items()}
        return {"hook": [self._expr], "parameters": [f"{name}: {shape}" for name, shape in shapes.items()]}

    def _find_replicas(self, options: AttachOptions) -> dist.ProcessGroup:
        """The replicate group; along both axes, all have the same model, along this one the same shard of it."""
        replicas = options.process_group or replica_group(self._shard_group, self._timeout)
        assert replicas is not None  # noqa: S101 - choose_axes has seen to it
        if options.verify_ranks:
            here = {"shard": [self.groups[0].coordinate]}
            agree_along(self._expr, self._identity(), [(self._shard_group, {}), (replicas, here)], self._timeout)
        return replicas

    def _replicate_engine(self, handle: CommHook, replicas: dist.ProcessGroup) -> Engine:
        state = handle.state if handle.reduction is not None else HookState()
        if not isinstance(state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(state).__name__}")
        engine = Engine(self.reduction, ProcessGroupTransport(replicas), state, timeout=self._timeout)
        engine.keep_buckets = True
        return engine

    def _place(self, handle: CommHook) -> None:
        """Put comms and hooks into torch's slots. Several groups in a module need no setter, only their own."""
        self._comms: list[ShardScatter] = []
        self._hooks: list[ReplicateHook] = []
        if self._replicas is not None:
            self._hooks = hooks_of(self.groups)
            for hook in self._hooks:
                hook.point(self.steps, handle.expr)
            # Without it the flat shard lacks the parameters that had no gradient, and which ones cannot be told.
            include_unused = getattr(self._model, "set_reduce_scatter_unused_params", None)
            if include_unused is not None:
                include_unused(True)
        if self._shard is not None:
            self._comms = [ShardScatter(g, self._shard, self.steps, handle.expr) for g in self.groups]
        # torch reduce-scatters nothing over one rank, and calls nobody.
        reduces = bool(self._hooks) or self._shard_group.size() > 1
        self._unverified = {g.name for g in self.groups} if reduces else set()
        self._watching = self._model.register_forward_hook(self._watch)

    # -- is it being called

    def _watch(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Have the backward of this forward looked at even if no group calls in."""
        if not self._unverified:
            self._watching.remove()
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.steps.touch())
                return

    def _inspect(self) -> CommHooksError | None:
        """At the end of a backward: has every group called that has gradients?"""
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
        if called:
            self._unverified.discard(group.name)
        return not called and group.reduces and any(p.grad is not None for p in group.params)


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> FSDP2Binding:
    """The ``commhooks_adapter`` of FSDP2."""
    return FSDP2Binding(model, handle, options)


def shards_layout(model: torch.nn.Module, groups: list[ParamGroup]) -> BucketLayout:
    """This rank's shards of all groups as one virtual bucket, in model order."""
    order = {name: position for position, (name, _) in enumerate(model.named_parameters())}
    entries: list[ParamLayout] = []
    offset = 0
    for group in groups:
        layout = group.shards(group.reduce_dtype)
        entries += [ParamLayout(p.name, p.shape, p.stride, offset + p.offset) for p in layout.params]
        offset += layout.numel
    entries.sort(key=lambda p: order[p.name.partition("[")[0]])
    return BucketLayout(entries, offset, groups[0].reduce_dtype, groups[0].device)


def unsharded_layout(groups: list[ParamGroup]) -> BucketLayout:
    """The flat gradients of all groups as one virtual bucket."""
    return flat_layout({g.name: g.unsharded_numel() for g in groups}, groups[0].reduce_dtype, groups[0].device)
