"""Cases just below, at and above every size at which a package changes how numbers are sent, cut or compared.

Each field of the objects in :data:`.models.OBJECTS` has cases here, a test of its own (:data:`BY_TEST`), or a reason why it is
no size (:data:`NO_SIZE`). The sizes of the cases follow from the present value of the field.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial

from .cases import Case, Message
from .hooks import ATTACH, REDUCER, REGISTER, VARIANTS
from .models import OBJECTS, Shape

NO_SIZE = {
    "ch_core.engine.schedule.spin_seconds": "a time",
    "ch_core.engine.schedule.cuts": "off or on",
    "ch_core.engine.schedule.link": "a rate and a time",
}
BY_TEST = {
    "ch_core.sizes.digest_row_words": "test_a_digest_sees_every_bit_around_its_rows",
    "ch_core.sizes.digest_rows": "test_a_digest_sees_every_bit_around_its_rows",
    "ch_core.sizes.sample_elements": "test_a_sample_is_the_middle_of_a_parameter",
    "ch_powersgd.sizes.batched_below": "test_a_gpu_batches_small_matrices",
    "ch_quant.sizes.triton_block": "test_triton_has_torchs_bits_around_its_sizes",
    "ch_quant.sizes.triton_lane": "test_triton_has_torchs_bits_around_its_sizes",
}
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""DDP's own sizes, in bytes."""
FEW = 2
"""Steps of a case that has no buckets of DDP."""
RACING = 5
"""Steps of a case that looks for a result that arrives too late: one in ten was wrong."""


Count = Callable[[Sequence[Message]], int]


@dataclass(frozen=True)
class Crossing:
    """Cases around one size.

    Attributes:
        field: that holds the size.
        cases: below, at and above it.
        seen: counts something in the messages of a case.
        expected: the count of each case; empty if no message shows the size.
    """

    field: str
    cases: tuple[Case, ...]
    seen: Count
    expected: tuple[int, ...]

    @property
    def world(self) -> int:
        return self.cases[0].world


def _around(size: int, by: int = 1) -> tuple[int, int, int]:
    return size - by, size, size + by


def _vectors(sizes: Iterable[int]) -> list[tuple[Shape, ...]]:
    return [(Shape((size,)),) for size in sizes]


def _rows(sizes: Iterable[int], *others: int) -> list[tuple[Shape, ...]]:
    """Return matrices of one row, which hooks compress although they leave vectors exact."""
    rest = tuple(Shape((1, other)) for other in others)
    return [(Shape((1, size - sum(others))), *rest) for size in sizes]


def _last(sizes: Iterable[int]) -> list[tuple[Shape, ...]]:
    """Return models whose last bucket of DDP's has exactly these sizes. Two buckets precede it."""
    before = (Shape((BUCKET // 4 + 1,)), Shape((FIRST_BUCKET // 4 + 3,)))
    return [(Shape((size,)), *before) for size in sizes]


def _matrix(numel: int) -> Shape:
    """Return a matrix of this many elements, as near to a square as its divisors allow."""
    rows = next(n for n in range(math.isqrt(numel), 0, -1) if numel % n == 0)
    return Shape((rows, numel // rows))


def crossings() -> list[Crossing]:
    """Return all of them. Those of one field stand together, the cheapest first."""
    made: list[Crossing] = []

    def add(
        field: str,
        hook: str | Sequence[str],
        way: str,
        models: Sequence[tuple[Shape, ...]],
        seen: str | Count = "",
        *expected: int,
        world: int = 2,
        steps: int = 0,
    ) -> None:
        hooks = [hook] * len(models) if isinstance(hook, str) else hook
        cases = tuple(
            Case(
                expr,
                way,
                world,
                f"{place} {field}",
                len(made),
                shapes,
                steps or (FEW if way == REDUCER else 3),
                bool(expected),
            )
            for expr, place, shapes in zip(hooks, ("below", "at", "above", "far above"), models, strict=False)
        )
        count = seen if callable(seen) else lambda messages: sum(seen in kind for kind, _ in messages)
        made.append(Crossing(field, cases, count, expected))

    tuning, core, powersgd, quant, sparse = OBJECTS
    exactly, levels = "bf16_compress(accumulate='fp32')", "two_level(allreduce, nodes=NODES)"

    engine = "ch_core.engine.schedule."
    rows = round(4 / tuning.deferred_share)
    models = [(Shape((n, 4099)), Shape((n, 104101)), Shape((n, 4201))) for n in (rows + 1, rows, rows - 1)]
    add(engine + "deferred_share", "powersgd(rank=4)", ATTACH, models, "", 4, 4, 7)
    for alone, rows in zip((0, 1, 1), _around(int(tuning.coalesced_bytes) // 4), strict=True):
        model = (Shape((64, 4099)), Shape((64, 104101)), Shape((rows, 33)))
        numel = 2 * rows  # of P of the first bucket, sent directly to two ranks
        add(engine + "coalesced_bytes", "powersgd(rank=1)", ATTACH, [model], partial(_of, numel), alone)
    around = _around(tuning.direct_bytes // 4)
    for way, made_of in ((REDUCER, _vectors), (ATTACH, _last)):
        add(engine + "direct_bytes", "allreduce", way, made_of(around), "all_to_all", 2, 2, 1)
    for world in (3, 4):
        around = _around(tuning.direct_extra_bytes // (world - 2) // 2)
        models = _vectors(around)
        add(engine + "direct_extra_bytes", "bf16_compress", REDUCER, models, "all_to_all", 2, 2, 1, world=world)
    half, numel = engine + "halved_from", int(tuning.halved_from) // 2
    models = _last(_around(numel))
    add(half, "bf16_compress", REDUCER, _vectors(_around(numel)), "all_reduce", 1, 2, 2)
    add(half, "allreduce", REDUCER, _vectors(_around(numel // 2)), "all_reduce", 1, 2, 2)
    add(half, "bf16_compress", ATTACH, models, "all_reduce", 3, 4, 4, steps=RACING)
    for world in (2, 3, 4):
        add(half, "bf16_compress", REGISTER, models, "all_reduce", 3, 4, 4, world=world, steps=RACING)
    for hook in (
        "fp16_compress",
        *(f"{name}_wrapper(allreduce)" for name in ("bf16", "fp16")),
        "error_feedback(bf16_compress)",
    ):
        add(half, hook, REGISTER, models, "all_reduce", 3, 4, 4, steps=RACING)
    add(engine + "spin_bytes", "allreduce", REDUCER, _vectors(_around(tuning.spin_bytes // 4)))
    add(engine + "spin_bytes", "bf16_compress", REGISTER, _last(_around(tuning.spin_bytes // 2)))

    sizes = "ch_core.sizes."
    line, numel = core.aligned_elements, core.broadcast_from // 4  # of the node's two parts, each of whole cache lines
    add(
        sizes + "broadcast_from",
        levels,
        REDUCER,
        _vectors((numel - 2 * line, numel, numel + 1)),
        "broadcast",
        0,
        2,
        2,
        world=4,
    )
    add(sizes + "pieces_from", exactly, REDUCER, _vectors(_around(core.pieces_from // 2, 2)), "all_gather", 1, 2, 3)
    models = _rows(_around(core.pieces_below // 2, 2), 5_000_000, 3_000_000)
    pieces = core.pieces_below // core.piece_bytes
    add(sizes + "pieces_below", exactly, REDUCER, models, "all_gather", pieces, 1, 1)
    add(sizes + "piece_bytes", exactly, REDUCER, _vectors(_around(3 * core.piece_bytes // 2, 2)), "all_gather", 3, 3, 4)
    world = core.piece_bytes // core.part_bytes + 1  # fewer ranks have longer parts
    models = _vectors(_around(world * core.part_bytes, world))
    add(sizes + "part_bytes", exactly, REDUCER, models, "all_gather", 2, 2, 3, world=world)
    for way, made_of in ((REDUCER, _vectors), (REGISTER, _last)):
        add(sizes + "cast_elements", "bf16_compress", way, made_of(_around(core.cast_elements)))
    models = _rows((*_around(core.packed_elements), core.packed_elements + 129))
    add(sizes + "packed_elements", "quant8(error_feedback=True, residual='int8')", REDUCER, models)
    parts = (4 * line - 2, 4 * line, 4 * line + 1)  # of four ranks on two nodes; the last fills three lines a rank
    models, whole = _vectors(parts), (4 * line - 2, 4 * line, 6 * line)
    add(sizes + "aligned_elements", levels, REDUCER, models, _longest_swap, *whole, world=4)

    # A bucket is cut if its length is nearer to two pieces than to one.
    models = _rows(_around(3 * quant.piece_bytes // 8), 400_000, 300_000)
    add("ch_quant.sizes.piece_bytes", "quant4", REDUCER, models, "all_gather", 1, 2, 2)
    add("ch_quant.sizes.piece_bytes", "quant4(error_feedback=True)", REGISTER, models)
    models = _rows(_around(quant.chunk_elements))  # one chunk, and two
    for hook in ("quant4", "quant4(block=48, exempt=False)", "quant4(error_feedback=True)"):
        add("ch_quant.sizes.chunk_elements", hook, REDUCER, models)
    add("ch_sparse.sizes.cached_elements", "topk", REDUCER, _rows(_around(sparse.cached_elements)))
    add("ch_sparse.sizes.largest_block", [row.expr for row in VARIANTS], REDUCER, _rows([300_007] * 3))
    for rank, block in ((4, powersgd.block_elements), (1, 3 * powersgd.block_elements // 2)):
        for numel in (block, 3 * block // 2):  # from the second on, two blocks are nearer than one
            models = [(Shape((rows, 512)),) for rows in _around(numel // 512)]
            add("ch_powersgd.sizes.block_elements", f"powersgd(rank={rank})", REDUCER, models)
    models = [(_matrix(numel),) for numel in _around(powersgd.loaded_from)]
    add("ch_powersgd.sizes.loaded_from", "powersgd(rank=4)", REDUCER, models)

    models = [(Shape((1, 600_000)), Shape((1, numel))) for numel in _around(FIRST_BUCKET // 4)]
    add("DDP's first bucket", "allreduce", ATTACH, models, "all_reduce", 1, 2, 2)
    models = [(Shape((1, 700_000)), Shape((1, n)), Shape((FIRST_BUCKET // 4,))) for n in _around(BUCKET // 4)]
    add("DDP's bucket", "quant4", REGISTER, models)
    return made


def _of(numel: int, messages: Sequence[Message]) -> int:
    return sum(length == numel for _, length in messages)


def _longest_swap(messages: Sequence[Message]) -> int:
    return max((numel for kind, numel in messages if kind == "all_to_all"), default=0)


def names() -> set[str]:
    """Return the name of every field of the objects that hold sizes."""
    return {f"{type(one).__module__}.{field.name}" for one in OBJECTS for field in fields(one)}
