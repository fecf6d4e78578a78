"""Everything that ch-ft takes from torchft. If torchft changes, adapt this module. Imports no torch.

It uses no private name of torchft. :mod:`ch_ft.manager` lists the methods of a Manager. Of process groups it calls
:meth:`~ch_ft.manager.Abortable.abort` and the methods of :class:`~ch_ft.manager.MemberGroup`. It never calls
``configure``, which nightly builds have replaced by ``reconfigure``. The Manager does.
"""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from ch_ft.manager import Membership, Reducer, Transaction
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
"""Name below the module torchft -> its methods that ch-ft calls."""


def require_torchft() -> Any:
    """Return the torchft module.

    Raises:
        HookNotSupportedError: it is not installed, or lacks a name of :data:`USED`.
    """
    try:
        import torchft
        import torchft.coordination
    except ImportError as error:
        raise HookNotSupportedError(
            "fault-tolerant training needs torchft, which is not installed: pip install 'torchft>=0.2.0'. For tests "
            f"without it there is a simulator, ch_testing.SimulatedCluster ({error})"
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
    """Return the names of :data:`USED` that a torchft does not have."""
    missing = []
    for path, methods in USED.items():
        found: Any = torchft
        for part in path.split("."):
            found = getattr(found, part, None)
        missing += [path] if found is None else [f"{path}.{name}" for name in methods if not hasattr(found, name)]
    return missing


def group_of(manager: object) -> Any:
    """Return the process group of torchft's Manager; ``None`` for any other manager.

    The Manager has no public name for it. torchft's wrapper of a Manager for DDP does.
    """
    if installed_torchft() is None:
        return None
    torchft = require_torchft()
    if not isinstance(manager, torchft.Manager):
        return None
    try:
        return torchft.process_group.ManagedProcessGroup(manager).parent
    except AttributeError:  # a test double with the methods of a Manager and no group
        return None


def swallows(group: object) -> str | None:
    """Return the reason if a group carries no all-to-all and all-gather, else ``None``."""
    if installed_torchft() is None:
        return None
    groups = require_torchft().process_group
    while group is not None:
        if isinstance(group, groups.ProcessGroupDummy):
            return f"its process group, a {type(group).__name__}, discards its input"
        if isinstance(group, groups.ProcessGroupBaby):
            return f"its process group, a {type(group).__name__}, lives in another process and shares whole tensors with it"
        try:
            group = getattr(group, "parent", None)
        except AssertionError:  # it has no parent before the first quorum
            return None
    return None


def installed(distribution: str) -> str | None:
    """Return the version of a distribution without importing it; ``None`` if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_torchft() -> str | None:
    """Return the version of torchft or of its nightly build; ``None`` if neither is installed."""
    return installed("torchft") or installed("torchft-nightly")
