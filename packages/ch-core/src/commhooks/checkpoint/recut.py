"""A state saved by shards, for a model that is cut into another number of them.

A parameter's shards are called ``"w[0/2]"``, ``"w[1/2]"``: equal runs of its rows, the last ones shorter or empty. A field
with a number for every element (a residual) is put together over the shards and cut anew. What belongs to a shard as such
(PowerSGD's Q spans the rows of one shard) has no meaning for another, and starts afresh.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commhooks.errors import StateError

Rows = Sequence[Sequence[Any]]
Read = Callable[[str, str], torch.Tensor]
"""Gives an entry of the checkpoint by name and field: the mean over replicas of what is a rank's own."""

_SHARD = re.compile(r"(.*)\[(\d+)/(\d+)\]", re.DOTALL)


def shard_of(name: str) -> tuple[str, int, int]:
    """Parameter, number of the shard, number of shards.

    >>> shard_of("blocks.0.up.weight[1/4]"), shard_of("head.bias")
    (('blocks.0.up.weight', 1, 4), ('head.bias', 0, 1))
    """
    found = _SHARD.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else (name, 0, 1)


def recut(parts: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Any]], read: Read) -> dict[str, Any]:
    """The entries of ``params`` (``[name, shape]`` of this rank) from the parts of a checkpoint, one per shard.

    Raises:
        StateError: the parts do not make up these parameters by rows, or a rank's own field is not one number for each
            element.
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
        start = _start(pieces, saved, name, tuple(shape), number, count)
        for field in sorted({field for piece in pieces for field in held.get(piece, {})}):
            value = _cut(pieces, saved, held, field, start, tuple(shape), read)
            entries.setdefault(name, {})[field] = value
    return entries


def _start(
    pieces: list[str], saved: Mapping[str, tuple[int, ...]], name: str, shape: tuple[int, ...], number: int, count: int
) -> int:
    """First row of this rank's shard, if the saved pieces are runs of rows of the same parameter."""
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


def _cut(
    pieces: list[str],
    saved: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Mapping[str, Sequence[int]]],
    field: str,
    start: int,
    shape: tuple[int, ...],
    read: Read,
) -> torch.Tensor:
    """A field of all pieces put together by rows, and this rank's rows of it; a piece that has none counts as zeros."""
    like: torch.Tensor | None = None
    found: list[torch.Tensor | None] = []
    for piece in pieces:
        tensor = read(piece, field) if field in held.get(piece, {}) else None
        if tensor is not None and tensor.numel() != math.prod(saved[piece]):
            raise StateError(
                f"the field {field!r} of {piece!r} is not one number for each element ({list(tensor.shape)} for "
                f"{list(saved[piece])}), so it cannot be cut anew: load it with world_change='reset'"
            )
        like = tensor if like is None else like
        found.append(tensor)
    assert like is not None  # noqa: S101 - the field is held by one of them
    width = math.prod(shape[1:])
    rows = [
        (t if t is not None else like.new_zeros(math.prod(saved[piece]))).reshape(-1, width)
        for piece, t in zip(pieces, found, strict=True)
    ]
    mine = torch.cat(rows)[start : start + (shape[0] if shape else 1)]  # (rows of this shard, width)
    return (
        mine.reshape(-1)
        if like.ndim == 1
        else mine.reshape(mine.shape[0], -1)
        if like.ndim == 2
        else mine.reshape(shape)
    )


def _undefined(name: str, shape: tuple[int, ...], pieces: list[str], shapes: list[tuple[int, ...]]) -> StateError:
    there = ", ".join(f"{piece} {list(one)}" for piece, one in zip(pieces, shapes, strict=True)) or "nothing of it"
    return StateError(
        f"{name!r}, {list(shape)}, is no run of rows of what was saved ({there}): only shards of whole rows can be cut "
        "anew. Load on the same mesh, or with world_change='reset'"
    )
