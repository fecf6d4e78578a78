"""State of a stateful hook: tensors keyed by parameter name, written beside the old ones and committed per step.

A step never overwrites what it may have to give back: it *stages* new tensors, and only :meth:`HookState.commit`
makes them the state. Two buffers per entry are kept and swapped, so a committed step costs no copy. With
:attr:`HookState.in_place` there is one: a step overwrites it, and one that does not count leaves nothing.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from commhooks.encoding import OWN_ORDER, Encoding, Entries
from commhooks.errors import StateError
from commhooks.param_table import ParamTable, position_name, refuse_shapes, trained_params, translate
from commhooks.state_owner import Base, RankId, StateWriter, another_rank, refuse_judge, refuse_late_read, say_lost


class HookState:
    """Base for the state of stateful hooks.

    Entries are addressed by ``(parameter name, field)``, never by bucket: bucket rebuilds, another ``bucket_cap_mb``,
    re-wrapping and resuming change nothing. Needs no process group, and can be pickled and deep-copied without one.

    Attributes:
        step: number of committed steps.
        params: names and shapes of the parameters of the model it belongs to, in model order; empty until known.
            Where no names are seen (``register_comm_hook``), they are called by position and shape, ``"0:50x50"``.
        buckets: names of the parameters in each of DDP's buckets in the last step; empty if the reduction does not depend
            on the buckets. A resumed process begins with them.
        in_place: keep one copy: what is staged is the committed tensor, to be overwritten. A step that does not count drops
            every entry, on all ranks alike: residuals begin at zero. ``attach(..., rollback=False)`` sets it; where the
            hook is registered, set it before the first step.
        scale: loss scale in whose units the fields of :attr:`scaled` are held; :meth:`entries` gives them unscaled.
        scaled: fields that follow the loss scale, and by which power: 1 for the gradient's units, 2 for its square.
            An engine adds the reduction's ``scaled_fields``.

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
    in_place = False

    def __init__(self) -> None:
        self.step = 0
        self.scale = 1.0
        self.params: ParamTable = ()
        self.buckets: tuple[tuple[str, ...], ...] = ()
        self._committed = Entries()
        self._place: RankId | None = None
        self._forget()

    def _forget(self) -> None:
        """Everything that belongs to this process and not to the state."""
        self._staged: dict[tuple[str, str], torch.Tensor] = {}
        self._carried: dict[tuple[str, str], torch.Tensor] = {}  # staged by an earlier reduction of this step
        self._spare: dict[tuple[str, str], torch.Tensor] = {}
        self._base: Base | None = None
        self._accepted: dict[int, Mapping[tuple[str, str], Encoding]] = {}  # by identity: nothing to convert
        self._device: torch.device | None = None  # where everything is; None: wherever it was loaded to
        self._engine: weakref.ref[StateWriter] | None = None
        self._owners: tuple[weakref.ref[torch.Tensor], ...] = ()  # the parameters, in the order of the table
        self.drivers: dict[object, Any] = {}  # of the hook functions that were given this state
        self.renames: dict[str, str] = {}  # of the last translation, for those who keep names themselves

    def read(self, name: str, field: str) -> torch.Tensor | None:
        """The committed tensor, or ``None``. Not to be written to."""
        return self._committed.get((name, field))

    def before(self, name: str, field: str) -> torch.Tensor | None:
        """:meth:`read` inside a step, refused where :attr:`in_place` has given the tensor away to be overwritten."""
        key = (name, field)
        if self.in_place and key in self._staged:
            refuse_late_read(name, field)
        return self._carried[key] if key in self._carried else self._committed.get(key)

    def reopen(self, names: Collection[str], fields: Collection[str]) -> None:
        """Let a second reduction of the same parameters in one step start from the entries that the first one staged.

        Without it both would read the committed residual: it would be sent twice, and the first new one would be lost.

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
    ) -> torch.Tensor:
        """An uninitialised tensor that becomes the entry when this step commits. Asked for again, it is the same.

        Read the entry before, or number by number while, you write to it: :attr:`in_place` it is the committed tensor.
        """
        key = (name, field)
        found = self._staged.get(key)
        if found is None:
            found = self._carried.get(key, self._committed.get(key)) if self.in_place else self._spare.pop(key, None)
        device = torch.device(device) if isinstance(device, str) else device
        if found is None or found.shape != tuple(shape) or found.dtype != dtype or found.device != device:
            found = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._staged[key] = found
        return found

    def newest(self, name: str, field: str) -> torch.Tensor:
        """What the last step has staged, if that is still open, else what is committed; one of :meth:`held`, unpacked."""
        key = (name, field)
        stores = (self._staged, self._carried, self._committed)
        store = next(store for store in stores if key in store)
        return Entries(store, self._committed.encodings).numbers(key)

    def numbers(self, name: str, field: str) -> torch.Tensor | None:
        """The committed numbers, or ``None``: :meth:`read`, unpacked."""
        return self._committed.numbers((name, field)) if (name, field) in self._committed else None

    def read_as(self, encodings: Mapping[tuple[str, str], Encoding]) -> None:
        """Convert committed entries to the encodings that a reduction reads and writes. Their numbers stay.

        Args:
            encodings: of a bucket's entries, see :meth:`.Reduction.encodings`; the same object while they are the same.
        """
        if self._accepted.get(id(encodings)) is encodings:
            return
        if self._committed.read_as(encodings):
            self._accepted.clear()
        self._accepted[id(encodings)] = encodings

    def held(self) -> set[tuple[str, str]]:
        """``(parameter name, field)`` of everything staged or committed."""
        return {*self._staged, *self._carried, *self._committed}

    def commit(self, *, tentative: bool = False, presumed: bool = False) -> None:
        """Make what was staged the state and count the step.

        Args:
            tentative: nobody knows yet whether the step is used: keep what was before it, for :meth:`resolve`. Several
                steps may be committed on top of one another in this way; all of them are resolved together.
            presumed: tentative, but to be saved as if it were used.
        """
        if tentative and self.in_place:
            refuse_judge("a step that waits to be used")
        if tentative and self._base is None:
            self._base = Base(self._committed.copy(), self.step)
        if self._base is not None:
            self._base.presumed = presumed
        self._fold_carried()
        replaced = {} if self.in_place else {k: self._committed[k] for k in self._staged if k in self._committed}
        self._committed.update(self._staged)
        (self._spare.update if self._base is None else self._put_aside)(replaced)
        self._staged.clear()
        self.step += 1

    def _fold_carried(self) -> None:
        """Stage the entries that a second reduction has read and not replaced."""
        self._staged = {**self._carried, **self._staged}
        self._carried.clear()

    @property
    def tentative(self) -> bool:
        """Whether steps are committed that may still be rolled back."""
        return self._base is not None

    def resolve(self, used: bool) -> None:
        """Keep the steps that were committed tentatively, or go back to before the first of them."""
        base, self._base = self._base, None
        if base is None:
            return
        dropped = base.entries
        if not used:
            dropped, self._committed, self.step = self._committed, base.entries, base.step
            self._accepted.clear()
        self._put_aside(dropped)

    def _put_aside(self, dropped: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Later steps may write to these tensors, unless they still are, or may again become, the state."""
        base, held = self._base.entries if self._base is not None else {}, self._committed
        self._spare.update({k: t for k, t in dropped.items() if t is not held.get(k) and t is not base.get(k)})

    def rollback(self) -> None:
        """Drop what was staged: the step never was. :attr:`in_place`, drop everything: how far a failed step has come
        differs between ranks, and what they share must not.
        """
        self._carried.clear()
        if not self.in_place:
            self._spare.update(self._staged)
        elif self._committed:
            say_lost(self._place, self.step + 1)
            self._committed.clear()
        self._staged.clear()

    def bring(self, device: torch.device) -> None:
        """Have everything on the device of the gradients: what is loaded may be elsewhere, as ``map_location`` says."""
        if self._device != device:
            stores = self._stores()
            moved = {id(tensor): tensor.to(device) for store in stores for tensor in store.values()}
            for store in stores:
                store.update({key: moved[id(tensor)] for key, tensor in store.items()})
            self._device = device

    def rescale(self, scale: float) -> None:
        """Hold what has the gradient's units in those of another loss scale: a scaler has changed it.

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

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield ``(parameter name, field, tensor)`` of every certain entry, sorted by name and field.

        Tensors are unscaled and unpacked. A field with a number for each element has the parameter's own shape and order.
        """
        for (name, field), tensor in self._certain()[0].decoded():
            in_units = field in self.scaled and self.scale != 1.0
            yield name, field, tensor / self.scale ** self.scaled[field] if in_units else tensor

    @property
    def certain_step(self) -> int:
        """The committed steps that nothing can roll back any more: :attr:`step` but for tentative ones."""
        return self._certain()[1]

    def _certain(self) -> tuple[Entries, int]:
        if self.in_place and (self._staged or self._carried):
            raise StateError("a step is under way, and with rollback=False it overwrites the state: save after it")
        base = self._base
        return (self._committed, self.step) if base is None or base.presumed else (base.entries, base.step)

    def _stores(self) -> tuple[Entries, ...]:
        """Return the committed entries, and those that tentative steps may be rolled back to."""
        return (self._committed,) if self._base is None else (self._committed, self._base.entries)

    def replace(
        self,
        entries: Mapping[tuple[str, str], torch.Tensor],
        step: int,
        params: ParamTable | None = None,
        place: "RankId | None" = None,
        *,
        keep: frozenset[str] = frozenset(),
        ordered: bool = True,
        buckets: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """Put ``entries`` and ``step`` in place of everything held.

        Args:
            entries: the new committed tensors, unscaled and unpacked.
            step: the new step.
            params: names and shapes of the parameters, where they change too.
            place: what made the state, until it is known to fit.
            keep: fields whose staged and tentative tensors stay: a member that healed in the middle of a step received
                the state from before that step, and the step itself is still to be committed on top.
            ordered: True if they have the parameter's own order, as :meth:`entries` gives them. False if each has the order
                that its reader expects, as in checkpoints of format 1.
            buckets: the new :attr:`buckets`; empty to keep those of before.
        """
        (before, self._base), held = (self._base, None), self._committed
        self._committed = Entries(entries, dict.fromkeys(entries, OWN_ORDER) if ordered else {})
        self._committed.read_as(held.encodings)  # what is staged and kept has these
        self._accepted.clear()
        if before is not None and keep:
            self._base = Base(self._committed.copy(), step, before.presumed)
            self._committed.update({k: t for k, t in held.items() if k[1] in keep and t is not before.entries.get(k)})
        self._fold_carried()
        self._staged = {key: tensor for key, tensor in self._staged.items() if key[1] in keep}
        self._spare.clear()
        self.step, self.scale, self._place, self._device = step, 1.0, place, None
        if params is not None:
            self.params = params
        self.buckets = buckets or self.buckets

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names, in every entry."""
        for store in self._stores():
            store.rename(names)
        for buffers in (self._staged, self._carried, self._spare):
            moved = {(names.get(name, name), field): t for (name, field), t in buffers.items()}
            buffers.clear()
            buffers.update(moved)
        self._accepted.clear()
        self.buckets = tuple(tuple(names.get(name, name) for name in bucket) for bucket in self.buckets)
        self.renames = dict(names)

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
        trained = trained_params(model)
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

    def follow(self, params: ParamTable, owners: Sequence[torch.Tensor]) -> None:
        """Take over the table of a model whose trainable parameters have changed; entries stay.

        Args:
            params: names and shapes of all parameters that have entries or may get some, in model order.
            owners: these parameters themselves.
        """
        self.params = params
        self._owners = tuple(weakref.ref(p) for p in owners)

    def bind_by_position(self, owners: Sequence[torch.Tensor]) -> None:
        """:meth:`bind` where no names are seen: to parameters in model order, called by position and shape, or as a
        checkpoint calls them. Raises :class:`StateError` if it was kept for parameters of other shapes.
        """
        shapes = [tuple(p.shape) for p in owners]
        if self.params and [shape for _, shape in self.params] != shapes:
            if any(self.entries()):
                refuse_shapes([shape for _, shape in self.params], shapes)
            self.params = ()
        names = [name for name, _ in self.params] or map(position_name, range(len(shapes)), shapes)
        self.bind_params(list(zip(names, shapes, strict=True)), owners)

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

    def driven_by(self, engine: StateWriter) -> None:
        """Called by an engine that will write to this state; one that did so before is settled.

        Raises:
            StateError: the state was loaded before there was a process group, and is another rank's.
        """
        self.keep_copies(one=self.in_place)
        self.scaled = {**engine.reduction.scaled_fields, **self.scaled}
        transport = engine.transport
        if self.in_place and transport.elastic:
            refuse_judge("a manager's vote")
        here, there = RankId(transport.rank, transport.world_size), self._place
        foreign = [key for key in self._committed if engine.reduction.fields.get(key[1]) == "local"]
        if there is not None and foreign and there != here and not transport.elastic:
            another_rank(there, here)
            for key in foreign:
                del self._committed[key]
        self._place = here
        self._engine = weakref.ref(engine)

    def keep_copies(self, *, one: bool) -> None:
        """Set :attr:`in_place`. What the engine before has left open ends by the rules that it began under."""
        self.settle()
        if self._staged or self._carried:
            self.rollback()  # a step that it has not seen the end of
        self.resolve(False)
        if one != self.in_place:
            self._spare.clear()  # may be what is committed
        self.in_place = one

    @property
    def engine(self) -> StateWriter | None:
        """The engine that writes to this state, while it is alive."""
        return self._engine() if self._engine is not None else None

    def settle(self) -> None:
        """Commit or roll back a finished step whose verdict is still open."""
        engine = self.engine
        if engine is not None:
            engine.resolve_step()

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
        kept["_committed"], kept["step"] = self._certain()
        own = (
            "_staged",
            "_carried",
            "_spare",
            "_base",
            "_accepted",
            "_device",
            "_engine",
            "_owners",
            "drivers",
            "renames",
        )
        for name in own:
            kept.pop(name, None)
        kept["_place"] = (self._place.rank, self._place.world_size) if self._place is not None else None
        if "process_group" in kept:
            kept["process_group"] = None  # the group of the model, or the default one, when it is used again
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update({"buckets": ()} | kept)  # version 0.1.0 pickles none
        self._committed = Entries.of(self._committed)
        self._place = RankId(*kept["_place"]) if kept["_place"] is not None else None
        self._forget()
