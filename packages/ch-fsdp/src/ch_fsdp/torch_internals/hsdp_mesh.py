"""FSDP2's own all-reduce between replicas on a 2-D mesh (HSDP), switched off while a handle is attached.

FSDP2 all-reduces in full precision before it calls any hook. It decides that by the parameter group's ``mesh_info``. A
parameter's own mesh describes its layout. So this module gives the groups a view of their mesh without replicas, over the
same process groups. The parameters (``DTensor``, ``state_dict``, norms) keep both dimensions. The view of a replicated
model (``torch.distributed._composable.replicate_with_fsdp``) has no dimension.
"""

from typing import Any

from ch_fsdp.torch_internals.param_groups import ParamGroup
from ch_fsdp.torch_internals.required import missing, need

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DataParallelMeshInfo,
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
    )
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error


class ShardsOnly(FSDPMeshInfo):
    """A group's mesh without its dimension of replicas.

    Attributes:
        native: torch's own description, which :func:`enable_all_reduce` puts back.
    """

    native: HSDPMeshInfo


class Unsharded(DataParallelMeshInfo):
    """The mesh of a replicated model without its dimension of replicas.

    Attributes:
        native: torch's own description.
    """

    native: DDPMeshInfo


def has_partial_sums(group: ParamGroup) -> bool:
    """Return True if torch holds gradients that ``set_requires_all_reduce(False)`` kept from its all-reduce."""
    return getattr(group.torch_group, "_partial_reduce_output", None) is not None


def disable_all_reduce(group: ParamGroup) -> None:
    """Stop torch's all-reduce of a group's gradients. On a 1-D mesh there is none."""
    inner, native = group.torch_group, group.torch_group.mesh_info
    if not isinstance(native, DDPMeshInfo):
        return
    need(inner, "post_forward_mesh_info")
    view = object.__new__(ShardsOnly if isinstance(native, HSDPMeshInfo) else Unsharded)
    vars(view).update(vars(native), native=native)
    _replace(inner, native, view)


def enable_all_reduce(group: ParamGroup) -> None:
    """Let torch all-reduce again."""
    inner, view = group.torch_group, group.torch_group.mesh_info
    if not isinstance(view, ShardsOnly | Unsharded):
        return
    if isinstance(view, ShardsOnly) and hasattr(view, "reduce_scatter_process_group"):
        # The user may have called set_separate_reduce_scatter_group after attach.
        view.native.reduce_scatter_process_group = view.reduce_scatter_process_group
    _replace(inner, view, view.native)


def _replace(inner: Any, old: DataParallelMeshInfo, new: DataParallelMeshInfo) -> None:
    # torch compares both fields. If only one changed, torch would reshard to another mesh after the forward.
    if inner.post_forward_mesh_info == old:
        inner.post_forward_mesh_info = new
    inner.mesh_info = new
