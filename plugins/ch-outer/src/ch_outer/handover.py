"""What a manager sends to a member that is behind: starts, outer optimizer, buffers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.fragment import Fragment
from commhooks import StateError

_KEYS = ("inner", "outer", "count", "landed", "fragments", "schedule")


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


def refuse_foreign(state_dict: Mapping[str, Any], schedule: str) -> None:
    """Refuse a state that is not an outer optimizer's, or of another schedule.

    Raises:
        StateError: naming what is missing, or both schedules.
    """
    missing = [key for key in _KEYS if key not in state_dict]
    if missing:
        raise StateError(
            f"this is not the state of an OuterOptimizer: {', '.join(missing)} missing. To begin with an inner optimizer's "
            "own state, load that into the inner optimizer"
        )
    if state_dict["schedule"] != schedule:
        raise StateError(
            f"the state was saved with {state_dict['schedule']}, this is {schedule}: give the same every=, fragments= "
            "and overlap="
        )
