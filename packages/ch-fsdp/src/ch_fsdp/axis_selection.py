"""Where a hook goes on an FSDP2 model: which axes, over which shard group, and what is refused, with the reason."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ch_fsdp import native_mesh, replicate_axis, shard_axis
from ch_fsdp.flat_reduction import fits_flat, is_cast
from ch_fsdp.torch_internals import REPLICATE, ParamGroup
from commhooks import AttachError, CommHook, HookConfigError, HookNotSupportedError, Reduction
from commhooks.adapters import AttachOptions

_INSIDE = (
    "fully_shard(module, mesh=mesh) with a 2-D mesh of (replicas, shards), or with its shard dimension alone and "
    "attach(process_group=...) of the other"
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
    parted = fits_flat(reduction) or reduction.scatters
    if axis == "replicate" or (axis is None and not (parted if not has_replicas else fits_flat(reduction))):
        if has_replicas:
            return ("replicate",)
        raise HookNotSupportedError(
            f"{reduction!r} reduces between replicas, and there is none: all {dist.get_world_size()} ranks share one "
            f"shard mesh, where each rank keeps only a part of the sum. Use {_INSIDE}"
        )
    if axis == "shard" and not parted:
        raise HookNotSupportedError(
            f"{reduction!r} cannot run on the shard axis: a reduce-scatter leaves each rank a part of the sum, and it has "
            "no run_scatter(): it needs the same result on every rank. Use axis='replicate', or a hook that can leave "
            "parts, such as quant4, quant8 or bf16_compress(accumulate='fp32')"
        )
    if axis == "shard" or not has_replicas:
        return ("shard",)
    return ("shard", "replicate") if is_cast(reduction) else ("replicate",)


def one_shard_group(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """The process group that all parameter groups are sharded over; ``None`` if they are replicated (``replicate``).

    Raises:
        AttachError: no parameters to train.
        HookNotSupportedError: they are sharded over several groups, or some are and others are not.
    """
    if not any(group.trainable for group in groups):
        raise AttachError("this FSDP2 model has no trainable parameters")
    return _same_for_all(
        groups,
        lambda group: group.shard_group,
        lambda over: over.group_name,
        "the parameter groups are sharded over different meshes ({}): one handle serves one shard mesh. Attach to a "
        "submodule whose groups share a mesh",
        lambda name: f" over group {name or 'none'}",
    )


def _same_for_all(
    groups: list[ParamGroup],
    of: Callable[[ParamGroup], dist.ProcessGroup | None],
    key: Callable[[dist.ProcessGroup], Any],
    refusal: str,
    shown: Callable[[Any], str] = lambda ranks: f": {f'{len(ranks)} ranks' if ranks else 'none'}",
) -> dist.ProcessGroup | None:
    """The process group that every parameter group has.

    Args:
        groups: the parameter groups.
        of: gives that of one; ``None``: it has none.
        key: the same of two process groups that count as one.
        refusal: the error's text, around what the groups have.
        shown: a key in that text, ``None`` included.

    Raises:
        HookNotSupportedError: they have not the same.
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


def find_replicas(groups: list[ParamGroup], options: AttachOptions) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard as this one: those given, or those that the mesh says are replicas.

    Decided by each rank for itself, so that ranks that disagree can be told along all axes.

    Which of the other ranks are replicas is never guessed: pipeline stages that are built alike look like them.

    Raises:
        HookConfigError: the ranks given are not those between which torch would all-reduce.
        HookNotSupportedError: there are further ranks, and nothing says what they are.
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
            raise HookConfigError(  # without the ranks: all ranks of the mesh must raise one and the same error
                "process_group= has other ranks than the replicas' dimension of the model's 2-D mesh, along which torch "
                "reduces: leave process_group out"
            )
        return options.process_group
    if groups[0].shard_group is None:
        return native  # of one rank, too: there is no other axis
    declared = native or _declared(groups)
    if declared is not None:
        return declared if declared.size() > 1 else None
    further = dist.get_world_size() - max(group.copy_size for group in groups)
    if further:
        raise HookNotSupportedError(
            f"the model is sharded over {dist.get_world_size() - further} of {dist.get_world_size()} ranks, and its mesh "
            f"has no dimension called {' or '.join(map(repr, REPLICATE))}: the other ranks may be replicas of this one, "
            "or hold other layers. Give attach(process_group=...) the group of ranks that hold the same shard, or "
            "axis='shard' if there are no replicas"
        )
    return None


def _native(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """Between whom torch itself all-reduces the gradients; ``None`` on a 1-D mesh."""
    return _same_for_all(
        groups,
        lambda group: group.native_replicas,
        _ranks,
        "the parameter groups have different replicas by their 2-D meshes ({}): one handle reduces between the same ranks. "
        "Use one mesh for all fully_shard calls, or attach to a submodule whose groups share one",
    )


def _declared(groups: list[ParamGroup]) -> dist.ProcessGroup | None:
    """The replicas that the groups' meshes declare, the same for all groups."""
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
    """With a manager: the replicas are the groups of other members, whoever takes part in a step."""
    if options.axis == "shard":
        raise HookConfigError(
            "axis='shard' reduces inside a replica group, and manager= between the groups, which nobody would then do: "
            "leave axis= out, or say axis='replicate'"
        )
    declared = groups[0].declared_replicas
    if groups[0].native_replicas is not None or (declared is not None and declared.size() > 1):
        raise HookNotSupportedError(
            "with manager= the replicas are the other groups, and this model's mesh has replicas of its own: use a 1-D mesh "
            "of shards inside the group, or one dimension of replicas less"
        )


def check_groups(groups: list[ParamGroup], axes: tuple[str, ...], reduction: Reduction) -> None:
    """Whether every parameter group is ready for a hook on these axes.

    Raises:
        AttachError: parameters on the meta device; a slot is taken; gradients are kept back by torch.
        HookNotSupportedError: tensor-parallel ranks would drift apart; gradients have no dtype that is known.
    """
    for group in groups:
        if any(p.is_meta for p in group.params):
            raise AttachError(f"{group.name} is on the meta device: materialise its parameters before attaching")
        if "shard" in axes:
            shard_axis.check_free(group)
            if not fits_flat(reduction) and group.tensor_parallel:
                raise HookNotSupportedError(
                    f"{group.name}: {', '.join(group.tensor_parallel)} are cut by tensor parallelism too, and {reduction!r} "
                    "on the shard axis keeps what belongs to whole parameters. Use axis='replicate', or bf16_compress here"
                )
        if "replicate" in axes:
            replicate_axis.check_free(group)
            native_mesh.check_ready(group)
            _check_dtypes(group)
            _check_tensor_parallel(group, reduction)


def _check_dtypes(group: ParamGroup) -> None:
    """A replica that does not use a parameter sends zeros for it, and has to know of which dtype."""
    if group.trainable and group.undecided:
        raise HookNotSupportedError(
            f"{group.name}: {', '.join(group.undecided)} have grad_dtype=None, and nothing says in which dtype the replicas "
            "reduce their gradients: give fully_shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=...)) the dtype that "
            "these gradients have"
        )


def _check_tensor_parallel(group: ParamGroup, reduction: Reduction) -> None:
    if not group.mixes_tensor_parallel():
        return
    if (reduction.lossy and reduction.granularity == "bucket") or _draws(reduction.node()):
        raise HookNotSupportedError(
            f"{group.name} has tensor-parallel parameters and others, which are the same on all tensor-parallel ranks; "
            f"{reduction!r} would round them there in different ways, because it treats a bucket as a whole or rounds "
            "at random, and they would drift apart. Use a hook that treats each parameter alone, or fully_shard the "
            "two kinds apart"
        )


def _draws(node: object) -> bool:
    """Whether an expression rounds at random anywhere."""
    if isinstance(node, Mapping):
        return node.get("rounding") == "stochastic" or any(map(_draws, node.values()))
    return isinstance(node, list | tuple) and any(map(_draws, node))
