"""How what crosses the network grows with the number of ranks."""

from collections.abc import Callable

BF16_BYTES = 4  # of an element: two bytes, and an all-reduce passes the network twice
LATER = 10**6  # steps: every warm-up is over


def passes_bf16(volume: Callable[[int], int], elements: int, world_size: int) -> int | None:
    """From how many ranks on a gradient of ``elements`` crosses the network as more bytes than ``bf16_compress`` sends.

    Args:
        volume: bytes of a step, by number of ranks: payload times passes.
        elements: of the gradient.
        world_size: ranks to look at.

    Returns:
        A number of at most ``world_size``; ``None`` if so many ranks send no more than that, or if the volume does not
        grow with their number.

    Example:
        >>> passes_bf16(lambda ranks: 500 * ranks, 1000, 64)
        9
        >>> passes_bf16(lambda ranks: 500 * ranks, 1000, 8), passes_bf16(lambda ranks: 8000, 1000, 64)
        (None, None)
    """
    limit = BF16_BYTES * elements
    now = volume(world_size)
    if now <= limit or 4 * volume(2 * world_size) < 5 * now:
        return None
    fits, over = 0, world_size
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if volume(middle) <= limit else (fits, middle)
    return over
