"""Random numbers that are the same on every rank and device."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from commhooks.numerics.cutting import cut


def seeded_normals(
    seed: str, shapes: Mapping[str, Sequence[int]], device: torch.device, unit: bool = False
) -> dict[str, torch.Tensor]:
    """Standard normal numbers by key, fp32: the same on all ranks and devices, whatever bucket they are for.

    They follow from ``seed`` and key alone, not from the other keys, torch's own generators or its default dtype. They are
    drawn on the host, and brought to a GPU in one copy that the host does not wait for.

    Args:
        seed: any text. Whatever they are to differ with goes into it, such as the step: ``f"{seed}/{ctx.step}"``.
        shapes: by key, such as the name of a parameter.
        device: where they are wanted; on ``"meta"`` nothing is drawn.
        unit: divide by the length along the last dimension, so that each row is of length one.

    Example:
        >>> import torch
        >>> cpu = torch.device("cpu")
        >>> here = seeded_normals("0/7", {"w": (2, 9), "b": (9,)}, cpu)
        >>> there = seeded_normals("0/7", {"w": (2, 9)}, cpu, unit=True)
        >>> torch.equal(torch.nn.functional.normalize(here["w"], dim=-1), there["w"])
        True
    """
    if device.type == "meta":
        return {key: torch.empty(shape, dtype=torch.float32, device=device) for key, shape in shapes.items()}
    generator, drawn = torch.Generator(), {}
    for key, shape in shapes.items():
        digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        drawn[key] = torch.nn.functional.normalize(numbers, dim=-1) if unit else numbers
    if device.type == "cpu" or not drawn:
        return drawn
    flat = torch.cat([numbers.view(-1) for numbers in drawn.values()]).pin_memory().to(device, non_blocking=True)
    return dict(zip(drawn, cut(flat, list(shapes.values())), strict=True))
