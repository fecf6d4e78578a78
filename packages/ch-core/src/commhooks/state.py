"""State of a stateful hook: tensors by parameter name and field, staged in a step and committed after it.

A step never overwrites an entry that it may have to restore. It *stages* new tensors, and :meth:`HookState.commit` makes them
the state. Each entry has two buffers that take turns, so a commit copies nothing.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Protocol

import torch

from commhooks.encoding import OWN_ORDER, Encoding, Entries, Key
from commhooks.errors import StateError
from commhooks.log import log
from commhooks.param_table import ParamTable, position_name, refuse_shapes, trained_params, translate

RESIDUAL = "residual"
"""Field of the numbers that a rank still owes. Errors of a step add up in it."""

BucketNames = tuple[tuple[str, ...], ...]
"""Names of the parameters in each of DDP's buckets, in order."""


@dataclass(frozen=True, slots=True)
class RankId:
    """The rank that residuals belong to.

    Attributes:
        loaded: True if it was read from a checkpoint, and :meth:`HookState.driven_by` has still to verify it.
    """

    rank: int
    world_size: int
    loaded: bool = dataclass_field(default=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


@dataclass(slots=True)
class Snapshot:
    """State before the first tentative step.

    Attributes:
        entries, step: the state.
        presumed: True if checkpoints hold the tentative steps as if the optimizer had used them.
    """

    entries: Entries
    step: int
    presumed: bool = False


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


class HookState:
    """Base for the state of stateful hooks.

    Entries are addressed by ``(parameter name, field)``, never by bucket. Another ``bucket_cap_mb``, rebuilt buckets and
    wrapping the model again keep them. A state needs no process group, and can be pickled and copied without one.

    Attributes:
        step: number of committed steps.
        params: names and shapes of the model's parameters in model order; empty until known. On the
            ``register_comm_hook`` path, which shows no names, a name is position and shape: ``"0:50x50"``.
        buckets: names of the parameters in each of DDP's buckets in the last step; empty if the reduction does not depend
            on the buckets. A resumed process begins with these buckets.
        scale: loss scale of the gradients that the fields of :attr:`scaled` were made from. :meth:`entries` divides by it.
        scaled: power of the loss scale in each field that follows it: 1 for gradients, 2 for their squares. An engine adds
            the reduction's ``scaled_fields``.
        handed_over: True if another engine of this run wrote the entries, False if they were loaded.

    Example:
        >>> import torch
        >>> state = HookState()
        >>> _ = state.stage("layer.weight", "residual", (2,)).fill_(1.0)
        >>> state.commit()
        >>> state.read("layer.weight", "residual")
        tensor([1., 1.])
        >>> _ = state.stage("layer.weight", "residual", (2,)).fill_(float("nan"))
        >>> state.rollback()
        >>> state.read("layer.weight", "residual"), state.step
        (tensor([1., 1.]), 1)
    """

    scaled: Mapping[str, int] = {"residual": 1}

    def __init__(self) -> None:
        self.step = 0
        self.scale = 1.0
        self.params: ParamTable = ()
        self.buckets: BucketNames = ()
        self.handed_over = False
        self._written = False  # True once an engine has driven this state
        self._committed = Entries()
        self._place: RankId | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset everything that belongs to this process, and not to the state."""
        self._staged: dict[Key, torch.Tensor] = {}
        self._carried: dict[Key, torch.Tensor] = {}  # staged by an earlier reduction of this step
        self._errors: set[Key] = set()  # staged entries that a commit adds to the committed ones
        self._spare: dict[Key, torch.Tensor] = {}  # buffers for later steps
        self._encoded: dict[Key, Encoding] = {}  # of staged and carried entries, if the reduction tells
        self._dropped: set[Key] = set()  # entries that go when the step commits
        self._base: Snapshot | None = None
        self._accepted: dict[int, Mapping[Key, Encoding]] = {}  # by identity: mappings that need no conversion
        self._device: torch.device | None = None  # of all entries; None after a load, which may put them anywhere
        self._engine: weakref.ref[StateWriter] | None = None
        self._owners: tuple[weakref.ref[torch.Tensor], ...] = ()  # the parameters, in the order of the table
        self.drivers: dict[object, Any] = {}  # of the hook functions that were called with this state
        self.renames: dict[str, str] = {}  # of the last translation, for objects with names of their own

    # -- entries in a step

    def read(self, name: str, field: str) -> torch.Tensor | None:
        """Return the committed tensor, or ``None``. It must not be written to."""
        return self._committed.get((name, field))

    def before(self, name: str, field: str) -> torch.Tensor | None:
        """Return the entry from before this step, or from an earlier reduction of it (see :meth:`reopen`)."""
        key = (name, field)
        if key in self._carried:
            return self._carried[key]
        return None if key in self._dropped else self._committed.get(key)

    def encoding(self, name: str, field: str) -> Encoding | None:
        """Return the encoding of the entry that :meth:`before` returns; ``None`` if the entry already has its reader's."""
        return self._encoding((name, field), (name, field) in self._carried)

    def decoded(self, name: str, field: str) -> torch.Tensor:
        """Return the entry that :meth:`before` returns, unpacked, in the parameter's own shape and order."""
        key = (name, field)
        store, encoding = (
            self._carried if key in self._carried else self._committed,
            self.encoding(name, field) or OWN_ORDER,
        )
        scales = store.get((name, encoding.packed.scales)) if encoding.packed is not None else None
        return encoding.decode(store[key], scales)

    def re_encode(self, name: str, field: str, tensor: torch.Tensor, encoding: Encoding) -> bool:
        """Hold the numbers of a committed entry in another encoding. Return False if this step has staged the entry."""
        key = (name, field)
        if key in self._carried:
            return False
        self._committed.drop(key)
        self._committed[key] = tensor
        self._committed.encodings[key] = encoding
        return True

    def drop(self, name: str, field: str) -> None:
        """Remove an entry when this step commits. From now on the step reads ``None``."""
        key = (name, field)
        self._carried.pop(key, None)
        self._dropped.add(key)

    def staged(self, name: str, field: str) -> bool:
        """True if this step has staged the entry."""
        return (name, field) in self._staged

    def take_staged(self, name: str, field: str) -> torch.Tensor:
        """Remove the staged tensor of an entry from this step, with its scales. Return its numbers, in the order of its hook."""
        encodings = {**self._committed.encodings, **self._encoded}
        numbers = Entries(self._staged, encodings).numbers((name, field))
        packed = encodings.get((name, field), OWN_ORDER).packed
        for key in ((name, field), (name, packed.scales if packed is not None else "")):
            self._staged.pop(key, None)
            self._errors.discard(key)  # otherwise the commit would add it to the entry
        return numbers

    def _encoding(self, key: Key, staged: bool) -> Encoding | None:
        committed = self._committed.encodings.get(key)
        return self._encoded.get(key, committed) if staged else committed

    def reopen(self, names: Collection[str], fields: Collection[str]) -> None:
        """Let a second reduction of the same parameters in one step start from the entries that the first one staged.

        Without it both would read the committed residual. They would send it twice, and the first new residual would be
        lost.

        Args:
            names: parameters that are reduced again.
            fields: fields of the reduction; a cheap test if any of them is staged.
        """
        if any((name, field) in self._staged for name in names for field in fields):
            for key in [key for key in self._staged if key[0] in names]:
                self._carried[key] = self._staged.pop(key)

    def stage(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        encoding: Encoding | None = None,
    ) -> torch.Tensor:
        """Return an uninitialised tensor that becomes the entry when this step commits. A second call returns the same.

        ``encoding`` describes the tensor's format; ``None`` keeps the format that :meth:`read_as` set.
        """
        key = (name, field)
        if encoding is not None:
            self._encoded[key] = encoding
        found = self._staged[key] if key in self._staged else self._spare.pop(key, None)
        device = torch.device(device) if isinstance(device, str) else device
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != device:
            found = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._staged[key] = found
        return found

    def stage_error(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        encoding: Encoding | None = None,
    ) -> torch.Tensor | None:
        """Return a tensor for an error that :meth:`commit` adds to a residual. ``None`` if the field is not a residual.

        A rank without a gradient of the parameter does not send its residual. It may still send other numbers, with a rounding
        error.
        """
        residual = (name, RESIDUAL)
        packed = self._encoded.get(residual, self._committed.encodings.get(residual, OWN_ORDER)).packed
        if field != RESIDUAL and (packed is None or field != packed.scales):
            return None
        key = (name, field)
        found = self._staged.get(key) if key in self._errors else self._spare.pop(key, None)
        device = torch.device(device)
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != device:
            found = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._staged[key] = found
        self._errors.add(key)
        if encoding is not None:
            self._encoded[key] = encoding
        return found

    def newest(self, name: str, field: str) -> torch.Tensor:
        """Return the unpacked entry that the last step staged, or else the committed one. Only for keys in :meth:`held`."""
        key = (name, field)
        if key in self._errors and key in self._committed:
            return self._committed.numbers(key)
        store = next(store for store in (self._staged, self._carried, self._committed) if key in store)
        return Entries(store, {**self._committed.encodings, **self._encoded}).numbers(key)

    def numbers(self, name: str, field: str) -> torch.Tensor | None:
        """Return the committed entry unpacked, in the order of its hook; ``None`` if there is none."""
        return self._committed.numbers((name, field)) if (name, field) in self._committed else None

    def held(self) -> set[Key]:
        """Return ``(parameter name, field)`` of every staged or committed entry."""
        return {*self._staged, *self._carried, *self._committed}

    def read_as(self, encodings: Mapping[Key, Encoding]) -> None:
        """Convert committed entries to the encodings that a reduction reads and writes. Their numbers stay.

        Args:
            encodings: of the entries of one bucket, from :meth:`.Reduction.encodings`. The same object again costs nothing.
        """
        if self._accepted.get(id(encodings)) is encodings:
            return
        if self._committed.read_as(encodings):
            self._accepted.clear()
        self._accepted[id(encodings)] = encodings

    # -- the end of a step

    def commit(self, *, tentative: bool = False, presumed: bool = False, dropped: Collection[str] = ()) -> None:
        """Make the staged entries the state, and count the step.

        Args:
            tentative: True if the optimizer may still skip the step. :meth:`resolve_tentative` decides later, for all tentative
                steps together.
            presumed: True if checkpoints hold a tentative step as if it were used.
            dropped: parameters whose average the wrapper did not apply. Their residuals stay as they were.
        """
        self._finish_errors(dropped)
        if tentative and self._base is None:
            self._base = Snapshot(self._committed.copy(), self.step)
        if self._base is not None:
            self._base.presumed = presumed
        self._fold_carried()
        for key in self._dropped:
            if key in self._committed:
                self._committed.drop(key)
        self._dropped.clear()
        replaced = {k: self._committed[k] for k in self._staged if k in self._committed}
        self._committed.update(self._staged)
        self._committed.encodings.update(self._encoded)
        self._encoded.clear()
        (self._spare.update if self._base is None else self._put_aside)(replaced)
        self._staged.clear()
        self.step += 1

    def _finish_errors(self, dropped: Collection[str]) -> None:
        """Add staged errors to the residuals, and drop the residuals of parameters whose average was not applied."""
        held, errors = self._committed, self._errors
        if dropped:
            packings = [(name, encoding.packed) for (name, _), encoding in held.encodings.items()]
            scales = {(name, packed.scales) for name, packed in packings if packed is not None}
            errors = errors | {key for key in self._staged if key[1] == RESIDUAL or key in scales}
        for key in [key for key in errors if key[0] in dropped]:
            if key in self._staged:
                self._spare[key] = self._staged.pop(key)
                self._encoded.pop(key, None)  # the committed entry keeps its own
        for key in self._errors:
            new, old = self._staged.get(key), held.get(key)
            if key[1] != RESIDUAL or new is None or old is None:
                continue
            packed = held.encodings.get(key, OWN_ORDER).packed
            if packed is not None and new.dtype == torch.int8:
                factors = self._staged[key[0], packed.scales]
                packed.pack(packed.unpack(new, factors).add_(held.numbers(key).view(new.shape)), new, factors)
            elif new.numel() == old.numel():  # another reduction may have staged the same numbers in another shape
                new.add_(old.view(new.shape))
        self._errors = set()

    def _fold_carried(self) -> None:
        """Stage the entries that a second reduction read and did not replace."""
        self._staged = {**self._carried, **self._staged}
        self._carried.clear()

    @property
    def tentative(self) -> bool:
        """True if committed steps may still be rolled back."""
        return self._base is not None

    def resolve_tentative(self, used: bool) -> None:
        """Keep the tentative steps, or return to the state before the first of them."""
        base, self._base = self._base, None
        if base is None:
            return
        dropped = base.entries
        if not used:
            dropped, self._committed, self.step = self._committed, base.entries, base.step
            self._accepted.clear()
        self._put_aside(dropped)

    def _put_aside(self, dropped: Mapping[Key, torch.Tensor]) -> None:
        """Reuse these tensors in later steps, unless they are the state or may become it again."""
        base, held = self._base.entries if self._base is not None else {}, self._committed
        self._spare.update({k: t for k, t in dropped.items() if t is not held.get(k) and t is not base.get(k)})

    def rollback(self) -> None:
        """Drop the staged entries."""
        self._carried.clear()
        self._encoded.clear()
        self._dropped.clear()
        self._errors = set()
        self._spare.update(self._staged)
        self._staged.clear()

    # -- units and devices

    def bring(self, device: torch.device) -> None:
        """Move all entries to the device of the gradients. A loaded state may be elsewhere, by ``map_location``."""
        if self._device != device:
            stores = self._stores()
            moved = {id(tensor): tensor.to(device) for store in stores for tensor in store.values()}
            for store in stores:
                store.update({key: moved[id(tensor)] for key, tensor in store.items()})
            self._device = device

    def rescale(self, scale: float) -> None:
        """Convert the fields of :attr:`scaled` to another loss scale.

        Raises:
            ValueError: ``scale`` is not a positive finite number.
        """
        if scale == self.scale:
            return
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale is {scale}; expected a positive finite number")
        found: dict[int, tuple[int, torch.Tensor]] = {}  # each tensor once: two stores may share it
        for store in self._stores():
            codes = store.scale_fields()
            for key, tensor in store.items():
                power = self.scaled.get(codes.get(key, key[1]))
                if power and tensor.is_floating_point():  # codes follow through their scales
                    found[id(tensor)] = power, tensor
        for power, tensor in found.values():
            tensor.mul_((scale / self.scale) ** power)
        self.scale = scale

    # -- checkpoints

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield ``(parameter name, field, tensor)`` of every certain entry, sorted by name and field.

        Tensors are unscaled and unpacked. A field with a number for each element has the parameter's own shape and order.
        """
        for (name, field), tensor in self._certain()[0].decoded():
            in_units = field in self.scaled and self.scale != 1.0
            yield name, field, tensor / self.scale ** self.scaled[field] if in_units else tensor

    @property
    def certain_step(self) -> int:
        """Number of committed steps without tentative ones."""
        return self._certain()[1]

    def _certain(self) -> tuple[Entries, int]:
        base = self._base
        return (self._committed, self.step) if base is None or base.presumed else (base.entries, base.step)

    def _stores(self) -> tuple[Entries, ...]:
        """Return the committed entries, and those that tentative steps may be rolled back to."""
        return (self._committed,) if self._base is None else (self._committed, self._base.entries)

    def replace(
        self,
        entries: Mapping[Key, torch.Tensor],
        step: int,
        params: ParamTable | None = None,
        place: RankId | None = None,
        *,
        keep: frozenset[str] = frozenset(),
        ordered: bool = True,
        buckets: BucketNames = (),
    ) -> None:
        """Replace all entries and the step.

        Args:
            entries: the new committed tensors, unscaled and unpacked.
            step: the new step.
            params: names and shapes of the parameters, if they change too.
            place: rank that the state was saved on, if it is still to be verified.
            keep: fields whose staged and tentative tensors stay. A member that heals within a step receives the state
                from before the step. The step is then committed on top.
            ordered: True if they have the parameter's own order, as :meth:`entries` yields them. False if each has the
                order that its reader expects, as in checkpoints of format 1.
            buckets: the new :attr:`buckets`; empty to keep the old ones.
        """
        (before, self._base), held = (self._base, None), self._committed
        self._committed = Entries(entries, dict.fromkeys(entries, OWN_ORDER) if ordered else {})
        self._committed.read_as(held.encodings)  # staged entries that stay have these
        self._accepted.clear()
        if before is not None and keep:
            self._base = Snapshot(self._committed.copy(), step, before.presumed)
            self._committed.update({k: t for k, t in held.items() if k[1] in keep and t is not before.entries.get(k)})
        self._fold_carried()
        self._dropped.clear()
        self._staged = {key: tensor for key, tensor in self._staged.items() if key[1] in keep}
        self._errors &= self._staged.keys()
        self._spare.clear()
        self.step, self.scale, self._place, self._device = step, 1.0, place, None
        self.handed_over = self._written = False
        if params is not None:
            self.params = params
        self.buckets = buckets or self.buckets

    def __getstate__(self) -> dict[str, Any]:
        """Return the committed state, without process group, model or buffers."""
        self.resolve_step()
        kept = dict(self.__dict__)
        kept["_committed"], kept["step"] = self._certain()
        for name in _OF_PROCESS:
            kept.pop(name, None)
        kept["_place"] = (self._place.rank, self._place.world_size) if self._place is not None else None
        if "process_group" in kept:
            kept["process_group"] = None  # the next model's group, or the default one
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        # version 0.1.0 pickled none of these
        self.__dict__.update({"buckets": (), "handed_over": False, "_written": False} | kept)
        self._committed = Entries.of(self._committed)
        self._place = RankId(*kept["_place"]) if kept["_place"] is not None else None
        self._forget()

    # -- the model

    def bind(self, model: torch.nn.Module) -> None:
        """Make this the state of ``model``: entries keyed by position get the model's parameter names.

        :func:`commhooks.attach` does this by itself. After ``register_comm_hook`` it is optional, before or after the first
        step.

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
        trained = trained_params(model)
        self.bind_params([(n, tuple(p.shape)) for n, p in trained], [p for _, p in trained])

    def bind_params(self, params: Iterable[tuple[str, Sequence[int]]], owners: Sequence[torch.Tensor] = ()) -> None:
        """Bind to parameters by names and shapes in model order; ``owners`` are the parameters themselves."""
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

    def replace_params(self, params: ParamTable, owners: Sequence[torch.Tensor]) -> None:
        """Replace the parameter table after parameters were thawed or frozen. Entries stay.

        Args:
            params: names and shapes of all parameters that have or may get entries, in model order.
            owners: these parameters.
        """
        self.params = params
        self._owners = tuple(weakref.ref(p) for p in owners)

    def bind_by_position(self, owners: Sequence[torch.Tensor]) -> None:
        """Bind to parameters in model order without names. They get names by position, or the names of a loaded
        checkpoint.

        Raises:
            StateError: the state has entries for parameters of other shapes.
        """
        shapes = [tuple(p.shape) for p in owners]
        if self.params and [shape for _, shape in self.params] != shapes:
            if any(self.entries()):
                refuse_shapes([shape for _, shape in self.params], shapes)
            self.params = ()
        names = [name for name, _ in self.params] or map(position_name, range(len(shapes)), shapes)
        self.bind_params(list(zip(names, shapes, strict=True)), owners)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names in every entry."""
        for store in self._stores():
            store.rename(names)
        for buffers in (self._staged, self._carried, self._spare, self._encoded):
            moved: dict[Key, Any] = {(names.get(name, name), field): t for (name, field), t in buffers.items()}
            buffers.clear()
            buffers.update(moved)
        self._dropped = {(names.get(name, name), field) for name, field in self._dropped}
        self._accepted.clear()
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

    # -- the engine

    def driven_by(self, engine: StateWriter) -> None:
        """Register the engine that will write to this state. An earlier engine's open step is resolved.

        Raises:
            StateError: the state was loaded before the process group existed, and belongs to another rank.
        """
        self.resolve_step()
        if self._staged or self._carried:
            self.rollback()  # the earlier engine's step never ended
        self.resolve_tentative(False)
        scaled = {**self.scaled, **engine.reduction.scaled_fields}
        if scaled != self.scaled:
            self.rescale(1.0)  # by the powers of the hook before
        self.scaled = scaled
        transport = engine.transport
        here, there = RankId(transport.rank, transport.world_size), self._place
        self.handed_over, self._written = self._written, True
        self._drop_undeclared(engine.reduction.fields)
        foreign = [key for key in self._committed if engine.reduction.fields.get(key[1]) == "local"]
        if there is not None and foreign and there != here and not transport.elastic:
            self._drop_residuals(foreign, there, here)
        self._place = here
        self._engine = weakref.ref(engine)

    def _drop_undeclared(self, fields: Mapping[str, str]) -> None:
        """Drop fields of another hook that the new one does not declare. It would neither use nor load them.

        A hook without any state leaves the entries to the next hook, as plain averaging in a single process must.
        """
        scales = self._committed.scale_fields()
        for key in [key for key in self._committed if fields and scales.get(key, key[1]) not in fields]:
            if key in self._committed:  # not yet dropped with its codes
                self._committed.drop(key)

    def drop_unfit(self, keys: Iterable[Key]) -> None:
        """Drop entries of a :attr:`handed_over` state that the present hook would keep in another shape.

        Args:
            keys: parameter name and field of each.
        """
        for name, field in keys:
            log.info("%s of %s starts again, because the previous hook kept it in another shape", field, name)
            self._committed.drop((name, field))

    def cast(self, name: str, field: str, dtype: torch.dtype) -> None:
        """Hold an entry of a :attr:`handed_over` state in another floating dtype, with its order and its scale."""
        key = (name, field)
        self._committed[key] = self._committed[key].to(dtype)

    def _drop_residuals(self, keys: Iterable[Key], there: RankId, here: RankId) -> None:
        """Drop the residuals of another rank's pickled state; refuse a loaded state."""
        if there.loaded:
            raise StateError(
                f"the loaded state is of rank {there.rank} of {there.world_size}, this is rank {here.rank} of "
                f"{here.world_size}. Load it after attach() with world_change='mean' or 'reset', or load this rank's own"
            )
        log.warning("the pickled state is of %s, not of %s: residuals are reset. Save every rank's", there, here)
        for key in keys:
            self._committed.drop(key)

    @property
    def engine(self) -> StateWriter | None:
        """The engine that writes to this state, while it is alive."""
        return self._engine() if self._engine is not None else None

    def resolve_step(self) -> None:
        """Commit or roll back a finished step whose outcome is still open."""
        engine = self.engine
        if engine is not None:
            engine.resolve_step()


_OF_PROCESS = (
    *("_staged", "_carried", "_errors", "_spare", "_base", "_accepted", "_encoded", "_dropped"),
    *("_device", "_engine", "_owners", "drivers", "renames"),
)
