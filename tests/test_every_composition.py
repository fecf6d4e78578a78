"""Every hook in every composition on nodes: it is legal by :func:`legal`, and gives all ranks the same bits, or it is refused.

The hooks come from the registry. Wrappers stand around ``two_level`` and inside it, alone and in pairs. Hooks inside a node are
all that decode what other ranks have sent. The buckets are small and odd, so that parts have padding, places own nothing, and
parameters are empty or scalars. All compositions are made. A sample runs, by ``COMMHOOKS_SEED``.
"""

import itertools
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch

import commhooks
from ch_core import Gathered, GatherEngine, Scattered, SimulatedRank, simulate
from ch_testing import SimulatedRanks
from commhooks import BucketLayout, CommHooksError, HookState, Reduction, ShardLayout
from commhooks.registry.expression import canonical
from tests.seed import SEED

OPTIONS = (  # forms that decode zeros to numbers, draw random numbers, or have other stages than the examples
    "bf16_compress(accumulate='fp32')",
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
    "fp16_wrapper": ("fp16_wrapper({})", "fp16_wrapper({}, accumulate='fp32')"),
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

# -- which compositions are legal

TRAITS = {
    "allreduce": "casts scatters gathers",
    "batched_powersgd(rank=4)": "casts state",
    "bf16_compress": "casts feedback scatters gathers",
    "bf16_compress(accumulate='fp32')": "feedback scatters gathers",
    "fp16_compress": "casts feedback scatters gathers",
    "powersgd(rank=2)": "casts state",
    "powersgd(rank=2, min_compression_rate=1)": "casts state",
    "powersgd(rank=4)": "casts state",
    "quant(rotation='hadamard')": "scatters gathers",
    "quant2": "scatters state",
    "quant2(error_feedback=False)": "scatters gathers",
    "quant4(error_feedback=True)": "scatters state",
    "quant4(error_feedback=True, residual='int8', block=16)": "scatters state",
    "quant8": "scatters gathers",
    "quant8(error_feedback=True)": "scatters state",
    "quant8(rotation='hadamard')": "scatters gathers",
    "quant8(rounding='stochastic')": "scatters state",
    "quantize_per_channel": "",
    "quantize_per_tensor": "",
    "randomk": "casts state",
    "randomk(density=0.2)": "casts state",
    "sign": "scatters state",
    "sign(error_feedback=False)": "scatters gathers",
    "sign(error_feedback=False, rotation='hadamard', exempt=False)": "scatters gathers",
    "topk(density=0.01, bits=2)": "state",
    "topk(density=0.1)": "state",
}
"""Of each hook: a wrapper can cast its messages, ``error_feedback`` may wrap it, it has state, scatters, or gathers weights."""
CASTS = ("bf16_wrapper", "fp16_wrapper")
Node = Mapping[str, Any]


@cache
def _stated() -> dict[str, frozenset[str]]:
    return {json.dumps(canonical(expr), sort_keys=True): frozenset(words.split()) for expr, words in TRAITS.items()}


def parts(node: Node) -> list[Node]:
    """Return the hooks that a wrapper wraps."""
    if "rules" in node:
        return [inner for _, inner in node["rules"]]
    inner = node.get("inner", [])
    return inner if isinstance(inner, list) else [inner]


def leveled(node: Node) -> bool:
    return node["hook"] == "two_level" or any(map(leveled, parts(node)))


def traits(node: Node) -> frozenset[str]:
    """Return the traits of a legal composition."""
    inner, hook, options = parts(node), node["hook"], node["config"]
    if not inner:
        return _stated()[json.dumps(node, sort_keys=True)]
    every = [traits(one) for one in inner]
    both, some = frozenset.intersection(*every), frozenset.union(*every)
    if hook == "warmup" and len(inner) == 1:
        some |= {"casts"}  # the warm-up averages plainly
    state = some & {"state"}
    if hook == "policy":
        return both | some & {"casts", "state"}
    if hook == "warmup":
        return both - {"gathers"} | some & {"casts", "state"}
    if hook == "two_level":
        return some & {"casts"} | state | (both & {"scatters", "gathers"} if not state else frozenset())
    if hook in CASTS:
        return (
            both & {"scatters", "gathers"}
            | state
            | (some & {"casts"} if options.get("accumulate") != "fp32" else frozenset())
        )
    return both & {"casts"} | {"state"}  # error_feedback


def legal(node: Node) -> bool:
    """True if a composition may be made."""
    inner, hook = parts(node), node["hook"]
    if not all(map(legal, inner)):
        return False
    if hook == "two_level":
        inside = canonical(node["config"].get("inside", "allreduce"))
        alone = legal(inside) and traits(inside) >= {"scatters", "gathers"} and not traits(inside) & {"state"}
        return alone and not any(map(leveled, [*inner, inside]))
    if hook in CASTS:
        return "casts" in traits(inner[0])
    if hook == "error_feedback":
        return "feedback" in traits(inner[0])
    return True


def made(expr: str) -> Reduction | None:
    """Return a reduction; None if it is refused."""
    try:
        reduction = commhooks.create(expr).reduction
    except CommHooksError:
        return None
    assert reduction is not None
    return reduction


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
    ranks = SimulatedRanks(lambda: commhooks.create(expr), world, like, nodes=each)
    for step in range(STEPS):
        drawing = torch.Generator().manual_seed(step)
        given = [{n: torch.empty_like(t).normal_(generator=drawing) for n, t in like.items()} for _ in range(world)]
        done = ranks.step(given)
        if any(done.errors):
            return f"{expr} in {dtype} on {world} ranks, step {step}: {next(filter(None, done.errors))!r:.300}"
        first = done.gradients[0]
        if odd := {n for one in done.gradients for n in like if not torch.equal(first[n], one[n])}:
            return f"{expr} in {dtype} on {world} ranks, step {step}: ranks differ in {sorted(odd)}"
    return ""


def test_every_wrapper_has_a_form() -> None:
    assert {spec.name for spec in commhooks.list_hooks(kind="wrapper")} == WRAPPERS.keys()


def test_legal_compositions_are_made_and_others_are_refused() -> None:
    """If this fails for a new hook or wrapper, state its traits."""
    assert {*HOOKS, *PAIRED} == TRAITS.keys()
    every = sorted({*SHARDED, *(expr for hook in HOOKS for expr in compositions(hook))})
    found = {expr: made(expr) is not None for expr in every}
    assert [expr for expr in every if found[expr] != legal(canonical(expr))] == []
    assert 800 < sum(found.values()) < len(every) - 900


def legal_ones(hook: str) -> list[str]:
    """Return the legal compositions of a hook, in an order that follows from each expression."""
    return sorted({expr for expr in compositions(hook) if legal(canonical(expr))}, key=drawn)


@pytest.mark.parametrize("hook", HOOKS)
def test_some_compositions_give_all_ranks_the_same_bits(hook: str) -> None:
    assert [found for expr in legal_ones(hook)[:2] if (found := wrong(expr))] == []


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_a_sample_of_compositions_gives_all_ranks_the_same_bits(hook: str) -> None:
    print(f"COMMHOOKS_SEED={SEED}")
    sample = random.Random(f"{SEED}:{hook}").sample(legal_ones(hook), 5)
    assert [found for expr in sample if (found := wrong(expr))] == []


# -- on sharded models

SHAPES = {"w": (31, 70), "b": (5,), "one": (1, 3), "v": (6, 160)}
"""Each rank's part of ``w`` and ``v`` is larger than a block of numbers, or quantizers would average it exactly."""


def sharded() -> list[str]:
    """Return what may stand on an axis of FSDP2: each hook alone, in one wrapper, and on two levels."""
    made = [*HOOKS, *(form.format(hook) for hook in HOOKS for form in FORMS)]
    rotated = "quant8(rotation='hadamard')"
    return [*made, *(f'two_level({hook}, inside="{rotated}")' for hook in HOOKS)]


SHARDED = sharded()


def on_axis(trait: str) -> list[str]:
    """Return the compositions that may stand on the axis which needs a trait."""
    return [expr for expr in SHARDED if legal(canonical(expr)) and trait in traits(canonical(expr))]


def built(expr: str) -> Reduction:
    reduction = made(expr)
    assert reduction is not None, expr
    return reduction


def cut_for(world: int, dtype: torch.dtype) -> tuple[ShardLayout, list[torch.Tensor]]:
    """Return the layout of shards, and for each rank ``(world * n,)`` numbers with zeros in the padding."""
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)
    drawing = torch.Generator().manual_seed(0)
    given = [torch.zeros(world, cut.part.numel, dtype=dtype) for _ in range(world)]
    for one in given:
        for p in cut.part.params:
            whole = torch.randn(cut.whole_param(p.name).numel, generator=drawing, dtype=torch.float32).to(dtype)
            for part, piece in zip(one, whole.split(p.numel), strict=False):
                part[p.offset : p.offset + piece.numel()] = piece
    return cut, [one.view(-1) for one in given]


def gathered(expr: str, world: int, each: int) -> tuple[ShardLayout, torch.Tensor, list[torch.Tensor]]:
    """Return the layout, the exact weights, and what each rank gathers, ``(world, n)``."""
    cut, given = cut_for(world, DTYPES[drawn(expr) % len(DTYPES)])
    exact = given[0].view(world, cut.part.numel)

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = GatherEngine(Gathered(built(expr), {"b": "1-D"}), rank.transport, HookState(), timeout=None)
        engine.open_levels()
        for _ in range(2):
            storage = torch.full_like(exact, float("nan"))
            storage[rank.rank] = exact[rank.rank]
            assert isinstance(engine.reduction, Gathered)
            engine.complete(engine.launch(engine.reduction.gather_bucket(cut, storage.view(-1))))
            error = engine.finish()
            if error is not None:
                raise error
        return storage

    return cut, exact, simulate(body=body, nodes=world // each, ranks_per_node=each)


def gathered_wrong(expr: str, world: int, each: int) -> str:
    cut, _, found = gathered(expr, world, each)
    for p in cut.part.params:
        for one in found:
            mine, first = (x[:, p.offset : p.offset + p.numel] for x in (one, found[0]))
            if not torch.equal(mine, first) or not bool(mine.isfinite().all()):
                return f"{expr} in {one.dtype} on {world} ranks: ranks gather different weights of {p.name}, or NaN"
    return ""


def scattered(expr: str, world: int, each: int) -> tuple[ShardLayout, torch.Tensor, torch.Tensor]:
    """Return the layout, the exact averages, and the part of each rank, both ``(world, n)`` in fp64."""
    cut, given = cut_for(world, DTYPES[drawn(expr) % len(DTYPES)])

    def body(rank: SimulatedRank) -> torch.Tensor:
        reduction = Scattered(built(expr))
        engine = rank.engine(reduction)
        engine.open_levels()
        for _ in range(2):
            output = torch.full((cut.part.numel,), float("nan"), dtype=given[0].dtype)
            engine.run(reduction.bucket(cut, given[rank.rank].clone(), output))
            error = engine.finish()
            if error is not None:
                raise error
        return output

    found = simulate(body=body, nodes=world // each, ranks_per_node=each)
    wanted = torch.stack([one.double() for one in given]).mean(0).view(world, -1)
    return cut, wanted, torch.stack([one.double() for one in found])


def scattered_wrong(expr: str, world: int, each: int) -> str:
    """Each part belongs to one rank, and no other rank decodes it. It is compared with the exact average."""
    cut, wanted, found = scattered(expr, world, each)
    for p in cut.part.params:
        mine, mean = (x[:, p.offset : p.offset + p.numel] for x in (found, wanted))
        off = float((mine - mean).norm() / mean.norm())
        if not off < 3.0:  # one bit for each number: twice the mean magnitude at most, or any larger number is wrong
            return f"{expr} on {world} ranks: {p.name} is {off:.3g} times its norm from the average"
    return ""


CHECKS = {"gathers": gathered_wrong, "scatters": scattered_wrong}


@pytest.mark.parametrize("trait", CHECKS)
def test_an_axis_takes_the_hooks_that_can_and_refuses_others(trait: str) -> None:
    wanted = set(on_axis(trait))
    for expr in SHARDED:
        reduction = made(expr)
        if reduction is None:
            continue
        try:
            Gathered(reduction, {"b": "1-D"}) if trait == "gathers" else Scattered(reduction)
        except CommHooksError:
            assert expr not in wanted, expr
        else:
            assert expr in wanted, expr


def test_no_quantizer_is_exempt_on_an_axis() -> None:
    quantizers = [expr for expr in HOOKS if expr.startswith(("quant", "sign")) and "scatters" in TRAITS[expr]]
    assert len(quantizers) > 8
    for expr in quantizers:
        compared = [scattered(expr, 6, 3)]
        if "gathers" in TRAITS[expr]:
            cut, exact, found = gathered(expr, 6, 3)
            compared.append((cut, exact.double(), found[0].double()))
        for cut, exact, got in compared:
            for p in cut.part.params:
                if p.name in "wv":  # bf16 has 8 bits, so an exact exchange is nearer than half a percent
                    mine, there = (x[:, p.offset : p.offset + p.numel] for x in (got, exact))
                    assert float((mine - there).norm() / there.norm()) > 0.004, (expr, p.name)


@pytest.mark.parametrize("trait", CHECKS)
def test_some_hooks_of_an_axis_decode_equally(trait: str) -> None:
    cases = [(expr, *NODES[drawn(expr) // 3 % len(NODES)]) for expr in sorted(on_axis(trait), key=drawn)[::4]]
    assert [found for case in cases if (found := CHECKS[trait](*case))] == []


@pytest.mark.full
@pytest.mark.parametrize("trait", CHECKS)
def test_all_hooks_of_an_axis_decode_equally(trait: str) -> None:
    cases = [(expr, *nodes) for expr in on_axis(trait) for nodes in NODES]
    assert [found for case in cases if (found := CHECKS[trait](*case))] == []
