"""Triton's kernels compared with torch's operations, bit for bit. ``test_triton.py`` runs this file in separate
processes. One uses Triton's interpreter, which must be on before the import of Triton. Another uses a GPU if there is
one.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_quant import Codec, Feedback, TwoStageExchange
from ch_quant.codec import Workspace
from ch_quant.triton_codec import INTERPRETED, TritonWorkspace
from ch_testing import spawn
from commhooks import StepContext
from commhooks.checkpoint.world_change import merge

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]  # by Inf
BITS = (8, 4)
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 3e-37, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"))
Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers, including the sign of zero. Every NaN counts as one value,
    because torch has several.
    """
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(whole)


def coded(made: type[Workspace], codec: Codec, x: torch.Tensor, total: torch.Tensor) -> Coded:
    """Return scales, packed codes, the sender's and the receiver's decoded numbers, and a total
    plus a third of them.
    """
    rows = len(x)
    work = made(codec, StepContext(), DEVICE, rows)
    message = torch.full((codec.bytes(rows),), 77, dtype=torch.uint8, device=DEVICE)
    scales, packed = codec.split(message, rows, 0, rows)
    work.encode(x, scales, packed, None, keep=True)
    mine = work.decoded(rows, scales).clone()
    unkept = torch.empty_like(message)
    work.encode(x, *codec.split(unkept, rows, 0, rows), None)
    assert torch.equal(unkept, message)
    theirs = work.decode(scales, packed).clone()
    both = work.decode(scales, packed, total.clone(), factor=1.0 / 3.0, add=True)
    return scales, packed, mine, theirs, both


def same(codec: Codec, x: torch.Tensor) -> None:
    x = x.to(DEVICE)
    total = torch.linspace(-1.0, 1.0, x.numel(), device=DEVICE).view_as(x)
    for name, one, other in zip(
        ("scales", "codes", "decoded", "received", "added"),
        coded(Workspace, codec, x, total),
        coded(TritonWorkspace, codec, x, total),
        strict=True,
    ):
        alike = torch.equal(one, other) if name == "codes" else torch.equal(bits(one), bits(other))
        assert alike, (name, one, other)


@given(
    st.sampled_from(BITS),
    st.sampled_from((16, 48, 128)),
    st.integers(1, 40),
    st.integers(0, 2**31),
    st.integers(-46, 38),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 127), st.sampled_from(SPECIAL)), max_size=4),
)
@settings(max_examples=120, deadline=None)
def test_any_numbers(
    width: int, block: int, rows: int, seed: int, exponent: int, special: list[tuple[int, int, float]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, block, generator=generator) * 10.0 ** (exponent / 2) * 10.0 ** (exponent / 2)
    x *= torch.randint(0, 2, (rows, 1), generator=generator)  # whole blocks of zeros of both signs
    for row, column, value in special:
        x[row % rows, column % block] = value
    same(Codec(width, block), x)


@pytest.mark.parametrize("width", BITS)
def test_halves_go_to_even(width: int) -> None:
    most = (1 << (width - 1)) - 1
    halves = torch.arange(-2 * most, 2 * most + 1) / 2.0
    x = torch.zeros(6, 1024)
    x[:, 0] = most  # the scale is one
    x[:, 1 : 1 + len(halves)] = halves * torch.tensor([1.0, 1.0, 1.0 + 2**-20, 1.0 - 2**-20, 1.0, -1.0])[:, None]
    same(Codec(width, 1024), x)
    work = TritonWorkspace(Codec(width, 1024), StepContext(), DEVICE, 6)
    message = torch.empty(Codec(width, 1024).bytes(6), dtype=torch.uint8, device=DEVICE)
    parts = Codec(width, 1024).split(message, 6, 0, 6)
    work.encode(x.to(DEVICE), *parts, None)
    assert torch.equal(work.decode(*parts)[0, 1 : 1 + len(halves)].cpu(), halves.round())


@pytest.mark.parametrize("width", BITS)
def test_scales_of_every_size(width: int) -> None:
    """The largest number of a block takes all bits between zero and Inf, and every mantissa near the halves of bf16."""
    generator = torch.Generator().manual_seed(1)
    largest = torch.randint(0, 0x7F800001, (6000,), dtype=torch.int32, generator=generator)
    near = torch.arange(-40, 40, dtype=torch.int32) + 0x3F808000 * torch.ones(80, dtype=torch.int32)
    subnormal = torch.arange(0, 400, dtype=torch.int32) * 997
    x = torch.zeros(6480, 16)
    x[:, 3] = torch.cat([largest, near, subnormal]).view(torch.float32)
    x[:, 5] = -x[:, 3] / 3
    same(Codec(width, 16), x)


@pytest.mark.parametrize(("block", "rows"), [(16, 1), (16, 129), (240, 2), (240, 65), (4096, 1), (4096, 7)])
def test_sizes(block: int, rows: int) -> None:
    """Odd numbers of blocks whose lanes end inside a block, and block sizes that are no power of two."""
    for width in BITS:
        same(Codec(width, block), torch.randn(rows, block, generator=torch.Generator().manual_seed(rows)))


SIZES = (1, 127, 129, 1009, 256)


def averaged(
    kernels: Sequence[str], codec: Codec, dtype: torch.dtype, rotated: bool, fed: bool
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return results, residuals and messages of two steps on ranks that run these kernels."""
    world, sent = len(kernels), []
    kept: list[list[torch.Tensor | None]] = [[None] * len(SIZES)] * world
    for step in range(2):
        exchanges, vectors, after, first = [], [], [], []
        for rank, kernel in enumerate(kernels):
            generator = torch.Generator().manual_seed(10 * step + rank)
            vectors.append([torch.randn(n, generator=generator).to(DEVICE, dtype) for n in SIZES])
            after.append([torch.zeros(n, device=DEVICE) for n in SIZES])
            ctx = StepContext(rank, world)
            made: Any = {"parts": world, "rotated": rotated, "kernel": kernel}
            exchanges.append(TwoStageExchange(codec, SIZES, ctx, DEVICE, **made))
        residuals = [Feedback(old, new) if fed else None for old, new in zip(kept, after, strict=True)]
        for one, own, residual in zip(exchanges, vectors, residuals, strict=True):
            first.append(one.send([own] * world, [residual] * world if residual is not None else None))
        sent += [request.input.clone() for request in first]
        for rank, request in enumerate(first):
            request.output.copy_(torch.cat([other.input.view(world, -1)[rank] for other in first]))
        second = [one.share(residual) for one, residual in zip(exchanges, residuals, strict=True)]
        everyone = torch.cat([request.input for request in second])
        sent.append(everyone)
        for one, own, request in zip(exchanges, vectors, second, strict=True):
            request.output.copy_(everyone)
            one.deliver([own] * world)
        kept = [list(row) for row in after]
    return vectors, after, sent


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize(
    ("dtype", "rotated", "fed"),
    [
        (torch.float32, False, False),
        (torch.float32, False, True),
        (torch.float32, True, True),
        (torch.bfloat16, False, True),
        (torch.float16, True, False),
    ],
)
def test_ranks_with_and_without_average_together(world: int, dtype: torch.dtype, rotated: bool, fed: bool) -> None:
    for width in BITS:
        codec = Codec(width, 64)
        wanted = averaged(["torch"] * world, codec, dtype, rotated, fed)
        for kernels in (["triton"] * world, ["torch", "triton", "triton", "torch", "triton"][:world]):
            results, residuals, sent = averaged(kernels, codec, dtype, rotated, fed)
            assert all(torch.equal(a, b) for a, b in zip(sent, wanted[2], strict=True)), kernels
            for found, exact in ((results, wanted[0]), (residuals, wanted[1])):
                for rank in range(world):
                    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[rank], exact[rank], strict=True))
            assert fed == any(bool(e.any()) for e in residuals[0])


def trained(rank: int, expr: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 129), nn.Linear(129, 5))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    handle = commhooks.attach(model, expr)
    found = []
    for step in range(3):
        x = torch.randn(4, 37, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(x).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    handle.commit()
    return found, handle.state_dict()


def pair(rank: int, world: int) -> dict[str, Any]:
    plain = "quant4(block=32, error_feedback=True)"
    own = plain if rank == 0 else "quant4(block=32, error_feedback=True, kernel='triton')"
    wanted, saved = trained(rank, plain)
    found, state = trained(rank, own)
    commhooks.create(own).load_state_dict(saved)
    commhooks.create(plain).load_state_dict(state)
    for name, row in saved["entries"].items():
        assert torch.equal(row["residual"], state["entries"][name]["residual"]), name
    assert len(found) == 18
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return state


@pytest.mark.gloo
@pytest.mark.skipif(DEVICE.type != "cpu", reason="CPU tensors over gloo; on a GPU the exchange above is the same")
def test_two_processes_of_which_one_uses_triton() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"  # child processes inherit it
    merged = merge(spawn(pair, 2, timeout=120.0))
    assert merged["entries"]
    commhooks.create("quant4(block=32, error_feedback=True, kernel='triton')").load_state_dict(
        merged, world_change="mean"
    )
