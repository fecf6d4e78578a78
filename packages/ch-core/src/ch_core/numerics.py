"""Arithmetic for lossy methods: random numbers equal on all ranks, exact products, views of a flat tensor."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ch_core.device import product_settings

__all__ = ["cut", "exact_products", "seeded_normals"]


def cut(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return consecutive views of these shapes. Elements beyond the last shape are in no view.

    Args:
        flat: 1-D and contiguous, with at least as many elements as all shapes together.
        shapes: shapes of the views.

    Raises:
        RuntimeError: ``flat`` is too short.

    Example:
        >>> import torch
        >>> [part.tolist() for part in cut(torch.arange(6), [(2, 2), (1,)])]
        [[[0, 1], [2, 3]], [4]]
    """
    sizes = [math.prod(shape) for shape in shapes]
    parts = flat.split_with_sizes([*sizes, flat.numel() - sum(sizes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]


def seeded_normals(
    seed: str, shapes: Mapping[str, Sequence[int]], device: torch.device, unit: bool = False
) -> dict[str, torch.Tensor]:
    """Draw standard normal numbers by key, in fp32, equal on all ranks and devices.

    They depend on ``seed`` and their key alone. Other keys, torch's generators, and its default dtype change nothing. The
    host draws them. A GPU receives them in one copy, and the host does not wait for the copy.

    Args:
        seed: any text. To draw other numbers in each step, include the step: ``f"{seed}/{ctx.step}"``.
        shapes: shape by key, such as the name of a parameter.
        device: device of the result. On ``"meta"`` nothing is drawn.
        unit: True to divide each row (last dimension) by its length.

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
    generator, drawn = torch.Generator(device="cpu"), {}
    for key, shape in shapes.items():
        digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        drawn[key] = torch.nn.functional.normalize(numbers, dim=-1) if unit else numbers
    if device.type == "cpu" or not drawn:
        return drawn
    flat = torch.cat([numbers.view(-1) for numbers in drawn.values()]).pin_memory().to(device, non_blocking=True)
    return dict(zip(drawn, cut(flat, list(shapes.values())), strict=True))


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Multiply fp32 matrices in fp32 on this type of device, even if the user allows TF32 or bf16.

    A method with error feedback needs this. In TF32 the decoded gradient and the residual would each be off by a
    thousandth, and the difference between them would never be sent. The user's setting returns when the block ends.

    Args:
        device: device of the products.

    Example:
        >>> import torch
        >>> allowed = torch.backends.mkldnn.matmul
        >>> allowed.fp32_precision = "bf16"
        >>> with exact_products(torch.device("cpu")):
        ...     print(allowed.fp32_precision)
        ieee
        >>> allowed.fp32_precision
        'bf16'
        >>> allowed.fp32_precision = "none"
    """
    settings = product_settings(device)
    backend = settings[0]
    if backend.fp32_precision in ("ieee", "none"):
        yield
        return
    both = [(each, each.fp32_precision) for each in settings]
    older = _older_setting()
    if older is not None:
        # `backend.fp32_precision` alone would contradict the older setting, and torch would refuse CUDA products.
        torch.set_float32_matmul_precision("highest")
    else:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for each, before in both:
            if each.fp32_precision != before:
                each.fp32_precision = before


def _older_setting() -> str | None:
    """Return torch's older setting (``set_float32_matmul_precision`` or ``allow_tf32``); ``None`` if it is unused."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the user set the newer one alone, and torch calls that a mix
        return None
