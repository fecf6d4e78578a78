"""Chooses the axes of an FSDP2 model for a hook and their ranks, and refuses models that a hook cannot serve."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ch_core import Fingerprint, agree_along
from ch_fsdp.flat_sum import fits_flat, is_cast
from ch_fsdp.layouts import Shapes
from ch_fsdp.replicate_axis import ReplicateHook, gradients_kept
from ch_fsdp.shard_axis import ShardScatter
from ch_fsdp.torch_internals.hsdp_mesh import has_partial_sums
from ch_fsdp.torch_internals.param_groups import REPLICATE_DIMS, ParamGroup
from commhooks import (
    AttachError,
    AttachOptions,
    CommHook,
    CommHooksError,
    HookConfigError,
    HookNotSupportedError,
    Reduction,
)

_TWO_AXES = (
    "fully_shard(module, mesh=mesh) with a 2-D mesh of (replicas, shards), or with its shard dimension alone and "
    "attach(process_group=...) of the other"
)


def choose_axes(reduction: Reduction, axis: str | None, has_replicas: bool) -> tuple[str, ...]:
    """Return the axes for a reduction.

    Args:
        reduction: the reduction.
        axis: ``"shard"``, ``"replicate"``, or ``None`` to choose by the reduction.
        has_replicas: True if there is a replicate axis.

    Raises:
        HookConfigError: ``axis`` is no axis.
        HookNotSupportedError: the reduction fits no axis, or not the given one.

    Example:
        >>> from commhooks import Plain
        >>> choose_axes(Plain(), None, True), choose_axes(Plain(), None, False)
        (('replicate',), ('shard',))
    """
    if axis not in (None, "shard", "replicate"):
        raise HookConfigError(f"axis={axis!r}: expected 'shard', 'replicate', 'gather' or None")
    scatters = fits_flat(reduction) or reduction.scatters
    if axis == "replicate" or (axis is None and not (scatters if not has_replicas else fits_flat(reduction))):
        if has_replicas:
            return ("replicate",)
        raise HookNotSupportedError(
            f"{reduction!r} reduces between replicas, and there is none. All {dist.get_world_size()} ranks share one "
            f"shard mesh, where each rank keeps only a part of the sum. Use {_TWO_AXES}"
        )
    if axis == "shard" and not scatters:
        raise HookNotSupportedError(
            f"{reduction!r} cannot run on the shard axis, where each rank keeps a part of the average, because it has no "
            "run_scatter(). Use axis='replicate', or a hook that has it, such as quant4, quant8 or "
            "bf16_compress(accumulate='fp32')"
        )
    if axis == "shard" or not has_replicas:
        return ("shard",)
    return ("shard", "replicate") if is_cast(reduction) else ("replicate",)


def agree_on_axes(
    handle: CommHook,
    options: AttachOptions,
    shapes: Shapes,
    axes: Sequence[str],
    along: Sequence[tuple[dist.ProcessGroup, Fingerprint]],
    refusal: CommHooksError | None,
) -> None:
    """Compare the ranks of all process groups of the mesh.

    Args:
        handle: the handle.
        options: arguments of ``attach``.
        shapes: the parameters.
        axes: chosen on this rank.
        along: the process groups, each with facts that only its own ranks must share.
        refusal: error of this rank.

    Raises:
        RankMismatchError: ranks differ, or a rank refuses the hook alone.
        CommHooksError: the error of this rank, if all ranks have it.
    """
    if options.verify_ranks:
        fields: Fingerprint = {
            "hook": handle.identity,
            "parameters": [f"{name}: {shape}" for name, shape in shapes.items()],
            "axes": axes,
            "does not fit": [str(refusal)] if refusal is not None else [],
        }
        agree_along(handle.expr, fields, along, options.timeout)
    if refusal is not None:
        raise refusal


# -- process groups


def one_shard_group(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """Return the process group of all reduce-scatters, or ``None`` for a replicated model (``replicate``).

    Raises:
        AttachError: the model has no parameters.
        HookNotSupportedError: the parameter groups have different process groups.
    """
    if not groups:
        raise AttachError("this FSDP2 model has no parameters")
    return _same_for_all(
        groups,
        lambda group: group.shard_group,
        lambda over: over.group_name,
        "the parameter groups are sharded over different meshes ({}): one handle serves one shard mesh. Attach to a "
        "submodule whose groups share a mesh",
        lambda name: f" over group {name or 'none'}",
    )


def find_replicas(groups: list[ParamGroup], options: AttachOptions) -> dist.ProcessGroup | None:
    """Return the ranks with the same shard as this rank: the user's process group, or the replicas of the mesh.

    Each rank decides for itself, so that an agreement along all axes can report ranks that differ. This function never
    guesses, because pipeline stages of the same shapes look like replicas.

    Raises:
        HookConfigError: the user's ranks differ from those between which torch all-reduces.
        HookNotSupportedError: there are other ranks, and no mesh describes them.
    """
    if options.manager is not None:
        _refuse_other_replicas(groups, options)
        return None
    if options.axis == "shard":
        if groups[0].shard_group is None:
            raise HookNotSupportedError(
                "axis='shard': this model is replicated, not sharded (torch's replicate): leave axis out"
            )
        return None
    native = _native(groups)
    if options.process_group is not None:
        if native is not None and _ranks(options.process_group) != _ranks(native):
            raise HookConfigError(  # the text has no ranks, so that it is the same on all ranks of the mesh
                "process_group= has other ranks than the replicas' dimension of the model's 2-D mesh, along which torch "
                "reduces: leave process_group out"
            )
        return options.process_group
    if groups[0].shard_group is None:
        return native  # also if it is one rank, because there is no other axis
    declared = native or _declared(groups)
    if declared is not None:
        return declared if declared.size() > 1 else None
    others = dist.get_world_size() - max(group.copy_size for group in groups)
    if others:
        raise HookNotSupportedError(
            f"the model is sharded over {dist.get_world_size() - others} of {dist.get_world_size()} ranks, and its mesh "
            f"has no dimension called {' or '.join(map(repr, REPLICATE_DIMS))}. The other ranks may be replicas of this "
            "rank or hold other layers. Give attach(process_group=...) the ranks with the same shard, or axis='shard' if "
            "there are no replicas"
        )
    return None


def _same_for_all(
    groups: list[ParamGroup],
    of: Callable[[ParamGroup], dist.ProcessGroup | None],
    key: Callable[[dist.ProcessGroup], Any],
    refusal: str,
    shown: Callable[[Any], str] = lambda ranks: f": {f'{len(ranks)} ranks' if ranks else 'none'}",
) -> dist.ProcessGroup | None:
    """Return the process group that every parameter group has.

    Args:
        groups: the parameter groups.
        of: returns the process group of a parameter group.
        key: returns equal keys for two process groups that count as the same.
        refusal: text of the error, with a place for the list of groups.
        shown: returns the text for a key or ``None``.

    Raises:
        HookNotSupportedError: the process groups differ.
    """
    found: dict[Any, list[str]] = {}
    for group in groups:
        over = of(group)
        found.setdefault(None if over is None else key(over), []).append(group.name)
    if len(found) > 1:
        raise HookNotSupportedError(
            refusal.format("; ".join(f"{', '.join(names)}{shown(one)}" for one, names in found.items()))
        )
    return of(groups[0])


def _native(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """Return the ranks between which torch itself all-reduces, or ``None`` on a 1-D mesh."""
    return _same_for_all(
        groups,
        lambda group: group.native_replicas,
        _ranks,
        "the parameter groups have different replicas by their 2-D meshes ({}): one handle reduces between the same ranks. "
        "Use one mesh for all fully_shard calls, or attach to a submodule whose groups share one",
    )


def _declared(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """Return the replicas that the meshes of all groups declare."""
    return _same_for_all(
        groups,
        lambda group: group.declared_replicas,
        _ranks,
        "the parameter groups' meshes declare different replicas ({}). Give attach(process_group=...) the group of ranks "
        "that hold the same shard, or use one mesh for all fully_shard calls",
    )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _refuse_other_replicas(groups: list[ParamGroup], options: AttachOptions) -> None:
    """With a manager the replicas are the other members, so the mesh must have none."""
    if options.axis == "shard":
        raise HookConfigError(
            "axis='shard' reduces inside a replica group, so with manager= no hook would reduce between the groups. Omit "
            "axis=, or use axis='replicate'"
        )
    declared = groups[0].declared_replicas
    if groups[0].native_replicas is not None or (declared is not None and declared.size() > 1):
        raise HookNotSupportedError(
            "with manager= the replicas are the other groups, but this model's mesh also has replicas. Use a mesh without "
            "the dimension of replicas, such as a 1-D mesh of shards inside the group"
        )


# -- parameter groups


def check_groups(groups: list[ParamGroup], axes: tuple[str, ...], reduction: Reduction) -> None:
    """Check that every parameter group is ready for a hook on these axes.

    Raises:
        AttachError: parameters on the meta device, a slot is taken, or torch keeps gradients from its all-reduce.
        HookNotSupportedError: tensor-parallel ranks would drift apart, or the dtype of gradients is unknown.
    """
    for group in groups:
        check_materialised(group)
        if "shard" in axes:
            ShardScatter.check_free(group)
            if not fits_flat(reduction) and group.tensor_parallel:
                raise HookNotSupportedError(
                    f"{group.name}: {', '.join(group.tensor_parallel)} are also cut by tensor parallelism, and {reduction!r} "
                    "needs whole parameters on the shard axis. Use axis='replicate' or bf16_compress"
                )
        if "replicate" in axes:
            ReplicateHook.check_free(group)
            if has_partial_sums(group):
                raise gradients_kept(group.name, "attaching")
            _check_dtypes(group)
            check_tensor_parallel(group, reduction)


def check_materialised(group: ParamGroup) -> None:
    """Raise AttachError if parameters are on the meta device."""
    if any(p.is_meta for p in group.params):
        raise AttachError(f"{group.name} is on the meta device: materialise its parameters before attaching")


def _check_dtypes(group: ParamGroup) -> None:
    # A replica that does not use a parameter sends zeros for it, so it must know their dtype.
    if group.trainable and group.undecided:
        raise HookNotSupportedError(
            f"{group.name}: {', '.join(group.undecided)} have grad_dtype=None, so the replicas do not know the dtype of "
            "their gradients. Set it with fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=...))"
        )


def check_tensor_parallel(group: ParamGroup, reduction: Reduction) -> None:
    """Raise HookNotSupportedError if parameters that tensor-parallel ranks share would drift apart."""
    if not group.mixes_tensor_parallel:
        return
    if reduction.lossy and reduction.granularity == "bucket":
        raise HookNotSupportedError(
            f"{group.name} has tensor-parallel parameters and parameters that are the same on all tensor-parallel ranks. "
            f"{reduction!r} treats a bucket as a whole, so the latter would drift apart. Use a hook that treats each parameter "
            "alone, or give fully_shard the two kinds separately"
        )
