"""Where a hook goes on an FSDP2 model: which axes, over which shard group, and what is refused, with the reason."""

import torch.distributed as dist

from ch_fsdp import replicate, shard
from ch_fsdp.flat import fits_flat, is_cast
from ch_fsdp.private import ParamGroup
from commhooks.attaching import AttachOptions
from commhooks.errors import AttachError, HookConfigError, HookNotSupportedError
from commhooks.handle import CommHook
from commhooks.reduction import Reduction

_INSIDE = (
    "fully_shard(module, mesh=mesh['shard']) on the 1-D shard mesh inside the node, and let commhooks.attach reduce "
    "between the replicas (process_group=mesh['replicate'].get_group(), or none if all other ranks are replicas)"
)


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
        >>> from commhooks.reduction import Plain
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


def check_groups(groups: list[ParamGroup], axes: tuple[str, ...], options: AttachOptions) -> None:
    """Whether every parameter group is ready for a hook on these axes.

    Raises:
        AttachError: parameters on the meta device; a slot is taken.
        HookNotSupportedError: torch itself all-reduces between replicas; replicas cannot be told.
    """
    for group in groups:
        if any(p.is_meta for p in group.params):
            raise AttachError(f"{group.name} is on the meta device: materialise its parameters before attaching")
        if "shard" in axes:
            shard.check_free(group)
        if "replicate" in axes:
            replicate.check_free(group)
            _check_replicas(group, options)


def _check_replicas(group: ParamGroup, options: AttachOptions) -> None:
    if group.native_replicas:
        raise HookNotSupportedError(
            f"{group.name} is sharded over a 2-D mesh: FSDP2 then all-reduces between replicas itself, before any "
            f"hook, and nothing is saved. Use {_INSIDE}"
        )
    if options.process_group is None and group.tensor_parallel:
        raise HookNotSupportedError(
            f"{group.name} has tensor-parallel parameters, so which ranks are replicas cannot be told from the shard "
            "mesh: give attach(process_group=...) the group of ranks that hold the same shard"
        )
