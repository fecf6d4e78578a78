"""Process groups over which a collective was given up: nobody knows which of them a rank will match next.

A rank that waited too long goes on, and its peer meets the old message with its next one: from then on gradients of
different steps are averaged, and no number shows it. So nothing is started over such a group any more, whoever asks.
"""

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.errors import TransportError

_LOST = WeakIdKeyDictionary()  # process group -> True


def give_up(group: dist.ProcessGroup | None) -> None:
    """Nothing may be started over this group any more by this process."""
    if group is not None:
        _LOST[group] = True


def refuse_lost(group: dist.ProcessGroup | None) -> None:
    """Raise if the group was given up.

    Raises:
        TransportError: it was.
    """
    if group in _LOST:
        raise TransportError(
            "a collective over this process group failed or was given up earlier, so ranks may be a step apart, and what is "
            "averaged over it may belong to different steps. On all ranks: make another group (dist.new_group, or destroy "
            "and initialise the default one), wrap the model over it and attach again, and load one checkpoint everywhere"
        )


def group_timeout(group: object) -> float:
    """Seconds that a process group, by default the default one, gives each of its collectives."""
    if not isinstance(group, dist.ProcessGroup):
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None:
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if options is not None:
                seconds: float = options._timeout.total_seconds()
                return seconds
    return default_pg_timeout.total_seconds()
