"""Turns off FSDP2's average between replicas, so that an outer optimizer may average the moves of the replicas instead.

Inside a replica nothing changes. Its ranks gather parameters and reduce-scatter gradients in each step.
"""

import torch
import torch.distributed as dist

from ch_fsdp.axis import SlotObject
from ch_fsdp.replicate_axis import gradients_kept
from ch_fsdp.torch_internals.hsdp_mesh import disable_all_reduce, has_partial_sums
from ch_fsdp.torch_internals.param_groups import ParamGroup, param_groups
from commhooks import HookNotSupportedError, SlotTakenError


def of_fsdp2(model: torch.nn.Module) -> dist.ProcessGroup:
    """Leave each replica its own gradients. Return the ranks with the same shard.

    Raises:
        SlotTakenError: the script has attached a hook, or has set its own hook between replicas.
        HookNotSupportedError: the mesh has no replicas, or parameters have different replicas.
        AttachError: ``set_requires_all_reduce(False)`` has kept gradients.
    """
    groups = param_groups(model)
    for group in groups:
        _refuse_taken(group)
        if has_partial_sums(group):
            raise gradients_kept("an outer optimizer", "training")
    found = {group.name: group.native_replicas or group.declared_replicas for group in groups}
    replicas = {name: dist.get_process_group_ranks(one) for name, one in found.items() if one is not None}
    if without := sorted(found.keys() - replicas.keys()):
        raise HookNotSupportedError(
            f"an outer optimizer exchanges moves between replicas, and the mesh of {without[:4]} has none: all ranks hold parts "
            "of one model. Give every fully_shard() a mesh of two dimensions, the first over replicas, e.g. "
            "init_device_mesh('cuda', (replicas, ranks of one replica))"
        )
    if len({tuple(ranks) for ranks in replicas.values()}) > 1:
        raise HookNotSupportedError(
            f"an outer optimizer exchanges all parameters between the same ranks, and the units have the replicas {replicas}. "
            "Give every fully_shard() the same mesh"
        )
    for group in groups:
        if group.native_replicas is not None and (factor := group.divide_factor) is not None:
            group.divide_factor = factor / len(replicas[group.name])  # it divides a sum over all ranks of the mesh
        disable_all_reduce(group)
    between = found[groups[0].name]
    assert between is not None  # noqa: S101 - checked above
    return between


def _refuse_taken(group: ParamGroup) -> None:
    """Raise :class:`~commhooks.SlotTakenError` if the script reduces gradients of a group itself."""
    if group.hook is not None:
        raise SlotTakenError(f"{group.name} has {getattr(group.hook, 'expr', None) or group.hook} between replicas")
    for one in (group.comm, group.gather_comm):
        if isinstance(one, SlotObject):
            raise SlotTakenError(f"{group.name} has {one.expr} on its {one.axis} axis")
