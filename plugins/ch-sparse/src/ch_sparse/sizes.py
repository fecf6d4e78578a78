"""Sizes at which ch-sparse cuts numbers. The tests try each of them just below, at and above its value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ch-sparse."""

    # fp32 elements that a core's cache holds between two passes.
    cached_elements: int = 1 << 18
    # Elements of the largest block of which only the maximum is compared at first.
    largest_block: int = 64


SIZES = Sizes()
