"""Sizes at which ch-core changes how it sends, cuts or compares numbers.

:class:`~ch_core.engine.schedule.CpuTuning` holds the engine's own. The tests try each of them just below, at and above its
value.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ch-core. All ranks need the same sizes of a gather, because they decide which collectives start."""

    # gloo's all-gather receives into new memory, copies it to the output and frees it. glibc keeps freed blocks of less than
    # 32 MiB, several for each of gloo's two threads. So gathers of such lengths are broadcasts into the output inside a node,
    # or pieces.
    # Bytes of an all-gather inside a node. For shorter ones the number of messages matters.
    broadcast_from: int = 1 << 18
    # Bytes of other all-gathers. A shorter one leaves little memory, and glibc returns the memory of a longer one.
    pieces_from: int = 1 << 21
    pieces_below: int = 1 << 25
    # Bytes of a piece of the output. Twice as long pieces left up to 34 MB.
    piece_bytes: int = 1 << 20
    # At least so many bytes of each rank in a piece, so that many ranks wait for the link and not for its latency.
    part_bytes: int = 1 << 17
    # fp32 elements that are scaled and cast per pass: few enough for a CPU's cache, many enough to be worth two calls.
    cast_elements: int = 1 << 19
    # Numbers that are packed into 8 bits per pass: they fit a core's caches.
    packed_elements: int = 1 << 18
    # 32-bit words of a digest's row, which have weights of their own.
    digest_row_words: int = 1 << 12
    # Rows of a digest in one operation on a CPU: products of 2 MiB fit a core's cache.
    digest_rows: int = 1 << 6
    # Elements between the starts of two parts of a partition: a part starts at a cache line.
    aligned_elements: int = 16
    # Elements of a parameter that are compared to see if it has changed.
    sample_elements: int = 64


SIZES = Sizes()
