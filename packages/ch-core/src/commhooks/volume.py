"""Volume: how the bytes that cross the network grow with the number of ranks."""

from collections.abc import Callable

BF16_BYTES = 4  # per element: two bytes, and an all-reduce passes the network twice
LATER = 10**6  # a step after every warm-up


def passes_bf16(volume: Callable[[int], int], elements: int, world_size: int) -> int | None:
    """Return the smallest number of ranks at which a hook sends more bytes than ``bf16_compress``.

    Args:
        volume: number of ranks -> bytes of a step, payload times passes.
        elements: elements of the gradient.
        world_size: largest number of ranks to consider.

    Returns:
        A number of at most ``world_size``. ``None`` if that many ranks do not send more, or if the volume does not grow
        with the number of ranks.

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
