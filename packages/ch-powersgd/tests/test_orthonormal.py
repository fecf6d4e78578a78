"""Orthonormal columns for every input, and factors side by side in one tensor."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ch_core.numerics import seeded_normals
from ch_powersgd import PowerSGD
from ch_powersgd.orthonormal import Columns
from ch_powersgd.workspace import Factor
from commhooks import AllReduce, Bucket, HookState, StepContext

CPU = torch.device("cpu")


def orthonormalised(x: torch.Tensor, noise: torch.Tensor | None = None, epsilon: float = 0.0) -> torch.Tensor:
    x = x.clone()
    Columns([x]).orthonormalise(None if noise is None else [noise], epsilon)
    return x


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(1, 8),
    length=st.integers(8, 200),
    scale=st.sampled_from([1e-12, 1e-6, 1.0, 1e12]),
    spread=st.sampled_from([1.0, 1e-1, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_columns_are_orthonormal_and_span_the_same(
    rank: int, length: int, scale: float, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, rank, length) * (spread ** torch.arange(rank)).view(1, rank, 1) * scale
    x += x.roll(1, dims=1) * 0.3  # makes the columns oblique
    y = orthonormalised(x)
    # Columns that are dependent up to a few parts in a million lose digits. The worst error found is 8e-5.
    torch.testing.assert_close(y @ y.mT, torch.eye(rank).expand(3, -1, -1), atol=3e-4, rtol=0)
    wide = y.double()
    left = x.double() - x.double() @ wide.mT @ wide
    assert left.norm() <= 1e-5 * x.double().norm()


def test_a_dependent_column_becomes_zero_or_noise() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 50)
    x = torch.stack([first, -2 * first, torch.zeros(50), second]).unsqueeze(0)
    y = orthonormalised(x)[0]
    assert y[1].count_nonzero() == 0
    assert y[2].count_nonzero() == 0
    torch.testing.assert_close((y @ y.T).diagonal(), torch.tensor([1.0, 0.0, 0.0, 1.0]))
    noise = seeded_normals("0/0", {"w": (4, 50)}, CPU, unit=True)["w"].unsqueeze(0)
    filled = orthonormalised(x, noise)[0]
    torch.testing.assert_close(filled @ filled.T, torch.eye(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e-28, 1e-20, 1.0, 1e20, 1e34])
def test_a_dependent_column_is_found_at_any_scale(scale: float) -> None:
    torch.manual_seed(0)
    first, second, third = torch.randn(3, 50) * scale
    y = orthonormalised(torch.stack([first, second, 1000 * first, third]).unsqueeze(0))[0]
    assert y[2].count_nonzero() == 0
    torch.testing.assert_close((y @ y.T).diagonal(), torch.tensor([1.0, 1.0, 0.0, 1.0]))


def test_a_short_remainder_hides_no_later_column() -> None:
    """The second column is nearly parallel to the first. Its remainder is parallel to the third."""
    x = torch.tensor([[1.0, 0.0, 0.0], [3e-30, 0.6e-30, 0.0], [0.0, 1e-3, 0.0]])
    y = orthonormalised(x.unsqueeze(0))[0].abs()
    assert y[:, 1].max() == pytest.approx(1.0)


@pytest.mark.parametrize("length", [1000, 32768, 524288])
@pytest.mark.parametrize("rank", [2, 3, 8])
def test_long_columns_of_equal_numbers_do_not_grow(rank: int, length: int) -> None:
    """Their products round the same way each time, so the factorisation may fail half way."""
    for seed in range(3):
        torch.manual_seed(seed)
        x = (torch.randn(rank, 1) * torch.full((length,), 0.1)).unsqueeze(0)
        y = orthonormalised(x)[0].double()
        assert y.norm(dim=1).max() < 1.01
        assert (x[0].double() - x[0].double() @ y.T @ y).norm() <= 1e-5 * x.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rank", [1, 3])
def test_inf_and_nan_stay(bad: float, rank: int) -> None:
    x = torch.randn(2, rank, 20)
    x[0, :, 7] = bad
    y = orthonormalised(x, seeded_normals("0/0", {"w": (rank, 20)}, CPU, unit=True)["w"].expand(2, -1, -1))
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()


def test_epsilon_damps_columns_that_are_shorter() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.0, 0.5]]])
    lengths = orthonormalised(x, epsilon=0.5)[0].norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([1 / 1.5, 0.5]))


def test_a_factor_does_not_depend_on_its_neighbours_to_the_bit() -> None:
    torch.manual_seed(1)
    sizes = [(1, 3, 37), (1, 2, 64), (2, 3, 5), (1, 3, 37)]
    together = Factor(torch.randn(sum(map(math.prod, sizes))), sizes)
    parts = [view.clone() for view in together.stacks]
    together.orthonormalise()
    for size, part, whole in zip(sizes, parts, together.stacks, strict=True):
        alone = Factor(part.flatten(), [size])
        alone.orthonormalise()
        assert torch.equal(alone.stacks[0], whole)


@pytest.mark.parametrize("allowed", ["tf32", "bf16"])
def test_the_average_and_the_residual_are_exact_products(allowed: str) -> None:
    """Decoding computes exact products even if the user allows reduced precision. The user's setting stays."""
    backend: Any = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    found: list[tuple[str, str]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append((func.overloadpacket.__name__, backend.fp32_precision))
            return func(*args, **(kwargs or {}))

    bucket = Bucket.from_tensors({"w": torch.randn(64, 48)})
    gradient = bucket.view("w").clone()
    state = HookState()
    backend.fp32_precision = allowed
    try:
        with Products():
            for request in PowerSGD(rank=4).start(bucket, StepContext(draft=state.draft)):
                assert isinstance(request, AllReduce)
                if request.sent is not None:  # a group of one rank
                    request.sent.copy_(request.tensor)
        assert backend.fp32_precision == allowed
    finally:
        backend.fp32_precision = before
    state.versions.commit()
    assert [precision for name, precision in found if name == "addmm"] == ["ieee"]  # e = D - P Q^T
    assert [precision for name, precision in found if name == "mm"] == [allowed, allowed, "ieee"]  # P, Q, and P Q^T
    residual = state.read("w", "residual")
    assert residual is not None
    torch.testing.assert_close(bucket.view("w") + residual, gradient, atol=1e-6, rtol=0)
