"""Every hook in every composition on nodes: all ranks get the same bits, or the composition is refused by a typed error.

The hooks come from the registry. Wrappers stand around ``two_level`` and inside it, alone and in pairs. Hooks inside a node are
all that decode what other ranks have sent. The buckets are small and odd, so that parts have padding, places own nothing, and
parameters are empty or scalars.
"""

import itertools
import zlib
from collections.abc import Iterator

import pytest
import torch

import commhooks
from ch_core import Gathered, GatherEngine, Scattered, SimulatedRank, simulate
from ch_testing import SimulatedRanks
from commhooks import BucketLayout, CommHooksError, HookState, Reduction, ShardLayout

OPTIONS = (  # forms that decode zeros to numbers, draw random numbers, or have other stages than the examples
    "bf16_compress(accumulate='fp32')",
    "bf16_compress(rounding='stochastic')",
    "powersgd(rank=2, min_compression_rate=1)",
    "quant8",
    "quant8(rotation='hadamard')",
    "quant8(rounding='stochastic')",
    "quant4(error_feedback=True, residual='int8', block=16)",
    "quant2(error_feedback=False)",
    "sign(error_feedback=False)",
    "sign(error_feedback=False, rotation='hadamard', exempt=False)",
    "topk(density=0.1)",
)
WRAPPERS = {
    "bf16_wrapper": ("bf16_wrapper({})", "bf16_wrapper({}, accumulate='fp32')"),
    "fp16_wrapper": ("fp16_wrapper({}, rounding='stochastic')", "fp16_wrapper({}, accumulate='fp32')"),
    "clip": ("clip({}, limit=1.0)",),
    "error_feedback": ("error_feedback({})",),
    "policy": ("policy({{'w*': {}, '*': allreduce}})", "policy({{'w*': allreduce, '*': {}}})"),
    "two_level": ("two_level({})",),
    "warmup": ("warmup({}, steps=2)", "warmup(bf16_compress, {}, steps=1)"),
}
FORMS = tuple(form for forms in WRAPPERS.values() for form in forms)
PAIRED = ("bf16_compress(accumulate='fp32')", "powersgd(rank=2)", "quant4(error_feedback=True)", "randomk(density=0.2)")
BUCKETS = (
    {"w": (31, 7), "b": (31,), "v": (1, 40), "s": (), "e": (0, 3), "q": (3, 5), "wt": (17, 33)},
    {"w": (24, 8), "v": (1, 40)},
)
NODES = ((4, 2), (6, 3), (6, 2))  # ranks, ranks per node
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
STEPS = 3


def hooks() -> tuple[str, ...]:
    """Return every reduction that gives all ranks one average, by its example, and :data:`OPTIONS`."""
    found = [spec.example for spec in commhooks.list_hooks(kind="reduction")]
    made = ((expr, commhooks.create(expr).reduction) for expr in dict.fromkeys([*found, *OPTIONS]))
    return tuple(expr for expr, reduction in made if reduction is not None and reduction.keeps_equal("w"))


HOOKS = hooks()


def compositions(hook: str) -> Iterator[str]:
    """Yield a hook alone, between nodes and inside them, and with one wrapper or two around, between and inside."""
    yield hook
    yield from (f'two_level({hook}, inside="{inside}")' for inside in HOOKS)
    wrapped = [f'two_level({hook}, inside="sign(error_feedback=False)")', f"two_level({hook})", hook]
    for form in FORMS:
        yield from (form.format(inner) for inner in wrapped)
        yield f"two_level({form.format(hook)})"
        yield f'two_level({hook}, inside="{form.format("quant8")}")'
    if hook in PAIRED:
        pairs = itertools.product(FORMS, FORMS)
        made = (
            expr
            for a, b in pairs
            for expr in (a.format(f"two_level({b.format(hook)})"), a.format(b.format(wrapped[1])))
        )
        yield from (
            expr for expr in made if not drawn(expr) % 4
        )  # a quarter of them, because each takes a third of a second


def drawn(expr: str) -> int:
    """Return a number that follows from the expression, so that a case is the same in every run."""
    return zlib.crc32(expr.encode())


def wrong(expr: str) -> str:
    """Run a composition. Return in which way ranks differ or fail, or an empty text if nothing is wrong."""
    world, each = NODES[drawn(expr) % len(NODES)]
    dtype = DTYPES[drawn(expr) // 7 % len(DTYPES)]
    like = {name: torch.zeros(shape, dtype=dtype) for name, shape in BUCKETS[drawn(expr) // 21 % len(BUCKETS)].items()}
    try:
        ranks = SimulatedRanks(lambda: commhooks.create(expr), world, like, nodes=each)
    except CommHooksError:
        return ""
    for step in range(STEPS):
        made = torch.Generator().manual_seed(step)
        given = [{n: torch.empty_like(t).normal_(generator=made) for n, t in like.items()} for _ in range(world)]
        done = ranks.step(given)
        if any(done.errors):
            return f"{expr} in {dtype} on {world} ranks, step {step}: {next(filter(None, done.errors))!r:.300}"
        first = done.gradients[0]
        if odd := {n for one in done.gradients for n in like if not torch.equal(first[n], one[n])}:
            return f"{expr} in {dtype} on {world} ranks, step {step}: ranks differ in {sorted(odd)}"
    return ""


def test_every_wrapper_has_a_form() -> None:
    assert {spec.name for spec in commhooks.list_hooks(kind="wrapper")} == WRAPPERS.keys()


@pytest.mark.parametrize("hook", HOOKS)
def test_some_compositions_give_all_ranks_the_same_bits(hook: str) -> None:
    every = sorted(set(compositions(hook)), key=drawn)
    assert [found for expr in every[:3] if (found := wrong(expr))] == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hook", HOOKS)
def test_all_compositions_give_all_ranks_the_same_bits(hook: str) -> None:
    assert [found for expr in compositions(hook) if (found := wrong(expr))] == []


# -- on sharded models

SHAPES = {"w": (7, 16), "b": (5,), "one": (1, 3), "v": (6, 40)}


def sharded() -> list[str]:
    """Return what may stand on an axis of FSDP2: each hook alone, in one wrapper, and on two levels."""
    made = [*HOOKS, *(form.format(hook) for hook in HOOKS for form in FORMS)]
    rotated = "quant8(rotation='hadamard')"
    return [*made, *(f'two_level({hook}, inside="{rotated}")' for hook in HOOKS)]


def built(expr: str) -> Reduction:
    reduction = commhooks.create(expr).reduction
    assert reduction is not None
    return reduction


def cut_for(world: int, dtype: torch.dtype) -> tuple[ShardLayout, list[torch.Tensor]]:
    """Return the layout of shards, and for each rank ``(world * n,)`` numbers with zeros in the padding."""
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)
    made = torch.Generator().manual_seed(0)
    given = [torch.zeros(world, cut.part.numel, dtype=dtype) for _ in range(world)]
    for one in given:
        for p in cut.part.params:
            whole = torch.randn(cut.whole_param(p.name).numel, generator=made, dtype=torch.float32).to(dtype)
            for part, piece in zip(one, whole.split(p.numel), strict=False):
                part[p.offset : p.offset + piece.numel()] = piece
    return cut, [one.view(-1) for one in given]


def gathered_wrong(expr: str, world: int, each: int) -> str:
    dtype = DTYPES[drawn(expr) % len(DTYPES)]
    cut, given = cut_for(world, dtype)
    n = cut.part.numel

    def body(rank: SimulatedRank) -> torch.Tensor | None:
        try:
            engine = GatherEngine(Gathered(built(expr), {"b": "1-D"}), rank.transport, HookState(), timeout=None)
            engine.open_levels()
        except CommHooksError:
            return None
        for _ in range(2):
            storage = torch.full((world, n), float("nan"), dtype=dtype)
            storage[rank.rank] = given[0].view(world, n)[rank.rank]
            assert isinstance(engine.reduction, Gathered)
            engine.complete(engine.launch(engine.reduction.gather_bucket(cut, storage.view(-1))))
            error = engine.finish()
            if error is not None:
                raise error
        return storage

    found = [one for one in simulate(body=body, nodes=world // each, ranks_per_node=each) if one is not None]
    if not found:
        return ""
    for p in cut.part.params:
        for one in found:
            mine, first = (x.view(world, n)[:, p.offset : p.offset + p.numel] for x in (one, found[0]))
            if not torch.equal(mine, first) or not bool(mine.isfinite().all()):
                return f"{expr} in {dtype} on {world} ranks: ranks gather different weights of {p.name}, or NaN"
    return ""


def scattered_wrong(expr: str, world: int, each: int) -> str:
    """Each part belongs to one rank, and no other rank decodes it. It is compared with the exact average."""
    dtype = DTYPES[drawn(expr) % len(DTYPES)]
    cut, given = cut_for(world, dtype)

    def body(rank: SimulatedRank) -> torch.Tensor | None:
        try:
            scattered = Scattered(built(expr))
            engine = rank.engine(scattered)
            engine.open_levels()
        except CommHooksError:
            return None
        for _ in range(2):
            output = torch.full((cut.part.numel,), float("nan"), dtype=dtype)
            engine.run(scattered.bucket(cut, given[rank.rank].clone(), output))
            error = engine.finish()
            if error is not None:
                raise error
        return output

    found = [one for one in simulate(body=body, nodes=world // each, ranks_per_node=each) if one is not None]
    if not found:
        return ""
    wanted = torch.stack([one.double() for one in given]).mean(0).view(world, -1)
    for p in cut.part.params:
        there = slice(p.offset, p.offset + p.numel)
        mine, mean = torch.stack([one.double() for one in found])[:, there], wanted[:, there]
        off = float((mine - mean).norm() / mean.norm())
        if not off < 3.0:  # one bit for each number: twice the mean magnitude at most, or any larger number is wrong
            return f"{expr} in {dtype} on {world} ranks: {p.name} is {off:.3g} times its norm from the average"
    return ""


SHARDED = sharded()


@pytest.mark.parametrize("part", range(4))
def test_some_hooks_of_an_axis_decode_equally(part: int) -> None:
    some = sorted(SHARDED, key=drawn)[part::24]
    cases = [(expr, *NODES[drawn(expr) // 3 % len(NODES)]) for expr in some]
    assert [found for case in cases for check in (gathered_wrong, scattered_wrong) if (found := check(*case))] == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_all_hooks_of_an_axis_decode_equally(part: int) -> None:
    cases = [(expr, *nodes) for expr in SHARDED[part::8] for nodes in NODES]
    assert [found for case in cases for check in (gathered_wrong, scattered_wrong) if (found := check(*case))] == []
