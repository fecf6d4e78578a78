"""Layouts of DDP's buckets and of a whole model, and the search for the model of given parameters.

PyTorch's ``hook(state, bucket)`` sees neither model nor parameter names. The order of buckets does not tell the order in
the model either: dtypes have separate buckets, and DDP rebuilds buckets after the first step. So this module searches
Python's live objects for the model, once per state.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks import BucketLayout, GradBucket, HookState, ParamLayout, StateError


def bucket_layout(grad_bucket: GradBucket, names: Mapping[int, str]) -> BucketLayout:
    """Return the layout of a ``GradBucket``.

    DDP stores a dense gradient in the strides of its parameter, and a complex gradient as pairs of reals.

    Args:
        grad_bucket: torch's bucket.
        names: ``id(parameter)`` -> name.
    """
    buffer = grad_bucket.buffer()
    if buffer.is_sparse:
        param = grad_bucket.parameters()[0]
        rows = torch.empty(param.shape, device="meta", dtype=torch.float32)  # sparse gradients ignore the strides
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


def averaged_params(
    model: DistributedDataParallel, names: Mapping[int, str] | None = None, *, frozen: bool = False
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters whose gradients DDP averages, in the order of DDP's own list. Ignored parameters are left out.

    Args:
        model: DDP model.
        names: ``id(parameter)`` -> name. The default is the name in the wrapped module.
        frozen: True to include frozen parameters, which DDP makes equal when it wraps the model.
    """
    known = names if names is not None else {id(p): name for name, p in model.module.named_parameters()}
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for prefix, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            # DDP looks up a parameter of the outermost module as ".name". A shared one is ignored only under all its names.
            if (frozen or p.requires_grad) and f"{prefix}.{name}" not in model.parameters_to_ignore:
                found.setdefault(id(p), (known[id(p)], p))
    return list(found.values())


def model_layout(model: DistributedDataParallel, names: Mapping[int, str] | None = None) -> BucketLayout:
    """Return all parameters that DDP averages as one virtual bucket, in model order."""
    sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    params = dict(averaged_params(model, names))
    kinds = {
        n: "sparse" if id(p) in sparse else "complex" for n, p in params.items() if id(p) in sparse or p.is_complex()
    }
    return BucketLayout.of_tensors(params, kinds)


class Numbered(dict[int, str]):
    """``id(parameter)`` -> a name for this process alone, made on first access."""

    def __missing__(self, key: int) -> str:
        return self.setdefault(key, f"parameter {len(self)}")


def named_by_position(state: HookState, params: Sequence[torch.Tensor]) -> dict[int, str]:
    """Bind a state to the model of these parameters, and return the names of all parameters of that model.

    Names from a loaded checkpoint stay, position by position.

    Raises:
        StateError: no model or several different models have these parameters, or the state belongs to another model.
    """
    bound = state.names()
    if all(id(p) in bound for p in params):
        return bound
    state.bind_by_position(_trained_with(params, state))
    return state.names()


def _trained_with(params: Sequence[torch.Tensor], state: HookState) -> list[torch.nn.Parameter]:
    having = models_of(params)
    own = [model for model in having if any(held is state for _, held in model._comm_hooks)]
    found = {tuple(map(id, rows)): rows for model in own or having if (rows := [p for _, p in averaged_params(model)])}
    if len(found) != 1:
        raise StateError(
            f"{len(found) or 'no'} DistributedDataParallel models hold the parameters of this hook state, so their order in "
            "the model is unknown (after gc.freeze() no model is found). Call state.bind(ddp_model) before the first step"
        )
    return next(iter(found.values()))


def models_of(params: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP models that have all of these parameters."""
    wanted = {id(p) for p in params}
    return [model for model in _models() if wanted <= {id(p) for _, p in averaged_params(model)}]


def _models() -> Iterator[DistributedDataParallel]:
    # type() instead of isinstance(): some lazy modules and dead proxies raise when asked for __class__.
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel) and hasattr(one, "module"):
            yield one
