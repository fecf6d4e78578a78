"""Whose a state is: the rank that its residuals belong to, and the engine that writes to it."""

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class RankId:
    """The rank that residuals belong to; ``loaded`` if it was read from a checkpoint and is still to be verified."""

    rank: int
    world_size: int
    loaded: bool = dataclass_field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


class StateWriter(Protocol):
    """The engine that writes to a state, as far as the state knows it."""

    reduction: Any
    transport: Any

    def resolve_step(self) -> bool | None:
        """Commit or roll back the last finished step, if that is still open."""

    def forget_open_steps(self) -> None:
        """Another state has been loaded: what is still open was part of the one before."""
