"""Which ranks are replicas of one another."""

from weakref import WeakKeyDictionary

import torch.distributed as dist

from commhooks.agreement import StoreExchange
from commhooks.errors import RankMismatchError


def replica_group(shard_group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup | None:
    """The ranks of the default group that hold the same shard as this one; ``None`` if there is no other.

    Collective over the default group; made once for a shard group.

    Raises:
        RankMismatchError: the shard groups differ in size.
    """
    if dist.get_world_size() == shard_group.size():
        return None
    made = _MADE.get(shard_group)
    if made is None:
        made = _MADE[shard_group] = _make(shard_group, timeout)
    return made


_MADE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _make(shard_group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - a mesh exists
    rows = StoreExchange(world, timeout)(f"{shard_group.size():8d}{shard_group.rank():8d}".encode())
    places = [tuple(map(int, row.split())) for row in rows]
    sizes = sorted({size for size, _ in places})
    if len(sizes) > 1:
        raise RankMismatchError(
            f"uneven meshes: the model is sharded over groups of {' and '.join(map(str, sizes))} ranks; replicas need "
            "shard meshes of one size, e.g. init_device_mesh(device, (replicas, shards), mesh_dim_names=(...))"
        )
    mine: dist.ProcessGroup | None = None
    for coordinate in range(sizes[0]):
        ranks = [rank for rank, (_, place) in enumerate(places) if place == coordinate]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None  # noqa: S101 - every rank has a coordinate
    return mine
