"""Every rank's state in one object, for checkpoints that only one rank writes.

Trainers that save one file write the objects of rank 0. A residual belongs to a rank, so rank 0 needs all of them.
:func:`gather` sends them there, one tensor at a time, into host memory. A checkpoint that is a folder holds every rank's state
without that, see :mod:`commhooks.checkpoint.dcp`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ch_core import HookState, StateError, device_of_backend
from commhooks.checkpoint.format import shown
from commhooks.checkpoint.save_load import load_obtained, state_dict
from commhooks.checkpoint.world_change import merge, recut

if TYPE_CHECKING:
    from commhooks.handle import CommHook

_KEY = "ranks"
_FORM = f"a dict with {_KEY!r}, the list of every rank's state, as commhooks.checkpoint.gather() makes it on rank 0"


def gather(hook: "CommHook | HookState", *, process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Collect every rank's state on rank 0 of the group.

    A collective call: every rank of the group makes it, after the same step. Each tensor travels alone, so a device holds at
    most one tensor of another rank. Rank 0 then has W times the hook's state in host memory.

    Args:
        hook: an attached handle, or the state of a hook on the ``register_comm_hook`` path.
        process_group: all ranks that train the model; the default group if None.

    Returns:
        ``{"ranks": [state of rank 0, of rank 1, ...]}`` on rank 0, tensors and plain values on the CPU; ``{}`` on the
        others. :func:`load_gathered` takes it.

    Raises:
        StateError: a foreign hook keeps its state itself.
    """
    mine = state_dict(hook)
    held = [(name, field, tensor) for name, row in mine["entries"].items() for field, tensor in row.items()]
    about = {**mine, "entries": [(name, field, tuple(t.shape), t.dtype) for name, field, t in held]}
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(about, every, group=process_group, group_dst=0)
    device = device_of_backend(str(dist.get_backend(process_group)))
    if every is None:
        for _, _, tensor in held:
            if tensor.numel():
                dist.send(_bytes(tensor.to(device)), group=process_group, group_dst=0)
        return {}
    states = [{**mine, "entries": {n: {f: t.cpu() for f, t in row.items()} for n, row in mine["entries"].items()}}]
    for source, other in enumerate(every[1:], start=1):
        entries: dict[str, dict[str, torch.Tensor]] = {}
        for name, field, shape, dtype in other["entries"]:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.recv(_bytes(tensor), group=process_group, group_src=source)
            entries.setdefault(name, {})[field] = tensor.cpu()
        states.append({**other, "entries": entries})
    return {_KEY: states}


def load_gathered(
    hook: "CommHook | HookState",
    saved: Mapping[str, Any],
    *,
    world_change: str = "error",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load the result of :func:`gather` on rank 0, all or nothing. Every rank passes the same object.

    On the old number of ranks each rank loads its own state. On another number, ``world_change="mean"`` gives each the mean
    residual, cut again if the model is sharded otherwise.

    Args:
        hook: an attached handle, or the state of a hook on the ``register_comm_hook`` path.
        saved: the object that rank 0 saved.
        world_change: see :func:`commhooks.checkpoint.load_state_dict`.
        process_group: all ranks that train the model; the default group if None.

    Raises:
        StateError: it is malformed, or does not fit. If so on one rank of an attached hook, no rank loads anything.
    """
    place, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    load_obtained(hook, lambda: _chosen(saved, state_dict(hook), place, world, world_change), world_change=world_change)


def _chosen(saved: object, mine: Mapping[str, Any], place: int, world: int, world_change: str) -> Mapping[str, Any]:
    """Return this rank's own state, or the merged state of all old ranks."""
    states = saved.get(_KEY) if isinstance(saved, Mapping) else None
    if not isinstance(states, list) or not states or not all(isinstance(one, Mapping) for one in states):
        raise StateError(f"the hook's state in this checkpoint is {shown(saved)}; expected {_FORM}")
    own: Mapping[str, Any] = states[place] if len(states) == world else {}
    if all(own.get(key) == mine[key] for key in ("rank", "world_size")):
        return own
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for one in states:
        parts.setdefault(str(one.get("params")), []).append(one)
    if world_change == "error":
        return next((one for one in states if one.get("params") == mine["params"]), states[0])
    merged = [merge(part) for part in parts.values()]
    for part in merged:
        if part["params"] == mine["params"]:
            return part
    return {**merged[0], "params": mine["params"], "entries": _recut(merged, mine["params"])}


def _recut(merged: list[dict[str, Any]], params: list[Any]) -> dict[str, Any]:
    rows = [
        {**part, "rows": [(n, f, t.shape, t.dtype) for n, row in part["entries"].items() for f, t in row.items()]}
        for part in merged
    ]
    held = {(n, f): t for part in merged for n, row in part["entries"].items() for f, t in row.items()}
    return recut(rows, params, lambda name, field: held[name, field])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, which every backend sends."""
    return tensor.contiguous().view(-1).view(torch.uint8)
