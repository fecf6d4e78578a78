"""The layouts of DDP's buckets, and of a whole model."""

from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks import BucketLayout, GradBucket, ParamLayout


def bucket_layout(grad_bucket: GradBucket, names: Mapping[int, str]) -> BucketLayout:
    """The layout of a ``GradBucket``.

    Args:
        grad_bucket: torch's bucket.
        names: ``id(parameter)`` -> name.

    DDP lays a dense parameter's gradient in its own strides, and a complex one as pairs of reals.
    """
    buffer = grad_bucket.buffer()
    if buffer.is_sparse:
        param = grad_bucket.parameters()[0]
        rows = torch.empty(param.shape, device="meta", dtype=torch.float32)  # in no strides of its own
        layout = ParamLayout.of(names[id(param)], rows, 0, "sparse")
        return BucketLayout([layout], param.numel(), buffer.dtype, buffer.device)
    params, offset = [], 0
    for param in grad_bucket.parameters():
        entry = ParamLayout.of(names[id(param)], param, offset, "complex" if param.is_complex() else "dense")
        if param.is_complex() and not buffer.is_complex():
            shape, stride = (*entry.shape, 2), (*(2 * s for s in entry.stride), 1)
            entry = ParamLayout(entry.name, shape, stride, offset, "complex")
        params.append(entry)
        offset += entry.numel
    return BucketLayout(params, buffer.numel(), buffer.dtype, buffer.device)


def averaged(
    model: DistributedDataParallel, names: Mapping[int, str] | None = None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters whose gradients are averaged, in model order, without those that DDP was told to ignore.

    Args:
        model: the DDP model.
        names: ``id(parameter)`` -> name; by default that in the module inside.
    """
    named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
    return [(n if names is None else names[id(p)], p) for n, p in named if n not in model.parameters_to_ignore]


def model_layout(model: DistributedDataParallel, names: Mapping[int, str] | None = None) -> BucketLayout:
    """All parameters that DDP averages as one virtual bucket, in model order; ``names`` as for :func:`averaged`."""
    sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    params = dict(averaged(model, names))
    kinds = {
        n: "sparse" if id(p) in sparse else "complex" for n, p in params.items() if id(p) in sparse or p.is_complex()
    }
    return BucketLayout.of_tensors(params, kinds)
