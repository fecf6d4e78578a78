"""Sizes at which ch-quant cuts numbers. The tests try each of them just below, at and above its value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ch-quant."""

    # Bytes of gradient in a piece of a bucket. The arithmetic of one piece overlaps the messages of another.
    piece_bytes: int = 4 << 20
    # Numbers in a chunk on a CPU: a core's caches hold it, and it is large against the overhead of a torch call.
    chunk_elements: int = 1 << 18
    # Numbers of the largest block that Triton's kernels take, because a program holds a block in its registers.
    triton_block: int = 4096
    # Numbers of each lane that a Triton program treats.
    triton_lane: int = 1024


SIZES = Sizes()
