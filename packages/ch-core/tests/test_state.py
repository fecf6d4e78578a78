"""``rollback=False`` keeps one copy of the state and overwrites it in place."""

import gc
import logging

import pytest
import torch

import commhooks
from commhooks import AllReduce, HookNotSupportedError, HookResultError, HookState, Reducer, Reduction, StateError
from commhooks.simulate import simulate, together
from commhooks.testing import SimulatedRanks
from commhooks.testing.gradients import all_ranks, parameters, same_bits
from commhooks.testing.simulated_ranks import split

EF = "error_feedback(bf16_compress)"


def ranks(expr: object, in_place: bool, like: dict[str, torch.Tensor], world: int = 2) -> SimulatedRanks:
    def make() -> commhooks.CommHook:
        handle = commhooks.create(expr)
        handle.state.in_place = in_place
        return handle

    return SimulatedRanks(make, world, like)


def held(state: HookState) -> int:
    """Return the bytes of every tensor in a state."""
    stores = (state._committed, state._staged, state._spare)
    return sum(t.nbytes for t in {id(t): t for store in stores for t in store.values()}.values())


@pytest.mark.parametrize("expr", [EF, "error_feedback(topk(feedback=False))"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits_in_half_the_memory(expr: str, dtype: torch.dtype) -> None:
    like = parameters(dtype)
    two, one = ranks(expr, False, like), ranks(expr, True, like)
    for step in range(4):
        every = all_ranks(like, 2, step)
        assert same_bits(one.step(every).gradients[0], two.step(every).gradients[0]) == []
    assert 2 * held(one.handles[0].state) == held(two.handles[0].state)
    for saved, wanted in zip(one.save(), two.save(), strict=True):
        assert saved["step"] == wanted["step"] == 4


def test_sent_is_no_copy_if_the_bucket_itself_is_sent() -> None:
    for expr, copies in ((EF, 0), ("error_feedback(topk(feedback=False))", 1)):
        made = ranks(expr, False, parameters())
        made.step(all_ranks(parameters(), 2, 0))
        names = [name for _, name in made.engines[0].sender.scratch._tensors]
        assert names.count("sent") == (2 if copies else 0)  # one for each bucket


def test_a_step_with_nan_drops_everything_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    like = parameters()
    one = ranks(EF, True, like)
    one.step(all_ranks(like, 2, 0))
    bad = all_ranks(like, 2, 1)
    bad[1]["prime"].view(-1)[0] = float("nan")
    with caplog.at_level(logging.WARNING, "commhooks"):
        one.step(bad)
        one.step(bad)
        assert [saved["entries"] for saved in one.save()] == [{}, {}]
    told = [r.getMessage() for r in caplog.records if "keeps no second copy" in r.getMessage()]
    assert sorted(line[:15] for line in told) == ["[rank 0 of 2] s", "[rank 1 of 2] s"]
    assert one.handles[0].state_dict()["step"] == 1
    fresh = ranks(EF, True, like)
    every = all_ranks(like, 2, 5)
    assert same_bits(one.step(every).gradients[0], fresh.step(every).gradients[0]) == []


def test_q_starts_again_equally_on_all_ranks() -> None:
    like = parameters()
    one = ranks("powersgd(rank=2, min_compression_rate=1)", True, like, 3)
    one.step(all_ranks(like, 3, 0))
    every = all_ranks(like, 3, 1)

    def first_bucket_alone(rank: int) -> None:
        one.engines[rank].submit(split(every[rank], one.buckets)[0])
        one.engines[rank].abandon()

    together(one.group, first_bucket_alone)
    assert not any(saved["entries"] for saved in one.save())
    done = one.step(every)
    assert same_bits(done.gradients[0], done.gradients[2]) == []


class Late(Reduction):
    """Reads the old residual after overwriting it with the new one."""

    name, lossy, fields = "late", True, {"residual": "local"}

    def run(self, bucket, ctx):  # type: ignore[no-untyped-def]
        for p, gradient in bucket.views():
            wanted = ctx.stage(p.name, "residual", p.shape, device=bucket.device).copy_(gradient)
            before = ctx.read(p.name, "residual")
            if before is not None:
                wanted.add_(before)
        yield AllReduce(bucket.buffer)


def test_a_hook_that_reads_too_late_is_refused_by_name() -> None:
    like = {"w": torch.zeros(4, 4)}
    fine, refused = ranks(Late(), False, like), ranks(Late(), True, like)
    for step in range(2):
        assert fine.step(all_ranks(like, 2, step)).errors == [None, None]
        errors = refused.step(all_ranks(like, 2, step)).errors
    assert all(isinstance(error, HookResultError) and "before ctx.stage()" in str(error) for error in errors)


def test_nothing_can_be_given_back() -> None:
    like = parameters()
    one = ranks(EF, True, like)
    one.step(all_ranks(like, 2, 0))
    with pytest.raises(HookNotSupportedError, match=r"rollback=False and handle\.rollback"):
        one.handles[0].rollback()
    state = HookState()
    state.in_place = True
    state.stage("w", "residual", (2,)).zero_()
    with pytest.raises(StateError, match=r"a step is running.*Save before"):
        state.state_dict()
    with pytest.raises(HookNotSupportedError, match="waits to be used"):
        state.commit(tentative=True)


def test_a_reducer_with_one_copy() -> None:
    def body(rank):  # type: ignore[no-untyped-def]
        mine = {"w": torch.full((8, 8), 1.0 + rank.rank)}
        reducer = Reducer("topk(density=0.1)", mine, transport=rank.transport, rollback=False)
        for _ in range(3):
            reducer.average(mine)
        reducer.commit()
        with pytest.raises(HookNotSupportedError, match="rollback=False"):
            reducer.rollback()
        return held(reducer.handle.state)

    assert simulate(2, body) == [4 * 64] * 2


def test_ranks_must_agree_on_it() -> None:
    def body(rank):  # type: ignore[no-untyped-def]
        Reducer(EF, {"w": torch.zeros(4)}, transport=rank.transport, rollback=rank.rank == 0)

    with pytest.raises(commhooks.RankMismatchError, match="rollback"):
        simulate(2, body)


@pytest.mark.full
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("expr", [EF, "powersgd(rank=2, min_compression_rate=1)", "quant4(error_feedback=True)"])
def test_nothing_grows_with_the_steps(expr: str, in_place: bool) -> None:
    like = {"w": torch.zeros(32, 16), "v": torch.zeros(16, 32)}
    made, every = ranks(expr, in_place, like), all_ranks(like, 2, 0)

    def alive() -> tuple[int, int]:
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len(found), sum(t.nbytes for t in found)

    for _ in range(5):
        made.step(every)
    before = alive()
    for _ in range(40):
        made.step(every)
    assert alive() <= before


def test_a_step_that_is_open_ends_by_the_rules_that_it_began_under() -> None:
    """A state may be attached again with another ``rollback=`` while a step is open."""
    state = HookState()
    state.keep_copies(one=True)
    for value in (1.0, 2.0):
        state.stage("w", "residual", (2,)).fill_(value)
        state.commit()
    state.keep_copies(one=False)
    state.stage("w", "residual", (2,)).fill_(9.0)
    state.rollback()
    assert state.read("w", "residual").tolist() == [2.0, 2.0]
    state.keep_copies(one=True)
    state.stage("w", "residual", (2,)).fill_(float("nan"))
    state.keep_copies(one=False)  # that step is still open
    assert state.read("w", "residual") is None
