"""Layouts of all gradients or weights of a model, over its parameter groups."""

from collections.abc import Collection, Mapping

import torch

from ch_fsdp.flat_sum import flat_layout
from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import BucketLayout, ParamLayout

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> unsharded shape of parameters."""


def model_order(groups: list[ParamGroup]) -> dict[str, int]:
    """Return name -> position in the model of every parameter."""
    return {name: at for group in groups for name, at in group.positions().items()}


def all_shapes(groups: list[ParamGroup]) -> Shapes:
    """Return the shapes of all parameters, in the order of the groups."""
    return {name: shape for group in groups for name, shape in group.all_shapes().items()}


def trainable_shapes(groups: list[ParamGroup], kept: Collection[str] = ()) -> Shapes:
    """Return the shapes of the trainable parameters and of the frozen ones in ``kept``, in the order of the groups."""
    return {name: shape for group in groups for name, shape in group.global_shapes(kept).items()}


def whole_layout(groups: list[ParamGroup], shapes: Shapes, dtype: torch.dtype) -> BucketLayout:
    """Return unsharded parameters, in model order."""
    order = model_order(groups)
    ordered = {name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}
    return BucketLayout.of_shapes(ordered, dtype, groups[0].device)


def shards_layout(groups: list[ParamGroup], kept: Collection[str] = ()) -> BucketLayout:
    """Return this rank's shards of all groups, and those of frozen parameters in ``kept``, in model order."""
    order: dict[str, int] = {}
    entries: list[ParamLayout] = []
    offset = 0
    for group in groups:
        layout = group.shards(group.reduce_dtype, kept)
        entries += [ParamLayout(p.name, p.shape, p.stride, offset + p.offset) for p in layout.params]
        order |= group.shard_positions()
        offset += layout.numel
    entries.sort(key=lambda p: order[p.name])
    return BucketLayout(entries, offset, groups[0].reduce_dtype, groups[0].device)


def unsharded_layout(groups: list[ParamGroup]) -> BucketLayout:
    """Return the flat gradients of all groups."""
    return flat_layout({g.name: g.unsharded_numel() for g in groups}, groups[0].reduce_dtype, groups[0].device)
