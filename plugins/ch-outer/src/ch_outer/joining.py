"""Members of a new group come to one state: the one of the member with most behind it."""

import ctypes
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def hand_over(
    state: Mapping[str, Any], progress: tuple[int, int], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """The state of the group's rank with most progress, the first of equals, on every rank.

    Args:
        state: this rank's: tensors and plain values.
        progress: of this rank, to be compared in order.
        group: its ranks all make this call.
        device: where the group's collectives work.
    """
    rows = torch.zeros(group.size(), 2, dtype=torch.int64, device=device)
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
    message = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
    if group.rank() == source:
        message = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, giver, group)
    message = message.cpu()
    read = io.BytesIO(
        ctypes.string_at(message.data_ptr(), message.numel())
    )  # without NumPy, which torch does not bring
    found: dict[str, Any] = torch.load(read, map_location=device, weights_only=True)
    return found


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is the giver's own: residuals would cross the link to be thrown away."""
    return {**state, "entries": _entries(state, "shared")}


def _entries(state: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {
        name: {field: tensor for field, tensor in row.items() if state["fields"][field] == kind}
        for name, row in state["entries"].items()
    }


def joined(own: Mapping[str, Any], given: Mapping[str, Any], *, behind: bool) -> dict[str, Any]:
    """The state of a reduction on a rank that goes on with another one.

    Args:
        own: this rank's, in the new group.
        given: the other's, whose step and shared fields count.
        behind: whether this rank's local fields (residuals) belong to what has been lost.
    """
    entries = {} if behind else _entries(own, "local")
    for name, row in _entries(given, "shared").items():
        entries[name] = {**entries.get(name, {}), **row}
    fields = {**given["fields"], **own["fields"]}
    return {**own, "fields": fields, "step": given["step"], "entries": entries}
