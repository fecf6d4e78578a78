"""Sizes at which ch-quant cuts numbers. The tests try each of them just below, at and above its value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of ch-quant."""

    # Bytes of gradient in a piece of a bucket. The arithmetic of one piece overlaps the messages of another.
    piece_bytes: int = 4 << 20
    # Numbers in a chunk on a CPU. The caches of a processor hold its 2 MiB of fp32. Each of the forty torch calls of a chunk
    # takes microseconds, because a pass over the numbers evicts the call's code. With 64 K numbers, calls take longer than
    # the passes.
    chunk_elements: int = 1 << 19
    # Numbers of the largest block that Triton's kernels take, because a program holds a block in its registers.
    triton_block: int = 4096
    # Numbers of each lane that a Triton program treats.
    triton_lane: int = 1024


SIZES = Sizes()
