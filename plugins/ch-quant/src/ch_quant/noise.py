"""Random numbers that follow from a name, a rank and the step: a resumed run draws those of an uninterrupted one.

Decoding needs none of them, so ranks need not agree; they differ, or the errors of all ranks would be one error.
"""

import zlib

import torch


def generator(device: torch.device, name: str, rank: int, step: int) -> torch.Generator:
    """A generator for one stage of one rank's step."""
    seed = zlib.crc32(f"{name} {rank} {step}".encode()) | (step & 0x7FFFFFFF) << 32
    return torch.Generator(device).manual_seed(seed)
