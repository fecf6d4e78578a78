"""What goes from one member, or from a checkpoint, to another: starts, outer optimizer, buffers, states of reductions."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment
from commhooks import CommHooksError, Reducer, StateError

_KEYS = ("inner", "outer", "count", "landed", "fragments", "buffers", "schedule")


def handed(fragments: Sequence[Fragment], outer: Optimizer, buffers: Buffers) -> dict[str, Any]:
    """Copies: torchft serves what it is given while training goes on."""
    return {
        "outer": copy.deepcopy(outer.state_dict()),
        "starts": [{name: start.clone() for name, start in fragment.starts.items()} for fragment in fragments],
        "buffers": {name: buffer.clone() for name, buffer in buffers.shared.items()},
    }


def holds(fragments: Sequence[Fragment], buffers: Buffers, given: Mapping[str, Any]) -> bool:
    """Whether these are the starts and shared buffers of the others already.

    Raises:
        StateError: the others have other parameters or buffers.
    """
    buffers.check({"shared": given["buffers"]})
    same = all(torch.equal(own, given["buffers"][name].to(own.device)) for name, own in buffers.shared.items())
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.check({"start": starts, "mean": {}, "left": {}, "rest": {}})
        same &= all(torch.equal(start, starts[name].to(start.device)) for name, start in fragment.starts.items())
    return same


def take(fragments: Sequence[Fragment], outer: Optimizer, buffers: Buffers, given: Mapping[str, Any]) -> None:
    """Go on from what the others have."""
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.begin_at(starts)
    buffers.put(given["buffers"])
    outer.load_state_dict(given["outer"])


def refuse_foreign(
    state_dict: Mapping[str, Any],
    schedule: str,
    fragments: Sequence[Fragment],
    buffers: Buffers,
    **optimizers: Optimizer,
) -> None:
    """Refuse a state that is not an outer optimizer's, or of another schedule, model, sharding or inner or outer optimizer.

    Raises:
        StateError: naming what is missing, or what differs.
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
    for fragment, saved in zip(fragments, state_dict["fragments"], strict=True):
        fragment.check(saved)
    buffers.check(state_dict["buffers"])
    for name, optimizer in optimizers.items():
        there, here = (_sizes(groups) for groups in (state_dict[name]["param_groups"], optimizer.param_groups))
        if there != here:
            raise StateError(f"the saved {name} optimizer steps groups of {there} parameters, this one of {here}")


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def load_parts(fragments: Sequence[Fragment], buffers: Buffers, saved: Mapping[str, Any], world_change: str) -> None:
    """Fragments and buffers go on from a checkpoint that :func:`refuse_foreign` has passed; all or none."""
    states = []
    for fragment, state in zip(fragments, saved["fragments"], strict=True):
        fragment.receive()  # a reduction's state is open while its exchange is under way
        states.append((fragment.reducer, state["reducer"]))
    states += zip(buffers.reducers, saved["buffers"]["reducers"], strict=True)
    _load_reducers(states, world_change)
    for fragment, state in zip(fragments, saved["fragments"], strict=True):
        fragment.load_state_dict(state)
    buffers.put(saved["buffers"]["shared"], live=False)


def join_parts(fragments: Sequence[Fragment], buffers: Buffers, given: Mapping[str, Any], *, behind: bool) -> None:
    """Fragments and buffers go on from what another member has; see :meth:`.Fragment.join`."""
    for fragment, theirs in zip(fragments, given["fragments"], strict=True):
        fragment.join(theirs, behind=behind)
    buffers.join(given["buffers"], behind=behind)


def _load_reducers(states: Sequence[tuple[Reducer, Mapping[str, Any]]], world_change: str) -> None:
    """Ranks that refuse one state, all alike, go on with what they had."""
    before = [(reducer, reducer.state_dict()) for reducer, _ in states]
    for index, (reducer, state) in enumerate(states):
        try:
            reducer.load_state_dict(state, world_change=world_change)
        except CommHooksError:
            for loaded, own in before[:index]:
                loaded.load_state_dict(own)
            raise
