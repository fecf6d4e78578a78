"""Everything that ch-ft takes from torchft, in one place: when torchft changes, this is the page to look at.

No private name of torchft is used. What a Manager must have is in :mod:`ch_ft.protocols`; its process groups are asked
for :meth:`~ch_ft.protocols.Abortable.abort` and the two collectives of :class:`~ch_ft.protocols.MemberGroup` alone, so
``configure``, which the nightly builds have replaced by ``reconfigure``, is the Manager's own business.
"""

from typing import TYPE_CHECKING, Any

from ch_ft.protocols import Membership, Reducer, Transaction
from ch_ft.versions import installed_torchft
from commhooks import HookNotSupportedError

if TYPE_CHECKING:
    from types import ModuleType

TRIED = "torchft 0.2.0 and torchft-nightly 2026.10.26"
USED = {
    "Manager": sorted(name for p in (Reducer, Membership, Transaction) for name in vars(p) if not name.startswith("_")),
    "ProcessGroupGloo": ["abort", "allgather", "alltoall_base", "size"],
    "process_group.ManagedProcessGroup": ["parent"],
    "process_group.ProcessGroupBaby": [],
    "process_group.ProcessGroupDummy": [],
    "coordination.LighthouseServer": ["address", "shutdown"],
}
"""Names below the module torchft -> methods that are called."""


def require_torchft() -> Any:
    """The torchft module.

    Raises:
        HookNotSupportedError: it is not installed, or lacks something of :data:`USED`.
    """
    try:
        import torchft
        import torchft.coordination
    except ImportError as error:
        raise HookNotSupportedError(
            "fault-tolerant training needs torchft, which is not installed: pip install 'torchft>=0.2.0'. For tests "
            f"without it there is a simulator, ch_ft.SimulatedCluster ({error})"
        ) from error
    missing = lacking(torchft)
    if missing:
        found = installed_torchft() or "of an unknown version"
        raise HookNotSupportedError(
            f"the installed torchft ({found}) has no {', '.join(missing)}. ch-ft has been tried with {TRIED}: install "
            "one of these"
        )
    return torchft


def lacking(torchft: "ModuleType") -> list[str]:
    """Which of :data:`USED` a torchft does not have."""
    missing = []
    for path, methods in USED.items():
        found: Any = torchft
        for part in path.split("."):
            found = getattr(found, part, None)
        missing += [path] if found is None else [f"{path}.{name}" for name in methods if not hasattr(found, name)]
    return missing


def group_of(manager: object) -> Any:
    """The process group that torchft's Manager was given; ``None`` if this is none of its managers.

    The Manager shows it to nobody, but what torchft puts around a Manager for DDP says what lies inside.
    """
    if installed_torchft() is None:
        return None
    torchft = require_torchft()
    if not isinstance(manager, torchft.Manager):
        return None
    try:
        return torchft.process_group.ManagedProcessGroup(manager).parent
    except AttributeError:  # a double of the Manager that has its methods and nothing inside
        return None


def swallows(group: object) -> str | None:
    """Why a group carries no all-to-all or all-gather, or ``None`` if it does."""
    if installed_torchft() is None:
        return None
    groups = require_torchft().process_group
    while group is not None:
        if isinstance(group, groups.ProcessGroupDummy):
            return f"its process group, a {type(group).__name__}, discards what it is given"
        if isinstance(group, groups.ProcessGroupBaby):
            return f"its process group, a {type(group).__name__}, lives in another process and shares whole tensors with it"
        try:
            group = getattr(group, "parent", None)
        except AssertionError:  # connected to nobody before the first quorum
            return None
    return None
