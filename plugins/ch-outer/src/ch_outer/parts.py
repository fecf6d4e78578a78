"""What of a model is exchanged, and how it is divided into fragments."""

from collections.abc import Mapping, Sequence

import torch

from ch_outer.fragment import local
from commhooks import HookConfigError

_WRAPPERS = ("module.", "_orig_mod.")  # DDP's, torch.compile's: the same model has the same names with and without


def _plain_name(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


def trained(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters that are exchanged, by name: all that require gradients.

    Raises:
        HookConfigError: there are none, or ``optim`` steps others.
    """
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(f"expected the model whose parameters are stepped, got {type(model).__name__}")
    found: dict[str, torch.Tensor] = {_plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
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


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Floating-point buffers by name: those that can be averaged."""
    return {_plain_name(name): local(b) for name, b in model.named_buffers() if b.is_floating_point()}


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
