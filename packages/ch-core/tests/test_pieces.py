"""The engine reduces a large bucket in pieces if the reduction computes much."""

from collections.abc import Iterator
from typing import Any

import torch

from ch_core import AllGather, AllToAll, Bucket, Plain, Reduction, RemoteHookError, SimulatedRank, StepContext, simulate
from ch_core.engine.engine import Engine
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_wrappers.error_feedback import ErrorFeedback
from ch_wrappers.policy import Policy
from ch_wrappers.warmup import Warmup
from commhooks import Reducer


def step(engine: Engine, parts: list[Bucket]) -> BaseException | None:
    for bucket in parts:
        engine.submit(bucket)
    return engine.finish()


class Packed(Reduction):
    """Sends every number twice as opaque bytes. It stands for a quantized exchange."""

    name = "packed"
    lossy = True
    collectives = frozenset({"all_to_all", "all_gather"})
    fields = {"last": "local"}
    piece_bytes = 64

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        rows = -(-bucket.layout.numel // ctx.world_size)
        sent, received, everything = (
            ctx.scratch(name, (ctx.world_size * rows,), device=bucket.device) for name in ("s", "r", "e")
        )
        sent.zero_()[: bucket.layout.numel] = bucket.storage
        yield AllToAll(sent, received)
        own = ctx.scratch("own", (rows,), device=bucket.device).copy_(received.view(ctx.world_size, rows).mean(0))
        yield AllGather(own, everything)
        bucket.storage.copy_(everything[: bucket.layout.numel])
        for p in bucket.params:
            ctx.write(p.name, "last", p.shape, device=bucket.device).copy_(bucket.view(p))


class Whole(Packed):
    piece_bytes = None


def opaque(rank: int) -> list[Bucket]:
    return [
        Bucket.from_tensors(
            {f"{i}.{n}": torch.full((3, n + 1), rank + i + 0.25 * n) for n in range(6)}, index=i, is_last=i == 1
        )
        for i in range(2)
    ]


def order(reduction: Reduction, tuning: CpuTuning = TUNED) -> tuple[list[str], list[torch.Tensor]]:
    """Return the messages of a step of two buckets, the same on both ranks, and the reduced buckets."""
    log: dict[int, list[str]] = {0: [], 1: []}

    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        engine = rank.engine(reduction, tuning=tuning)
        for kind in ("all_to_all", "all_gather"):
            original = getattr(rank.transport, kind)

            def record(output: torch.Tensor, input: torch.Tensor, original: Any = original, kind: str = kind) -> Any:
                log[rank.rank].append(f"{kind[4]} {output.numel()}")
                return original(output, input)

            setattr(rank.transport, kind, record)
        parts = opaque(rank.rank)
        assert step(engine, parts) is None
        assert engine.resolve_step()
        assert len(list(engine.state.entries())) == 12
        return [bucket.storage for bucket in parts]

    left = simulate(2, body)
    assert log[0] == log[1]
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    return log[0], left[0]


def test_a_large_bucket_goes_in_pieces_that_do_not_wait_for_one_another() -> None:
    whole, averages = order(Whole())
    assert whole == ["t 64", "t 64", "g 64", "g 64"]
    pieces, same = order(Packed())
    # Four pieces of each bucket, of 18, 12, 15 and 18 numbers. Submitting the second bucket advances the first bucket's
    # pieces once.
    sent, gathered = ["t 18", "t 12", "t 16", "t 18"], ["g 18", "g 12", "g 16", "g 18"]
    assert pieces == [*sent, *sent, *gathered, *gathered]
    assert all(torch.equal(a, b) for a, b in zip(averages, same, strict=True))
    assert order(Packed(), CpuTuning.off())[0] == whole


def test_a_piece_that_fails_on_one_rank_fails_the_step_on_all() -> None:
    class Breaks(Packed):
        def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
            stages = super().run(bucket, ctx)
            yield next(stages)
            if ctx.rank == 1 and bucket.params[0].name == "0.3" and not bucket.storage.is_meta:
                raise ArithmeticError("broken")
            yield from stages

    def body(rank: SimulatedRank) -> tuple[BaseException | None, int, BaseException | None]:
        engine = rank.engine(Breaks())
        first = step(engine, opaque(rank.rank))
        engine.reduction = Packed()
        return first, len(list(engine.state.entries())), step(engine, opaque(rank.rank))

    for error, kept, again in simulate(2, body):
        assert isinstance(error, (ArithmeticError, RemoteHookError))
        assert kept == 0 and again is None


def test_a_step_of_pieces_ends_like_another_one() -> None:
    """The users of each average, a rank that does not participate, parameters without a gradient, and a bucket run by
    itself.
    """

    def body(rank: SimulatedRank) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
        engine = rank.engine(Packed())
        seen: list[str] = []
        engine.set_on_reduced(lambda piece: seen.extend(p.name for p in piece.params))
        parts = opaque(rank.rank)
        for part in parts:
            part.unused = frozenset({"0.2", "1.5"})
        assert step(engine, parts) is None
        engine.set_participating(rank.rank == 0)
        again = opaque(rank.rank)
        for bucket in again:
            engine.run(bucket)
        assert engine.finish() is None
        return seen, [part.storage for part in parts], [part.storage for part in again]

    (first, once, twice), (second, *_) = simulate(2, body)
    names = [f"{i}.{n}" for i in range(2) for n in range(6)]
    assert first == names + names and second == names  # a rank that does not participate uses no parameter
    for number, part in enumerate(opaque(0)):
        assert torch.equal(once[number], part.storage + 0.5)
        assert torch.equal(twice[number], part.storage + 0.5)


def test_start_waits_for_no_message_of_the_round() -> None:
    """The messages hide behind the computation between start() and wait()."""

    def body(rank: SimulatedRank) -> tuple[list[str], float, bool]:
        sent: list[str] = []
        for kind in ("all_to_all", "all_gather"):
            original = getattr(rank.transport, kind)

            def record(*tensors: torch.Tensor, original: Any = original, kind: str = kind) -> Any:
                sent.append(kind)
                return original(*tensors)

            setattr(rank.transport, kind, record)
        reducer = Reducer(Packed(), {str(n): torch.zeros(3, n + 1) for n in range(6)}, transport=rank.transport)
        sent.clear()  # drop the messages of the ranks' agreement
        exchange = reducer.start({str(n): torch.full((3, n + 1), float(rank.rank + n)) for n in range(6)})
        begun, waited = list(sent), reducer.stats()["wait_seconds"]
        averages = exchange.wait()
        return begun, waited, all(bool((averages[str(n)] == n + 0.5).all()) for n in range(6))

    for begun, waited, right in simulate(2, body):
        assert begun == ["all_to_all"] * 4
        assert waited == 0.0
        assert right


def test_wrappers_that_choose_a_part_have_its_piece_size() -> None:
    choosing = [Warmup(Plain(), Packed(), 2), Policy([("*.bias", Plain()), ("*", Packed())])]
    assert [one.piece_bytes for one in choosing] == [64, 64]
    assert Policy([("*.bias", Whole()), ("*", Packed())]).piece_bytes is None  # Whole is lossy and sets no piece_bytes

    class Told(Packed):
        reports_sent = True

    assert ErrorFeedback(Told()).piece_bytes is None
