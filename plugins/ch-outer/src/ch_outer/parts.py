"""What of a model is exchanged, and how it is divided into fragments."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from ch_outer.fragment import local
from commhooks import HookConfigError
from commhooks.adapters import digest

_WRAPPERS = ("module.", "_orig_mod.")  # DDP's, torch.compile's: the same model has the same names with and without


def _wrapping(model: torch.nn.Module) -> int:
    """How many characters of every name are wrappers'. What only some names begin with is a module's own name."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    found = 0
    while names and (shared := next((w for w in _WRAPPERS if all(name.startswith(w, found) for name in names)), "")):
        found += len(shared)
    return found


def reshard(model: torch.nn.Module) -> None:
    """Have FSDP2 gather anew: after a forward without a backward the root's parameters stay gathered, as they were."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def write(model: torch.nn.Module, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put values into parameters and buffers of a model: ``(which, value)`` each."""
    for mine, value in pairs:
        mine.copy_(value)
    reshard(model)


def trained(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters that are exchanged, by name: all that require gradients.

    Raises:
        HookConfigError: there are none, or ``optim`` steps others.
    """
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(f"expected the model whose parameters are stepped, got {type(model).__name__}")
    found, _ = parameters_of(model)
    known = {id(p) for p in model.parameters()}
    foreign = [tuple(p.shape) for group in optim.param_groups for p in group["params"] if id(p) not in known]
    if foreign or not found:
        raise HookConfigError(
            f"the inner optimizer steps {len(foreign)} tensors that are no parameters of the model, of shapes {foreign[:4]}: "
            "they would drift apart. Make the optimizer of model.parameters(), after the model was wrapped"
            if foreign
            else "the model has no parameter that requires gradients: there is nothing to exchange"
        )
    return found


def parameters_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those that require gradients, and those that do not, by name."""
    wrapping = _wrapping(model)
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for name, param in model.named_parameters():
        found[not param.requires_grad][name[wrapping:]] = param
    return found


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Floating-point buffers by name: those that can be averaged."""
    wrapping = _wrapping(model)
    return {name[wrapping:]: local(b) for name, b in model.named_buffers() if b.is_floating_point()}


def facts_of(
    model: torch.nn.Module,
    starts: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    buffers: str,
    *,
    values: bool,
) -> dict[str, list[str]]:
    """What has to be the same on all ranks, as lines by name.

    Args:
        model: whose buffers.
        starts: of the parameters that are exchanged.
        frozen: the other parameters.
        buffers: ``"average"``, or ``"local"``: then they may differ.
        values: also the values of all of them: where nobody is sent what the others begin with.
    """
    facts = {"frozen parameters": [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in frozen.items()]}
    if values:
        averaged = buffers_of(model) if buffers == "average" else {}
        for kind, tensors in (("parameters", starts), ("frozen parameters", frozen), ("buffers", averaged)):
            facts[f"{kind} at the start"] = [f"{name}: {digest(local(t))}" for name, t in tensors.items()]
    return facts


def check_parameters(
    model: torch.nn.Module, optim: torch.optim.Optimizer, exchanged: Mapping[str, torch.Tensor]
) -> None:
    """Check that all parameters that may move are exchanged. Others would differ between ranks.

    Args:
        model: the model as it is now.
        optim: the inner optimizer as it is now.
        exchanged: the parameters of all fragments by name, as found at construction.

    Raises:
        HookConfigError: a parameter was unfrozen or added since, the inner optimizer steps a tensor that is no parameter of
            the model, or a parameter has another shape.
    """
    reshard(model)  # FSDP2 shows gathered parameters, which are other tensors, until it reshards
    known = {id(param) for param in exchanged.values()}
    found, frozen = parameters_of(model)
    if missing := [name for name, param in found.items() if id(param) not in known]:
        raise HookConfigError(
            f"{missing[:4]} require gradients and are not exchanged: they were added, replaced or unfrozen after the "
            "OuterOptimizer was made. Call finish() first, change the model in the same way on all ranks, then make another "
            "OuterOptimizer"
        )
    known |= {id(param) for param in (*found.values(), *frozen.values())}
    if foreign := [tuple(p.shape) for group in optim.param_groups for p in group["params"] if id(p) not in known]:
        raise HookConfigError(
            f"the inner optimizer steps {len(foreign)} tensors that are no parameters of the model, of shapes {foreign[:4]}. "
            "They would differ between ranks. Add them to the model before the OuterOptimizer is made"
        )


def options_of(optim: torch.optim.Optimizer) -> list[str]:
    """Its class, and the options of each of its groups: what is to be the same on all ranks."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optim.param_groups]
    return [type(optim).__name__, *map(str, groups)]


def divide(params: Mapping[str, torch.Tensor], fragments: int | Sequence[Sequence[str]]) -> list[list[str]]:
    """The names of every fragment.

    Args:
        params: by name, in model order.
        fragments: how many consecutive parts of about equal size; or the parts themselves.

    Raises:
        HookConfigError: more parts than parameters, or parts that do not hold each parameter once.

    Example:
        >>> divide({"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(2)}, 2)
        [['a'], ['b', 'c']]
    """
    if not isinstance(fragments, int):
        given = [list(part) for part in fragments]
        odd = sorted({name for part in given for name in part} ^ set(params))
        if odd or sum(map(len, given)) != len(params) or not all(given):
            raise HookConfigError(f"fragments= are to hold every parameter once; they differ in {odd[:6]}")
        return given
    if not 1 <= fragments <= len(params):
        raise HookConfigError(f"fragments={fragments}: expected 1 to {len(params)}, the number of parameters")
    total = sum(p.numel() for p in params.values())
    made: list[list[str]] = [[]]
    passed = 0
    left = len(params)
    for name, param in params.items():
        # A part ends where its share is reached, and early enough that the others get a parameter each.
        if (
            made[-1]
            and len(made) < fragments
            and (passed + param.numel() / 2 > total * len(made) / fragments or left <= fragments - len(made))
        ):
            made.append([])
        made[-1].append(name)
        passed += param.numel()
        left -= 1
    return made
