"""States of FSDP1's hooks, as PyTorch has them."""

from typing import Any

import torch
import torch.distributed as dist


class DefaultState:
    """State of FSDP1's hooks: the group, and the factors before and after the sum.

    In 16 bits, division by W before the sum underflows, and division after the sum overflows. The division is therefore
    split into two nearly equal factors, the first one a power of two.

    Args:
        process_group: the group to reduce over.

    Raises:
        ValueError: ``process_group`` is None.

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
        """Return the factors before and after the sum, whose product is ``world_size``."""
        factor = 1
        while world_size % factor == 0 and world_size / factor > factor:
            factor *= 2
        return float(factor), world_size / factor

    @staticmethod
    def _get_gradient_predivide_factor(world_size: int) -> float:
        """Return the first factor of :meth:`split_factor`, under PyTorch's name."""
        return DefaultState.split_factor(world_size)[0]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "process_group"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self.process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class LowPrecisionState(DefaultState):
    """State of FSDP1's 16-bit hooks.

    Args:
        process_group: the group to reduce over.
        parameter_type: dtype of the reduced gradient after the cast back.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type
