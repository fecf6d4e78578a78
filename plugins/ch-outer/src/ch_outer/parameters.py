"""Parameters and buffers of a model by name, and the checks that all of them are exchanged."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ch_core import checksum
from commhooks import HookConfigError

_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DDP and torch.compile; names must not depend on them


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter on this rank, detached: its shard under FSDP2, otherwise the tensor."""
    found = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _prefix_length(model: torch.nn.Module) -> int:
    """Return the length of the wrapper prefixes that all names share. Other prefixes belong to the module's own names."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    found = 0
    while names and (shared := next((w for w in _WRAPPERS if all(name.startswith(w, found) for name in names)), "")):
        found += len(shared)
    return found


def parameters_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the trainable parameters and the frozen parameters by name."""
    prefix = _prefix_length(model)
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for name, param in model.named_parameters():
        found[not param.requires_grad][name[prefix:]] = param
    return found


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers by name. Integer buffers have no average."""
    prefix = _prefix_length(model)
    return {name[prefix:]: local(b) for name, b in model.named_buffers() if b.is_floating_point()}


def shard_groups(params: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """Return the groups of two ranks or more that share one copy of the parameters."""
    found: dict[str, dist.ProcessGroup] = {}
    for param in params:
        if isinstance(param, DTensor):
            for dim, placement in enumerate(param.placements):
                group = param.device_mesh.get_group(dim)
                if not placement.is_replicate() and group.size() > 1:
                    found.setdefault(group.group_name, group)
    return list(found.values())


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters of FSDP2. After a forward without a backward, the root module would keep its old values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def write(model: torch.nn.Module, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each ``(tensor, value)`` into parameters and buffers of a model."""
    for mine, value in pairs:
        mine.copy_(value)
    reshard(model)


# -- checks


def trained(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters to exchange by name, which are all trainable ones.

    Raises:
        HookConfigError: the model has none, or ``optim`` steps other tensors.
    """
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(f"expected the model whose parameters are stepped, got {type(model).__name__}")
    found, _ = parameters_of(model)
    if not found:
        raise HookConfigError("the model has no parameter that requires gradients, so there is nothing to exchange")
    _refuse_foreign(model, optim)
    return found


def check_parameters(
    model: torch.nn.Module, optim: torch.optim.Optimizer, exchanged: Mapping[str, torch.Tensor]
) -> None:
    """Check that all parameters that may move are exchanged. Others would differ between ranks.

    Args:
        model: the model as it is now.
        optim: the inner optimizer as it is now.
        exchanged: the parameters of all fragments by name, as found at construction.

    Raises:
        HookConfigError: a parameter was unfrozen or added since, or the inner optimizer steps a tensor that is not a parameter of
            the model.
    """
    reshard(model)  # FSDP2 shows gathered parameters, which are other tensors, until it reshards
    known = {id(param) for param in exchanged.values()}
    if missing := [name for name, param in parameters_of(model)[0].items() if id(param) not in known]:
        raise HookConfigError(
            f"{missing[:4]} require gradients and are not exchanged, because they were added or replaced after the "
            "OuterOptimizer was made, or unfrozen where ranks do not compare starts (a manager, verify_ranks=False). Call "
            "finish() first, change the model in the same way on all ranks, then make another OuterOptimizer"
        )
    _refuse_foreign(model, optim, known)


def _refuse_foreign(model: torch.nn.Module, optim: torch.optim.Optimizer, known: Iterable[int] = ()) -> None:
    legal = {*known, *(id(param) for param in model.parameters())}
    if foreign := [tuple(p.shape) for group in optim.param_groups for p in group["params"] if id(p) not in legal]:
        raise HookConfigError(
            f"the inner optimizer steps {len(foreign)} tensors that are not parameters of the model, of shapes {foreign[:4]}. "
            "They would differ between ranks. Make the optimizer of model.parameters(), after the model was wrapped"
        )


# -- comparison of ranks


def facts_of(
    model: torch.nn.Module,
    starts: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    buffers: str,
    *,
    values: bool,
) -> dict[str, list[str]]:
    """Return the facts that must be equal on all ranks, as lines by name.

    Args:
        model: the model, for its buffers.
        starts: copies of the parameters that are exchanged.
        frozen: the other parameters.
        buffers: ``"average"``, or ``"local"`` if buffers may differ.
        values: True to compare values too. A manager sends its members equal values instead.
    """
    facts = {"frozen parameters": [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in frozen.items()]}
    if values:
        averaged = buffers_of(model) if buffers == "average" else {}
        for kind, tensors in (("parameters", starts), ("frozen parameters", frozen), ("buffers", averaged)):
            facts[f"{kind} at the start"] = [f"{name}: {checksum(local(t))}" for name, t in tensors.items()]
    return facts


def options_of(optim: torch.optim.Optimizer) -> list[str]:
    """Return the class of an optimizer and the options of each group, which must be equal on all ranks."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]
    return [type(optim).__name__, *map(str, groups)]
