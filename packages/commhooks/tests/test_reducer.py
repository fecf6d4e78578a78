"""A Reducer averages plain tensors, as an engine averages gradients in a backward."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from ch_core import SimulatedGroup, SimulatedRank, SimulatedTransport, simulate
from ch_testing import spawn
from commhooks import (
    AllReduce,
    AttachError,
    Bucket,
    HookConfigError,
    HookNotSupportedError,
    HookTimeoutError,
    Plain,
    RankMismatchError,
    Reducer,
    Reduction,
    RemoteHookError,
)


class TwoStages(Reduction):
    """Computes the mean in two stages, and counts rounds in a residual."""

    name, lossy = "two_stages", True
    fields = {"residual": "local"}

    def __init__(self, broken: tuple[int, int] | None = None) -> None:
        self.broken, self.rounds = broken, 0

    def config(self) -> dict[str, Any]:
        return {}

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        for p, view in bucket.views():
            before = ctx.read(p.name, "residual")
            kept = ctx.write(p.name, "residual", p.shape, bucket.dtype, bucket.device)
            kept.fill_(1.0)
            if before is not None:
                kept.add_(before)
            view.add_(kept)
        half = bucket.buffer.numel() // 2
        yield AllReduce(bucket.buffer[:half])
        if not bucket.buffer.is_meta:
            self.rounds += 1
            if self.broken == (ctx.rank, self.rounds):
                raise ArithmeticError("broken between its stages")
        yield AllReduce(bucket.buffer[half:])


def mine(rank: int, world: int, turn: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return {
        "w": torch.randn(5, 3, generator=generator),
        "half": torch.randn(4, generator=generator).to(torch.bfloat16),
        "turned": torch.randn(3, 4, generator=generator).t(),
        "one": torch.randn((), generator=generator),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_mean_of_every_dtype_shape_and_stride(world: int) -> None:
    def body(rank: SimulatedRank) -> list[dict[str, torch.Tensor]]:
        reducer = Reducer(Plain(), mine(0, world), transport=rank.transport)
        assert (reducer.rank, reducer.world_size) == (rank.rank, world)
        return [{n: t.clone() for n, t in reducer.average(mine(rank.rank, world, turn)).items()} for turn in range(2)]

    found = simulate(world, body)
    for turn in range(2):
        given = [mine(rank, world, turn) for rank in range(world)]
        for name in given[0]:
            total = given[0][name] * (1 / world)
            for other in given[1:]:
                total = total + other[name] * (1 / world)
            assert all(torch.equal(rank[turn][name], total) for rank in found), name


def test_the_rounds_are_those_of_an_engine_and_advancing_changes_no_bit() -> None:
    """A Reducer keeps residuals by name and commits them. Extra calls of advance() change no bit."""

    def with_engine(rank: SimulatedRank) -> list[list[float]]:
        engine, found = rank.engine(TwoStages()), []
        for turn in range(3):
            bucket = Bucket.from_tensors({"w": mine(rank.rank, 2, turn)["w"]})
            engine.submit(bucket)
            assert engine.finish() is None
            found.append(bucket.view("w").flatten().tolist())
        return found

    def with_reducer(rank: SimulatedRank, advances: int) -> tuple[list[list[float]], int, dict[str, Any]]:
        like = {"w": torch.empty(5, 3, device="meta")}
        reducer, found = Reducer(TwoStages(), like, transport=rank.transport, device="cpu"), []
        for turn in range(3):
            exchange = reducer.start({"w": mine(rank.rank, 2, turn)["w"]})
            for _ in range(advances):
                exchange.advance()
            found.append(exchange.wait()["w"].flatten().tolist())
            assert exchange.done
        return found, reducer.stages, reducer.state_dict()

    expected = simulate(2, with_engine)
    for advances in range(4):
        for rank, (found, stages, saved) in enumerate(simulate(2, lambda r, a=advances: with_reducer(r, a))):
            assert found == expected[rank]
            assert stages == 2
            assert saved["step"] == 3
            assert saved["entries"]["w"]["residual"].eq(3).all()


def test_saved_and_loaded_rolled_back_and_not_finite() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        tensors = {"w": torch.zeros(4)}
        first = Reducer(TwoStages(), tensors, transport=rank.transport)
        values = [first.average(tensors)["w"][0].item()]  # 0 + 1
        saved = first.state_dict()
        first.average(tensors)
        first.rollback()  # the caller used no average of this round
        values.append(first.average(tensors)["w"][0].item())  # 0 + 2 again
        bad = torch.full((4,), torch.nan if rank.rank else 0.0)
        assert first.average({"w": bad})["w"].isnan().all()
        assert first.commit() is False
        values.append(first.average(tensors)["w"][0].item())  # 0 + 3
        second = Reducer(TwoStages(), tensors, transport=rank.transport)
        second.load_state_dict(saved)
        return [*values, second.average(tensors)["w"][0].item()]

    assert simulate(2, body) == [[1.0, 2.0, 3.0, 2.0]] * 2


def test_an_error_is_raised_on_every_rank_and_the_round_never_was() -> None:
    def body(rank: SimulatedRank) -> tuple[str, float, float]:
        reducer = Reducer(TwoStages((1, 2)), {"w": torch.zeros(4)}, transport=rank.transport)
        reducer.average({"w": torch.zeros(4)})
        with pytest.raises((ArithmeticError, RemoteHookError)) as caught:
            reducer.average({"w": torch.zeros(4)})
        again = reducer.average({"w": torch.zeros(4)})["w"]
        return type(caught.value).__name__, again[0].item(), reducer.state_dict()["step"]

    assert simulate(2, body) == [("RemoteHookError", 2.0, 2), ("ArithmeticError", 2.0, 2)]


def test_ranks_that_differ_get_an_error_before_any_message() -> None:
    def body(rank: SimulatedRank) -> str:
        shape = (4,) if rank.rank else (5,)
        with pytest.raises(RankMismatchError) as caught:
            Reducer(Plain(), {"w": torch.zeros(shape)}, transport=rank.transport)
        return str(caught.value)

    assert all("w: (5,)" in text and "w: (4,)" in text for text in simulate(2, body))


def test_a_rank_that_does_not_come_is_named() -> None:
    group = SimulatedGroup(2)
    reducer = Reducer(
        Plain(), {"w": torch.zeros(4)}, transport=SimulatedTransport(group, 0), timeout=0.2, verify_ranks=False
    )
    with pytest.raises(HookTimeoutError, match="ranks \\[1\\] did not take part"):
        reducer.average({"w": torch.zeros(4)})


def test_refusals() -> None:
    one = SimulatedTransport(SimulatedGroup(1), 0)
    with pytest.raises(HookConfigError, match="no"):
        Reducer(Plain(), {}, transport=one)
    with pytest.raises(HookConfigError, match="device="):
        Reducer(Plain(), {"w": torch.empty(2, device="meta")}, transport=one)
    with pytest.raises(HookConfigError, match="dense"):
        Reducer(Plain(), {"w": torch.eye(2).to_sparse()}, transport=one)
    with pytest.raises(HookNotSupportedError, match="DDP"):
        Reducer(lambda state, bucket: bucket, {"w": torch.zeros(2)}, transport=one)
    moving = SimulatedTransport(SimulatedGroup(1), 0)
    moving.elastic = True
    with pytest.raises(HookNotSupportedError, match="fixed ranks"):
        Reducer(Plain(), {"w": torch.zeros(2)}, transport=moving)
    handle = commhooks.create(Plain())
    reducer = Reducer(handle, {"w": torch.zeros(2)}, transport=one)
    with pytest.raises(AttachError, match="attached already"):
        Reducer(handle, {"w": torch.zeros(2)}, transport=one)
    with pytest.raises(HookConfigError, match="differs in"):
        reducer.average({"v": torch.zeros(2)})
    exchange = reducer.start()
    with pytest.raises(RuntimeError, match="still in flight"):
        reducer.start()
    with pytest.raises(RuntimeError, match="in flight"):
        reducer.state_dict()
    exchange.wait()
    reducer.close()
    assert not handle.attached


def overlapped(rank: int, world: int) -> tuple[list[bool], str]:
    """Two rounds of two reducers in flight at once with another all-reduce between them, then ranks that differ."""
    reducers = [Reducer(TwoStages(), mine(0, world), timeout=20.0) for _ in range(2)]
    same = []
    for turn in range(2):
        under_way = [r.start(mine(rank, world, 2 * turn + i)) for i, r in enumerate(reducers)]
        other = torch.full((3,), float(rank))
        dist.all_reduce(other)
        under_way[1].advance()
        for i in (0, 1):
            mean = under_way[i].wait()
            given = [mine(r, world, 2 * turn + i) for r in range(world)]
            for name in given[0]:
                wanted = sum(g[name].float() for g in given) / world + 1 + turn
                same.append(torch.allclose(mean[name].float(), wanted, atol=0.05))
    try:
        Reducer(Plain() if rank else TwoStages(), mine(0, world), timeout=20.0)
    except RankMismatchError as error:
        return same, str(error)
    return same, ""


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_over_gloo_two_at_once() -> None:
    for same, text in spawn(overlapped, 2):
        assert len(same) == 16
        assert all(same)
        assert "the ranks disagree on" in text


def left_alone(rank: int, world: int) -> list[float]:
    """Average tensors of the rank's device while torch's default device is the CPU."""
    tensors = {"w": torch.full((512,), float(rank)), "half": torch.full((512,), float(rank), dtype=torch.bfloat16)}
    torch.set_default_device("cpu")
    reducer = Reducer(TwoStages(), tensors, timeout=20.0)
    found = [reducer.average(tensors) for _ in range(3)][-1]
    assert all(found[name].device == tensor.device for name, tensor in tensors.items())
    saved = reducer.state_dict()
    reducer.load_state_dict(saved)
    return [float(t.float().mean()) for t in reducer.average(tensors).values()]


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_no_tensor_of_ours_depends_on_the_default_device() -> None:
    first, second = spawn(left_alone, 2)
    assert first == second


def test_a_failure_on_a_gpu_is_raised_by_the_round_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward on a GPU reports its failure in the next backward. An average is used at once, and would be NaN by
    then.
    """
    monkeypatch.setattr("ch_core.engine.outcome.is_asynchronous", lambda device: True)
    monkeypatch.setattr("ch_core.engine.engine.is_asynchronous", lambda device: True)

    def body(rank: SimulatedRank) -> list[str]:  # two dtypes, two buckets a round
        reducer = Reducer(TwoStages(broken=(1, 3)), mine(rank.rank, 2), transport=rank.transport)
        found = []
        for turn in range(4):
            try:
                averages = reducer.average(mine(rank.rank, 2, turn))
                assert all(t.isfinite().all() for t in averages.values())
                found.append("ok")
            except (ArithmeticError, RemoteHookError) as error:
                found.append(type(error).__name__)
        return found

    assert simulate(2, body) == [["ok", "RemoteHookError", "ok", "ok"], ["ok", "ArithmeticError", "ok", "ok"]]


@pytest.mark.parametrize("kind", ["shape", "names", "error", "no data"])
def test_a_rank_that_cannot_contribute_fails_the_round_on_all_ranks(kind: str) -> None:
    def body(rank: SimulatedRank) -> tuple[str, list[float]]:
        tensors = {"w": torch.full((2,), float(rank.rank))}
        reducer = Reducer(Plain(), tensors, transport=rank.transport, timeout=5.0)
        error = None
        given = tensors
        if rank.rank == 1:
            error = HookConfigError("differs in taste") if kind == "error" else None
            odd = {"shape": torch.zeros(3), "no data": torch.zeros(2, device="meta")}.get(kind, torch.zeros(2))
            given = tensors if kind == "error" else {"v" if kind == "names" else "w": odd}
        with pytest.raises(Exception, match="meta" if kind == "no data" else "differs in") as caught:
            reducer.start(given, error=error).wait()
        return type(caught.value).__name__, reducer.average(tensors)["w"].tolist()

    own = "NotImplementedError" if kind == "no data" else "HookConfigError"
    assert simulate(2, body) == [("RemoteHookError", [0.5, 0.5]), (own, [0.5, 0.5])]


def test_the_bytes_of_a_round_follow_from_each_tensors_own_dtype() -> None:
    def body(rank: SimulatedRank) -> tuple[float, float, bool]:
        tensors = {"body": torch.ones(64, 64), "head": torch.ones(64, 2, dtype=torch.bfloat16)}
        reducer = Reducer("bf16_compress", tensors, transport=rank.transport)
        planned, warned = reducer.handle.payload_per_step(), reducer.handle.report().warnings
        reducer.average(tensors)
        return planned, reducer.stats()["payload_bytes"], any("never compresses" in line for line in warned)

    numbers = 64 * 64 + 64 * 2
    assert simulate(2, body) == [(2 * numbers, 2 * numbers, False)] * 2


# -- rounds that are dropped while their messages are in flight

MANY = 3_000_000  # numbers, so that a message is still in flight when the next round begins


def dropped_rounds(rank: int, world: int, hook: str, how: str) -> list[int]:
    """Drop a round on all ranks, then average other numbers. Rank 1 is late in the dropped one. Return the wrong rounds."""
    store = dist.distributed_c10d._get_default_store()
    groups, wrong = [dist.new_group(list(range(world))) for _ in range(4)], []
    # In a move that compares ranks, rank 0 would wait for rank 1.
    reducer = Reducer(hook, {"w": torch.zeros(MANY)}, process_group=groups.pop(), verify_ranks=how == "abandon")
    view = reducer.tensors["w"][:7]
    for turn in range(3):
        if rank == 1:
            store.wait([f"filled {turn}"])
        reducer.start({"w": torch.full((MANY,), 64.0 * (rank + 1))})
        if how == "move":
            reducer.move(groups.pop())
        else:
            reducer.abandon()
        reducer.tensors["w"].fill_(rank + 1.0)
        store.set(f"filled {turn}", "")
        mean = reducer.start().wait()["w"]
        if not (mean.eq(1.5).all() and view.eq(1.5).all()):
            wrong.append(turn)
    return wrong


@pytest.mark.gloo
@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["abandon", "move"])
@pytest.mark.parametrize("hook", ["allreduce", pytest.param("bf16_compress", marks=pytest.mark.full)])
def test_a_dropped_round_writes_nothing_into_the_next_one(hook: str, how: str) -> None:
    assert spawn(dropped_rounds, 2, hook, how) == [[], []]


def newcomer(rank: int, world: int, other: dict[str, Any]) -> str:
    """Move to a group with a rank that has been alone, and has other options. Return the error."""
    alone = [dist.new_group([one]) for one in range(world)][rank]
    options = {"hook": "quant4", "link": "far", "tensors": {"w": torch.zeros(8)}, **(other if rank else {})}
    reducer = Reducer(process_group=alone, **options)
    reducer.average()  # ranks may differ in their steps
    with pytest.raises(RankMismatchError) as raised:
        reducer.move(dist.group.WORLD)
    reducer.average()  # nothing has changed
    return str(raised.value)


@pytest.mark.cpu("link= is for CPUs over gloo")
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("other", "named"),
    [({"link": None}, "link: 200mbit,80ms"), ({"hook": "quant8"}, "quant8"), ({"tensors": {"v": torch.zeros(8)}}, "v")],
    ids=["link", "hook", "tensors"],
)
def test_a_move_compares_the_ranks_of_the_new_group(other: dict[str, Any], named: str) -> None:
    assert all(named in text for text in spawn(newcomer, 2, other))


def late_peer(rank: int, world: int, hook: str) -> bool:
    """Rank 2 sends its message of a lost round when the others have filled their memory for a round without it."""
    store = dist.distributed_c10d._get_default_store()
    reducer = Reducer(hook, {"w": torch.zeros(MANY)}, timeout=1.5, verify_ranks=False)
    lost = torch.full((MANY,), 2.0**20)
    if rank == 2:
        store.wait(["filled 0", "filled 1"])
        right = bool(reducer.average({"w": lost})["w"].eq(2.0**20).all())
        store.set("sent", "")
        return right
    with pytest.raises(HookTimeoutError):
        reducer.average({"w": lost})
    reducer.move(dist.new_group([0, 1], use_local_synchronization=True))
    reducer.tensors["w"].fill_(rank + 1.0)
    store.set(f"filled {rank}", "")
    store.wait(["sent"])
    time.sleep(0.3)  # this rank's part of the lost message ends, too
    return bool(reducer.start().wait()["w"].eq(1.5).all())


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
@pytest.mark.gloo
@pytest.mark.timeout(90)
@pytest.mark.parametrize("hook", ["allreduce", pytest.param("bf16_compress", marks=pytest.mark.full)])
def test_a_late_peer_writes_nothing_into_a_round_of_the_survivors(hook: str) -> None:
    """Nor do the survivors change what they send to it: the average of the late peer is right."""
    assert spawn(late_peer, 3, hook) == [True] * 3
