"""Passes the state of an outer optimizer to a checkpoint, to members of a new group, or to a member behind its peers."""

import copy
import ctypes
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment
from commhooks import CommHooksError, Reducer, StateError

_KEYS = ("inner", "outer", "count", "landed", "fragments", "buffers", "schedule")

# -- checkpoints


def check_checkpoint(
    saved: Mapping[str, Any], schedule: str, fragments: Sequence[Fragment], buffers: Buffers, **optimizers: Optimizer
) -> None:
    """Refuse a state of something else, or of another schedule, model, sharding or optimizer.

    Raises:
        StateError: names the missing or differing part.
    """
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        raise StateError(
            f"this is not the state of an OuterOptimizer: {', '.join(missing)} missing. Load the state of an inner optimizer "
            "into the inner optimizer"
        )
    if saved["schedule"] != schedule:
        raise StateError(
            f"the state was saved with {saved['schedule']}, this is {schedule}. Use the same every=, fragments= and overlap="
        )
    for fragment, state in zip(fragments, saved["fragments"], strict=True):
        fragment.check(state)
    buffers.check(saved["buffers"])
    for name, optimizer in optimizers.items():
        there, here = (_sizes(groups) for groups in (saved[name]["param_groups"], optimizer.param_groups))
        if there != here:
            raise StateError(f"the saved {name} optimizer steps groups of {there} parameters, this one of {here}")


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def load_checkpoint(
    fragments: Sequence[Fragment], buffers: Buffers, saved: Mapping[str, Any], world_change: str
) -> None:
    """Load a state that :func:`check_checkpoint` has accepted into all fragments and buffers, or into none."""
    states = []
    for fragment, state in zip(fragments, saved["fragments"], strict=True):
        fragment.receive()  # the state of a reduction is open while its exchange is under way
        states.append((fragment.reducer, state["reducer"]))
    states += zip(buffers.reducers, saved["buffers"]["reducers"], strict=True)
    _load_reducers(states, world_change)
    for fragment, state in zip(fragments, saved["fragments"], strict=True):
        fragment.load_state_dict(state)
    buffers.put(saved["buffers"]["shared"], live=False)


def _load_reducers(states: Sequence[tuple[Reducer, Mapping[str, Any]]], world_change: str) -> None:
    """Load all states. If a reducer refuses its state, restore the others."""
    before = [(reducer, reducer.state_dict()) for reducer, _ in states]
    for index, (reducer, state) in enumerate(states):
        try:
            reducer.load_state_dict(state, world_change=world_change)
        except CommHooksError:
            for loaded, own in before[:index]:
                loaded.load_state_dict(own)
            raise


# -- members of a manager


def snapshot(fragments: Sequence[Fragment], outer: Optimizer, buffers: Buffers) -> dict[str, Any]:
    """Return copies for a member behind. torchft serves them while training continues."""
    return {
        "outer": copy.deepcopy(outer.state_dict()),
        "starts": [{name: start.clone() for name, start in fragment.starts.items()} for fragment in fragments],
        "buffers": {name: buffer.clone() for name, buffer in buffers.shared.items()},
    }


def equals_snapshot(fragments: Sequence[Fragment], buffers: Buffers, given: Mapping[str, Any]) -> bool:
    """Return True if starts and shared buffers equal a peer's snapshot.

    Raises:
        StateError: the peer has other parameters or buffers.
    """
    buffers.check({"shared": given["buffers"]})
    same = all(torch.equal(own, given["buffers"][name].to(own.device)) for name, own in buffers.shared.items())
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.check({"start": starts, "mean": {}, "left": {}, "rest": {}})
        same &= all(torch.equal(start, starts[name].to(start.device)) for name, start in fragment.starts.items())
    return same


def load_snapshot(fragments: Sequence[Fragment], outer: Optimizer, buffers: Buffers, given: Mapping[str, Any]) -> None:
    """Continue from a peer's snapshot."""
    for fragment, starts in zip(fragments, given["starts"], strict=True):
        fragment.begin_at(starts)
    buffers.put(given["buffers"])
    outer.load_state_dict(given["outer"])


# -- members of a new process group


def broadcast_newest(
    state: Mapping[str, Any], progress: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """Return the state of the rank with most progress, on all ranks of a group. All of them make this call.

    Args:
        state: this rank's tensors and plain values.
        progress: this rank's progress, compared in order. Of equal ranks the first counts.
        group: the group.
        device: device of the group's collectives.
    """
    rows = torch.zeros(group.size(), 2, dtype=torch.int64, device=device)  # (ranks, 2)
    rows[group.rank()] = torch.tensor(progress, device=device, dtype=torch.int64)
    dist.all_reduce(rows, group=group)
    source = max(range(group.size()), key=lambda rank: (*rows[rank].tolist(), -rank))
    written = io.BytesIO()
    if group.rank() == source:
        given = {key: value for key, value in state.items() if key != "inner"}
        given["fragments"] = [{**one, "rest": {}, "reducer": _shared(one["reducer"])} for one in given["fragments"]]
        torch.save(given, written)
    size = torch.tensor([written.getbuffer().nbytes], device=device, dtype=torch.int64)
    giver = dist.get_global_rank(group, source)
    dist.broadcast(size, giver, group)
    message = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")  # (bytes,)
    if group.rank() == source:
        message = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, giver, group)
    message = message.cpu()
    # Tensor.numpy() would need NumPy, which torch does not install.
    read = io.BytesIO(ctypes.string_at(message.data_ptr(), message.numel()))
    found: dict[str, Any] = torch.load(read, map_location=device, weights_only=True)
    return found


def join(fragments: Sequence[Fragment], buffers: Buffers, given: Mapping[str, Any], *, behind: bool) -> None:
    """Continue from the state of another rank in a new group.

    Args:
        fragments: this rank's fragments.
        buffers: this rank's buffers.
        given: the other rank's state.
        behind: True if this rank is new, or missed a round that moved the start. It begins at the start, with the averaged
            buffers and without residuals. Other ranks keep their parameters and residuals.
    """
    for fragment, peer in zip(fragments, given["fragments"], strict=True):
        fragment.check(peer)
        if behind:
            fragment.begin_at(peer["start"])
            fragment.renumber(0)
        else:
            for name, start in fragment.starts.items():
                start.copy_(peer["start"][name])
        _join_reducer(fragment.reducer, peer["reducer"], behind=behind)
    buffers.check(given["buffers"])
    buffers.put(given["buffers"]["shared"], live=behind)
    for reducer, state in zip(buffers.reducers, given["buffers"]["reducers"], strict=True):
        _join_reducer(reducer, state, behind=behind)


def _join_reducer(reducer: Reducer, given: Mapping[str, Any], *, behind: bool) -> None:
    """Load step and shared fields of another rank's reducer. Residuals are local and stay, unless this rank is behind."""
    own = reducer.state_dict()
    entries = {} if behind else _entries(own, "local")
    for name, row in _entries(given, "shared").items():
        entries[name] = {**entries.get(name, {}), **row}
    fields = {**given["fields"], **own["fields"]}
    reducer.load_state_dict({**own, "fields": fields, "step": given["step"], "entries": entries})


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reducer's state without residuals, which would cross the link only to be dropped."""
    return {**state, "entries": _entries(state, "shared")}


def _entries(state: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {
        name: {field: tensor for field, tensor in row.items() if state["fields"][field] == kind}
        for name, row in state["entries"].items()
    }
