"""A request completes once, after all of its works, and a dropped one never writes to memory of a later step.

The works end when a test says so, in every order. Each result is written on another thread, like a result of gloo.
"""

import threading
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

from ch_core import AllGather, AllReduce, AllToAll, Bucket, HookTimeoutError, Plain, ReduceScatter, Request, Wire
from ch_core.engine.engine import Engine
from ch_core.engine.messages import Batch, Messenger
from ch_core.engine.schedule import TUNED
from ch_core.engine.stats import Counters
from ch_core.transport import loan
from ch_core.transport.base import Work
from ch_wrappers import WireCast

NUMEL = int(TUNED.halved_from) // 4  # fp32 at the limit; a message in 16 bits needs twice as many
BF16 = Wire(torch.bfloat16)


class Held:
    """A work that ends when :meth:`end` is called."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.write, self.ended = write, torch.futures.Future[None]()

    def end(self) -> None:
        """Write the result on another thread, and complete the future."""

        def receive() -> None:
            self.write()
            self.ended.set_result(None)

        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()

    def wait(self, timeout: float | None) -> None:
        if not self.ended.done():
            raise HookTimeoutError("the peer is frozen")

    def is_completed(self) -> bool:
        return self.ended.done()

    def future(self) -> Any:
        return self.ended


class Peers:
    """A transport of two ranks, of which the other one sends the same numbers. It reads a message when it starts."""

    rank, world_size, free, elastic, link, exchanged = 0, 2, True, False, None, 0

    def __init__(self) -> None:
        self.works: list[Held] = []
        self.aborted = False

    def _held(self, output: torch.Tensor, result: torch.Tensor) -> Work:
        if not output.is_sparse:
            output.fill_(float("nan") if output.is_floating_point() else 99)
        self.works.append(Held(lambda: _write(output, result)))
        return self.works[-1]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._held(tensor, tensor * 2)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._held(output, torch.cat([input, input]))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._held(output, input.view(2, -1)[:1].repeat(2, 1).view(-1))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        return self._held(output, input.view(2, -1)[0] * 2)

    def abort(self) -> None:
        self.aborted = True


def _write(output: torch.Tensor, result: torch.Tensor) -> None:
    output.copy_(result)


def numbers(numel: int = 2 * NUMEL) -> torch.Tensor:
    return (torch.arange(numel) % 16).float()


def started(*requests: Request) -> tuple[Peers, Batch]:
    peers = Peers()
    return peers, Messenger(peers, Counters()).post(*requests)


@pytest.mark.parametrize("wire", [None, BF16], ids=["in place", "cast"])
@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("late", [False, True], ids=["waited for", "decoded on arrival"])
def test_halves_decode_once_after_both(wire: Wire | None, order: tuple[int, ...], late: bool) -> None:
    tensor, ends = numbers(), list[bool]()
    peers, batch = started(AllReduce(tensor, wire=wire))
    assert len(peers.works) == 2
    if late:
        batch.on_decoded(lambda: ends.append(bool(torch.equal(tensor, numbers()))))
    peers.works[order[0]].end()
    assert ends == []
    with pytest.raises(HookTimeoutError):
        batch.wait(0.1)
    assert wire is None or torch.equal(tensor, numbers()), "half a message was decoded"
    peers.works[order[1]].end()
    assert ends == [True] * late
    batch.wait(0.1)
    assert torch.equal(tensor, numbers())


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_messages_of_one_batch_decode_in_any_order(order: tuple[int, ...]) -> None:
    tensor, other, ends = numbers(), numbers(300_000), list[bool]()
    peers, batch = started(AllReduce(tensor, wire=BF16), AllReduce(other))
    assert len(peers.works) == 3
    batch.on_decoded(lambda: ends.append(True))
    for number in order:
        assert ends == []
        peers.works[number].end()
    assert ends == [True]
    batch.wait(0.1)
    assert torch.equal(tensor, numbers()) and torch.equal(other, numbers(300_000))


def test_an_empty_batch_is_decoded_at_once() -> None:
    ends = list[bool]()
    started()[1].on_decoded(lambda: ends.append(True))
    assert ends == [True]


def test_a_result_that_fails_to_decode_is_raised_by_the_wait() -> None:
    peers, batch = started(AllReduce(numbers(8), wire=BF16))
    batch._messages[0]._decode = lambda: 1 / 0  # type: ignore[assignment,return-value]
    batch.on_decoded(lambda: None)
    peers.works[0].end()
    with pytest.raises(ZeroDivisionError):
        batch.wait(0.1)


def in_place(kind: str) -> tuple[torch.Tensor, Request]:
    """Return a user's memory, and a request that receives there."""
    memory = numbers(2 * NUMEL)
    if kind == "all_reduce":
        return memory, AllReduce(memory)
    if kind == "a part":
        return memory, AllReduce(memory[NUMEL:])
    if kind == "all_gather":
        return memory, AllGather(numbers(NUMEL), memory)
    if kind == "all_to_all":
        return memory, AllToAll(numbers(2 * NUMEL), memory)
    return memory, ReduceScatter(numbers(4 * NUMEL), memory)


KINDS = ["all_reduce", "a part", "all_gather", "all_to_all", "reduce_scatter"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [0, 1])
def test_a_dropped_message_writes_to_no_memory_of_its_user(kind: str, ended: int) -> None:
    memory, request = in_place(kind)
    view = memory[3:7]
    peers, batch = started(request)
    for work in peers.works[:ended]:
        work.end()
    loan.take_back(batch.drop())
    memory.fill_(5.0)
    for work in peers.works[ended:]:
        work.end()
    assert memory.eq(5.0).all() and view.eq(5.0).all()
    view.fill_(6.0)
    assert memory[3:7].eq(6.0).all(), "a view is live no more"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_swap_of_storages_messages_have_their_own_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, request = in_place(kind)
    peers, batch = started(request)
    for work in peers.works:
        work.end()
    batch.wait(0.1)
    monkeypatch.setattr(loan, "_CAN_SWAP", False)
    same, request = in_place(kind)
    peers, batch = started(request)
    for work in peers.works:
        work.end()
    batch.wait(0.1)
    assert torch.equal(same, memory), "a result was lost"
    test_a_dropped_message_writes_to_no_memory_of_its_user(kind, 0)


def test_a_dropped_message_that_is_decoded_on_arrival_decodes_nothing() -> None:
    """Its numbers would be written into the next step."""
    tensor, ends = numbers(), list[bool]()
    peers, batch = started(AllReduce(tensor, wire=BF16))
    batch.on_decoded(lambda: ends.append(True))
    loan.take_back(batch.drop())
    tensor.fill_(5.0)
    for work in peers.works:
        work.end()
    assert tensor.eq(5.0).all()
    assert ends == [True], "a future would never complete"


def test_a_dropped_sparse_message_writes_to_no_memory_of_its_user() -> None:
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (5, 4), check_invariants=True)
    peers, batch = started(AllReduce(gradient))
    loan.take_back(batch.drop())
    gradient.zero_()
    peers.works[0].end()
    assert not gradient.to_dense().any()


def test_a_sparse_result_is_received() -> None:
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (5, 4), check_invariants=True)
    peers, batch = started(AllReduce(gradient, "sum"))
    peers.works[0].end()
    batch.wait(0.1)
    assert gradient.to_dense().sum() == 2 * 8


@pytest.mark.parametrize("reduction", [Plain(), WireCast(Plain(), "bf16")], ids=["in place", "cast"])
@pytest.mark.parametrize("how", ["abandoned", "lost"])
def test_an_engine_drops_a_step_with_messages_in_flight(reduction: Any, how: str) -> None:
    """Bucket 0 has ended. Half of bucket 1 has. The next step runs over other ranks."""
    peers, others = Peers(), Peers()
    engine = Engine(reduction, peers, timeout=0.1)
    memory = [numbers(2 * NUMEL), numbers(4 * NUMEL)]
    buckets = [
        Bucket.from_tensors({f"w{index}": one}, index=index, is_last=index == 1) for index, one in enumerate(memory)
    ]
    for bucket in buckets:
        engine.submit(bucket)
    for work in peers.works[:2]:
        work.end()
    if how == "lost":
        with pytest.raises(HookTimeoutError):
            engine.finish()
        assert peers.aborted
    else:
        engine.abandon()
    for bucket, one in zip(buckets, memory, strict=True):
        bucket.storage.copy_(one + 1)
    engine.move(others)
    for bucket in buckets:
        engine.submit(bucket)
    for work in others.works:
        work.end()
    _finish(engine, others)
    for work in peers.works:
        if not work.is_completed():
            work.end()
    for bucket, one in zip(buckets, memory, strict=True):
        assert torch.equal(bucket.buffer, one + 1)


def _finish(engine: Engine, peers: Peers) -> None:
    """Finish a step. Further messages of the step end at once."""
    hold = peers._held

    def at_once(output: torch.Tensor, result: torch.Tensor) -> Any:
        work: Any = hold(output, result)
        work.end()
        return work

    peers._held = at_once  # type: ignore[method-assign]
    engine.finish()
