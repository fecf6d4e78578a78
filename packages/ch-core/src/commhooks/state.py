"""State of a stateful hook: tensors keyed by parameter name, written beside the old ones and committed per step.

A step never overwrites what it may have to give back: it *stages* new tensors, and only :meth:`HookState.commit`
makes them the state. Two buffers per entry are kept and swapped, so a committed step costs no copy.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


class HookState:
    """Base for the state of stateful hooks.

    Entries are addressed by ``(parameter name, field)``, never by bucket: bucket rebuilds, another
    ``bucket_cap_mb``, re-wrapping and resuming change nothing. Needs no process group.

    Attributes:
        step: number of committed steps.
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
        self._committed: dict[tuple[str, str], torch.Tensor] = {}
        self._staged: dict[tuple[str, str], torch.Tensor] = {}
        self._spare: dict[tuple[str, str], torch.Tensor] = {}
        self._settle: Callable[[], object] | None = None

    def settle(self) -> None:
        """Commit or roll back the last finished step now, instead of at the start of the next one."""
        if self._settle is not None:
            self._settle()

    def settled_by(self, settle: Callable[[], object]) -> None:
        """Name what decides about the last step: a method of the engine, which this state does not keep alive."""
        method = weakref.WeakMethod(settle)

        def alive() -> None:
            found = method()
            if found is not None:
                found()

        self._settle = alive

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**self.__dict__, "_settle": None, "_staged": {}, "_spare": {}}

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
        self, entries: dict[tuple[str, str], torch.Tensor], step: int, *, keep: frozenset[str] = frozenset()
    ) -> None:
        """Put ``entries`` and ``step`` in place of everything held.

        Args:
            entries: the new committed tensors.
            step: the new step.
            keep: fields whose staged tensors stay staged: a member that healed in the middle of a step received
                the state from before that step, and the step itself is still to be committed on top.
        """
        self._committed = dict(entries)
        self._staged = {key: tensor for key, tensor in self._staged.items() if key[1] in keep}
        self._spare.clear()
        self.step, self.scale = step, 1.0

    def rename(self, names: dict[str, str]) -> None:
        """Give parameters other names, in every entry."""
        for store in (self._committed, self._staged, self._spare):
            moved = {(names.get(name, name), field): t for (name, field), t in store.items()}
            store.clear()
            store.update(moved)

    def nbytes(self) -> int:
        """Bytes held, both buffers counted."""
        stores = (self._committed, self._staged, self._spare)
        return sum(t.numel() * t.element_size() for store in stores for t in store.values())


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
