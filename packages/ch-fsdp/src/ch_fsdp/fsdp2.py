"""The adapter for FSDP2 (``fully_shard``): a handle's hook on every parameter group below the model.

Axes: ``"shard"`` replaces the reduce-scatter inside the shard mesh, ``"replicate"`` reduces the shards between
replicas. By default casts are put on both, other reductions on the replicate axis.
"""

from typing import Any

import torch
import torch.distributed as dist
from commhooks.attaching import AttachOptions
from commhooks.bucket import BucketLayout, ParamLayout
from commhooks.engine import Engine
from commhooks.errors import AttachError, CommHooksError, HookConfigError, HookNotSupportedError
from commhooks.handle import CommHook
from commhooks.reduction import Plain, Reduction
from commhooks.state import HookState
from commhooks.transport import ProcessGroupTransport
from torch.utils._pytree import tree_leaves

from ch_fsdp.agreement import agree, replica_group
from ch_fsdp.flat import fits_flat, flat_layout, is_cast
from ch_fsdp.private import ParamGroup, param_groups
from ch_fsdp.replicate import ReplicateHook, ShardState, broadcast, hooks_of
from ch_fsdp.replicate import check_free as replicate_slot_free
from ch_fsdp.shard import ShardAxis, ShardScatter
from ch_fsdp.shard import check_free as shard_slot_free
from ch_fsdp.steps import Steps

_INSIDE = (
    "fully_shard(module, mesh=mesh['shard']) on the 1-D shard mesh inside the node, and let commhooks.attach reduce "
    "between the replicas (process_group=mesh['replicate'].get_group(), or none if all other ranks are replicas)"
)


class FSDP2Binding:
    """A handle in place on an FSDP2 model.

    Attributes:
        engine: the replicate axis's engine if there is one, else the shard axis's.
        layout: what that engine reduces: this rank's shards, or the flat gradients.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        self.reduction = reduction_of(handle)
        shard_group, axes = self._agreed(handle, options)
        replicas = self._replicas(model, shard_group, handle, options) if "replicate" in axes else None
        self._expr, self._timeout = handle.expr, options.timeout
        engines: dict[str, Engine] = {}
        self._shard = ShardAxis(self.reduction, shard_group, options.timeout) if "shard" in axes else None
        if self._shard is not None:
            engines["shard"] = self._shard.engine
        if replicas is not None:
            engines["replicate"] = self._replicate_engine(handle, replicas, shard_group)
        relay = ProcessGroupTransport(shard_group) if replicas is not None else None
        self.steps = Steps(engines, self._inspect, relay)
        self._comms: list[ShardScatter] = []
        if self._shard is not None:
            self._comms = [ShardScatter(g, self._shard, self.steps, handle.expr) for g in self.groups]
        self._hooks = self._point(model, replicas)
        self._replica_group = replicas
        # torch reduce-scatters nothing over one rank, and calls nobody.
        self._unverified = {g.name for g in self.groups} if self._hooks or shard_group.size() > 1 else set()
        self._watching = model.register_forward_hook(self._watch)
        self.engine: Engine | None = engines.get("replicate") or engines["shard"]
        self.layout = shards_layout(self.groups) if self._hooks else unsharded_layout(self.groups)

    @property
    def calls(self) -> int:
        return self.steps.calls

    def stats(self) -> dict[str, float]:
        return self.steps.stats()

    def check(self) -> None:
        self.steps.check()

    def detach(self) -> None:
        """Torch's own reduce-scatter again; between replicas plain averaging, or they would drift apart."""
        self._watching.remove()
        for comm in self._comms:
            comm.remove()
        if self._replica_group is not None:
            plain = Engine(Plain(), ProcessGroupTransport(self._replica_group), timeout=self._timeout)
            steps = Steps({"replicate": plain})
            for hook in self._hooks:
                hook.point(steps, None)

    # -- attaching

    def _agreed(self, handle: CommHook, options: AttachOptions) -> tuple[dist.ProcessGroup, tuple[str, ...]]:
        """The shard group and the axes; a refusal on one rank is known to all ranks of the shard group."""
        shard_group = one_shard_group(self.groups)
        axes: tuple[str, ...] = ()
        refusal: CommHooksError | None = None
        try:
            axes = choose_axes(self.reduction, options.axis, self._has_replicas(shard_group, options))
            self._check(axes, options)
        except CommHooksError as error:
            refusal = error
        if options.verify_ranks:
            agree({**self._identity(handle), "axes": axes, "fit": refusal}, [(shard_group, {})])
        if refusal is not None:
            raise refusal
        return shard_group, axes

    def _has_replicas(self, shard_group: dist.ProcessGroup, options: AttachOptions) -> bool:
        if options.process_group is not None:
            return True
        return dist.get_world_size() > shard_group.size()

    def _check(self, axes: tuple[str, ...], options: AttachOptions) -> None:
        for group in self.groups:
            if any(p.is_meta for p in group.params):
                raise AttachError(f"{group.name} is on the meta device: materialise its parameters before attaching")
            if "shard" in axes:
                shard_slot_free(group)
            if "replicate" not in axes:
                continue
            replicate_slot_free(group)
            if group.native_replicas:
                raise HookNotSupportedError(
                    f"{group.name} is sharded over a 2-D mesh: FSDP2 then all-reduces between replicas itself, before "
                    f"any hook, and nothing is saved. Use {_INSIDE}"
                )
            if options.process_group is None and any(m is not None and m.ndim > 1 for m in map(mesh_of, group.params)):
                raise HookNotSupportedError(
                    f"{group.name} has tensor-parallel parameters, so which ranks are replicas cannot be told from the "
                    "shard mesh: give attach(process_group=...) the group of ranks that hold the same shard"
                )

    def _identity(self, handle: CommHook) -> dict[str, object]:
        shapes = {name: shape for group in self.groups for name, shape in group.global_shapes().items()}
        sizes = sorted({g.shard_group.size() for g in self.groups if g.shard_group is not None})
        return {"hook": handle.expr, "parameters": shapes, "shard mesh size": sizes, "torch": torch.__version__}

    def _replicas(
        self, model: torch.nn.Module, shard_group: dist.ProcessGroup, handle: CommHook, options: AttachOptions
    ) -> dist.ProcessGroup:
        replicas = options.process_group or replica_group(shard_group)
        assert replicas is not None  # noqa: S101 - choose_axes has seen to it
        if options.verify_ranks:
            here = {"shard coordinate": coordinate(shard_group, self.groups)}
            agree(self._identity(handle), [(shard_group, {}), (replicas, here)])
        broadcast(model, replicas)
        return replicas

    def _replicate_engine(self, handle: CommHook, replicas: dist.ProcessGroup, shard: dist.ProcessGroup) -> Engine:
        if not isinstance(handle.state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(handle.state).__name__}")
        state = ShardState(handle.state, coordinate(shard, self.groups))
        return Engine(self.reduction, ProcessGroupTransport(replicas), state, timeout=self._timeout)

    def _point(self, model: torch.nn.Module, replicas: dist.ProcessGroup | None) -> list[ReplicateHook]:
        if replicas is None:
            return []
        hooks = hooks_of(self.groups)
        for hook in hooks:
            hook.point(self.steps, self._expr)
        # Without it, the flat shard lacks the parameters that had no gradient, and which ones cannot be told.
        include_unused = getattr(model, "set_reduce_scatter_unused_params", None)
        if include_unused is not None:
            include_unused(True)
        return hooks

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


def reduction_of(handle: CommHook) -> Reduction:
    """What a handle runs; our FSDP1 functions stand for the reduction they carry.

    Raises:
        HookNotSupportedError: it is a foreign function.
    """
    reduction = handle.reduction or getattr(handle.built, "reduction", None)
    if not isinstance(reduction, Reduction):
        raise HookNotSupportedError(
            f"{handle.expr} is a hook function; FSDP2 calls none. Give a reduction: a name such as 'bf16_compress', or "
            "a generator function (bucket, ctx)"
        )
    return reduction


def choose_axes(reduction: Reduction, axis: str | None, has_replicas: bool) -> tuple[str, ...]:
    """The axes that a reduction is put on.

    Raises:
        HookConfigError: no such axis.
        HookNotSupportedError: it fits none, or not the one asked for.

    Example:
        >>> choose_axes(Plain(), None, True), choose_axes(Plain(), None, False)
        (('replicate',), ('shard',))
    """
    if axis not in (None, "shard", "replicate"):
        raise HookConfigError(f"axis={axis!r}: expected 'shard', 'replicate' or None")
    if axis == "replicate" or (axis is None and not fits_flat(reduction)):
        if has_replicas:
            return ("replicate",)
        raise HookNotSupportedError(
            f"{reduction!r} reduces between replicas, and there is none: all {dist.get_world_size()} ranks share one "
            f"shard mesh, where each rank keeps only a part of the sum. Use {_INSIDE}"
        )
    if axis == "shard" and not fits_flat(reduction):
        raise HookNotSupportedError(
            f"{reduction!r} cannot run on the shard axis: a reduce-scatter leaves each rank a part of the sum, while "
            "it needs whole parameters, their names and shapes, and the same result on every rank. Use "
            "axis='replicate', or bf16_compress(accumulate='fp32') on this axis"
        )
    if axis == "shard" or not has_replicas:
        return ("shard",)
    return ("shard", "replicate") if is_cast(reduction) else ("replicate",)


def one_shard_group(groups: list[ParamGroup]) -> dist.ProcessGroup:
    """The process group that all parameter groups are sharded over.

    Raises:
        AttachError: no parameters to train.
        HookNotSupportedError: they are not sharded, or over several groups.
    """
    if not any(group.trainable for group in groups):
        raise AttachError("this FSDP2 model has no trainable parameters")
    by_name: dict[str, list[str]] = {}
    first: dist.ProcessGroup | None = None
    for group in groups:
        process_group = group.shard_group
        if process_group is None:
            raise HookNotSupportedError(
                f"{group.name} is replicated, not sharded (torch's replicate): wrap it in DistributedDataParallel, "
                f"whose buckets hooks can use, or use {_INSIDE}"
            )
        first = first or process_group
        by_name.setdefault(process_group.group_name, []).append(group.name)
    if len(by_name) > 1:
        named = "; ".join(f"{', '.join(names)} over group {key}" for key, names in by_name.items())
        raise HookNotSupportedError(
            f"the parameter groups are sharded over different meshes ({named}): one handle serves one shard mesh. "
            "Attach to a submodule whose groups share a mesh"
        )
    assert first is not None  # noqa: S101
    return first


def coordinate(shard_group: dist.ProcessGroup, groups: list[ParamGroup]) -> str:
    """This rank's place among the shards, e.g. ``"0/2"``; with tensor parallelism the place in the whole mesh."""
    mesh = mesh_of(groups[0].params[0])
    if mesh is not None and mesh.ndim > 1:
        return f"{'.'.join(map(str, mesh.get_coordinate()))}/{'x'.join(map(str, mesh.mesh.shape))}"
    return f"{shard_group.rank()}/{shard_group.size()}"


def mesh_of(param: torch.Tensor) -> Any:
    """The device mesh that a parameter is distributed over, if it is."""
    return getattr(param, "device_mesh", None)


def shards_layout(groups: list[ParamGroup]) -> BucketLayout:
    """This rank's shards of all groups as one virtual bucket."""
    entries: list[ParamLayout] = []
    offset = 0
    for group in groups:
        layout = group.shards(group.reduce_dtype)
        entries += [ParamLayout(p.name, p.shape, p.stride, offset + p.offset) for p in layout.params]
        offset += layout.numel
    return BucketLayout(entries, offset, groups[0].reduce_dtype, groups[0].device)


def unsharded_layout(groups: list[ParamGroup]) -> BucketLayout:
    """The flat gradients of all groups as one virtual bucket."""
    return flat_layout({g.name: g.unsharded_numel() for g in groups}, groups[0].reduce_dtype, groups[0].device)
