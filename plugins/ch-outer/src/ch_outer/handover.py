"""What a manager sends to a member that is behind: starts, outer optimizer, buffers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.fragment import Fragment


def handed(fragments: Sequence[Fragment], outer: Optimizer, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copies: torchft serves what it is given while training goes on."""
    return {
        "outer": copy.deepcopy(outer.state_dict()),
        "starts": [{name: start.clone() for name, start in fragment.starts.items()} for fragment in fragments],
        "buffers": {name: buffer.clone() for name, buffer in buffers.items()},
    }


def holds(fragments: Sequence[Fragment], given: Mapping[str, Any]) -> bool:
    """Whether these are the starts of the others already.

    Raises:
        StateError: the others have other parameters.
    """
    same = True
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.check({"start": starts, "mean": {}, "left": {}})
        same &= all(torch.equal(start, starts[name].to(start.device)) for name, start in fragment.starts.items())
    return same


def take(
    fragments: Sequence[Fragment], outer: Optimizer, buffers: Mapping[str, torch.Tensor], given: Mapping[str, Any]
) -> None:
    """Go on from what the others have."""
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.begin_at(starts)
    for name, buffer in buffers.items():
        buffer.copy_(given["buffers"][name])
    outer.load_state_dict(given["outer"])
