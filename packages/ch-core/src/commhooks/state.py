"""State of a stateful hook: tensors keyed by parameter name, written beside the old ones and committed per step.

A step never overwrites what it may have to give back: it *stages* new tensors, and only :meth:`HookState.commit`
makes them the state. Two buffers per entry are kept and swapped, so a committed step costs no copy.
"""

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import StateError
from commhooks.naming import ParamTable, translate

if TYPE_CHECKING:
    from commhooks.engine import Engine


log = logging.getLogger("commhooks")


@dataclass(frozen=True, slots=True)
class Place:
    """The rank that residuals belong to; ``loaded`` if it was read from a checkpoint and is still to be verified."""

    rank: int
    world_size: int
    loaded: bool = dataclass_field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


class HookState:
    """Base for the state of stateful hooks.

    Entries are addressed by ``(parameter name, field)``, never by bucket: bucket rebuilds, another
    ``bucket_cap_mb``, re-wrapping and resuming change nothing. Needs no process group, and can be pickled and
    deep-copied without one.

    Attributes:
        step: number of committed steps.
        params: names and shapes of the parameters of the model it belongs to, in model order; empty until known.
            Where no names are seen (``register_comm_hook``), they are called by position and shape, ``"0:50x50"``.
        scale: loss scale in whose units the fields of :attr:`scaled` are held; :meth:`entries` gives them unscaled.
        scaled: fields that have the gradient's units, and therefore follow the loss scale.

    Example:
        >>> import torch
        >>> state = HookState()
        >>> _ = state.stage("layer.weight", "residual", (2,)).fill_(1.0)
        >>> state.read("layer.weight", "residual") is None   # not committed yet
        True
        >>> state.commit()
        >>> state.read("layer.weight", "residual")
        tensor([1., 1.])
        >>> _ = state.stage("layer.weight", "residual", (2,)).fill_(float("nan"))
        >>> state.rollback()
        >>> state.read("layer.weight", "residual"), state.step
        (tensor([1., 1.]), 1)
    """

    scaled: frozenset[str] = frozenset({"residual"})

    def __init__(self) -> None:
        self.step = 0
        self.scale = 1.0
        self.params: ParamTable = ()
        self._committed: dict[tuple[str, str], torch.Tensor] = {}
        self._place: Place | None = None
        self._forget()

    def _forget(self) -> None:
        """Everything that belongs to this process and not to the state."""
        self._staged: dict[tuple[str, str], torch.Tensor] = {}
        self._spare: dict[tuple[str, str], torch.Tensor] = {}
        self._engine: weakref.ref[Engine] | None = None
        self._owners: tuple[weakref.ref[torch.Tensor], ...] = ()  # the parameters, in the order of the table
        self.drivers: dict[object, Any] = {}  # of the hook functions that were given this state
        self.renames: dict[str, str] = {}  # of the last translation, for those who keep names themselves

    def read(self, name: str, field: str) -> torch.Tensor | None:
        """The committed tensor, or ``None``. Not to be written to."""
        return self._committed.get((name, field))

    def stage(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """An uninitialised tensor that becomes the entry when this step commits. Asked for again, it is the same."""
        key = (name, field)
        found = self._staged.get(key)
        if found is None:
            found = self._spare.pop(key, None)
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != torch.device(device):
            found = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._staged[key] = found
        return found

    def newest(self, name: str, field: str) -> torch.Tensor:
        """What the last step has staged, if that is still open, else what is committed."""
        return self._staged.get((name, field), self._committed.get((name, field)))  # type: ignore[return-value]

    def held(self) -> set[tuple[str, str]]:
        """``(parameter name, field)`` of everything staged or committed."""
        return set(self._staged) | set(self._committed)

    @property
    def staging(self) -> bool:
        """Whether anything is staged."""
        return bool(self._staged)

    def commit(self) -> None:
        """Make what was staged the state and count the step."""
        for key, tensor in self._staged.items():
            old = self._committed.get(key)
            if old is not None:
                self._spare[key] = old
            self._committed[key] = tensor
        self._staged.clear()
        self.step += 1

    def rollback(self) -> None:
        """Drop what was staged: the step never was."""
        self._spare.update(self._staged)
        self._staged.clear()

    def rescale(self, scale: float) -> None:
        """Hold what has the gradient's units in those of another loss scale: a scaler has changed it.

        Raises:
            ValueError: ``scale`` is not a positive finite number.
        """
        if scale == self.scale:
            return
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number")
        for (_, field), tensor in self._committed.items():
            if field in self.scaled:
                tensor.mul_(scale / self.scale)
        self.scale = scale

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """``(parameter name, field, tensor)`` of everything committed, unscaled, in sorted order."""
        for (name, field), tensor in sorted(self._committed.items(), key=lambda entry: entry[0]):
            yield name, field, tensor / self.scale if field in self.scaled and self.scale != 1.0 else tensor

    def replace(
        self,
        entries: Mapping[tuple[str, str], torch.Tensor],
        step: int,
        params: ParamTable | None = None,
        place: "Place | None" = None,
        *,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        """Put ``entries`` and ``step`` in place of everything held.

        Args:
            entries: the new committed tensors.
            step: the new step.
            params: names and shapes of the parameters, where they change too.
            place: what made the state, until it is known to fit.
            keep: fields whose staged tensors stay staged: a member that healed in the middle of a step received
                the state from before that step, and the step itself is still to be committed on top.
        """
        self._committed = dict(entries)
        self._staged = {key: tensor for key, tensor in self._staged.items() if key[1] in keep}
        self._spare.clear()
        self.step, self.scale = step, 1.0
        self._place = place
        if params is not None:
            self.params = params

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names, in every entry."""
        for store in (self._committed, self._staged, self._spare):
            moved = {(names.get(name, name), field): t for (name, field), t in store.items()}
            store.clear()
            store.update(moved)
        self.renames = dict(names)

    def nbytes(self) -> int:
        """Bytes held, both buffers counted."""
        stores = (self._committed, self._staged, self._spare)
        return sum(t.numel() * t.element_size() for store in stores for t in store.values())

    # -- whose it is

    def bind(self, model: torch.nn.Module) -> None:
        """Make this the state of ``model``: entries keyed by position get the model's parameter names.

        :func:`commhooks.attach` does this by itself; on the bare ``register_comm_hook`` path it is optional, before or
        after the first step.

        Args:
            model: the model, wrapped in ``DistributedDataParallel`` or not.

        Raises:
            StateError: the state belongs to another model that is still alive, or its names and shapes do not fit.

        Example:
            >>> state = HookState()
            >>> state.bind(torch.nn.Linear(3, 2))
            >>> state.params
            (('weight', (2, 3)), ('bias', (2,)))
            >>> other = torch.nn.Linear(4, 2)
            >>> state.bind(other)
            Traceback (most recent call last):
            ...
            commhooks.errors.StateError: this state does not fit the model: 'weight' has shape (2, 3) in the state, ...
        """
        ignored: Iterable[str] = ()
        if isinstance(model, DistributedDataParallel):  # its parameters have the names of the module inside
            ignored, model = model.parameters_to_ignore, model.module
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
        self.bind_params([(n, tuple(p.shape)) for n, p in trained], [p for _, p in trained])

    def bind_params(self, params: Iterable[tuple[str, Sequence[int]]], owners: Sequence[torch.Tensor] = ()) -> None:
        """:meth:`bind` with names and shapes in model order, and the parameters themselves."""
        table = tuple((name, tuple(shape)) for name, shape in params)
        if owners:
            self.refuse_other(owners)
        held = self.names()
        if len(owners) == len(table) == len(held) and all(id(p) in held for p in owners):  # the very same parameters
            translation = {held[id(p)]: name for p, (name, _) in zip(owners, table, strict=True)}
        else:
            translation = translate(self.params, table)
        if any(old != new for old, new in translation.items()):
            self.rename(translation)
        self.params = table
        if owners:
            self._owners = tuple(weakref.ref(p) for p in owners)

    def refuse_other(self, owners: Iterable[torch.Tensor]) -> None:
        """Refuse the parameters of another model than the one it is bound to.

        Raises:
            StateError: the state serves another model that is still alive.
        """
        held = self.names()
        if held and not any(id(p) in held for p in owners):
            raise StateError(
                "this hook state serves another model already, and each would get the other's residuals: make one "
                "state per model, or handle.detach() the first"
            )

    def names(self) -> dict[int, str]:
        """``id(parameter)`` -> name, of the model it is bound to."""
        pairs = zip(self.params, self._owners, strict=False)
        return {id(p): name for (name, _), ref in pairs if (p := ref()) is not None}

    def unbind(self) -> None:
        """Belong to no model any more, so that another of the same shapes may be bound."""
        self._owners = ()

    def driven_by(self, engine: "Engine") -> None:
        """Called by an engine that will write to this state; one that did so before is settled.

        Raises:
            StateError: the state was loaded before there was a process group, and is another rank's.
        """
        self.settle()
        transport = engine.transport
        here = Place(transport.rank, transport.world_size)
        there, fields = self._place, engine.reduction.fields
        foreign = [key for key in self._committed if fields.get(key[1]) == "local"]
        if there is not None and foreign and there != here and not transport.elastic:
            if there.loaded:
                raise StateError(
                    f"the loaded state is of rank {there.rank} of {there.world_size}, this is rank {here.rank} of "
                    f"{here.world_size}: load it after attach() with world_change='mean' or 'reset', or load its own"
                )
            log.warning("the pickled state is of %s, not of %s: residuals are reset. Save every rank's", there, here)
            for key in foreign:
                del self._committed[key]
        self._place = here
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> "Engine | None":
        """The engine that writes to this state, while it is alive."""
        return self._engine() if self._engine is not None else None

    def settle(self) -> None:
        """Commit or roll back a finished step whose verdict is still open."""
        engine = self.engine
        if engine is not None:
            engine.settle()

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that :meth:`load_state_dict` reads; see :mod:`commhooks.checkpoint`."""
        from commhooks.checkpoint import state_dict

        return state_dict(self)

    def load_state_dict(self, saved: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Go on from :meth:`state_dict`; all or nothing. See :func:`commhooks.checkpoint.load_state_dict`."""
        from commhooks.checkpoint import load_state_dict

        load_state_dict(self, saved, world_change=world_change)

    def __getstate__(self) -> dict[str, Any]:
        """What is committed, without process group, model or buffers."""
        self.settle()
        kept = dict(self.__dict__)
        for name in ("_staged", "_spare", "_engine", "_owners", "drivers", "renames"):
            kept.pop(name, None)
        kept["_place"] = (self._place.rank, self._place.world_size) if self._place is not None else None
        if "process_group" in kept:
            kept["process_group"] = None  # the group of the model, or the default one, when it is used again
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._place = Place(*kept["_place"]) if kept["_place"] is not None else None
        self._forget()


class DefaultState:
    """State of FSDP1's hooks: the group, and the factors before and after the sum.

    Dividing by all of W before the sum underflows in 16 bits, dividing after it overflows, so the division is
    split in two near-equal powers of two where W allows it.

    Args:
        process_group: the group to reduce over.

    Attributes:
        gradient_predivide_factor: smallest power of two f with ``f * f >= W`` while f divides W.
        gradient_postdivide_factor: ``W / gradient_predivide_factor``.

    Example:
        >>> DefaultState.split_factor(64)
        (8.0, 8.0)
        >>> DefaultState.split_factor(6)
        (4.0, 1.5)
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError("DefaultState needs the process group to reduce over, got None")
        self.process_group: dist.ProcessGroup | None = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor, self.gradient_postdivide_factor = self.split_factor(self.world_size)

    @staticmethod
    def split_factor(world_size: int) -> tuple[float, float]:
        """Pre- and post-divide factors whose product is ``world_size``."""
        factor = 1
        while world_size % factor == 0 and world_size / factor > factor:
            factor *= 2
        return float(factor), world_size / factor

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "process_group"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class LowPrecisionState(DefaultState):
    """State of FSDP1's 16-bit hooks.

    Args:
        process_group: the group to reduce over.
        parameter_type: dtype that the reduced gradient is cast back to.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type
