"""torch's own 2-D mesh (HSDP): what this package reads or sets of it that torch keeps private.

On a mesh of (replicas, shards) FSDP2 all-reduces between the replicas itself, in full precision, before it calls any
hook. Whether it does is asked of the parameter group's ``mesh_info``; how a parameter is laid out is asked of the
parameter's own. So while a handle reduces between the replicas, the groups show a view of their mesh that has no
replicas, over the same process groups, and the parameters (``DTensor``, ``state_dict``, norms) keep both dimensions.
Of a replicated model (``replicate`` in ``torch.distributed._composable.replicate_with_fsdp``) nothing is left to show.
"""

from typing import Any

from ch_fsdp.replicate_axis import kept_back
from ch_fsdp.torch_internals import ParamGroup, missing, need

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
    """A group's mesh as torch sees it while a handle is attached: the shards' dimension of it.

    Attributes:
        native: torch's own description, put back by :func:`hand_back`.
    """

    native: HSDPMeshInfo


class Unsharded(DataParallelMeshInfo):
    """The same of a replicated model, which has no shards.

    Attributes:
        native: torch's own description.
    """

    native: DDPMeshInfo


def check_ready(group: ParamGroup) -> None:
    """Raise :class:`AttachError` if torch holds a part of a gradient that it would now never all-reduce."""
    if getattr(group.torch_group, "_partial_reduce_output", None) is not None:
        raise kept_back(group.name, "attaching")


def take_over(group: ParamGroup) -> None:
    """Keep torch from all-reducing a group's gradients between the replicas; nothing on a 1-D mesh."""
    inner, native = group.torch_group, group.torch_group.mesh_info
    if not isinstance(native, DDPMeshInfo):
        return
    need(inner, "post_forward_mesh_info")
    view = object.__new__(ShardsOnly if isinstance(native, HSDPMeshInfo) else Unsharded)
    vars(view).update(vars(native), native=native)
    _show(inner, native, view)


def hand_back(group: ParamGroup) -> None:
    """Let torch all-reduce again."""
    inner, view = group.torch_group, group.torch_group.mesh_info
    if not isinstance(view, ShardsOnly | Unsharded):
        return
    if isinstance(view, ShardsOnly) and hasattr(
        view, "reduce_scatter_process_group"
    ):  # the user may have set another one since
        view.native.reduce_scatter_process_group = view.reduce_scatter_process_group
    _show(inner, view, view.native)


def _show(inner: Any, old: DataParallelMeshInfo, new: DataParallelMeshInfo) -> None:
    # torch compares the two: were only one exchanged, it would take them for different meshes after the forward.
    if inner.post_forward_mesh_info == old:
        inner.post_forward_mesh_info = new
    inner.mesh_info = new
