"""Every rank's state in one object, for checkpoints that only one rank writes.

Trainers that save one file write what rank 0 gives them. A residual is a rank's own, so rank 0 must have all of them:
:func:`gather` sends them to it, one tensor at a time, and keeps them in host memory. A checkpoint that is a folder holds
them without that: :mod:`commhooks.checkpoint.dcp`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.format import shown
from commhooks.checkpoint.merging import merge
from commhooks.checkpoint.recut import recut
from commhooks.checkpoint.save_load import load_obtained, state_dict
from commhooks.device import device_of_backend
from commhooks.errors import StateError
from commhooks.state import HookState

if TYPE_CHECKING:
    from commhooks.handle import CommHook

_KEY = "ranks"
_FORM = f"a dict with {_KEY!r}, the list of every rank's state, as commhooks.checkpoint.gather() makes it on rank 0"


def gather(hook: "CommHook | HookState", *, process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Every rank's state, on rank 0 of the group.

    A collective call: every rank of the group makes it, after the same step. Each tensor is sent to rank 0 by itself, so
    that no device holds more than one of another rank's. Rank 0 then has W times the hook's state in host memory.

    Args:
        hook: an attached handle, or the state of a hook given to ``register_comm_hook``.
        process_group: all ranks that train the model; the default group if not given.

    Returns:
        ``{"ranks": [state of rank 0, of rank 1, ...]}`` on rank 0, tensors and plain values on the CPU; ``{}`` on the
        others. :func:`load_gathered` takes it.

    Raises:
        StateError: a foreign hook that keeps its state itself.
    """
    mine = state_dict(hook)
    held = [(name, field, tensor) for name, row in mine["entries"].items() for field, tensor in row.items()]
    about = {**mine, "entries": [(name, field, tuple(t.shape), t.dtype) for name, field, t in held]}
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(about, every, group=process_group, group_dst=0)
    device = _device(process_group)
    if every is None:
        for _, _, tensor in held:
            if tensor.numel():
                dist.send(_bits(tensor.to(device)), group=process_group, group_dst=0)
        return {}
    states = [{**mine, "entries": {n: {f: t.cpu() for f, t in row.items()} for n, row in mine["entries"].items()}}]
    for source, other in enumerate(every[1:], start=1):
        entries: dict[str, dict[str, torch.Tensor]] = {}
        for name, field, shape, dtype in other["entries"]:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if tensor.numel():
                dist.recv(_bits(tensor), group=process_group, group_src=source)
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
    """Go on from what :func:`gather` returned on rank 0; all or nothing.

    Every rank is given the same. On the old number of ranks each takes its own; on another, with
    ``world_change="mean"``, the mean residual, cut anew where the model is sharded otherwise.

    Args:
        hook: an attached handle, or the state of a hook given to ``register_comm_hook``.
        saved: what rank 0 saved.
        world_change: see :func:`commhooks.checkpoint.load_state_dict`.
        process_group: all ranks that train the model; the default group if not given.

    Raises:
        StateError: it is malformed, or does not fit. If that is so on one rank of an attached hook, no rank loads
            anything.
    """
    place, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    load_obtained(hook, lambda: _chosen(saved, state_dict(hook), place, world, world_change), world_change=world_change)


def _chosen(saved: object, mine: Mapping[str, Any], place: int, world: int, world_change: str) -> Mapping[str, Any]:
    """This rank's own state, or what takes its place: that of all old ranks together."""
    states = saved.get(_KEY) if isinstance(saved, Mapping) else None
    if not isinstance(states, list) or not states or not all(isinstance(one, Mapping) for one in states):
        raise StateError(f"the hook's state in this checkpoint is {shown(saved)}; expected {_FORM}")
    own: Mapping[str, Any] = states[place] if len(states) == world else {}
    if all(own.get(what) == mine[what] for what in ("rank", "world_size")):
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: every backend sends them, whatever the dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where rank 0 receives: NCCL sends from and to GPUs alone."""
    return device_of_backend(str(dist.get_backend(group)))
