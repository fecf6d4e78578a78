"""Agreement of all ranks before the first collective of variable size: fixed-size digests, and every rank told.

A rank compares itself along each axis of the mesh in turn and passes on what it has heard, so a mismatch anywhere in
the mesh raises the same error everywhere.
"""

import hashlib
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from commhooks.errors import RankMismatchError

_DIGEST = 16  # bytes


def agree(values: Mapping[str, object], groups: Sequence[tuple[dist.ProcessGroup, Mapping[str, object]]]) -> None:
    """Compare ``values`` over all groups of this rank.

    Args:
        values: what must be the same on every rank, by field.
        groups: the axes, each with further fields that must be the same along it only.

    Raises:
        RankMismatchError: on every rank that can be reached over the axes; names the fields that differ.
    """
    fields = [*values, *(name for _, extra in groups for name in extra)]
    bad = torch.zeros(len(fields), dtype=torch.uint8)
    for group, extra in [*groups, *groups[:-1]]:
        mine = {**values, **extra}
        rows = torch.stack([_row(mine.get(name), heard) for name, heard in zip(fields, bad.tolist(), strict=True)])
        everyone = _gather(rows, group)  # (W, fields, 1 + _DIGEST)
        differs = (everyone[:, :, 1:] != everyone[:1, :, 1:]).any(2).any(0)
        bad = (differs | everyone[:, :, 0].any(0)).to(torch.uint8)
    if bad.any():
        wrong = [name for name, flag in zip(fields, bad.tolist(), strict=True) if flag]
        known = {**values, **{name: value for _, extra in groups for name, value in extra.items()}}
        here = "; ".join(f"{name} = {str(known[name])[:500]}" for name in wrong)
        raise RankMismatchError(
            f"the ranks do not agree on {', '.join(wrong)}; on rank {dist.get_rank()}: {here}. Attach the same hook to "
            "the same model, sharded over meshes of one size, on every rank"
        )


def _row(value: object, heard: int) -> torch.Tensor:
    digest = hashlib.sha256(str(value).encode()).digest()[:_DIGEST]
    return torch.tensor([heard, *digest], dtype=torch.uint8)


def _gather(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``rows`` of every rank of the group: ``(W, *rows.shape)``, on the CPU."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sent = rows.to(device).contiguous()
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return torch.stack(received).cpu()


def replica_group(shard_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks of the default group that hold the same shard as this one; ``None`` if there is no other.

    Collective over the default group; made once for a shard group.

    Raises:
        RankMismatchError: the shard groups differ in size.
    """
    if dist.get_world_size() == shard_group.size():
        return None
    made = _MADE.get(shard_group)
    if made is None:
        made = _MADE[shard_group] = _make(shard_group)
    return made


_MADE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _make(shard_group: dist.ProcessGroup) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - a mesh exists
    place = torch.tensor([shard_group.size(), shard_group.rank()])
    places = [(int(size), int(rank)) for size, rank in _gather(place, world).tolist()]
    sizes = sorted({size for size, _ in places})
    if len(sizes) > 1:
        raise RankMismatchError(
            f"uneven meshes: the model is sharded over groups of {' and '.join(map(str, sizes))} ranks; replicas need "
            "shard meshes of one size, e.g. init_device_mesh(device, (replicas, shards), mesh_dim_names=(...))"
        )
    mine: dist.ProcessGroup | None = None
    for coordinate in range(sizes[0]):
        ranks = [rank for rank, (_, place_of) in enumerate(places) if place_of == coordinate]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None  # noqa: S101 - every rank has a coordinate
    return mine
