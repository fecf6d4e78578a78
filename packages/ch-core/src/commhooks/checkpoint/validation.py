"""Whether entries fit a model and a reduction: names, shapes, dtypes and sizes, from the layout alone.

What a reduction keeps is found as its collectives are: its generator is run on meta tensors, and what it stages is
looked at. No hook has to declare it.
"""

from collections.abc import Iterator, Mapping

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.checkpoint.format import shown
from commhooks.errors import StateError
from commhooks.param_table import ParamTable
from commhooks.reduction import Reduction, StepContext
from commhooks.state import HookState

Key = tuple[str, str]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KEPT = (*_DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_ROOM = 4  # an entry of unknown shape may be this often its parameter


def fits(
    entries: Mapping[Key, torch.Tensor],
    params: ParamTable,
    step: int,
    reduction: Reduction | None,
    layout: BucketLayout | None,
    world_size: int,
) -> None:
    """Check entries against the model, and their numbers.

    Raises:
        StateError: an entry of an unknown parameter or field, of another shape or dtype, too large, or not finite.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in params}
    by_name = reduction is None or reduction.granularity == "tensor"
    largest = _ROOM * max([256, *sizes.values()]) if by_name else _ROOM * (sum(sizes.values()) + 256)
    for (name, field), tensor in entries.items():
        where = f"the state of {shown(name)}, field {shown(field)},"
        if tensor.dtype not in _KEPT:
            raise StateError(f"{where} is of {tensor.dtype}; a hook keeps floating or integer numbers")
        if sizes and by_name and name not in sizes:
            raise StateError(f"{where} is of no parameter of this model")
        bound = _ROOM * max(256, sizes[name]) if by_name and name in sizes else largest
        if sizes and tensor.numel() > bound:
            raise StateError(f"{where} has {tensor.numel()} numbers; at most {bound} are plausible here")
    if reduction is not None and layout is not None and by_name:
        _as_expected(entries, reduction, layout, step, world_size)
    for (name, field), tensor in entries.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StateError(f"the state of {shown(name)}, field {shown(field)}, holds NaN or infinite numbers")


def fit_to(state: HookState, reduction: Reduction, layout: BucketLayout, world_size: int) -> None:
    """Check a state that was loaded before there was a model.

    Raises:
        StateError: see :func:`fits`.
    """
    state.read_as(reduction.encodings(layout, max(state.step - 1, 0)))
    known = {name for name, _ in state.params}  # what was frozen before attach is still in DDP's buckets
    entries = {(name, field): tensor for name, field, tensor in state.entries() if name in known}
    fits(entries, state.params, state.step, reduction, layout, world_size)


def _as_expected(
    entries: Mapping[Key, torch.Tensor], reduction: Reduction, layout: BucketLayout, step: int, world_size: int
) -> None:
    pending = dict(entries)
    known: dict[Key, set[tuple[tuple[int, ...], torch.dtype]]] = {}
    for at, dtype in _conditions(layout.dtype, step):
        for key, like in expected(reduction, layout, at, dtype, world_size).items():
            known.setdefault(key, set()).add((tuple(like.shape), like.dtype))
            if key in pending and (tuple(pending[key].shape), pending[key].dtype) in known[key]:
                del pending[key]
        if not pending:
            return
    for (name, field), tensor in pending.items():
        legal = known.get((name, field))
        if legal is not None:
            wanted = " or ".join(sorted(f"{list(shape)} of {dtype}" for shape, dtype in legal))
            raise StateError(
                f"the state of {shown(name)}, field {shown(field)}, is {list(tensor.shape)} of {tensor.dtype}; "
                f"{reduction.name} keeps {wanted} here"
            )


def _conditions(dtype: torch.dtype, step: int) -> Iterator[tuple[int, torch.dtype]]:
    """Steps and gradient dtypes under which an entry may have been kept, the likeliest first.

    A method that alternates keeps what either of its steps keeps, and a model may have parameters of several dtypes.
    """
    for kind in dict.fromkeys((dtype, *_DTYPES)):
        for at in (max(step - 1, 0), step):
            yield at, kind


def expected(
    reduction: Reduction, layout: BucketLayout, step: int, dtype: torch.dtype, world_size: int
) -> dict[Key, torch.Tensor]:
    """What one step stages, as meta tensors; empty where the generator cannot be run without numbers."""
    meta = BucketLayout(layout.params, layout.numel, dtype, "meta")
    bucket = Bucket(meta, torch.empty(layout.numel, dtype=dtype, device="meta"))
    state = HookState()
    stages = reduction.start(bucket, StepContext(0, world_size, step, state=state))
    try:
        for _ in stages:
            pass
    except Exception:  # a reduction with a plan() of its own; its entries are bounded by size alone
        return {}
    finally:
        stages.close()
    state.commit()
    state.read_as(reduction.encodings(meta, step))
    return {(name, field): tensor for name, field, tensor in state.entries()}
