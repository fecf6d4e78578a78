"""Sizes at which PowerSGD cuts or joins matrices. The tests try each of them just below, at and above its value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ch-powersgd, all in elements of a matrix."""

    # Block of rows on a CPU: half of a core's cache.
    block_elements: int = 1 << 17
    # Smaller blocks load in no time, or are still in the cache.
    loaded_from: int = 1 << 14
    # On a GPU, passes over the memory of smaller matrices take no longer than a kernel launch, so they form batches.
    batched_below: int = 1 << 20


SIZES = Sizes()
