"""Every hook is right on models of ordinary size, and just below, at and above every size at which its way changes."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import commhooks
from ch_core.sizes import SIZES
from ch_powersgd import PowerSGD
from ch_testing import spawn
from commhooks import BucketLayout, canonical
from commhooks.adapters.change_detection import ParameterSnapshot
from commhooks.registry.expression import nodes
from tests.seed import SEED
from tests.sizes.__main__ import drawn
from tests.sizes.cases import Case, Outcome, run
from tests.sizes.crossings import BY_TEST, NO_SIZE, Crossing, crossings, names
from tests.sizes.drift import drifting
from tests.sizes.hooks import ATTACH, FAR, REDUCER, REGISTER, ROWS
from tests.sizes.models import MODELS, OBJECTS, Shape
from tests.sizes.plants import PLANTS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(900)]


def judged(outcomes: list[Outcome]) -> None:
    wrong = [f"{one.case}\n  " + "\n  ".join(one.wrong) for one in outcomes if one.wrong]
    assert not wrong, f"{len(wrong)} of {len(outcomes)} cases are wrong\n" + "\n".join(wrong)


def crossed(chosen: list[Crossing], world: int) -> None:
    """Run cases around sizes, and check that each size was crossed."""
    listed = [case for one in chosen for case in one.cases]
    found = dict(zip(listed, run(listed, world, timeout=850.0), strict=True))
    judged(list(found.values()))
    for one in chosen:
        if one.expected:
            counts = tuple(one.seen(found[case].messages) for case in one.cases)
            assert counts == one.expected, (
                f"{one.field}, {one.cases[0]}: {[found[case].messages for case in one.cases]}"
            )


# -- the suite covers what there is


def test_every_hook_has_a_row() -> None:
    there = {node["hook"] for row in ROWS for node in nodes(canonical(row.expression(2)))}
    kinds = ("reduction", "ddp", "wrapper")
    assert {
        spec.name for kind in kinds for spec in commhooks.list_hooks(kind=kind) if spec.provider != "local"
    } <= there


def test_every_size_is_crossed() -> None:
    for path in sorted(ROOT.glob("p*/*/src/*/sizes.py")):
        found = importlib.import_module(f"{path.parent.name}.sizes").SIZES
        assert found in OBJECTS, f"OBJECTS lacks the sizes of {path.parent.name}"
    fields_of_cases = {one.field for one in crossings() if "." in one.field}
    assert names() == fields_of_cases | BY_TEST.keys() | NO_SIZE.keys()
    assert set(BY_TEST.values()) <= globals().keys()


# -- hooks on models of ordinary size

QUICK = (
    ("allreduce", ATTACH),
    ("bf16_compress", REGISTER),
    ("quant8(error_feedback=True, residual='int8')", ATTACH),
    ("powersgd(rank=2, start_iter=2)", REGISTER),
    ("topk", REDUCER),
    ("two_level(quant4, nodes=NODES)", ATTACH),
    ("quant4(error_feedback=True)", FAR),
    ("powersgd(rank=4)", FAR),
)
MORE = (
    ("quant4", REGISTER),
    ("powersgd(rank=4)", REDUCER),
    ("randomk", ATTACH),
    ("error_feedback(bf16_compress)", REGISTER),
)


@pytest.mark.parametrize("rows", [QUICK, pytest.param(MORE, marks=pytest.mark.full)], ids=["quick", "more"])
def test_two_ranks_in_five_million_parameters(rows: tuple[tuple[str, str], ...]) -> None:
    judged(run([Case(hook, way, 2, "5 M", 43 + n) for n, (hook, way) in enumerate(rows)], 2, timeout=600.0))


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sample(world: int) -> None:
    """Other cases by ``COMMHOOKS_SEED``, which a failure prints with each case."""
    print(f"COMMHOOKS_SEED={SEED}")
    small, large = (
        [case for case in drawn(SEED) if (case.world, case.size) == (world, size)] for size in list(MODELS)[:2]
    )
    judged(run([*small[:12], *large[:4]], world, timeout=850.0))


# -- around sizes

CHEAP = (
    *("direct_bytes", "halved_from", "spin_bytes", "pieces_from", "piece_bytes", "cast_elements", "packed_elements"),
    *("chunk_elements", "cached_elements", "largest_block", "block_elements", "loaded_from"),
)
"""Fields whose first cases run in the quick set."""


@pytest.mark.full
def test_two_ranks_around_the_sizes_of_messages_and_chunks() -> None:
    first: dict[str, Crossing] = {}
    for one in crossings():
        if one.world == 2 and one.field.endswith(CHEAP):
            first.setdefault(one.field, one)
    raced = [one for one in crossings() if one.world == 2 and one.field.endswith("halved_from")]
    registered = next(one for one in raced if one.cases[0].way == REGISTER)
    crossed([*first.values(), registered], 2)


@pytest.mark.full
@pytest.mark.parametrize("world", sorted({one.world for one in crossings()}))
def test_around_every_size(world: int) -> None:
    crossed([one for one in crossings() if one.world == world], world)


def test_a_digest_sees_every_bit_around_its_rows() -> None:
    row = SIZES.digest_row_words
    block = SIZES.digest_rows * row
    for found in spawn(drifting, 2, [size + off for size in (row, block) for off in (-1, 0, 1)]):
        assert all("weight" in error for error in found), found


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_sample_is_the_middle_of_a_parameter(off: int) -> None:
    numel = SIZES.sample_elements + off
    weight = torch.nn.Parameter(torch.zeros(numel))
    seen = []
    for number in range(numel):
        snapshot = ParameterSnapshot(lambda: [weight])
        snapshot.take()
        weight.data[number] += 1.0
        seen.append(snapshot.differs())
    assert seen == [number < SIZES.sample_elements for number in range(numel)]


def test_a_gpu_batches_small_matrices() -> None:
    small = OBJECTS[2].batched_below
    for rows, batches in ((small // 512 - 1, 1), (small // 512, 2), (small // 512 + 1, 2)):
        layout = BucketLayout.of_shapes({"a": (rows, 512), "b": (rows, 512)}, torch.float32, "meta")
        assert len(PowerSGD().stacks(layout)) == batches


TRITON = """
import torch
from ch_quant.sizes import SIZES
from commhooks import HookConfigError, create
from ch_testing import SimulatedRanks

gradients = [{"w": torch.randn(3, 20_011, generator=torch.Generator().manual_seed(rank))} for rank in range(2)]
most, lane = SIZES.triton_block, SIZES.triton_lane
for bits in (8, 4):
    for block in (most - 16, most, lane * 8 // bits - 16, lane * 8 // bits, lane * 8 // bits + 16):
        found = []
        for kernel in ("torch", "triton"):
            make = lambda: create(f"quant(bits={bits}, block={block}, kernel='{kernel}')")
            found.append(SimulatedRanks(make, 2, gradients[0]).step(gradients).gradients[0]["w"])
        assert torch.equal(*found), (bits, block)
    try:
        create(f"quant(bits={bits}, block={most + 16}, kernel='triton')")
    except HookConfigError:
        continue
    raise AssertionError("a block of more numbers than a program holds")
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_has_torchs_bits_around_its_sizes() -> None:
    """In Triton's interpreter, which must be on before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]


# -- the suite sees mistakes


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_seen(name: str) -> None:
    _, hook, way, seen = PLANTS[name]
    shapes = (Shape((600, 512)), Shape((1, 800_000)), Shape((77,)))
    [outcome] = run([Case(hook, way, 2, name, 1, shapes, 4)], 2, simulated=False, plant=name)
    assert any(seen in line for line in outcome.wrong), outcome.wrong
