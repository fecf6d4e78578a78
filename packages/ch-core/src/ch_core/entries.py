"""Entries of a state in versions: the committed one, the draft of a step, and the one that tentative steps may return to.

All versions have one loss scale and one device.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ch_core.encoding import OWN_ORDER, Encoding, Entry, Key

RESIDUAL = "residual"
"""Field of the numbers that a rank still owes. Errors of a step add up in it."""


class Version(NamedTuple):
    """Entries after a number of committed steps."""

    entries: Mapping[Key, Entry]
    step: int


class Draft:
    """Entries that a step writes, and the entries that it found.

    Reductions read the entries that they found. They write to other buffers, so that the step can be dropped.

    Attributes:
        found: committed entries. After :meth:`reopen` they include entries that an earlier reduction of this step wrote.
        written: entries that the step has written.
        spare: a buffer for the next draft of each entry.
    """

    def __init__(self) -> None:
        self.found: Mapping[Key, Entry] = {}
        self.written: dict[Key, Entry] = {}
        self.spare: dict[Key, Entry] = {}

    def begin(self, found: Mapping[Key, Entry]) -> None:
        """Begin the draft of the next step over these entries."""
        self.found, self.written = found, {}

    def newest(self) -> dict[Key, Entry]:
        """Return the entries as the step has written them. A written error is no entry yet."""
        found = self.found
        return {**found, **{k: e for k, e in self.written.items() if not (e.is_error and k in found)}}

    def write(
        self,
        key: Key,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        encoding: Encoding = OWN_ORDER,
        *,
        is_error: bool = False,
    ) -> Entry:
        """Return an uninitialised entry to fill. A second call returns the same.

        Codes (int8 in a packed encoding) get scales.
        """
        found = self.written.get(key) or self.spare.pop(key, None)
        device = torch.device(device) if isinstance(device, str) else device
        if found is None or not found.fits(shape, dtype, device):
            found = Entry(torch.empty(tuple(shape), dtype=dtype, device=device))
        blocks = encoding.scales(found.tensor)
        if blocks is None:
            found.scales = None
        elif found.scales is None or found.scales.numel() != blocks:
            found.scales = torch.empty(blocks, dtype=torch.float32, device=device)
        found.encoding, found.is_error = encoding, is_error
        self.written[key] = found
        return found

    def drop(self, key: Key) -> None:
        """Remove an entry that the step found. It goes when the step commits."""
        self.found = {other: entry for other, entry in self.found.items() if other != key}

    def read_as(self, encodings: Mapping[Key, Encoding]) -> None:
        """Convert found entries to the encodings that a reduction reads, from :meth:`.Reduction.encodings`."""
        for key, wanted in encodings.items():
            entry = self.found.get(key)
            if entry is not None and entry.encoding is not wanted:
                entry.convert(wanted)

    def reopen(self, names: Collection[str], fields: Collection[str]) -> None:
        """Let a second reduction of the same parameters in one step find the entries that the first one wrote.

        Without it both would read the committed residual. They would send it twice, and the first new residual would be
        lost.

        Args:
            names: parameters that are reduced again.
            fields: fields of the reduction.
        """
        if any((name, field) in self.written for name in names for field in fields):
            self.begin(self.merged())

    def merged(self) -> Mapping[Key, Entry]:
        """Return the found entries, replaced by the written ones. Written errors are added to what they are errors of."""
        for key, entry in self.written.items():
            if entry.is_error and key in self.found:
                entry.add(self.found[key])
            entry.is_error = False
        return {**self.found, **self.written}


class Versions:
    """Committed entries, the number of steps behind them, and the draft of the next step.

    A step never overwrites an entry that it may have to restore. Each entry has two buffers that take turns, so a commit
    copies nothing.

    Attributes:
        committed: the entries. A commit replaces the mapping.
        step: number of committed steps.
        draft: entries of the step that runs, or waits for its outcome.
        loss_scale: loss scale of the gradients that the fields of :attr:`scaled` were made from.
        scaled: power of the loss scale in each field that follows it: 1 for gradients, 2 for their squares.
        reference: weight that ranks divide their weights by (:mod:`ch_core.engine.weights`); ``None`` before the first
            weighted step. The fields of :attr:`scaled` are in its unit.
        next_reference: reference from the next step on; ``None`` for the same.
        dropped: entries that :meth:`drop` has removed; ``None`` if they cannot come back.

    Example:
        >>> versions = Versions()
        >>> _ = versions.draft.write(("w", "residual"), (2,)).tensor.fill_(1.0)
        >>> versions.commit()
        >>> _ = versions.draft.write(("w", "residual"), (2,)).tensor.fill_(2.0)
        >>> versions.commit(tentative=True)
        >>> versions.committed["w", "residual"].tensor, versions.certain.step
        (tensor([2., 2.]), 1)
        >>> versions.resolve_tentative(used=False)
        >>> versions.committed["w", "residual"].tensor, versions.step
        (tensor([1., 1.]), 1)
    """

    def __init__(self, entries: Mapping[Key, Entry] | None = None, step: int = 0) -> None:
        self.draft = Draft()
        self.step = step
        self._before: Version | None = None  # the first tentative step
        self._presumed = False  # True if checkpoints hold the tentative steps as if the optimizer had used them
        self.loss_scale = 1.0
        self.scaled: Mapping[str, int] = {RESIDUAL: 1}
        self.reference: float | None = None
        self.next_reference: float | None = None
        self.dropped: Mapping[Key, Entry] | None = None
        self._device: torch.device | None = None  # None after a load, which may put entries anywhere, by `map_location`
        self._set(entries or {})

    def _set(self, entries: Mapping[Key, Entry]) -> None:
        self.committed = entries
        self.draft.begin(entries)

    @property
    def tentative(self) -> bool:
        """True if committed steps may still be rolled back."""
        return self._before is not None

    @property
    def certain(self) -> Version:
        """The version that checkpoints hold: without tentative steps, unless they are presumed to be used."""
        present = Version(self.committed, self.step)
        return present if self._before is None or self._presumed else self._before

    def move_to(self, device: torch.device) -> None:
        """Move all entries to the device of the gradients."""
        if self._device != device:
            for _, entry in self._every():
                entry.to(device)
            self._device = device

    def rescale(self, loss_scale: float) -> None:
        """Convert the fields of :attr:`scaled` to another loss scale.

        Raises:
            ValueError: ``loss_scale`` is not a positive finite number.
        """
        if loss_scale == self.loss_scale:
            return
        if not 0.0 < loss_scale < float("inf"):
            raise ValueError(f"the loss scale is {loss_scale}; expected a positive finite number")
        self._multiply(loss_scale / self.loss_scale)
        self.loss_scale = loss_scale

    def refer(self, reference: float) -> None:
        """Convert the fields of :attr:`scaled` to another reference weight. Powers of two round nothing.

        A gradient enters a weighted average times weight over reference, so a residual grows if the reference shrinks. The
        first reference converts nothing: in steps without weights every rank has counted as much as the reference.

        >>> versions = Versions({("w", RESIDUAL): Entry(torch.ones(2))})
        >>> versions.refer(1024.0)
        >>> versions.refer(256.0)
        >>> versions.committed["w", RESIDUAL].tensor
        tensor([4., 4.])
        """
        if self.reference is not None and reference != self.reference:
            self._multiply(self.reference / reference)
        self.reference, self.next_reference = reference, None

    def _multiply(self, factor: float) -> None:
        for (_, field), entry in self._every():
            power, tensor = self.scaled.get(field), entry.tensors[-1]  # codes follow through their scales
            if power and tensor.is_floating_point():
                tensor.mul_(factor**power)

    def unscaled(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers of a field without the loss scale."""
        if field not in self.scaled or self.loss_scale == 1.0:
            return tensor
        return tensor / self.loss_scale ** self.scaled[field]

    def _every(self) -> Iterator[tuple[Key, Entry]]:
        """Yield each entry of every version once."""
        before = self._before.entries if self._before is not None else {}
        yield from self.committed.items()
        yield from ((key, entry) for key, entry in before.items() if entry is not self.committed.get(key))

    def commit(self, *, tentative: bool = False, presumed: bool = False, dropped: Collection[str] = ()) -> None:
        """Make the draft the state, and count the step.

        Args:
            tentative: True if the optimizer may still skip the step. :meth:`resolve_tentative` decides later, for all tentative
                steps together.
            presumed: True if checkpoints hold a tentative step as if it were used.
            dropped: parameters whose average the wrapper did not apply. Their residuals stay as they were.
        """
        draft, old = self.draft, self.committed
        for key in [(name, RESIDUAL) for name in dropped]:
            if key in draft.written:
                draft.spare[key] = draft.written.pop(key)
        if tentative and self._before is None:
            self._before = Version(old, self.step)
        self._presumed = presumed
        # A second reduction of the step has merged what the first one wrote. Then any entry may be replaced.
        replaced = draft.written if draft.found is old else old
        self._set(draft.merged())
        self._reuse({key: old[key] for key in replaced if key in old and key in self.committed})
        self.step += 1

    def rollback(self) -> None:
        """Drop the draft of a step that has ended."""
        self.draft.spare.update(self.draft.written)
        self.draft.begin(self.committed)

    def abandon(self) -> None:
        """Drop the draft of a step that has not ended, with its buffers.

        A late message of the step may still write to them, so no later step may use them.
        """
        self.draft.begin(self.committed)

    def resolve_tentative(self, used: bool) -> None:
        """Keep the tentative steps, or return to the state before the first of them."""
        before, self._before = self._before, None
        if before is not None:
            gone = before.entries if used else self.committed
            if not used:
                self.step = before.step
                self._set(before.entries)
            self._reuse(gone)

    def _reuse(self, gone: Mapping[Key, Entry]) -> None:
        """Reuse these buffers in later steps, unless they are the state or may become it again."""
        before = self._before.entries if self._before is not None else {}
        held = self.committed
        self.draft.spare.update({k: e for k, e in gone.items() if e is not held.get(k) and e is not before.get(k)})

    def replace(
        self,
        entries: Mapping[Key, Entry],
        step: int,
        keep: Collection[str] = (),
        reference: float | None = None,
    ) -> None:
        """Replace all entries and the step.

        Args:
            entries: the new committed entries, without the loss scale.
            step: the new step.
            keep: fields whose written and tentative entries stay. A member that heals within a step receives the state
                from before the step. The step is then committed on top.
            reference: the new :attr:`reference`.
        """
        before, old, draft = self._before, self.committed, self.draft
        written = {k: e for k, e in {**draft.found, **draft.written}.items() if k[1] in keep and e is not old.get(k)}
        self._before, self.step = None, step
        self._set(entries)
        if before is not None and keep:
            tried = {k: e for k, e in old.items() if k[1] in keep and e is not before.entries.get(k)}
            self._before = Version(entries, step)
            self._set({**entries, **tried})
        draft.written = written
        draft.spare.clear()
        self.loss_scale, self._device = 1.0, None
        self.reference, self.next_reference = reference, None

    def drop(self, keys: Collection[Key]) -> None:
        """Remove committed entries, between steps."""
        if keys:
            if self.dropped is not None:
                self.dropped = {**{key: self.committed[key] for key in keys}, **self.dropped}
            self._set({key: entry for key, entry in self.committed.items() if key not in keys})

    def restore_dropped(self) -> None:
        """Put the entries of :attr:`dropped` back, between steps."""
        self._set({**self.committed, **(self.dropped or {})})

    def rename(self, names: Mapping[str, str]) -> None:
        """Give parameters other names."""

        def renamed(entries: Mapping[Key, Entry]) -> dict[Key, Entry]:
            return {(names.get(name, name), field): entry for (name, field), entry in entries.items()}

        draft = self.draft
        found, written = renamed(draft.found), renamed(draft.written)
        self._before = self._before and Version(renamed(self._before.entries), self._before.step)
        self._set(renamed(self.committed))
        self.dropped = None if self.dropped is None else renamed(self.dropped)
        draft.found, draft.written, draft.spare = found, written, renamed(draft.spare)

    def __getstate__(self) -> dict[str, Any]:
        """Return the certain version, without buffers."""
        entries, step = self.certain
        units = {"loss_scale": self.loss_scale, "scaled": self.scaled, "reference": self.reference}
        return {"entries": dict(entries), "step": step, **units}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        Versions.__init__(self, kept["entries"], kept["step"])
        self.loss_scale, self.scaled = kept["loss_scale"], kept["scaled"]
        self.reference = kept.get("reference")  # pickles of older versions have none
