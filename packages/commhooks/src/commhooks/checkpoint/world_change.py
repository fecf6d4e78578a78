"""From one number of ranks or shards to another: the mean of all residuals, or none.

Only the mean over ranks of a residual enters the averaged update: ``mean_i(g_i + e_i) = mean_i(g_i) + mean_i(e_i)``. Each of
W' new ranks that receives ``mean(e)`` therefore loses nothing, and one model's worth of disk is enough.

A parameter's shards are called ``"w[0/2]"``, ``"w[1/2]"``. They are equal runs of its rows; the last ones are shorter or empty. A
field with a number for every element (a residual) is assembled over the shards and cut again. A field of one shard alone
(PowerSGD's Q spans the rows of one shard) means nothing to another shard, and starts again.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ch_core import Key, RankId, StateError
from commhooks.checkpoint.format import Saved, alike, as_dict, read, shown

POLICIES = ("error", "mean", "reset")
Read = Callable[[str, str], torch.Tensor]
"""Reads an entry of a checkpoint by name and field; a local field as the mean over replicas."""

_SHARD = re.compile(r"(.*)\[(\d+)/(\d+)\]", re.DOTALL)


# -- another number of ranks


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks of one checkpoint into a state for any rank of any world size.

    Args:
        states: ``handle.state_dict()`` of every rank, in any order, saved at the same step.

    Returns:
        A state with ``rank`` None. Local fields are averaged over the ranks (fp64 sum; a rank without an entry counts as
        zero). Shared fields stay unchanged, and owned fields become shared ones. Load it with ``world_change="mean"``.

    Raises:
        StateError: a state is malformed, a rank is missing or present twice, or they are not of one checkpoint.

    Example:
        >>> import commhooks, torch
        >>> def saved(rank):
        ...     state = commhooks.HookState()
        ...     state.replace({("w", "residual"): torch.full((2,), float(rank))}, step=1)
        ...     return commhooks.state_dict(state) | {"world_size": 2, "rank": rank, "fields": {"residual": "local"}}
        >>> merge([saved(0), saved(1)])["entries"]["w"]["residual"]
        tensor([0.5000, 0.5000])
    """
    ranks = [read(state) for state in states]
    if not ranks:
        raise StateError("merge needs at least one state: give handle.state_dict() of every rank")
    first = ranks[0]
    for other in ranks[1:]:
        for key in ("expr", "world_size", "step", "params", "fields", "reference"):
            if getattr(other, key) != getattr(first, key) and not (key == "expr" and _same_hook(other, first)):
                raise StateError(
                    f"these are not states of one checkpoint: {key} of rank {first.rank}{_value(getattr(first, key))} differs "
                    f"from rank {other.rank}{_value(getattr(other, key))}. Give the states that all ranks saved at one step"
                )
    present = sorted(-1 if r.rank is None else r.rank for r in ranks)
    if present != list(range(first.world_size)):
        raise StateError(f"merge needs each of the {first.world_size} ranks once; given were {present[:32]}")
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for name, field in sorted({key for r in ranks for key in r.entries}):
        held = {r.rank: r.entries[name, field] for r in ranks if (name, field) in r.entries}
        kind = first.fields[field]
        some = next(iter(held.values()))
        if kind == "owned" and not all(torch.equal(some, tensor) for tensor in held.values()):
            continue  # ranks own several pieces of the parameter: it starts again
        entries.setdefault(name, {})[field] = (_mean if kind == "local" else _same)(name, field, held, len(ranks))
    fields = {field: "shared" if kind == "owned" else kind for field, kind in first.fields.items()}
    return as_dict(replace(first, fields=fields, nodes=()), entries)


def for_rank(saved: Saved, place: RankId | None, policy: str) -> dict[Key, torch.Tensor]:
    """Return the entries that this rank loads. ``place`` is None before there is a process group.

    Raises:
        StateError: the state is of another rank or world size, and ``policy`` does not permit it.
    """
    if policy not in POLICIES:
        raise StateError(f"world_change={shown(policy)}; legal: 'error', 'mean', 'reset'")
    local = {key for key in saved.entries if saved.fields[key[1]] == "local"}
    own = saved.rank is not None and (place is None or place == RankId(saved.rank, saved.world_size))
    own = own and not (place is None and policy == "reset")
    if own or not local or (policy == "mean" and saved.rank is None):
        return dict(saved.entries)
    if policy == "reset":
        return {key: tensor for key, tensor in saved.entries.items() if key not in local}
    if saved.rank is None:
        raise StateError(
            f"this state is merged over {saved.world_size} ranks. Load it with world_change='mean' (every rank continues "
            "with the mean residual) or 'reset'"
        )
    ranks = f"{RankId(saved.rank, saved.world_size)}, this is {place}"
    if policy == "mean":
        raise StateError(
            f"the state is of {ranks}, and the mean needs the states of all old ranks. Load "
            "commhooks.checkpoint.merge([...]) of them"
        )
    raise StateError(
        f"the state is of {ranks}, and a residual belongs to one rank. Load this rank's own state, or set "
        "world_change='mean' with commhooks.checkpoint.merge([...]) of all old ranks' states, or 'reset'"
    )


def _same_hook(one: Saved, other: Saved) -> bool:
    """Return True if two expressions differ in local options alone, which no configuration has."""
    try:
        return one.config is not None and alike(one.config, other.config)
    except RecursionError:  # no hook is nested so deeply
        return False


def _mean(name: str, field: str, held: dict[int | None, torch.Tensor], world_size: int) -> torch.Tensor:
    tensors = list(held.values())
    total = torch.zeros(tensors[0].shape, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        if tensor.shape != total.shape or tensor.dtype != tensors[0].dtype:
            raise StateError(f"the ranks' states differ in shape or dtype at {shown(name)}, field {shown(field)}")
        total += tensor
    return (total / world_size).to(tensors[0].dtype)


def _same(name: str, field: str, held: dict[int | None, torch.Tensor], world_size: int) -> torch.Tensor:
    (first_rank, first), *others = held.items()
    for rank, tensor in others:
        if first.dtype != tensor.dtype or not torch.equal(first, tensor):
            raise StateError(
                f"{shown(name)}, field {shown(field)}, is the same on all ranks in a sound run; ranks {first_rank} and "
                f"{rank} saved different values"
            )
    return first.clone()


def _value(value: object) -> str:
    """Return a number or a text for an error message; nothing for a table, which would be too long."""
    return f" ({shown(value)})" if isinstance(value, int | str) else ""


# -- another number of shards


def shard_of(name: str) -> tuple[str, int, int]:
    """Return the parameter, the number of the shard, and the number of shards.

    >>> shard_of("blocks.0.up.weight[1/4]"), shard_of("head.bias")
    (('blocks.0.up.weight', 1, 4), ('head.bias', 0, 1))
    """
    found = _SHARD.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else (name, 0, 1)


def recut(parts: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Any]], read: Read) -> dict[str, Any]:
    """Return the entries of this rank's shards from the parts of a checkpoint, one part per saved shard.

    Args:
        parts: saved states. ``rows`` of each lists ``[name, field, shape, dtype]`` of its entries.
        params: ``[name, shape]`` of this rank's shards.
        read: reads an entry of the checkpoint.

    Raises:
        StateError: the parts are not these parameters by rows, or a local field has not one number for each element.
    """
    saved = {str(name): tuple(shape) for part in parts for name, shape in part["params"]}
    whole: dict[str, dict[int, str]] = {}
    for name in saved:
        fqn, number, _ = shard_of(name)
        whole.setdefault(fqn, {})[number] = name
    held: dict[str, dict[str, Sequence[int]]] = {}
    for part in parts:
        for name, field, shape, _ in part["rows"]:
            if part["fields"].get(field) == "local":
                held.setdefault(name, {})[field] = shape
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in params:
        fqn, number, count = shard_of(name)
        names = [whole.get(fqn, {}).get(i) for i in range(len(whole.get(fqn, {})))]
        pieces = [one for one in names if one is not None]
        start = _first_row(pieces, saved, name, tuple(shape), number, count)
        for field in sorted({field for piece in pieces for field in held.get(piece, {})}):
            value = _rows(pieces, saved, held, field, start, tuple(shape), read)
            entries.setdefault(name, {})[field] = value
    return entries


def _first_row(
    pieces: list[str], saved: Mapping[str, tuple[int, ...]], name: str, shape: tuple[int, ...], number: int, count: int
) -> int:
    """Return the first row of this rank's shard, if the saved pieces are runs of rows of the same parameter."""
    shapes = [saved[piece] for piece in pieces]
    complete = bool(pieces) and all(shard_of(piece)[1:] == (i, len(pieces)) for i, piece in enumerate(pieces))
    if complete and len(pieces) == count == 1 and shapes == [shape]:
        return 0
    if not complete or not shape or any(not one or one[1:] != shape[1:] for one in shapes):
        raise _undefined(name, shape, pieces, shapes)
    rows = sum(one[0] for one in shapes)
    each = -(-rows // count)
    start = min(number * each, rows)
    if min(each, rows - start) != shape[0]:
        raise _undefined(name, shape, pieces, shapes)
    return start


def _rows(
    pieces: list[str],
    saved: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Mapping[str, Sequence[int]]],
    field: str,
    start: int,
    shape: tuple[int, ...],
    read: Read,
) -> torch.Tensor:
    """Assemble a field of all pieces by rows, and return this rank's rows. A piece without the field counts as zeros."""
    like: torch.Tensor | None = None
    found: list[torch.Tensor | None] = []
    for piece in pieces:
        tensor = read(piece, field) if field in held.get(piece, {}) else None
        if tensor is not None and tensor.numel() != math.prod(saved[piece]):
            raise StateError(
                f"the field {field!r} of {piece!r} has shape {list(tensor.shape)}, the parameter {list(saved[piece])}. Without "
                "one number per element it cannot be cut for other shards. Load it with world_change='reset'"
            )
        like = tensor if like is None else like
        found.append(tensor)
    assert like is not None  # noqa: S101 - one of the pieces has the field
    width = math.prod(shape[1:])
    rows = [
        (t if t is not None else like.new_zeros(math.prod(saved[piece]))).reshape(-1, width)
        for piece, t in zip(pieces, found, strict=True)
    ]
    mine = torch.cat(rows)[start : start + (shape[0] if shape else 1)]  # (rows of this shard, width)
    if like.ndim == len(shape):
        return mine.reshape(shape)
    return mine.reshape(-1) if like.ndim == 1 else mine.reshape(mine.shape[0], -1)


def _undefined(name: str, shape: tuple[int, ...], pieces: list[str], shapes: list[tuple[int, ...]]) -> StateError:
    there = ", ".join(f"{piece} {list(one)}" for piece, one in zip(pieces, shapes, strict=True)) or "no piece of it"
    return StateError(
        f"{name!r}, {list(shape)}, is not a run of rows of the saved pieces ({there}). Only shards of whole rows can be cut "
        "again. Load on the same mesh, or with world_change='reset'"
    )
