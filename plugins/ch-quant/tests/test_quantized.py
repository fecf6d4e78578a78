"""The 8-bit hooks over simulated ranks and on gloo processes."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_quant
import commhooks
from ch_core import SimulatedRank, simulate
from ch_quant import Quantized, quant8, quantize_per_channel, quantize_per_tensor, rotation
from ch_quant.affine import decode, encode
from ch_testing import spawn

pytestmark = pytest.mark.timeout(120)

SHAPES = {"up": (40, 33), "norm": (40,), "down": (33, 40), "small": (3, 5), "head": (256, 2)}
QUANTIZED = ("up", "down", "head")
LOSSY = [quant8(), quant8(error_feedback=True), quantize_per_tensor(), quantize_per_channel(64)]


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    scales = {"up": 3.0, "norm": 50.0, "down": 1e-4, "small": 1.0, "head": 1.0}
    return {name: (torch.randn(shape, generator=generator) * scales[name]).to(dtype) for name, shape in SHAPES.items()}


def average(world: int, step: int = 0) -> dict[str, torch.Tensor]:
    return {n: torch.stack([gradients(r, step)[n] for r in range(world)]).mean(0) for n in SHAPES}


def one_step(engine: Any, tensors: dict[str, torch.Tensor], cuts: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    names, edges = list(tensors), [0, *cuts, len(tensors)]
    made = [
        commhooks.Bucket.from_tensors({n: tensors[n] for n in names[a:b]}, index=i, is_last=b == len(names))
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    for bucket in made:
        engine.submit(bucket)
    assert engine.finish() is None
    return {p.name: view for bucket in made for p, view in bucket.views()}


def reduced(reduction: commhooks.Reduction, world: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    def body(rank: SimulatedRank) -> dict[str, torch.Tensor]:
        cuts = options.get("cuts", ())
        return one_step(rank.engine(reduction), gradients(rank.rank, dtype=options.get("dtype", torch.float32)), cuts)

    return simulate(world, body)


@pytest.mark.parametrize("reduction", LOSSY, ids=repr)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_all_ranks_have_the_same_bits_close_to_the_average(reduction: commhooks.Reduction, world: int) -> None:
    ranks = reduced(reduction, world, cuts=(2, 4))
    wanted = average(world)
    for got in ranks:
        assert all(torch.equal(got[n], ranks[0][n]) for n in SHAPES)
    for name in QUANTIZED:
        error = (ranks[0][name] - wanted[name]).norm() / wanted[name].norm()
        assert 0 < error < 0.03, (name, error)


@pytest.mark.parametrize("world", [2, 4])
def test_quant8_is_off_by_at_most_half_a_level_at_each_rounding(world: int) -> None:
    block = 16
    got, wanted = reduced(quant8(block=block), world)[0]["up"], average(world)["up"]

    def level(x: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(-(-x.numel() // block) * block)
        padded[: x.numel()] = x.flatten()
        return (padded.view(-1, block).abs().amax(1, keepdim=True) / 127).expand(-1, block).flatten()[: x.numel()]

    first = torch.stack([level(gradients(r)["up"]) for r in range(world)]).mean(0) / 2
    second = level(wanted) / 2
    assert ((got - wanted).flatten().abs() <= 1.02 * (first + second)).all()


def test_quant8_exempts_norms_and_small_ones_exactly() -> None:
    got, exact = reduced(quant8(), 2)[0], average(2)
    assert torch.equal(got["norm"], exact["norm"])
    assert torch.equal(got["small"], exact["small"])
    everything = reduced(quant8(exempt=False), 2)[0]
    assert not torch.equal(everything["norm"], exact["norm"])


@pytest.mark.parametrize("reduction", [r for r in LOSSY if r.granularity == "tensor"], ids=repr)
def test_results_do_not_depend_on_the_buckets(reduction: commhooks.Reduction) -> None:
    whole, cut = (reduced(reduction, 3, cuts=cuts)[0] for cuts in ((), (1, 2, 3, 4)))
    assert all(torch.equal(whole[n], cut[n]) for n in QUANTIZED)


@pytest.mark.parametrize(
    "options", [{"bits": 4}, {"bits": 2}, {"bits": 4, "rotation": "hadamard"}, {"bits": 4, "exempt": False}]
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bucket_in_pieces_gives_the_same_bits(options: dict[str, Any], world: int) -> None:
    whole, cut = Quantized(**options), Quantized(**options)
    whole.piece_bytes, cut.piece_bytes = None, 4 * 1000
    (one, *_), (other, *_) = reduced(whole, world), reduced(cut, world)
    assert all(torch.equal(one[n], other[n]) for n in SHAPES)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("expr", ["quant8", "quant4", "quant4(error_feedback=True)"])
def test_unused_rows_of_an_embedding_stay_unused(expr: str, world: int) -> None:
    """Rows and blocks do not end together, and the last block has padding."""
    used = torch.zeros(61, 1)
    used[::4] = 1.0

    def body(rank: SimulatedRank) -> bool:
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        engine, zero = rank.engine(reduction), True
        for step in range(3):
            chance = torch.Generator().manual_seed(10 * step + rank.rank)
            got = one_step(engine, {"w": (torch.randn(61, 37, generator=chance) + 1.0) * used})["w"]
            zero = zero and bool(got[::4].any(1).all()) and not bool(got[used[:, 0] == 0.0].any())
        return zero

    assert all(simulate(world, body))


def test_wire_volume_does_not_grow_with_the_world() -> None:
    layout = commhooks.BucketLayout.of_shapes({"w": (512, 512)})

    def volume(reduction: commhooks.Reduction, world: int) -> int:
        stages = reduction.plan(layout, commhooks.StepContext(world_size=world))
        return sum(request.payload_bytes for stage in stages for request in stage)

    for bits in (8, 4, 2, 1):
        packed = 512 * 512 * bits // 8 + 2 * 2048  # one scale per 128 elements
        assert {volume(Quantized(bits), world) for world in (2, 4, 8, 16, 64)} == {2 * packed}
    assert volume(Quantized(4), 64) <= 2 * 0.53 * 512 * 512
    assert volume(quantize_per_tensor(), 64) == 32 * volume(quantize_per_tensor(), 2)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("fed", "piece"), [(True, None), (True, 4 * 500), (False, None)])
def test_error_feedback_covers_both_roundings(fed: bool, piece: int | None, world: int) -> None:
    """The sum applied + the mean residual = the sum of the averages."""
    steps = 20

    def body(rank: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        reduction = quant8(error_feedback=fed)
        reduction.piece_bytes = piece
        engine = rank.engine(reduction)
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(steps):
            for name, g in one_step(engine, gradients(rank.rank, step), (2, 4)).items():
                total[name] += g
        engine.resolve_step()
        kept = {name: tensor for name, field, tensor in engine.state.entries() if field == "residual"}
        assert sorted(kept) == (sorted(QUANTIZED) if fed else [])
        return total, kept

    ranks = simulate(world, body)
    for name in QUANTIZED:
        truth = sum((average(world, step)[name] for step in range(steps)), torch.zeros(SHAPES[name]))
        residual = torch.stack([kept[name] for _, kept in ranks]).mean(0).view(SHAPES[name]) if fed else 0
        lost = (ranks[0][0][name] + residual - truth).norm() / truth.norm()
        assert lost < 1e-6 if fed else lost > 1e-3


@pytest.mark.parametrize("residual", ["fp32", "int8"])
def test_feedback_adds_little_noise_to_a_step(residual: str) -> None:
    """Plain error feedback sends the errors of two steps in one, which doubles the noise (see ch_quant.feedback)."""

    def noise(options: dict[str, Any]) -> float:
        def body(rank: SimulatedRank) -> float:
            engine, apart = rank.engine(Quantized(4, **options)), 0.0
            for step in range(30):
                every = [torch.randn(64, 96, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(2)]
                got = one_step(engine, {"w": every[rank.rank]})["w"]
                apart += float((got - (every[0] + every[1]) / 2).square().mean()) if step >= 10 else 0.0
            return apart

        return simulate(2, body)[0]

    assert 1.0 < noise({"error_feedback": True, "residual": residual}) / noise({}) < 1.3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reduction", LOSSY, ids=repr)
def test_inf_and_nan_arrive_and_leave_no_trace(reduction: commhooks.Reduction, bad: float) -> None:
    def body(rank: SimulatedRank) -> dict[str, torch.Tensor]:
        engine = rank.engine(reduction)
        one_step(engine, gradients(rank.rank), (1, 3))
        engine.resolve_step()
        before = {name: t.clone() for name, _, t in engine.state.entries()}
        poisoned = gradients(rank.rank, 1)
        if rank.rank == 1:
            poisoned["up"][7, 7] = bad
        got = one_step(engine, poisoned, (1, 3))
        engine.resolve_step()
        assert all(torch.equal(before[name], t) for name, _, t in engine.state.entries())
        return {name: t.isfinite() for name, t in got.items()}

    for finite in simulate(2, body):
        assert not finite["up"][7, 7]
        assert all(finite[name].all() for name in ("norm", "down", "small", "head"))


@pytest.mark.parametrize("reduction", LOSSY, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-37, 3e38])
def test_zeros_and_extremes(reduction: commhooks.Reduction, value: float) -> None:
    def body(rank: SimulatedRank) -> torch.Tensor:
        tensors = {"w": torch.full((20, 30), value if rank.rank else 0.0)}
        return one_step(rank.engine(reduction), tensors)["w"]

    for got in simulate(2, body):
        assert torch.allclose(got, torch.full((20, 30), value / 2), rtol=0.01, atol=1e-35)


@pytest.mark.parametrize("reduction", LOSSY, ids=repr)
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("value", [2e38, -2e38, 3.3e38])
def test_a_mean_that_fits_is_finite_although_the_sum_is_not(
    reduction: commhooks.Reduction, world: int, value: float
) -> None:
    signs = torch.ones(20, 30)
    signs[::3] = -1.0

    def body(rank: SimulatedRank) -> torch.Tensor:
        return one_step(rank.engine(reduction), {"w": value * signs})["w"]

    for got in simulate(world, body):
        assert torch.allclose(got, value * signs, rtol=0.02)


@pytest.mark.parametrize("reduction", LOSSY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_result_has_the_gradients_dtype(reduction: commhooks.Reduction, dtype: torch.dtype) -> None:
    got = reduced(reduction, 2, dtype=dtype)[0]
    for name in ("up", "head"):
        assert got[name].dtype == dtype
        assert (got[name].float() - average(2)[name]).norm() < 0.03 * average(2)[name].norm()


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_affine_codes_are_torchs() -> None:
    x = torch.randn(5, 96) * torch.tensor([[1.0], [1e-3], [100.0], [1.0], [1.0]])
    x[3] = x[3].abs()  # the range is widened to include zero
    x[4] = 0
    scales, zeros = torch.empty(5, 1), torch.empty(5, 1, dtype=torch.uint8)
    codes = torch.empty(5, 96, dtype=torch.uint8)
    encode(x.clone(), scales, zeros, codes)
    theirs = torch.quantize_per_channel(x, scales.view(-1).double(), zeros.view(-1).long(), 0, torch.quint8)
    assert torch.equal(codes, theirs.int_repr())
    assert torch.equal(decode(scales, zeros, codes), theirs.dequantize())
    assert torch.equal(scales[3], x[3].max().view(1) / 255)


def test_a_multiple_of_the_bucket_size_has_no_extra_channel() -> None:
    def payload(numel: int) -> int:
        layout = commhooks.BucketLayout.of_shapes({"w": (numel,)})
        return quantize_per_channel().plan(layout, commhooks.StepContext(world_size=1))[0][0].payload_bytes

    assert payload(1024) == 2 * 5 + 1024  # two channels
    assert payload(1025) == 3 * 5 + 1025


@pytest.mark.parametrize(
    "expr",
    [
        "quant8(block=10)",
        "quant8(block=24)",
        "quant(bits=3)",
        "quant(bits=5)",
        "quant4(block=48, rotation='hadamard')",
        "quant4(rounding='up')",
        "quant2(rounding='stochastic')",
        "quantize_per_channel(bucket_size=0)",
        "bf16_wrapper(quant8)",
    ],
)
def test_illegal_options(expr: str) -> None:
    if expr.startswith("bf16"):
        pytest.importorskip("ch_ddp", reason="the wrapper is ch-ddp's")
    with pytest.raises(commhooks.HookConfigError):
        commhooks.create(expr)


def test_a_state_of_another_version_is_refused_with_the_difference() -> None:
    def body(rank: SimulatedRank) -> None:
        handle = commhooks.create("quant8(error_feedback=True)")
        saved = handle.state_dict()
        saved["config"] = saved["config"] | {"config": {"block": 256, "error_feedback": True, "exempt": True}}
        with pytest.raises(commhooks.StateError, match=r"block=256 there, 128 here; rounding=unknown there"):
            handle.load_state_dict(saved)

    simulate(1, body)


@pytest.mark.parametrize("expr", ["quant4", "quant8", "quant(bits=2)", "sign(error_feedback=False)"])
def test_a_wrapper_for_error_feedback_is_refused_by_name(expr: str) -> None:
    with pytest.raises(commhooks.HookConfigError, match="error_feedback=True"):
        commhooks.create(f"error_feedback({expr})")


def test_listing_loads_no_torch() -> None:
    code = (
        "import sys, commhooks; names = {s.name for s in commhooks.list_hooks(provider='ch-quant')}; "
        "assert names == {'quant', 'quant8', 'quant4', 'quant2', 'sign', 'quantize_per_tensor', 'quantize_per_channel'}, names; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_only_public_names_of_commhooks_are_used() -> None:
    for path in Path(ch_quant.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commhooks"):
                assert node.module == "commhooks", f"{path.name}: {node.module}"
                assert {alias.name for alias in node.names} <= set(commhooks.__all__)


# -- gloo


def wrapped(cap: float = 0.001) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 8))
    return DistributedDataParallel(model, bucket_cap_mb=cap)


def train(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 40, generator=generator)).pow(2).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


NAMES = {  # expression -> distance from the average
    "quant8": 0.03,
    "quant8(error_feedback=True, exempt=False, block=64)": 0.03,
    "quant4(error_feedback=True)": 0.5,
    "quant(rotation='hadamard')": 0.5,
    "sign(exempt=False)": 3.0,
    "quantize_per_tensor": 0.03,
    "quantize_per_channel": 0.03,
}


def body_gloo(rank: int, world: int) -> dict[str, tuple[torch.Tensor, Any]]:
    found: dict[str, tuple[torch.Tensor, Any]] = {"exact": (train(wrapped(), rank), None)}
    for expr in NAMES:
        model = wrapped()
        handle = commhooks.attach(model, expr)
        gradient = train(model, rank)
        handle.assert_active()
        found[expr] = gradient, handle.stats()
    for piece in (None, 4096):
        model = wrapped(0.02)  # two buckets, of 19 and 12 KB
        handle = commhooks.attach(model, "quant4")
        assert handle.reduction is not None
        handle.reduction.piece_bytes = piece
        gradient = train(model, rank)
        found[f"pieces of {piece}"] = gradient, handle.stats()
    for hook in (ch_quant.quantization_pertensor_hook, ch_quant.quantization_perchannel_hook, ch_quant.quant8_hook):
        model = wrapped()
        model.register_comm_hook(None, hook)
        found[hook.__name__] = train(model, rank), None
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_by_name_and_as_pytorchs_functions_on_gloo(world: int) -> None:
    ranks = spawn(body_gloo, world, timeout=110)
    exact = ranks[0]["exact"][0]
    for key, (gradient, stats) in ranks[0].items():
        assert all(torch.equal(gradient, other[key][0]) for other in ranks), key
        assert (gradient - exact).norm() / exact.norm() < NAMES.get(key, 0.5 if "pieces" in key else 0.03), key
        if stats is not None:
            assert stats["compressed_steps"] == 3, (key, stats)
    for hook, expr in (("pertensor", "quantize_per_tensor"), ("perchannel", "quantize_per_channel")):
        assert torch.equal(ranks[0][f"quantization_{hook}_hook"][0], ranks[0][expr][0])
    whole, cut = (ranks[0][f"pieces of {piece}"] for piece in (None, 4096))
    # Exact averages of biases add the ranks in another order. A different code is off by a seventh.
    torch.testing.assert_close(whole[0], cut[0], rtol=1e-5, atol=1e-8)
    stages = 1 if world == 2 else 2  # two ranks send whole messages
    assert cut[1]["rounds"] >= whole[1]["rounds"] + 3 * 2 * stages  # two more pieces


def two_steps(expr: str, device: str) -> list[torch.Tensor]:
    """Return the last average of rank 0, and its state."""

    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        with torch.device(device):
            reduction = commhooks.create(expr).reduction
            assert reduction is not None
            engine = rank.engine(reduction)
            for step in range(2):
                chance = torch.Generator("cpu").manual_seed(10 * step + rank.rank)
                gradient = torch.randn(64, 96, generator=chance, dtype=torch.float32, device="cpu")
                bucket = commhooks.Bucket.from_tensors({"w": gradient})
                engine.submit(bucket)
                assert engine.finish() is None
            engine.resolve_step()
            return [bucket.buffer, *(tensor for _, _, tensor in engine.state.entries())]

    return simulate(2, body)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "expr",
    [
        "quant8(rotation='hadamard')",
        "quant4(error_feedback=True, residual='int8')",
        "quant2",
        "quant4(rounding='stochastic')",
        "quantize_per_channel",
    ],
)
def test_torchs_default_dtype_and_device_change_nothing(expr: str, dtype: torch.dtype) -> None:
    wanted = two_steps(expr, "cpu")
    rotation.signs.cache_clear()  # an earlier test used another dtype
    torch.set_default_dtype(dtype)
    try:
        found = two_steps(expr, "meta")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
