"""State of a stateful hook: entries by parameter name and field, and the rank and model that they belong to."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ch_core.encoding import Entry, Key
from ch_core.entries import Draft, Versions
from ch_core.errors import StateError
from ch_core.identity import BucketNames, Identity, RankId
from ch_core.logs import log
from ch_core.param_table import ParamTable, trained_params


class StateWriter(Protocol):
    """The engine that writes to a state."""

    @property
    def reduction(self) -> Any: ...

    @property
    def transport(self) -> Any: ...

    def resolve_step(self) -> bool | None:
        """Commit or roll back the last finished step if it is still open."""

    def forget_unresolved(self) -> None:
        """Forget finished steps, because another state was loaded."""


_OF_PROCESS = ("_engine", "drivers", "weighing")  # attributes that no other process can use


class HookState:
    """Base for the state of stateful hooks.

    Entries are addressed by ``(parameter name, field)``, never by bucket. Another ``bucket_cap_mb``, rebuilt buckets and
    wrapping the model again keep them. A state needs no process group, and can be pickled and copied without one.
    A checkpoint holds it as tensors and plain values.

    Attributes:
        versions: the entries: committed ones, and the draft of a step.
        identity: rank, and model with its parameters.
        handed_over: True if another engine of this run wrote the entries, False if they were loaded.
        drivers: of the hook functions that were called with this state.
        weighing: see :attr:`.Engine.weighing`. The engine of the next attach needs the weights of gradients that wait under
            ``no_sync()``.

    Example:
        >>> import torch
        >>> state = HookState()
        >>> _ = state.draft.write(("layer.weight", "residual"), (2,)).tensor.fill_(1.0)
        >>> state.versions.commit()
        >>> state.read("layer.weight", "residual")
        tensor([1., 1.])
        >>> _ = state.draft.write(("layer.weight", "residual"), (2,)).tensor.fill_(float("nan"))
        >>> state.versions.rollback()
        >>> state.read("layer.weight", "residual"), state.step
        (tensor([1., 1.]), 1)
    """

    def __init__(self) -> None:
        self.versions = Versions()
        self.identity = Identity(self.versions)
        self.handed_over = False
        self._written = False  # True once an engine has driven this state
        self._leave_process()

    def _leave_process(self) -> None:
        self._engine: weakref.ref[StateWriter] | None = None
        self.drivers: dict[object, Any] = {}
        self.weighing: Any = None

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.versions.step

    @step.setter
    def step(self, step: int) -> None:
        self.versions.step = step

    @property
    def draft(self) -> Draft:
        """Entries that the present step writes."""
        return self.versions.draft

    def read(self, name: str, field: str) -> torch.Tensor | None:
        """Return the committed tensor, or ``None``. It must not be written to."""
        entry = self.versions.committed.get((name, field))
        return entry.tensor if entry is not None else None

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield ``(parameter name, field, tensor)`` of every certain entry, sorted by name and field.

        Tensors are unscaled and unpacked. A field with a number for each element has the parameter's own shape and order.
        """
        for (name, field), entry in sorted(self.versions.certain.entries.items(), key=lambda pair: pair[0]):
            yield name, field, self.versions.unscaled(field, entry.decoded())

    def replace(
        self,
        entries: Mapping[Key, torch.Tensor],
        step: int,
        params: ParamTable | None = None,
        place: RankId | None = None,
        *,
        keep: Collection[str] = (),
        buckets: BucketNames = (),
        reference: float | None = None,
    ) -> None:
        """Replace all entries and the step.

        Args:
            entries: the new committed tensors, unscaled and unpacked, as :meth:`entries` yields them.
            step: the new step.
            params: names and shapes of the parameters, if they change too.
            place: rank that the state was saved on, if it is still to be verified.
            keep: see :meth:`.Versions.replace`.
            buckets: the new buckets; empty to keep the old ones.
            reference: reference weight that the entries were saved with; ``None`` if steps had no weights.
        """
        self.versions.replace({key: Entry(tensor) for key, tensor in entries.items()}, step, keep, reference)
        self.handed_over = self._written = False
        identity = self.identity
        identity.rank, identity.buckets = place, buckets or identity.buckets
        identity.params = params if params is not None else identity.params

    def bind(self, model: torch.nn.Module) -> None:
        """Make this the state of ``model``: entries keyed by position get the model's parameter names.

        An adapter does this by itself. After ``register_comm_hook`` it is optional, before or after the first
        step.

        Args:
            model: the model, wrapped in ``DistributedDataParallel`` or not.

        Raises:
            StateError: the state belongs to another model that is still alive, or its names and shapes do not fit.

        Example:
            >>> state = HookState()
            >>> state.bind(torch.nn.Linear(3, 2))
            >>> state.identity.params
            (('weight', (2, 3)), ('bias', (2,)))
            >>> other = torch.nn.Linear(4, 2)
            >>> state.bind(other)
            Traceback (most recent call last):
            ...
            ch_core.errors.StateError: this state does not fit the model: 'weight' has shape (2, 3) in the state, ...
        """
        trained = trained_params(model)
        self.identity.bind([(n, tuple(p.shape)) for n, p in trained], [p for _, p in trained])

    # -- the engine

    def driven_by(self, engine: StateWriter) -> None:
        """Register the engine that will write to this state. An earlier engine's open step is resolved.

        Raises:
            StateError: the state was loaded before the process group existed, and belongs to another rank.
        """
        self.resolve_step()
        versions, fields = self.versions, engine.reduction.fields
        versions.abandon()  # if the earlier engine's step never ended
        versions.resolve_tentative(False)
        scaled = {**versions.scaled, **engine.reduction.scaled_fields}
        if scaled != versions.scaled:
            versions.rescale(1.0)  # by the powers of the hook before
        versions.scaled = scaled
        transport = engine.transport
        here, there = RankId(transport.rank, transport.world_size), self.identity.rank
        foreign = [key for key in versions.committed if fields.get(key[1]) == "local"]
        if there is not None and foreign and there != here and not transport.elastic:
            _refuse_loaded(there, here)
            versions.drop(foreign)
        if fields:  # the new hook would neither use nor load other fields; one without state leaves them to the next
            versions.drop([key for key in versions.committed if key[1] not in fields])
        self.handed_over, self._written = self._written, True
        self.identity.rank = here
        self._engine = weakref.ref(engine)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Give this state back with all entries if the block raises, for example because the ranks disagree on a new engine."""
        versions, rank, written = self.versions, self.identity.rank, self._written
        versions.dropped = {}
        try:
            yield
        except BaseException:
            versions.restore_dropped()
            self.identity.rank, self._written = rank, written
            raise
        finally:
            versions.dropped = None

    @property
    def engine(self) -> StateWriter | None:
        """The engine that writes to this state, while it is alive."""
        return self._engine() if self._engine is not None else None

    def resolve_step(self) -> None:
        """Commit or roll back a finished step whose outcome is still open."""
        engine = self.engine
        if engine is not None:
            engine.resolve_step()

    # -- pickles and copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the committed state, without process group, model or buffers."""
        self.resolve_step()
        kept = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        if "process_group" in kept:
            kept["process_group"] = None  # the next model's group, or the default one
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._leave_process()


def _refuse_loaded(there: RankId, here: RankId) -> None:
    """Raise if residuals of another rank were loaded. Warn if they were pickled, because the caller resets them."""
    if there.loaded:
        raise StateError(
            f"the loaded state is of rank {there.rank} of {there.world_size}, this is rank {here.rank} of "
            f"{here.world_size}. Load it after attach() with world_change='mean' or 'reset', or load this rank's own"
        )
    log.warning("the pickled state is of %s, not of %s: residuals are reset. Save every rank's", there, here)
