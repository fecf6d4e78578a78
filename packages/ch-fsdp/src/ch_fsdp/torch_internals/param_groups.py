"""FSDP2's parameter groups: their hook slots, and names and shapes of the flat tensors that a hook sees."""

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ch_fsdp.torch_internals.required import missing, need
from commhooks import BucketLayout, ParamLayout, ShardLayout

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

# These are methods. Fields exist on instances only, so `ParamGroup` checks them.
need(FSDPParamGroup, "post_backward", "_init_mp_dtypes")
need(FSDPParam, "to_sharded_dtensor")

REPLICATE_DIMS = ("replicate", "dp_replicate")
"""Names of a mesh dimension along which ranks are replicas."""


def _attribute(name: str) -> Any:
    """Return a property that reads and writes an attribute of torch's own parameter group."""

    def write(group: "ParamGroup", value: object) -> None:
        setattr(group.torch_group, name, value)

    return property(lambda group: getattr(group.torch_group, name), write)


class ParamGroup:
    """One FSDP2 parameter group: the parameters that one ``fully_shard`` call reduces together.

    Attributes:
        name: fully qualified name of its module, ``"root"`` for the model itself. If a module has several groups, the
            name ends with the group's number.
        device: device of the reduced gradients.
        torch_group: torch's own object.
    """

    def __init__(self, name: str, group: Any, names: dict[tuple[int, str], str]) -> None:
        need(group, "fsdp_params", "modules", "comm_ctx", "mesh_info", "_reduce_scatter_comm", "_all_reduce_hook")
        need(group, "_all_gather_comm", "post_forward_mesh_info", "mp_policy")
        need(group, "reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms")
        self.name = name
        self.device: torch.device = group.device
        self.torch_group = self._group = group
        self._names = names
        self._shard_layouts: dict[tuple[torch.dtype, tuple[int, ...]], BucketLayout] = {}
        self._scatter_layouts: dict[tuple[torch.dtype, tuple[int, ...]], ShardLayout] = {}
        self._gather_layouts: dict[torch.dtype, ShardLayout] = {}
        self._regather_layouts: dict[tuple[torch.dtype, int], ShardLayout] = {}
        self._paused: list[tuple[dict[int, Any], dict[int, Any]]] = []  # each parameter's hooks, and a copy of them
        self._empty: set[int] = set()  # identities of parameters that had no gradient when their hooks were taken out

    # -- torch's slots

    comm = _attribute("_reduce_scatter_comm")
    """The object that reduce-scatters, as ``set_custom_reduce_scatter`` sets it."""
    gather_comm = _attribute("_all_gather_comm")
    """The object that all-gathers, as ``set_custom_all_gather`` sets it."""
    hook = _attribute("_all_reduce_hook")
    """The function that torch calls with the reduced shard, as ``set_all_reduce_hook`` sets it."""

    @property
    def includes_unused(self) -> bool:
        """True if torch reduces parameters without a gradient as zeros (``set_reduce_scatter_unused_params``)."""
        return bool(getattr(self._group, "reduce_scatter_unused_params", False))

    @includes_unused.setter
    def includes_unused(self, value: bool) -> None:
        # torch 2.10 lacks the option. The hooks then refuse a shard that is too short.
        if hasattr(self._group, "reduce_scatter_unused_params"):
            self._group.reduce_scatter_unused_params = value

    # -- process groups

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group of the reduce-scatter, or ``None`` if the parameters are not sharded (``replicate``)."""
        if not hasattr(self._group.mesh_info, "shard_process_group"):
            return None
        own = getattr(self._group.mesh_info, "reduce_scatter_process_group", None)
        return own or self._group.mesh_info.shard_process_group  # type: ignore[no-any-return]

    @property
    def gather_group(self) -> dist.ProcessGroup | None:
        """The process group of the all-gather from the sharded parameters; ``None`` if they are not sharded."""
        return getattr(self._group.mesh_info, "shard_process_group", None)

    @property
    def regather_group(self) -> dist.ProcessGroup | None:
        """The smaller group that gathers in backward with ``reshard_after_forward=N``; ``None`` otherwise."""
        after = self._group.post_forward_mesh_info
        found: dist.ProcessGroup | None = getattr(after, "shard_process_group", None)
        return found if found is not self.gather_group else None

    @property
    def native_replicas(self) -> dist.ProcessGroup | None:
        """The replicas of a 2-D mesh, or ``None``. Without a handle, torch all-reduces between them."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @property
    def declared_replicas(self) -> dist.ProcessGroup | None:
        """The ranks along a dimension of the root mesh that is named as in :data:`REPLICATE_DIMS`.

        ``None`` if the parameters are also sharded over these ranks: a flattened dimension is a part of this mesh.
        """
        mesh = self._group.mesh_info.mesh
        need(mesh, "_get_root_mesh")
        root: DeviceMesh = mesh._get_root_mesh()
        names = [name for name in REPLICATE_DIMS if name in (root.mesh_dim_names or ())]
        found: dist.ProcessGroup | None = root.get_group(names[0]) if names else None
        if found is None:
            return None
        common = set(dist.get_process_group_ranks(found)) & set(mesh.mesh.flatten().tolist())
        return found if common == {dist.get_rank()} else None

    @property
    def copy_size(self) -> int:
        """Number of ranks that make up one copy of the parameters, by the meshes of the parameters."""
        return max(p.device_mesh.size() for p in self.params if isinstance(p, DTensor))

    # -- the user's settings

    @property
    def replicas_in_factor(self) -> int:
        """Factor for a mean over the replicas. On a 2-D mesh ``set_gradient_divide_factor`` divides their sum."""
        native = self.native_replicas
        return native.size() if native is not None and self._group.gradient_divide_factor is not None else 1

    divide_factor = _attribute("gradient_divide_factor")
    """The divisor of the gradients' sum over the whole mesh, by ``set_gradient_divide_factor``. ``None`` is a mean."""

    @property
    def sums_replicas(self) -> bool:
        """True if the replicas' shards are summed and never divided: a divide factor of 1 on a 2-D mesh."""
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
        """The dtype of the reduction, from the mixed-precision policy if it has one, otherwise from the gradients."""
        packed = self._packed()  # first, because it has torch set `_reduce_dtype`
        policy: torch.dtype | None = self._group._reduce_dtype
        if policy is not None or not packed:
            return policy or self.params[0].dtype
        if not hasattr(packed[0], "unsharded_grad_dtype"):  # before torch 2.15 a group has one dtype
            common: torch.dtype = packed[0].param_dtype or packed[0].orig_dtype
            return common
        own: list[torch.dtype] = [p.unsharded_grad_dtype or p.param_dtype or p.orig_dtype for p in packed]
        widest: torch.dtype = functools.reduce(torch.promote_types, own)
        return widest

    @property
    def undecided(self) -> list[str]:
        """Trainable parameters with ``grad_dtype=None`` (torch 2.15): only autograd knows their gradients' dtype."""
        packed = self._packed()  # first, because it has torch set `_reduce_dtype`
        if self._group._reduce_dtype is not None:
            return []
        return [self._fqn(p) for p in packed if getattr(p, "unsharded_grad_dtype", p.orig_dtype) is None]

    def may_call_again(self, calls: int) -> bool:
        """Return True if torch may hand over more gradients of this group before it ends the backward.

        torch hands them over once for each use in a forward. If several modules share the group, a forward may use them
        one by one, and torch does not count that.

        Args:
            calls: number of calls in this backward so far.
        """
        uses = sum(used is self._group for used in self._group.comm_ctx.post_forward_order)
        return calls < uses or len(self._group.modules) > 1

    # -- parameters

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [p.sharded_param for p in self._group.fsdp_params]

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.params)

    @property
    def tensor_parallel(self) -> list[str]:
        """Names of the parameters that tensor parallelism also cuts."""
        return [self._fqn(p) for p in self._group.fsdp_params if "x" in coordinate(p.sharded_param)]

    @property
    def mixes_tensor_parallel(self) -> bool:
        """True if tensor parallelism cuts some parameters and replicates others."""
        return len({_parts(p) for p in self.params}) > 1

    def reshard(self) -> None:
        """Free the parameters that a forward without a backward left gathered. They would hide changes of the shards."""
        self._group.reshard()

    def params_by_name(self) -> dict[str, torch.nn.Parameter]:
        """Return name -> this rank's shard of every parameter, trainable or frozen."""
        return {self._fqn(p): p.sharded_param for p in self._group.fsdp_params}

    def positions(self) -> dict[str, int]:
        """Return name -> position of the parameter in the model."""
        position = {name: number for number, name in enumerate(dict.fromkeys(self._names.values()))}
        return {(name := self._fqn(p)): position[name] for p in self._group.fsdp_params}

    def shard_positions(self) -> dict[str, int]:
        """Return name with shard (``"w[0/2]"``) -> position of the parameter in the model."""
        positions = self.positions()
        return {self._shard_name(p): positions[self._fqn(p)] for p in self._group.fsdp_params}

    def global_shapes(self, kept: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """Return name -> unsharded shape of the trainable parameters, and of the frozen ones in ``kept``."""
        return {self._fqn(p): tuple(p.sharded_param.shape) for p in self._packed(kept)}

    # -- the flat tensors

    def shards(self, dtype: torch.dtype, kept: Collection[str] = ()) -> BucketLayout:
        """Return names (``"w[0/2]"``) and shapes of this rank's shards, in the order of the flat tensor of the hook.

        The flat tensor has this layout if it holds every trainable parameter (``set_reduce_scatter_unused_params``).

        Args:
            dtype: dtype of the flat tensor.
            kept: names of frozen parameters that also get a place. No flat tensor holds them.
        """
        packed = self._packed(kept)
        key = (dtype, tuple(map(id, packed)))
        if key not in self._shard_layouts:
            entries, offset = [], 0
            for p in packed:
                stride = tuple(p.contiguous_sharded_stride)
                entries.append(ParamLayout(self._shard_name(p), tuple(p.sharded_size), stride, offset))
                offset += math.prod(p.padded_sharded_param_size)
            self._shard_layouts[key] = BucketLayout(entries, offset, dtype, self.device)
        return self._shard_layouts[key]

    def scatter_layout(self, dtype: torch.dtype) -> ShardLayout:
        """Return the layout of a reduce-scatter's input. Each rank's part has a padded chunk of every parameter.

        The input has this layout under the same condition as in :meth:`shards`.
        """
        packed = self._packed()
        key = (dtype, tuple(map(id, packed)))
        if key not in self._scatter_layouts:
            padded = {self._fqn(p): tuple(p.padded_sharded_param_size) for p in packed}
            part = BucketLayout.of_shapes(padded, dtype, self.device)
            dims = {self._fqn(p): p.fsdp_placement.dim for p in packed}
            self._scatter_layouts[key] = ShardLayout(part, self.global_shapes(), dims)
        return self._scatter_layouts[key]

    def gather_layout(self, dtype: torch.dtype) -> ShardLayout:
        """Return the layout of an all-gather's output: each rank's padded shard of every parameter, frozen ones too."""
        if dtype not in self._gather_layouts:
            params = self._group.fsdp_params
            padded = {self._fqn(p): tuple(p.padded_sharded_param_size) for p in params}
            dims = {self._fqn(p): p.fsdp_placement.dim for p in params}
            self._gather_layouts[dtype] = ShardLayout(
                BucketLayout.of_shapes(padded, dtype, self.device), self.all_shapes(), dims
            )
        return self._gather_layouts[dtype]

    def regather_layout(self, dtype: torch.dtype, world_size: int) -> ShardLayout:
        """Return the layout of the all-gather of :attr:`regather_group`, whose inputs are parts of gathered parameters."""
        key = (dtype, world_size)
        if key not in self._regather_layouts:
            assert self.gather_group is not None  # noqa: S101 - otherwise torch gathers nothing
            times = self.gather_group.size() // world_size
            padded = {p.name: (p.numel * times,) for p in self.gather_layout(dtype).part.params}
            whole = {name: (size[0] * world_size,) for name, size in padded.items()}
            self._regather_layouts[key] = ShardLayout(BucketLayout.of_shapes(padded, dtype, self.device), whole)
        return self._regather_layouts[key]

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> unsharded shape of every parameter, trainable or frozen."""
        return {self._fqn(p): tuple(p.sharded_param.shape) for p in self._group.fsdp_params}

    def gather_dtypes(self) -> dict[str, torch.dtype]:
        """Return name -> dtype in which each parameter is gathered. The mixed-precision policy sets it, or the
        parameter's dtype.
        """
        common: torch.dtype | None = self._group.mp_policy.param_dtype
        return {self._fqn(p): common or p.sharded_param.dtype for p in self._group.fsdp_params}

    def gathered_by_tensor(self) -> list[str]:
        """Return names of parameters whose tensor class codes its own gather (``fsdp_pre_all_gather``)."""
        return [
            self._fqn(p) for p in self._group.fsdp_params if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")
        ]

    def embeddings(self) -> list[str]:
        """Return names of parameters that an embedding looks up, tied ones too."""
        found = []
        for p in self._group.fsdp_params:
            info = p._module_info
            if any(
                isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) for m in (info.module, *info.shared_modules)
            ):
                found.append(self._fqn(p))
        return found

    def unsharded_numel(self) -> int:
        """Return the number of elements of a reduce-scatter's input: the trainable parameters, padded."""
        return self.shards(self.reduce_dtype).numel * (self.shard_group.size() if self.shard_group is not None else 1)

    # -- averages that arrive after torch has called the hook

    def pause_param_hooks(self) -> None:
        """Take out the parameters' post-accumulate-grad hooks: the zeros that torch now adds are no gradient."""
        if self._paused:
            return
        for param in self.params:
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            self._paused.append((hooks, dict(hooks)))
            hooks.clear()
            if param.grad is None:
                self._empty.add(id(param))

    def resume_param_hooks(self) -> None:
        """Put the hooks back, and drop torch's zeros of parameters that had no gradient.

        A replica that does not use such a parameter has no zeros. Both then take the average as it is. With zeros, -0.0 would
        become 0.0 on one of them.
        """
        for hooks, saved in self._paused:
            hooks.update(saved)
        self._paused.clear()
        for p in self._group.fsdp_params:
            if id(p.sharded_param) in self._empty:
                if p.grad_offload_event is not None:  # torch may still copy to this gradient
                    p.grad_offload_event.synchronize()
                p.sharded_param.grad = None
        self._empty.clear()

    def add_to_gradients(self, average: torch.Tensor) -> None:
        """Add an average to the parameters' gradients as torch does after its hook.

        Args:
            average: flat shards, ``(shards(dtype).numel,)``. The gradients may alias it.
        """
        self.resume_param_hooks()
        group = self._group
        size, factor, sums = self.shard_group, group.gradient_divide_factor, group.force_sum_reduction_for_comms
        after = _get_gradient_divide_factors(size, None, average.dtype, self.device.type, factor, sums)[1]
        if after is not None and after != 1:
            average.div_(after)
        for p, entry in zip(self._packed(), self.shards(average.dtype).params, strict=True):
            param, new = p.sharded_param, average.as_strided(entry.shape, entry.stride, entry.offset)
            dtype = p.sharded_grad_dtype if hasattr(p, "sharded_grad_dtype") else param.dtype
            # Cast, then add, as torch does. In the other order ranks would round differently.
            local = new.to("cpu" if p.offload_to_cpu else new.device, dtype or new.dtype)
            if param.grad is not None:
                if p.grad_offload_event is not None:  # torch may still copy to this gradient
                    p.grad_offload_event.synchronize()
                param.grad._local_tensor.add_(local)
            else:
                param.grad = p.to_sharded_dtensor(local)
            for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
                hook(param)

    # -- names

    def _packed(self, kept: Collection[str] = ()) -> list[Any]:
        """Return the trainable parameters in the order of the flat tensor, with the frozen ones in ``kept``."""
        params: list[Any] = self._group.fsdp_params
        by_dtype = hasattr(self._group, "_init_reduce_scatter_param_order")  # from torch 2.15 on
        if not hasattr(params[0], "orig_dtype"):  # torch does this in the first forward
            self._group._init_mp_dtypes()
            if by_dtype:
                self._group._init_reduce_scatter_param_order()
        if by_dtype:
            params = [params[index] for index in self._group._reduce_scatter_param_indices]
        if not kept:
            return [p for p in params if p.sharded_param.requires_grad]
        also = [self._fqn(p) in kept or self._shard_name(p) in kept for p in params]
        return [p for p, one in zip(params, also, strict=True) if one or p.sharded_param.requires_grad]

    def _fqn(self, param: Any) -> str:
        info = param._module_info
        return self._names[id(info.module), info.param_name]

    def _shard_name(self, param: Any) -> str:
        return self._fqn(param) + coordinate(param.sharded_param)


def all_params(groups: list[ParamGroup]) -> dict[str, torch.nn.Parameter]:
    """Return name -> this rank's shard of every parameter of some groups."""
    return {name: p for group in groups for name, p in group.params_by_name().items()}


def ignored_params(model: torch.nn.Module, groups: list[ParamGroup]) -> frozenset[int]:
    """Return the identities of parameters of ``model`` that are in no group (``fully_shard(ignored_params=...)``).

    torch neither shards nor reduces them, and ranks may differ in them. The groups are sharded when it is called.
    """
    return frozenset(map(id, model.parameters())).difference(map(id, all_params(groups).values()))


def managed_tensors(model: torch.nn.Module, groups: list[ParamGroup]) -> list[torch.Tensor]:
    """Return the parameters of some groups, and the buffers of ``model`` except those of modules whose parameters are all
    ignored.
    """
    ignored = ignored_params(model, groups)
    found: dict[int, torch.Tensor] = {id(p): p for p in all_params(groups).values()}

    def add_buffers(module: torch.nn.Module, managed: bool) -> None:
        params = list(module.parameters())
        managed = not ignored.issuperset(map(id, params)) if params else managed
        if managed:
            found.update({id(buffer): buffer for buffer in module.buffers(recurse=False)})
        for child in module.children():
            add_buffers(child, managed)

    add_buffers(model, True)
    return list(found.values())


def param_groups(model: torch.nn.Module) -> list[ParamGroup]:
    """Return every parameter group below ``model`` once, in module order."""
    names = _names(model)
    found: dict[int, ParamGroup] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            groups = _groups_of(module)
            for number, group in enumerate(groups):
                label = (name or "root") + (f"#{number}" if len(groups) > 1 else "")
                found.setdefault(id(group), ParamGroup(label, group, names))
    return list(found.values())


def _groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    need(state, "_fsdp_param_group")  # torch before 2.13
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _names(model: torch.nn.Module) -> dict[tuple[int, str], str]:
    """Return (module id, attribute) -> the parameter's name in ``model.named_parameters()``.

    A wrapper such as ``checkpoint_wrapper`` may shorten these names, and a model may list them in another order.
    """
    public = {id(param): name for name, param in model.named_parameters()}
    return {
        (id(module), attribute): public.get(id(param), f"{path}.{attribute}")
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute, param in module._parameters.items()
        if param is not None
    }


def coordinate(param: torch.nn.Parameter) -> str:
    """Return this rank's part of a parameter as a suffix of its name: ``"[0/2]"``, or ``""`` for the whole parameter.

    A parameter cut along two dimensions of a mesh has the suffix ``"[0.1/2x2]"``. Dimensions that replicate the
    parameter do not count, so all ranks with the same numbers use the same name.
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


def _parts(param: torch.nn.Parameter) -> int:
    """Return the number of parts of a parameter over all dimensions of its mesh."""
    _, _, sizes = coordinate(param).strip("[]").partition("/")
    return math.prod(map(int, sizes.split("x"))) if sizes else 1


def premultiplier(op: Any) -> float:
    """Return the factor of a ``PREMUL_SUM``, which gloo cannot carry out."""
    return float(op.__getstate__()[1])
