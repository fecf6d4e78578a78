"""Whose a state is: the rank that its residuals belong to, and the engine that writes to it; what it may go back to."""

import logging
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, NoReturn, Protocol

from commhooks.encoding import Entries
from commhooks.errors import HookNotSupportedError, HookResultError, StateError

log = logging.getLogger("commhooks")


@dataclass(frozen=True, slots=True)
class RankId:
    """The rank that residuals belong to; ``loaded`` if it was read from a checkpoint and is still to be verified."""

    rank: int
    world_size: int
    loaded: bool = dataclass_field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


@dataclass(slots=True)
class Base:
    """What tentatively committed steps may be rolled back to; ``presumed`` if they are saved as if they were used."""

    entries: Entries
    step: int
    presumed: bool = False


class StateWriter(Protocol):
    """The engine that writes to a state, as far as the state knows it."""

    reduction: Any
    transport: Any

    def resolve_step(self) -> bool | None:
        """Commit or roll back the last finished step, if that is still open."""

    def forget_open_steps(self) -> None:
        """Another state has been loaded: what is still open was part of the one before."""


def another_rank(there: RankId, here: RankId) -> None:
    """A state holds residuals of another rank: refuse a loaded one, or say that those of a pickled one are dropped.

    Raises:
        StateError: naming both ranks.
    """
    if there.loaded:
        raise StateError(
            f"the loaded state is of rank {there.rank} of {there.world_size}, this is rank {here.rank} of "
            f"{here.world_size}: load it after attach() with world_change='mean' or 'reset', or load its own"
        )
    log.warning("the pickled state is of %s, not of %s: residuals are reset. Save every rank's", there, here)


def say_lost(place: RankId | None, step: int) -> None:
    """A step does not count, and there is one copy of the state."""
    log.warning(
        "[%s] step %d does not count (a hook raised, or numbers were not finite), and rollback=False keeps no copy to go "
        "back to: residuals begin at zero again",
        place or "a state without a rank",
        step,
    )


def refuse_judge(who: str) -> NoReturn:
    """Somebody decides after a step whether it counts, and there is nothing to go back to.

    Raises:
        HookNotSupportedError: naming who.
    """
    raise HookNotSupportedError(
        f"rollback=False and {who} exclude each other: {who} may give a step back, and with one copy of the state there is "
        f"nothing to go back to. Leave rollback=False out, or {who}"
    )


def refuse_late_read(name: str, field: str) -> NoReturn:
    """Raise :class:`HookResultError`: an entry is read after its tensor was handed out to be overwritten."""
    raise HookResultError(
        f"{field!r} of {name} is read after it was staged, and with rollback=False the staged tensor is the committed one: "
        "call ctx.read() before ctx.stage(), then write number by number, as torch.add(gradient, before, out=staged)"
    )
