"""Whose parameters a hook is given where no model is: PyTorch's ``hook(state, bucket)`` sees neither model nor names.

The order of DDP's buckets does not tell the order in the model: buckets of different dtypes come one after the other, and
after the first step they are laid out as the gradients come. So the model is looked for, once per state, among the objects
that Python knows of.
"""

import gc
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.layout import averaged
from commhooks import HookState, StateError


class Numbered(dict[int, str]):
    """``id(parameter)`` -> a name for this process alone, made when it is first asked for."""

    def __missing__(self, key: int) -> str:
        return self.setdefault(key, f"parameter {len(self)}")


def named_by_position(state: HookState, params: Sequence[torch.Tensor]) -> dict[int, str]:
    """Bind a state to the model of these parameters, and give the names of all of the model's.

    What the state has names for already, from a checkpoint, keeps them, place by place.

    Raises:
        StateError: no model, or several that differ, has these parameters; or the state was kept for another.
    """
    bound = state.names()
    if all(id(p) in bound for p in params):
        return bound
    state.bind_by_position(_trained_beside(params, state))
    return state.names()


def _trained_beside(params: Sequence[torch.Tensor], state: HookState) -> list[torch.nn.Parameter]:
    having = models_of(params)
    own = [model for model in having if any(held is state for _, held in model._comm_hooks)]
    found = {tuple(map(id, rows)): rows for model in own or having if (rows := [p for _, p in averaged(model)])}
    if len(found) != 1:
        raise StateError(
            f"{len(found) or 'no'} DistributedDataParallel models hold the parameters that this hook state was given (after "
            "gc.freeze() none is found), so their order in the model is not known: call state.bind(ddp_model) before the "
            "first step"
        )
    return next(iter(found.values()))


def models_of(params: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """The DDP models that have all of these parameters."""
    wanted = {id(p) for p in params}
    return [model for model in _models() if wanted <= {id(p) for _, p in averaged(model)}]


def _models() -> Iterator[DistributedDataParallel]:
    # By type(): isinstance() asks an object for its class, and some lazy modules and dead proxies raise at that.
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel) and hasattr(one, "module"):
            yield one
