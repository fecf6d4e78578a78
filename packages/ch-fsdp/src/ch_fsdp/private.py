"""Everything this package reads or sets that torch keeps private: the one file to look at when torch changes.

FSDP2 hands a hook a flat tensor without names, and its setters refuse modules with several parameter groups; FSDP1
registers no hook under hybrid sharding and tells a hook no unit. Checked by ``tests/test_private.py`` against the
installed torch.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import _traversal_utils as traversal
from torch.distributed.tensor import DTensor

from commhooks.bucket import BucketLayout, ParamLayout
from commhooks.errors import HookNotSupportedError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def _need(owner: object, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise HookNotSupportedError(
            f"torch {torch.__version__}: {type(owner).__name__} has no {', '.join(missing)}, which ch-fsdp reads; "
            "it is tested with torch 2.13. Report this with the output of `python -m commhooks env`"
        )


# -- FSDP2


class ParamGroup:
    """One FSDP2 parameter group: the parameters that one ``fully_shard`` call reduces together.

    Attributes:
        name: fully qualified name of its module, ``"root"`` for the model itself; with a number where the module has
            several groups.
        device: where its gradients are reduced.
    """

    def __init__(self, name: str, group: Any, names: dict[tuple[int, str], str]) -> None:
        _need(group, "fsdp_params", "mesh_info", "_reduce_scatter_comm", "_all_reduce_hook", "reduce_grads")
        self.name = name
        self.device: torch.device = group.device
        self._group = group
        self._names = names
        self._layouts: dict[tuple[torch.dtype, tuple[bool, ...]], BucketLayout] = {}

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

    # what torch will do

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group that reduce-scatters; ``None`` if the parameters are not sharded (``replicate``)."""
        if not hasattr(self._group.mesh_info, "shard_process_group"):
            return None
        own = getattr(self._group.mesh_info, "reduce_scatter_process_group", None)
        return own or self._group.mesh_info.shard_process_group  # type: ignore[no-any-return]

    @property
    def native_replicas(self) -> bool:
        """Whether torch itself all-reduces, before any hook (a 2-D mesh)."""
        return hasattr(self._group.mesh_info, "replicate_process_group")

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
        """The dtype that is reduced: the mixed-precision policy's, or the parameters' own."""
        policy = self._group.mp_policy
        own: torch.dtype = self.params[0].dtype
        return policy.reduce_dtype or policy.param_dtype or own

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [p.sharded_param for p in self._group.fsdp_params]

    @property
    def tensor_parallel(self) -> bool:
        """Whether the parameters are distributed over a mesh of more dimensions than the shard mesh."""
        return any(p.device_mesh.ndim > 1 for p in self.params if isinstance(p, DTensor)) and not self.native_replicas

    @property
    def coordinate(self) -> str:
        """Which shard this rank holds, as a suffix of names: ``"[0/2]"``; empty if it holds the whole parameters.

        With tensor parallelism it is the place in the whole mesh, ``"[0.1/2x2]"``.
        """
        first = self.params[0]
        if self.tensor_parallel and isinstance(first, DTensor):
            place = list(first.device_mesh.get_coordinate() or ())
            return f"[{'.'.join(map(str, place))}/{'x'.join(map(str, first.device_mesh.mesh.shape))}]"
        group = self.shard_group
        return f"[{group.rank()}/{group.size()}]" if group is not None and group.size() > 1 else ""

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.params)

    def unsharded_numel(self) -> int:
        """Elements of a reduce-scatter's input: the trainable parameters, padded."""
        return self.shards(self.reduce_dtype).numel * (self.shard_group.size() if self.shard_group is not None else 1)

    def shards(self, dtype: torch.dtype) -> BucketLayout:
        """Names (``"w[0/2]"``) and shapes of this rank's shards, in the order of the flat tensor that the hook sees.

        Valid when every trainable parameter is in it (``set_reduce_scatter_unused_params(True)``).
        """
        key = (dtype, tuple(p.requires_grad for p in self.params))
        if key not in self._layouts:
            entries, offset, where = [], 0, self.coordinate
            for p in self._group.fsdp_params:
                if p.sharded_param.requires_grad:
                    stride = tuple(p.contiguous_sharded_stride)
                    entries.append(ParamLayout(f"{self._fqn(p)}{where}", tuple(p.sharded_size), stride, offset))
                    offset += math.prod(p.padded_sharded_param_size)
            self._layouts[key] = BucketLayout(entries, offset, dtype, self.device)
        return self._layouts[key]

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> unsharded shape of the trainable parameters."""
        trainable = (p for p in self._group.fsdp_params if p.sharded_param.requires_grad)
        return {self._fqn(p): tuple(p.sharded_param.shape) for p in trainable}

    def _fqn(self, param: Any) -> str:
        info = param._module_info
        return self._names[id(info.module), info.param_name]


def param_groups(model: torch.nn.Module) -> list[ParamGroup]:
    """Every parameter group below ``model``, in module order, each once."""
    names: dict[tuple[int, str], str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters:
            names.setdefault((id(module), name), f"{prefix}.{name}" if prefix else name)
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
    _need(state, "_fsdp_param_group")  # torch before 2.13
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def premultiplier(op: Any) -> float:
    """The factor inside a ``PREMUL_SUM``; gloo cannot carry one out, but we can."""
    factor = op.__getstate__()[1]
    return float(factor)


# -- FSDP1


class Unit:
    """One FSDP1 unit: what one wrapped module reduces together.

    Attributes:
        name: fully qualified name of its module; ``"root"`` for the model itself.
    """

    def __init__(self, name: str, state: Any) -> None:
        _need(state, "_comm_hook", "_comm_hook_state", "process_group", "sharding_strategy", "_handle")
        self.name = name
        self._state = state

    @property
    def group(self) -> dist.ProcessGroup:
        """The group over which the unit is sharded (or, with ``NO_SHARD``, replicated)."""
        return self._state.process_group  # type: ignore[no-any-return]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Under hybrid sharding, the group of ranks that hold the same shard."""
        return self._state._inter_node_pg if self._state.sharding_strategy in HYBRID else None

    @property
    def sharded(self) -> bool:
        return self._state.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def hook(self) -> Any:
        return self._state._comm_hook

    @property
    def registered(self) -> Any:
        """The state that the hook was registered with."""
        return self._state._comm_hook_state

    def register(self, state: object, hook: object) -> None:
        """Put a hook in place; unlike ``register_comm_hook``, per unit and under hybrid sharding too."""
        self._state._comm_hook_state = state
        self._state._comm_hook = hook

    def numel(self) -> int:
        """Elements of the gradient that the hook is given, padded."""
        handle = self._state._handle
        if handle is None:
            return 0
        numel = int(math.prod(handle.flat_param._unpadded_unsharded_size))
        world = self.group.size() if self.sharded else 1
        return -(-numel // world) * world

    def dtype(self) -> torch.dtype:
        handle = self._state._handle
        return handle._reduce_dtype or torch.float32 if handle is not None else torch.float32


def is_inner(model: FullyShardedDataParallel) -> bool:
    """Whether this is known not to be the outermost FSDP1 wrapper: torch decides it at the first forward."""
    return model._is_root is False


def units(model: FullyShardedDataParallel) -> Iterator[Unit]:
    """Every FSDP1 unit of the model that has parameters, in module order."""
    names = {id(module): name for name, module in model.named_modules()}
    for state in traversal._get_fsdp_states(model):
        if state._handle is not None:
            yield Unit(names.get(id(state)) or "root", state)
