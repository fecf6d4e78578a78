"""Divides a process group into equal groups."""

import itertools
import socket

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ch_core import StoreExchange, sub_group
from commhooks import HookConfigError

Group = dist.ProcessGroup


def part_of(group: Group | None, size: int, what: str) -> Group:
    """Return the group of ``size`` consecutive ranks of ``group`` that includes this rank.

    Only members of a part wait for each other, so ranks outside ``group`` need not take part.

    Args:
        group: the group to divide; ``None`` is the default group.
        size: ranks per part.
        what: name of the caller, for errors.

    Raises:
        HookConfigError: ``size`` does not divide the group.
    """
    whole = group if group is not None else dist.group.WORLD
    if whole is None:
        raise HookConfigError(f"{what}: there is no process group to divide; call init_process_group(...) first")
    if size < 1 or whole.size() % size:
        raise HookConfigError(f"{what}: {whole.size()} ranks cannot be divided into groups of {size}")
    first = dist.get_rank(whole) // size * size
    return sub_group(whole, tuple(range(first, first + size)), "local SGD")


def ranks_per_machine(group: Group | None) -> int:
    """Return the number of ranks per machine, by host name. This call is collective.

    Raises:
        HookConfigError: the numbers differ between machines, or ranks of one machine are not consecutive.
    """
    whole = group if group is not None else dist.group.WORLD
    if whole is None:
        raise HookConfigError("there is no process group to divide; call init_process_group(...) first")
    # Over the store: all_gather_object unpickles through NumPy, which neither torch nor this package installs.
    exchange = StoreExchange(whole, default_pg_timeout.total_seconds())
    names = [name.decode() for name in exchange(socket.gethostname().encode())]
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    if len({size for _, size in runs}) > 1 or len({name for name, _ in runs}) < len(runs):
        raise HookConfigError(f"the ranks lie on machines as {runs}: give a subgroup, or a subgroup_size that fits")
    return runs[0][1]


def has_default_group() -> bool:
    """Return True if a default process group exists."""
    return dist.is_available() and dist.is_initialized()
