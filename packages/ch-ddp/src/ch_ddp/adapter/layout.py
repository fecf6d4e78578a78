"""Layouts of DDP's buckets and of a whole model, and the search for the model of given parameters.

PyTorch's ``hook(state, bucket)`` sees neither model nor parameter names. The order of buckets does not tell the order in
the model either: dtypes have separate buckets, and DDP rebuilds buckets after the first step. So this module searches
Python's live objects for the model, once per state.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import AttachError, BucketLayout, GradBucket, HookState, ParamLayout, StateError


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


def held_params(
    model: DistributedDataParallel, names: Mapping[int, str] | None = None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that DDP makes equal when it wraps the model, trainable and frozen, in model order.

    Ignored parameters are left out.

    Args:
        model: DDP model.
        names: ``id(parameter)`` -> name. The default is the name in the wrapped module.
    """
    known = names if names is not None else {id(p): name for name, p in model.module.named_parameters()}
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for prefix, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            # DDP looks up a parameter of the outermost module as ".name". A shared one is ignored only under all its names.
            full = f"{prefix}.{name}"
            if full not in model.parameters_to_ignore:
                found.setdefault(id(p), (known.get(id(p), full.removeprefix(".")), p))
    return list(found.values())


def averaged_params(
    model: DistributedDataParallel, names: Mapping[int, str] | None = None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters whose gradients DDP averages, in the order of DDP's own list.

    DDP averages what was trainable when it wrapped the model. A parameter that has been frozen since is averaged once it is
    thawed. A parameter that was frozen then is never averaged. Never call this inside a hook, because the reducer holds its lock.

    Raises:
        AttachError: a parameter that DDP averages has been removed or replaced.
    """
    held = held_params(model, names)
    try:
        averaged = {id(p) for bucket in _buckets(model) for p in bucket.parameters()}
    except RuntimeError:  # a bucket of sparse gradients has no memory before the first backward
        averaged = {id(p) for _, p in held if p.requires_grad}
    found = [(name, p) for name, p in held if id(p) in averaged]
    count = len(model.reducer.get_backward_stats())  # one number for each averaged parameter
    if len(found) != count:
        raise AttachError(
            f"DDP averages {count} parameters, and {len(found)} of them are in the model. The others were replaced, removed or "
            "frozen after DDP wrapped the model. Wrap the model again, then attach"
        )
    return found


def model_layouts(
    model: DistributedDataParallel, named: Sequence[tuple[str, torch.Tensor]]
) -> tuple[BucketLayout, list[BucketLayout]]:
    """Return the parameters that DDP averages as one virtual bucket, and as one for each dtype and device, in model order.

    Args:
        model: DDP model.
        named: its :func:`averaged_params`.
    """
    sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
    kinds = {n: "sparse" if id(p) in sparse else "complex" for n, p in named if id(p) in sparse or p.is_complex()}
    return BucketLayout.of_tensors(dict(named), kinds), BucketLayout.by_dtype(dict(named), kinds)


def skips_after(model: DistributedDataParallel, index: int) -> bool:
    """Return True if a static graph uses no parameter in the buckets after this index, so that DDP skips all of them.

    Only for a model with ``skip_all_reduce_unused_params``, after its first backward, and never inside a hook.
    """
    if not model.static_graph:
        return False
    used = model.reducer._get_local_used_map().tolist()  # of the first iteration
    unused = {id(p) for (_, p), count in zip(averaged_params(model), used, strict=True) if not count}
    rest = [bucket for bucket in _buckets(model) if bucket.index() > index]
    return all(id(p) in unused for bucket in rest for p in bucket.parameters())


def _buckets(model: DistributedDataParallel) -> list[GradBucket]:
    """Return DDP's buckets, with numbers on the meta device."""
    with _OnMeta():  # type: ignore[no-untyped-call]
        found: list[GradBucket] = model.reducer._get_zeros_like_grad_buckets()
        return found


class _OnMeta(TorchDispatchMode):
    """Makes tensors without memory, so that a look at DDP's buckets does not allocate all gradients once more."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        like: torch.Tensor = args[0]
        return torch.empty(like.shape, dtype=like.dtype, device="meta")


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
    bound = state.identity.names()
    if all(id(p) in bound for p in params):
        return bound
    state.identity.bind_by_position(_trained_with(params, state))
    return state.identity.names()


def _trained_with(params: Sequence[torch.Tensor], state: HookState) -> list[torch.nn.Parameter]:
    having = models_of(params)
    # The driver of a bare hook has a proxy of the state, which equals the state and is another object.
    own = [m for m in having if any(isinstance(held, HookState) and held == state for _, held in m._comm_hooks)]
    found = {tuple(map(id, rows)): rows for model in own or having if (rows := _reduced(model, params))}
    if len(found) != 1:
        raise StateError(
            f"{len(found) or 'no'} DistributedDataParallel models hold the parameters of this hook state, so their order in "
            "the model is unknown (after gc.freeze() no model is found). Call state.bind(ddp_model) before the first step"
        )
    return next(iter(found.values()))


def _reduced(model: DistributedDataParallel, params: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return the parameters that a hook of the model gets, as far as a hook can know them, in model order.

    DDP averages what was trainable when it wrapped the model, and a hook cannot ask it. If a bucket has a frozen parameter, flags
    do not tell them, and all parameters get a place.
    """
    held = [p for _, p in held_params(model)]
    trained = [p for p in held if p.requires_grad]
    return trained if {id(p) for p in params} <= {id(p) for p in trained} else held


def models_of(params: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP models that have all of these parameters."""
    wanted = {id(p) for p in params}
    return [model for model in _models() if wanted <= {id(p) for _, p in held_params(model)}]


def _models() -> Iterator[DistributedDataParallel]:
    # type() instead of isinstance(): some lazy modules and dead proxies raise when asked for __class__.
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel) and hasattr(one, "module"):
            yield one
