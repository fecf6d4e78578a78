"""Passes the state of an outer optimizer to the ranks of a new process group."""

import ctypes
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ch_outer.shared_model import SharedModel
from commhooks import Reducer


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
        fragments = [{**one, "rest": {}, "reducer": _shared(one["reducer"])} for one in state["fragments"]]
        torch.save({**state, "fragments": fragments}, written)
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


def join(shared: SharedModel, given: Mapping[str, Any], *, behind: bool) -> None:
    """Continue from the state of another rank in a new group.

    Args:
        shared: the shared model as this rank has it.
        given: the other rank's state.
        behind: True if this rank is new, or missed a round that moved the start. It begins at the start, with the averaged
            buffers and without residuals. Other ranks keep their parameters and residuals.
    """
    for fragment, peer in zip(shared.fragments, given["fragments"], strict=True):
        fragment.check(peer)
        if behind:
            fragment.begin_at(peer["start"])
            fragment.renumber(0)
        else:
            for name, start in fragment.starts.items():
                start.copy_(peer["start"][name])
        _join_reducer(fragment.reducer, peer["reducer"], behind=behind)
    buffers = shared.buffers
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
