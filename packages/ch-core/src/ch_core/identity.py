"""Identity of a state: the rank whose residuals it holds, and the model whose parameters it names."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ch_core.entries import Versions
from ch_core.errors import StateError
from ch_core.param_table import ParamTable, position_name, refuse_shapes, translate

BucketNames = tuple[tuple[str, ...], ...]
"""Names of the parameters in each of DDP's buckets, in order."""


@dataclass(frozen=True, slots=True)
class RankId:
    """The rank that residuals belong to.

    Attributes:
        loaded: True if it was read from a checkpoint, and :meth:`.HookState.driven_by` has still to verify it.
    """

    rank: int
    world_size: int
    loaded: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


class Identity:
    """Rank and model that a state belongs to.

    Args:
        versions: the entries, which get the parameters' names.

    Attributes:
        rank: ``None`` until known.
        params: names and shapes of the model's parameters in model order; empty until known. On the
            ``register_comm_hook`` path, which shows no names, a name is position and shape: ``"0:50x50"``.
        buckets: names of the parameters in each of DDP's buckets in the last step; empty if the reduction does not depend
            on the buckets. A resumed process begins with these buckets.
        renames: names of the last translation, for objects with names of their own.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self.rank: RankId | None = None
        self.params: ParamTable = ()
        self.buckets: BucketNames = ()
        self.renames: dict[str, str] = {}
        self._owners: tuple[weakref.ref[torch.Tensor], ...] = ()  # the parameters, in the order of the table

    def bind(self, params: Iterable[tuple[str, Sequence[int]]], owners: Sequence[torch.Tensor] = ()) -> None:
        """Bind to parameters by names and shapes in model order; ``owners`` are the parameters themselves.

        Raises:
            StateError: the state belongs to another model that is still alive, or its names and shapes do not fit.
        """
        table = tuple((name, tuple(shape)) for name, shape in params)
        if owners:
            self.refuse_other(owners)
        held = self.names()
        if len(owners) == len(table) == len(held) and all(id(p) in held for p in owners):  # the very same parameters
            translation = {held[id(p)]: name for p, (name, _) in zip(owners, table, strict=True)}
        else:
            translation = translate(self.params, table)
        if any(old != new for old, new in translation.items()):
            self._rename(translation)
        self.replace_params(table, owners)

    def replace_params(self, params: ParamTable, owners: Sequence[torch.Tensor]) -> None:
        """Replace the parameter table, for example after parameters were thawed or frozen. Entries stay.

        Args:
            params: names and shapes of all parameters that have or may get entries, in model order.
            owners: these parameters; empty to keep the present ones.
        """
        self.params = params
        if owners:
            self._owners = tuple(weakref.ref(p) for p in owners)

    def bind_by_position(self, owners: Sequence[torch.Tensor]) -> None:
        """Bind to parameters in model order without names. They get names by position, or the names of a loaded
        checkpoint.

        Raises:
            StateError: the state has entries for parameters of other shapes.
        """
        shapes = [tuple(p.shape) for p in owners]
        if self.params and [shape for _, shape in self.params] != shapes:
            if self._versions.certain.entries:
                refuse_shapes([shape for _, shape in self.params], shapes)
            self.params = ()
        names = [name for name, _ in self.params] or map(position_name, range(len(shapes)), shapes)
        self.bind(list(zip(names, shapes, strict=True)), owners)

    def _rename(self, names: Mapping[str, str]) -> None:
        self._versions.rename(names)
        self.buckets = tuple(tuple(names.get(name, name) for name in bucket) for bucket in self.buckets)
        self.renames = dict(names)

    def refuse_other(self, owners: Iterable[torch.Tensor]) -> None:
        """Refuse the parameters of a second model.

        Raises:
            StateError: the state serves another model that is still alive.
        """
        held = self.names()
        if held and not any(id(p) in held for p in owners):
            raise StateError(
                "this hook state serves another model already, and each model would get the other's residuals. Make one "
                "state per model, or handle.detach() the first"
            )

    def names(self) -> dict[int, str]:
        """Return ``id(parameter)`` -> name of the model that the state is bound to."""
        pairs = zip(self.params, self._owners, strict=False)
        return {id(p): name for (name, _), ref in pairs if (p := ref()) is not None}

    def unbind(self) -> None:
        """Release the model, so that another model with the same shapes may be bound."""
        self._owners = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process can use: no parameters, and a rank that need not be loaded."""
        rank = self.rank and RankId(self.rank.rank, self.rank.world_size)
        return {"_versions": self._versions, "rank": rank, "params": self.params, "buckets": self.buckets}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__init__(kept["_versions"])  # type: ignore[misc]
        self.__dict__.update(kept)
