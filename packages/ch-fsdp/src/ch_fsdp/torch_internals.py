"""Everything this package reads or sets of FSDP2 that torch keeps private: the one file to look at when torch changes.

FSDP2 hands a hook a flat tensor without names, and its setters refuse modules with several parameter groups. Checked
when imported, and by ``tests/test_private.py``, against the installed torch. What belongs to the ends of backwards is
in ``private_ends``, to 2-D meshes in ``native_mesh``, FSDP1's in ``private1``.
"""

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commhooks import BucketLayout, HookNotSupportedError, ParamLayout, ShardLayout

REPLICATE = ("replicate", "dp_replicate")  # names of the mesh dimension that says which ranks are replicas
TRIED = "2.10, 2.13 and 2.15"
"""The versions of torch that this file was written for."""


def missing(owner: str, names: str) -> HookNotSupportedError:
    """The error of a torch that has not got what is used here."""
    return HookNotSupportedError(
        f"torch {torch.__version__}: {owner} has no {names}, which ch-fsdp uses; it was written for torch {TRIED}. "
        "Install one of those, or report this with the output of `python -m commhooks env`"
    )


def need(owner: object, *names: str) -> None:
    """Raise :class:`HookNotSupportedError` unless ``owner`` has all of ``names``."""
    absent = [name for name in names if not hasattr(owner, name)]
    if absent:
        raise missing(owner.__name__ if isinstance(owner, type) else type(owner).__name__, ", ".join(absent))


try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

# What exists from the start; the fields that instances make are asked for when one is met.
need(FSDPParamGroup, "post_backward", "_init_mp_dtypes")
need(FSDPParam, "to_sharded_dtensor")


class ParamGroup:
    """One FSDP2 parameter group: the parameters that one ``fully_shard`` call reduces together.

    Attributes:
        name: fully qualified name of its module, ``"root"`` for the model itself; with a number where the module has
            several groups.
        device: where its gradients are reduced.
        torch_group: torch's own object.
    """

    def __init__(self, name: str, group: Any, names: dict[tuple[int, str], str]) -> None:
        need(group, "fsdp_params", "modules", "comm_ctx", "mesh_info", "_reduce_scatter_comm", "_all_reduce_hook")
        need(group, "reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms")
        self.name = name
        self.device: torch.device = group.device
        self.torch_group = self._group = group
        self._names = names
        self._layouts: dict[tuple[torch.dtype, tuple[int, ...]], BucketLayout] = {}
        self._parts: dict[tuple[torch.dtype, tuple[int, ...]], ShardLayout] = {}
        self._held: list[tuple[dict[int, Any], dict[int, Any]]] = []  # hooks of parameters, and what was in them

    # what is in torch's two slots

    @property
    def comm(self) -> Any:
        """The object that reduce-scatters (``set_custom_reduce_scatter``, for one of several groups too)."""
        return self._group._reduce_scatter_comm

    @comm.setter
    def comm(self, comm: object) -> None:
        self._group._reduce_scatter_comm = comm

    @property
    def hook(self) -> Any:
        """What is called with the reduced shard (``set_all_reduce_hook``)."""
        return self._group._all_reduce_hook

    @hook.setter
    def hook(self, hook: object) -> None:
        self._group._all_reduce_hook = hook

    @property
    def includes_unused(self) -> bool:
        """Whether parameters without a gradient are reduced as zeros (``set_reduce_scatter_unused_params``)."""
        return bool(getattr(self._group, "reduce_scatter_unused_params", False))

    @includes_unused.setter
    def includes_unused(self, value: bool) -> None:
        if hasattr(self._group, "reduce_scatter_unused_params"):  # not in every torch: then a short shard is refused
            self._group.reduce_scatter_unused_params = value

    # what torch will do

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group that reduce-scatters; ``None`` if the parameters are not sharded (``replicate``)."""
        if not hasattr(self._group.mesh_info, "shard_process_group"):
            return None
        own = getattr(self._group.mesh_info, "reduce_scatter_process_group", None)
        return own or self._group.mesh_info.shard_process_group  # type: ignore[no-any-return]

    @property
    def native_replicas(self) -> dist.ProcessGroup | None:
        """The replicas of a 2-D mesh, between which torch itself all-reduces unless a handle does in its place."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @property
    def replicas_in_factor(self) -> int:
        """What a mean over the replicas is multiplied by: on a 2-D mesh ``set_gradient_divide_factor`` divides their sum."""
        native = self.native_replicas
        return native.size() if native is not None and self._group.gradient_divide_factor is not None else 1

    @property
    def sums_replicas(self) -> bool:
        """Whether the replicas' shards are added up and divided by nothing: a factor of 1 on a 2-D mesh."""
        return self.native_replicas is not None and self._group.gradient_divide_factor == 1.0

    @property
    def reduces(self) -> bool:
        """False under ``set_requires_gradient_sync(False)``."""
        return bool(self._group.reduce_grads)

    @property
    def all_reduces(self) -> bool:
        """False under ``set_requires_all_reduce(False)``."""
        return bool(getattr(self._group, "all_reduce_grads", True))

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype that is reduced: the mixed-precision policy's, or the gradients' own."""
        packed = self._packed()
        policy: torch.dtype | None = self._group._reduce_dtype
        if policy is not None or not packed:
            return policy or self.params[0].dtype
        if not hasattr(packed[0], "unsharded_grad_dtype"):  # before torch 2.15 one dtype for all of a group
            common: torch.dtype = packed[0].param_dtype or packed[0].orig_dtype
            return common
        own: list[torch.dtype] = [p.unsharded_grad_dtype or p.param_dtype or p.orig_dtype for p in packed]
        widest: torch.dtype = functools.reduce(torch.promote_types, own)
        return widest

    @property
    def undecided(self) -> list[str]:
        """Trainable parameters whose gradients' dtype only autograd knows (``grad_dtype=None``, from torch 2.15 on)."""
        packed = self._packed()
        if self._group._reduce_dtype is not None:
            return []
        return [self._fqn(p) for p in packed if getattr(p, "unsharded_grad_dtype", p.orig_dtype) is None]

    def _packed(self, kept: Collection[str] = ()) -> list[Any]:
        """Return the trainable parameters in the order of the flat tensor.

        Args:
            kept: names, with or without shard, of further parameters to include although they are frozen.
        """
        params: list[Any] = self._group.fsdp_params
        by_dtype = hasattr(self._group, "_init_reduce_scatter_param_order")  # from torch 2.15 on
        if not hasattr(params[0], "orig_dtype"):  # torch does this at the first forward
            self._group._init_mp_dtypes()
            if by_dtype:
                self._group._init_reduce_scatter_param_order()
        if by_dtype:
            params = [params[index] for index in self._group._reduce_scatter_param_indices]
        if not kept:
            return [p for p in params if p.sharded_param.requires_grad]
        also = [self._fqn(p) in kept or self._shard_name(p) in kept for p in params]
        return [p for p, one in zip(params, also, strict=True) if one or p.sharded_param.requires_grad]

    def may_call_again(self, calls: int) -> bool:
        """Whether torch may hand over more of this group's gradients before it ends the backward.

        It hands them over once for each use in a forward. Modules sharded together may be used one by one, which
        it does not count.

        Args:
            calls: how often it has in this backward.
        """
        uses = sum(used is self._group for used in self._group.comm_ctx.post_forward_order)
        return calls < uses or len(self._group.modules) > 1

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [p.sharded_param for p in self._group.fsdp_params]

    @property
    def declared_replicas(self) -> dist.ProcessGroup | None:
        """The ranks along the dimension called as in :data:`REPLICATE` of the mesh that this one was cut out of.

        ``None`` if the parameters are sharded over these ranks, too: flattened, the dimension is a part of this mesh.
        """
        mesh = self._group.mesh_info.mesh
        need(mesh, "_get_root_mesh")
        root: DeviceMesh = mesh._get_root_mesh()
        names = [name for name in REPLICATE if name in (root.mesh_dim_names or ())]
        found: dist.ProcessGroup | None = root.get_group(names[0]) if names else None
        if found is None or set(dist.get_process_group_ranks(found)) & set(mesh.mesh.flatten().tolist()) != {
            dist.get_rank()
        }:
            return None
        return found

    @property
    def copy_size(self) -> int:
        """Number of ranks that make up one copy of its parameters, as far as their meshes tell."""
        return max(p.device_mesh.size() for p in self.params if isinstance(p, DTensor))

    def mixes_tensor_parallel(self) -> bool:
        """Whether some parameters are cut by tensor parallelism and others are the same on all its ranks."""
        return len({_cuts(p) for p in self.params}) > 1

    def reshard(self) -> None:
        """Free what a forward without a backward has left gathered: what is written to the shards would not reach it."""
        self._group.reshard()

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.params)

    def unsharded_numel(self) -> int:
        """Elements of a reduce-scatter's input: the trainable parameters, padded."""
        return self.shards(self.reduce_dtype).numel * (self.shard_group.size() if self.shard_group is not None else 1)

    def shards(self, dtype: torch.dtype, kept: Collection[str] = ()) -> BucketLayout:
        """Names (``"w[0/2]"``) and shapes of this rank's shards, in the order of the flat tensor that the hook sees.

        Valid when every trainable parameter is in it (``set_reduce_scatter_unused_params(True)``). With ``kept`` also
        these frozen parameters have a place, which no flat tensor has.
        """
        packed = self._packed(kept)
        key = (dtype, tuple(map(id, packed)))
        if key not in self._layouts:
            entries, offset = [], 0
            for p in packed:
                stride = tuple(p.contiguous_sharded_stride)
                entries.append(ParamLayout(self._shard_name(p), tuple(p.sharded_size), stride, offset))
                offset += math.prod(p.padded_sharded_param_size)
            self._layouts[key] = BucketLayout(entries, offset, dtype, self.device)
        return self._layouts[key]

    def parts(self, dtype: torch.dtype) -> ShardLayout:
        """How a reduce-scatter's input is cut: each part has a padded chunk of every trainable parameter, by its name.

        Valid as :meth:`shards` is.
        """
        packed = self._packed()
        key = (dtype, tuple(map(id, packed)))
        if key not in self._parts:
            padded = {self._fqn(p): tuple(p.padded_sharded_param_size) for p in packed}
            part = BucketLayout.of_shapes(padded, dtype, self.device)
            dims = {self._fqn(p): p.fsdp_placement.dim for p in packed}
            self._parts[key] = ShardLayout(part, self.global_shapes(), dims)
        return self._parts[key]

    @property
    def tensor_parallel(self) -> list[str]:
        """Parameters that are cut by tensor parallelism as well."""
        return [self._fqn(p) for p in self._group.fsdp_params if "x" in coordinate(p.sharded_param)]

    # what torch does after its hook, where the average comes later

    def hold_hooks(self) -> None:
        """Keep back the parameters' post-accumulate-grad hooks: what torch now adds is not the gradient yet."""
        if self._held:
            return
        for param in self.params:
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            self._held.append((hooks, dict(hooks)))
            hooks.clear()

    def release_hooks(self) -> None:
        for hooks, held in self._held:
            hooks.update(held)
        self._held.clear()

    def give(self, average: torch.Tensor) -> None:
        """Add an average to the parameters' gradients, as torch does with what its hook leaves.

        Args:
            average: of the flat shards, ``(shards(dtype).numel,)``; may be kept.
        """
        self.release_hooks()
        group = self._group
        size, factor, sums = self.shard_group, group.gradient_divide_factor, group.force_sum_reduction_for_comms
        after = _get_gradient_divide_factors(size, None, average.dtype, self.device.type, factor, sums)[1]
        if after is not None and after != 1:
            average.div_(after)
        for p, entry in zip(self._packed(), self.shards(average.dtype).params, strict=True):
            param, new = p.sharded_param, average.as_strided(entry.shape, entry.stride, entry.offset)
            dtype = p.sharded_grad_dtype if hasattr(p, "sharded_grad_dtype") else param.dtype
            # Cast first, then added: what other ranks were given in time is rounded so.
            local = new.to("cpu" if p.offload_to_cpu else new.device, dtype or new.dtype)
            if param.grad is not None:
                if p.grad_offload_event is not None:  # the host adds to what is still being copied to it
                    p.grad_offload_event.synchronize()
                param.grad._local_tensor.add_(local)
            else:
                param.grad = p.to_sharded_dtensor(local)
            for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
                hook(param)

    def global_shapes(self, kept: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """Return name -> unsharded shape of the trainable parameters, and of the frozen ones in ``kept``."""
        return {self._fqn(p): tuple(p.sharded_param.shape) for p in self._packed(kept)}

    def positions(self) -> dict[str, int]:
        """Return name -> position of the parameter in the model."""
        position = {name: number for number, name in enumerate(self._names.values())}
        return {(fqn := self._fqn(p)): position[fqn] for p in self._group.fsdp_params}

    def order(self) -> dict[str, int]:
        """Return name with its shard -> position of the parameter in the model."""
        positions = self.positions()
        return {self._shard_name(p): positions[self._fqn(p)] for p in self._group.fsdp_params}

    def sharded_params(self) -> dict[str, torch.nn.Parameter]:
        """Return name -> this rank's shard of every parameter, trainable or frozen."""
        return {self._fqn(p): p.sharded_param for p in self._group.fsdp_params}

    def _shard_name(self, param: Any) -> str:
        return self._fqn(param) + coordinate(param.sharded_param)

    def _fqn(self, param: Any) -> str:
        info = param._module_info
        return self._names[id(info.module), info.param_name]


def param_groups(model: torch.nn.Module) -> list[ParamGroup]:
    """Every parameter group below ``model``, in module order, each once."""
    names = _names(model)
    found: dict[int, ParamGroup] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            groups = _groups_of(module)
            for number, group in enumerate(groups):
                label = (name or "root") + (f"#{number}" if len(groups) > 1 else "")
                found.setdefault(id(group), ParamGroup(label, group, names))
    return list(found.values())


def _names(model: torch.nn.Module) -> dict[tuple[int, str], str]:
    """Module and attribute -> the parameter's name in ``model.named_parameters()``, which a wrapper may have shortened."""
    slots = [
        (id(module), name)
        for _, module in model.named_modules(remove_duplicate=False)
        for name, param in module._parameters.items()
        if param is not None
    ]
    public = (name for name, _ in model.named_parameters(remove_duplicate=False))
    names: dict[tuple[int, str], str] = {}
    for slot, name in zip(slots, public, strict=True):
        names.setdefault(slot, name)
    return names


def coordinate(param: torch.nn.Parameter) -> str:
    """Which part of a parameter this rank holds, as a suffix of its name: ``"[0/2]"``; empty if all of it.

    Of a parameter cut along several dimensions of a mesh it is the place in these, ``"[0.1/2x2]"``. Dimensions along
    which it is the same count for nothing, so ranks with the same numbers call them by the same name.
    """
    if not isinstance(param, DTensor):
        return ""
    place = param.device_mesh.get_coordinate() or [0] * param.device_mesh.ndim
    cut = [
        (str(at), str(size))
        for at, size, placement in zip(place, param.device_mesh.shape, param.placements, strict=True)
        if size > 1 and not placement.is_replicate()
    ]
    return f"[{'.'.join(at for at, _ in cut)}/{'x'.join(size for _, size in cut)}]" if cut else ""


def _cuts(param: torch.nn.Parameter) -> int:
    """Number of parts that a parameter is cut into, over all dimensions of its mesh."""
    _, _, sizes = coordinate(param).strip("[]").partition("/")
    return math.prod(map(int, sizes.split("x"))) if sizes else 1


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    need(state, "_fsdp_param_group")  # torch before 2.13
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def premultiplier(op: Any) -> float:
    """The factor inside a ``PREMUL_SUM``; gloo cannot carry one out, but we can."""
    factor = op.__getstate__()[1]
    return float(factor)
