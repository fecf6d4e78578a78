"""All ranks get an error if they do not agree, before any rank communicates."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_core import agreement
from ch_core.agreement import StoreExchange, agree
from ch_ddp.adapter.result_checks import gradient_checksum
from ch_testing import spawn
from commhooks import Bucket, Plain, RankMismatchError, Reduction, StepContext

pytestmark = pytest.mark.timeout(120)


def together(world: int, fields: Any, says: Any = lambda rank: "") -> list[str]:
    """Return the error text of each of ``world`` ranks. The ranks are threads and exchange through a table."""
    table: dict[tuple[int, int], bytes] = {}
    barrier = threading.Barrier(world, timeout=20)
    said = [""] * world

    def rank_main(rank: int) -> None:
        count = 0

        def exchange(message: bytes) -> list[bytes]:
            nonlocal count
            table[count, rank] = message
            barrier.wait()
            rows = [table[count, r] for r in range(world)]
            assert len({len(row) for row in rows}) == 1, "messages must have a fixed size"
            barrier.wait()
            count += 1
            return rows

        try:
            agree("the hook", fields(rank), exchange, expression=says(rank))
        except RankMismatchError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_equal_fingerprints_agree() -> None:
    assert together(5, lambda rank: {"a": ["x", "y"], "b": []}) == [""] * 5


@pytest.mark.parametrize("where", [0, 1, 4, 7, 8])
def test_the_one_differing_line_among_many_is_named_with_its_ranks(where: int) -> None:
    def fields(rank: int) -> dict[str, list[str]]:
        shapes = [f"layer{i}: (3, 4)" for i in range(8)]
        if rank == 2:
            shapes[where : where + 1] = ["odd: (9,)"]
        return {"shapes": shapes, "torch": ["2.13"]}

    said = together(4, fields)
    assert len(set(said)) == 1
    assert "rank 2 odd: (9,)" in said[0]
    assert "ranks 0, 1, 3 " + (f"layer{where}: (3, 4)" if where < 8 else "(nothing)") in said[0]
    assert "torch" not in said[0].split("\nGive")[0]


def test_lists_of_different_length_and_several_fields() -> None:
    said = together(3, lambda rank: {"names": ["a", "b"][: 2 - (rank == 0)], "rank": [str(rank)], "same": ["s"]})
    assert "names: rank 0 (nothing); ranks 1, 2 b" in said[1]
    assert "rank: rank 0 0; rank 1 1; rank 2 2" in said[1]


def test_the_error_names_the_other_rank_s_expression() -> None:
    def says(rank: int) -> str:
        return f"powersgd(rank={8 if rank == 1 else 4})"

    said = together(
        3, lambda rank: {"hook": [f"config.rank = {says(rank)[-2]}"], "collectives": [f"sends {rank}"]}, says
    )
    assert len(set(said)) == 1
    assert "expression: ranks 0, 2 powersgd(rank=4); rank 1 powersgd(rank=8)" in said[0]
    assert "config.rank = 8" in said[0] and "sends" not in said[0]  # the messages follow from the hook
    alike = together(2, lambda rank: {"torch": [str(rank)]}, lambda rank: "powersgd")
    assert "expression" not in alike[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_alone_says_so_once(rank: int, monkeypatch, caplog) -> None:
    monkeypatch.setattr(agreement, "TELL_AFTER", 0.2)
    exchange = StoreExchange.over(dist.HashStore(), rank=rank, world=2, timeout=1.0)
    with pytest.raises(commhooks.HookTimeoutError):
        exchange(b"mine")
    [record] = caplog.records
    assert f"rank {rank} waits in attach(), load_state_dict() or move() for rank {1 - rank}" in record.getMessage()


def test_ranks_that_meet_say_nothing(caplog) -> None:
    assert together(2, lambda rank: {"same": ["1"]}) == ["", ""] and not caplog.records


# -- over real processes


class Sized(Reduction):
    """Stands for a hook with an option that changes the size of its messages."""

    name, lossy, fields = "sized", True, {"memory": "shared"}

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        return Plain().run(bucket, ctx)

    def config(self) -> dict[str, Any]:
        return {"size": self.size}


def net(width: int = 7, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, width), nn.Linear(width, 3)).to(dtype)


def told(action: Any) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        action()
    except commhooks.CommHooksError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


def mismatches(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    def ddp() -> DistributedDataParallel:
        return DistributedDataParallel(net(), bucket_cap_mb=0.0001)

    found = {}
    # After each mismatch the model must work with plain averaging.
    for name, what in {
        "options": Sized(1 + rank),
        "hooks": "fp16_compress" if rank else "bf16_compress",
        "wrapping": "bf16_wrapper(allreduce)" if rank else "bf16_compress",
        "kind": (lambda state, bucket: None) if rank else "allreduce",
    }.items():
        model = ddp()
        found[name] = told(lambda: commhooks.attach(model, what, timeout=20.0))  # noqa: B023
        model(torch.ones(2, 12)).sum().backward()
    model = ddp()
    ahead = commhooks.create(Sized())
    ahead.state.step = 7 * rank
    found["step"] = told(lambda: commhooks.attach(model, ahead, timeout=20.0))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if rank else None
    found["optimizer"] = told(lambda: commhooks.attach(model, Sized(), optimizer=optimizer, timeout=20.0))
    found["unverified"] = told(lambda: commhooks.attach(ddp(), Sized(1 + rank), verify_ranks=False))
    found["good"] = told(lambda: commhooks.attach(ddp(), Sized(), timeout=20.0))
    # One rank attaches and the other does not. This must not disturb the other's collectives.
    model = ddp()
    if rank == 0:
        found["absent"] = told(lambda: commhooks.attach(model, Sized(), timeout=1.5))
    model(torch.ones(2, 12)).sum().backward()
    if rank == 1:
        StoreExchange(dist.group.WORLD, 1.0)  # reach the same number of agreements
        found["late"] = told(lambda: StoreExchange(dist.group.WORLD, 1.0)(b"x"))
        found["absent"] = found["late"]
    return found


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
def test_attach_names_the_difference_on_every_rank() -> None:
    results = spawn(mismatches, 2)
    expected = {
        "options": "config.size = 1; rank 1 config.size = 2",
        "hooks": "bf16_compress",
        "wrapping": "bf16_wrapper",
        "kind": "rank 1 function",
        "step": "step: rank 0 0; rank 1 7",
        "optimizer": "optimizer or scaler given: rank 0 False; rank 1 True",
    }
    for found in results:
        for name, text in expected.items():
            kind, said, seconds = found[name]
            assert (kind, seconds < 3.0) == ("RankMismatchError", True), (name, kind, said)
            assert text in said, said
        assert found["unverified"][0] == found["good"][0] == ""
    kind, said, seconds = results[0]["absent"]
    assert kind == "HookTimeoutError"
    assert "ranks 1 did not take part" in said
    assert 1.4 < seconds < 4.0
    assert results[1]["late"][0] == "HookTimeoutError"  # a rank that comes alone also learns the missing ranks
    assert "ranks 0" in results[1]["late"][1]


def drifts(rank: int, world: int) -> list[tuple[str, str, float]]:
    """The periodic check finds hooks whose result depends on the rank."""
    found = []
    for what in ("noop", own_way):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0001)
        handle = commhooks.attach(model, what, timeout=20.0)
        handle.verify_gradients(every=3)
        for _ in range(4):
            x = torch.full((2, 12), float(rank + 1))
            found.append(told(lambda: model(x).sum().backward()))  # noqa: B023
    model = DistributedDataParallel(net(), bucket_cap_mb=0.0001)
    handle = commhooks.attach(model, "allreduce")
    handle.verify_gradients(every=1)
    for _ in range(2):
        found.append(told(lambda: model(torch.full((2, 12), float(rank + 1))).sum().backward()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_compared_by_all_their_bits(dtype: torch.dtype) -> None:
    one = torch.randn(9000, dtype=dtype)
    signs, swapped = one.clone(), one.clone()
    signs[:2].neg_()
    swapped[0], swapped[8191] = one[8191], one[0]
    sums = [gradient_checksum([made]) for made in (one, one.clone(), signs, swapped)]
    assert len({tuple(found.tolist()) for found in sums}) == 3 and torch.equal(sums[0], sums[1])


def own_way(state: object, bucket: Any) -> Any:
    """All-reduces, then adds a small number that depends on the rank."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] + 1e-6 * dist.get_rank())


def test_gradients_that_differ_between_ranks_are_found_when_asked_to_look() -> None:
    for found in spawn(drifts, 2):
        assert [kind for kind, _, _ in found] == ["", "", "RankMismatchError", ""] * 2 + ["", ""]
        assert "the reduced gradients differ between ranks" in found[2][1]


def after_failed_attaches(rank: int, world: int) -> dict[str, list[Any]]:
    """Return what failed attaches leave of a trained state: entries that differ, and the rank."""
    model = DistributedDataParallel(nn.Linear(16, 16, bias=False))
    handle = commhooks.attach(model, "powersgd(rank=1, min_compression_rate=1)")
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
    handle.detach()
    state = handle.hook_state
    assert state is not None
    before = {(name, field): tensor.clone() for name, field, tensor in state.entries()}
    hooks = {
        "other fields on one rank": "topk(density=0.1)" if rank else handle,
        "another shape of q": f"powersgd(rank={2 + rank}, min_compression_rate=1)",
    }
    found: dict[str, list[Any]] = {}
    for name, hook in hooks.items():
        with pytest.raises(RankMismatchError):
            commhooks.attach(model, hook, state=state)
        after = {(name, field): tensor for name, field, tensor in state.entries()}
        found[name] = [sorted(before.keys() ^ after.keys())]
        found[name] += [key for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])]
    commhooks.attach(model, handle)
    return found


def test_a_failed_attach_leaves_the_state_that_was_handed_over() -> None:
    everything = {"other fields on one rank": [[]], "another shape of q": [[]]}
    assert spawn(after_failed_attaches, 2, timeout=60) == [everything, everything]
