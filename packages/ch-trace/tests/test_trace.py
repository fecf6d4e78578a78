"""Traces: aligned clocks, the file's format, and figures that agree with the counters."""

import dataclasses
import json
import os
import time
import weakref
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ch_trace
import commhooks
from ch_core import simulate
from ch_testing import spawn
from ch_trace.clocks import DRIFT, align
from ch_trace.rank_part import EnginePart, Moments, Part, Timeline
from ch_trace.recording import BucketFacts, EngineTrace, Message, PolledWork, Span
from ch_trace.summary import BucketRow, Summary, summarize
from commhooks import Bucket, Plain, Reducer


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.02), st.floats(0, 0.02)),
        min_size=1,
        max_size=30,
    ),
    st.floats(-1e5, 1e5),
    st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_the_true_offset_is_within_the_bound(rows: list[Any], offset: float, speed: float) -> None:
    reference, other, now = {}, {}, 0.0
    clock = lambda true: true + offset + speed * true  # noqa: E731 - the other rank's clock
    for number, (gap, late0, late1, slow0, slow1) in enumerate(rows):
        now += gap
        met = now + max(late0, late1)
        reference[number] = (now + late0, met + slow0)
        other[number] = (clock(now + late1), clock(met + slow1))
    found = align({0: reference, 1: other})[1]
    assert found.bound is not None
    for begun, ended in other.values():
        moment = (begun + ended) / 2
        true = (moment - offset) / (1 + speed)
        assert abs(found(moment) - true) <= found.bound + 1e-9 * abs(offset) + 1e-9


def test_ranks_without_a_common_message_are_aligned_through_others() -> None:
    found = align({0: {"row": (0.0, 1.0)}, 1: {"row": (10.0, 11.0), "column": (12.0, 12.5)}, 3: {"column": (2.0, 2.5)}})
    assert found[3].bound == pytest.approx(found[1].bound + 0.5)
    assert found[3](2.0) == pytest.approx(2.0, abs=found[3].bound)
    assert align({0: {}, 1: {}})[1].bound is None


def check_format(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the rules of the Trace Event Format that Perfetto's importer enforces. Return the slices.

    Perfetto's trace processor downloads its program at run time, so the tests check the published format instead.
    """
    assert isinstance(data["traceEvents"], list)
    assert data["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in data["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert list(event["args"]) == [key]
            named.add((event["pid"], event["tid"]))
        else:
            assert isinstance(event["cat"], str)
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
    assert set(threads) <= named
    for slices in threads.values():  # slices of one thread are nested or disjoint; else the importer drops them
        ends: list[int] = []
        for event in sorted(slices, key=lambda e: (round(e["ts"] * 1e3), -round(e["dur"] * 1e3))):
            begun = round(event["ts"] * 1e3)
            ended = begun + round(event["dur"] * 1e3)
            while ends and ends[-1] <= begun:
                ends.pop()
            assert not ends or ended <= ends[-1], event
            ends.append(ended)
    return [event for some in threads.values() for event in some]


def hooks_of(model: torch.nn.Module) -> list[list[Any]]:
    return [list(model._forward_pre_hooks.values()), list(model._forward_hooks.values())]


def gloo_body(rank: int, world: int, folder: str) -> dict[str, float]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.04)
    handle = commhooks.attach(model, "powersgd(rank=2)")
    for _ in range(2):
        model(torch.randn(8, 64)).square().mean().backward()
    before = handle.stats()
    untraced = hooks_of(model)
    with ch_trace.Trace(handle, Path(folder) / "trace.json") as running:
        for _ in range(5):
            model(torch.randn(8, 64)).square().mean().backward()
        after = handle.stats()
        with pytest.raises(commhooks.HookNotSupportedError, match="traced already"):
            ch_trace.Trace(handle, Path(folder) / "other.json")
        if (child := os.fork()) == 0:  # a process of the script that ends in the usual way
            running._at_exit()
            os._exit(len(list(Path(folder).iterdir())))
        assert os.waitpid(child, 0)[1] == 0
    model(torch.randn(8, 64)).square().mean().backward()
    assert running.close() is None  # closed already
    engine = handle.binding.engine
    assert engine is not None and engine.counters.trace is None
    assert engine.messenger.transport is engine.transport
    assert hooks_of(model) == untraced
    assert handle.stats()["steps"] == after["steps"] + 1
    with pytest.raises(ValueError, match="at least 1"):
        ch_trace.Trace(handle, Path(folder) / "other.json", limit=0)
    with pytest.raises(commhooks.HookConfigError, match=r"cannot be written \(Not a directory: /dev/null"):
        ch_trace.Trace(handle, "/dev/null/trace.json" if rank else Path(folder) / "other.json")
    return {key: after[key] - before[key] for key in after}


@pytest.mark.gloo
def test_two_gloo_ranks_write_one_file(tmp_path: Path) -> None:
    stats = spawn(gloo_body, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]  # the parts are deleted
    data = json.loads((tmp_path / "trace.json").read_text())
    slices = check_format(data)
    other = data["otherData"]
    assert other["ranks"] == [0, 1] and other["missing_ranks"] == 0
    clock = other["clocks"]["1"]
    assert abs(clock["offset_s"]) <= clock["error_bound_s"]  # both ranks have the clock of this machine
    for rank in (0, 1):
        mine = [event for event in slices if event["pid"] == rank]
        kinds = {event["cat"] for event in mine}
        assert {"model", "encode", "send", "wait", "decode", "message", "wire", "status", "step"} <= kinds
        assert {"forward", "backward"} <= {event["name"] for event in mine}
        carried = [e for e in mine if e["cat"] == "message" and "bucket" in e["args"]]
        sent = [e for e in mine if e["cat"] == "message" and e["args"]["step"] >= 0]
        assert sum(e["args"]["wire_bytes"] for e in sent) == stats[rank]["wire_bytes"]
        waits = sum(e["dur"] for e in mine if e["cat"] == "wait") / 1e6
        assert waits == pytest.approx(stats[rank]["wait_seconds"], rel=0.01, abs=1e-4)
        assert all(e["args"]["hook"] == "powersgd" for e in carried)
    summary = other["summary"]
    assert summary["steps"] == 4  # excludes the first step
    assert 0 <= summary["hidden"] <= 1
    assert {row["bucket"] for row in summary["buckets"]} == {e["args"]["bucket"] for e in carried}


def waiting_body(rank: int, world: int) -> list[float]:
    binding = Reducer(Plain(), {"w": torch.zeros(8)}).handle.binding
    assert binding is not None and binding.engine is not None
    engine = binding.engine
    recorder = EngineTrace(engine, 100)
    sends = engine.messenger.transport
    if rank == 1:
        time.sleep(0.3)
    short = [sends.all_reduce(torch.zeros(8), "sum") for _ in range(2)]
    if rank == 1:
        time.sleep(1.0)
    sends.all_reduce(torch.zeros(8), "sum").wait(60.0)  # rank 0 waits for both delays without an event
    ended = time.perf_counter()
    for work in short:
        work.wait(60.0)
    return [ended - event.done for event in recorder.events if isinstance(event, Message) and event.done is not None]


@pytest.mark.gloo
def test_the_end_of_a_message_is_seen_while_the_rank_waits_for_another() -> None:
    before = spawn(waiting_body, 2)[0]
    assert len(before) == 3
    assert min(before[:2]) > 0.5  # both had ended before rank 1 slept again


class FakeWork:
    """Work that ends when the test says so. It has no future."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: float | None) -> None:
        raise RuntimeError("a peer was lost")


class FutureWork(FakeWork):
    def __init__(self) -> None:
        self.futures = torch.futures.Future[torch.Tensor]()

    def future(self) -> Any:
        return self.futures


def recorded(work: FakeWork) -> tuple[EngineTrace, PolledWork]:
    """Return a trace of an engine, and a short work that it polls."""
    [recorder] = simulate(1, lambda rank: EngineTrace(rank.engine(Plain()), 100))
    message = recorder.message("all_reduce", torch.zeros(8), torch.zeros(8), 2, "all")
    message.launched = time.perf_counter() - 1.0  # longer than a spin
    polled = PolledWork(work, message, recorder)
    recorder.poll(polled)
    return recorder, polled


@pytest.mark.parametrize("waits", [True, False])
def test_a_message_that_failed_has_no_end(waits: bool) -> None:
    """A later begin on another rank would misalign the clocks."""
    work = FutureWork()
    recorder, polled = recorded(work)
    [message] = recorder.events
    assert isinstance(message, Message)
    if waits:
        with pytest.raises(RuntimeError, match="a peer was lost"):
            polled.wait(None)  # leaves a callback
    work.completed = True
    work.futures.set_exception(RuntimeError("a peer was lost"))
    assert not polled.needs_polling() and message.done is None


def test_work_without_a_future_is_polled_until_it_ends() -> None:
    work = FakeWork()
    recorder, polled = recorded(work)
    [message] = recorder.events
    assert isinstance(message, Message)
    recorder.stop_polling()
    recorder.end()
    recorder.agreed(0.0, 1.0)  # an event
    assert polled.needs_polling() and message.done is None
    work.completed = True
    recorder.agreed(1.0, 2.0)
    assert message.done is not None


def test_a_closed_trace_keeps_no_work_alive() -> None:
    recorder, polled = recorded(FakeWork())
    kept = weakref.ref(polled._inside)
    del polled
    assert kept() is not None
    recorder.close()
    assert kept() is None


def test_a_limit_drops_the_oldest_events(tmp_path: Path) -> None:
    def body(rank: Any) -> None:
        reducer = Reducer(Plain(), {"w": torch.zeros(8)}, transport=rank.transport)
        if rank.rank == 0:
            with ch_trace.Trace(reducer.handle, tmp_path / "trace.json", limit=10) as running:
                for _ in range(20):
                    reducer.average()
            assert running.final.dropped > 0
            assert running.final.steps >= 1
        else:
            for _ in range(20):
                reducer.average()

    simulate(2, body)
    data = json.loads((tmp_path / "trace.json").read_text())
    check_format(data)
    assert data["otherData"]["missing_ranks"] == 1
    [part] = (tmp_path / "trace.json.parts").glob("rank-0-*.json")  # stays for a later merge
    again = ch_trace.merge([part], tmp_path / "again.json")
    assert json.loads(again.read_text())["otherData"]["dropped_events"]["0"] > 0


def test_a_trace_changes_no_message_and_no_number() -> None:
    def body(rank: Any, traced: bool, folder: Path) -> list[float]:
        torch.manual_seed(rank.rank)
        engine = rank.engine(Plain())
        source = SimpleNamespace(trace_source=lambda: commhooks.TraceSource({"": engine}, "allreduce"))
        recorder = ch_trace.Trace(source, folder / "t.json") if traced else None
        found = []
        for _ in range(3):
            buckets = [Bucket.from_tensors({str(i): torch.randn(64)}, index=i, is_last=i == 2) for i in range(3)]
            for bucket in buckets:
                engine.submit(bucket)
            assert engine.finish() is None
            found += [bucket.buffer.sum().item() for bucket in buckets]
        if recorder is not None:
            messages = [e for e in recorder._traces[""].events if isinstance(e, Message)]
            assert len(messages) == 3 * 4  # three buckets and the status
            recorder.close(together=False)
        return found

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        traced = simulate(2, lambda rank: body(rank, rank.rank == 0, Path(folder)))
    assert traced == simulate(2, lambda rank: body(rank, False, Path()))


def test_merge_refuses_parts_of_different_traces(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="no part of a trace"):
        ch_trace.merge([bad], tmp_path / "x.json")


def timeline(
    *messages: tuple[str, tuple[float, float], tuple[float, float]], nbytes: int = 10, world_size: int = 2
) -> Timeline:
    """Return the traces of two ranks with equal clocks. A message is a collective, and begin and end on each rank.

    A larger ``world_size`` has ranks without a trace.
    """
    parts = []
    for rank in (0, 1):
        part = Part("token", rank, world_size, "host", rank, "quant4", exchanges=[("begin", 0.0, 0.0)])
        engine = EnginePart("", "quant4", tuple(range(world_size)), buckets={"0": BucketFacts(("w",), 8)})
        engine.spans.append(Span("step", 0, "", 0, 0.0, 1000.0))
        for index, (kind, *times) in enumerate(messages):
            begun, ended = times[rank]
            engine.messages.append(Message(kind, 0, index, ("0",), 0, nbytes, 10.0, "all", begun, begun, ended))
        part.engines.append(engine)
        parts.append(part)
    return Timeline(parts)


def moments(line: Timeline, rank: int) -> list[Moments]:
    return [one for _, one in line.moments(rank, line.parts[rank].engines[0])]


def test_the_rank_that_joins_last_sends_before_it_receives() -> None:
    """Ten bytes each way, over a link of a byte per second in each direction."""
    line = timeline(
        ("all_to_all", (5.0, 25.0), (0.0, 15.0)),  # rank 0 sends its block, then rank 1 learns that it can receive
        ("all_gather", (30.0, 45.0), (26.0, 40.0)),  # in two halves
        ("all_reduce", (50.0, 60.0), (47.0, 60.0)),  # in short segments
        ("all_to_all", (70.001, 80.0), (70.0, 80.0)),  # both at once
    )
    late, early = moments(line, 0), moments(line, 1)
    assert [one.met for one in early] == [5.0, 30.0, 50.0, 70.001]
    assert {one.last for one in early} == {0}
    assert [one.arriving for one in early] == [5.0, 30.0, 50.0, 70.001]
    assert [one.arriving for one in late] == pytest.approx([15.0, 35.0, 50.0, 70.001], abs=0.01)
    summary = summarize(line)
    assert summary.wire == pytest.approx(40.0, abs=0.01)  # 4 messages of 10 bytes
    assert [row.wire for row in summary.buckets] == pytest.approx([summary.wire])


def test_a_late_rank_sends_only_half_a_piece_first_in_a_long_gather() -> None:
    """Rank 0 joins last. Eight megabytes in sixteen pieces take 16 s."""
    line = timeline(("all_gather", (4.0, 21.0), (0.0, 20.0)), nbytes=1 << 23)
    assert [one.arriving for one in moments(line, 0)] == [4.5]


def test_a_rank_sends_first_only_the_block_of_one_peer_if_traces_are_missing() -> None:
    """Rank 1 sends a block to each of four peers in 10 s. Three of them have no trace."""
    line = timeline(("all_to_all", (5.0, 25.0), (0.0, 15.0)), world_size=5)
    assert [one.arriving for one in (*moments(line, 0), *moments(line, 1))] == [7.5, 5.0]


def test_a_rank_announces_a_message_behind_the_bytes_of_the_one_before() -> None:
    """Ten bytes each way, over a link of a byte per second in each direction. Both ranks have two messages at once."""
    line = timeline(
        ("all_to_all", (5.0, 25.0), (0.0, 15.0)),  # rank 0 sends its block, until 15
        ("all_to_all", (8.0, 35.0), (8.0, 25.0)),  # only then rank 1 learns that rank 0 can receive the second block
    )
    assert [one.arriving for one in moments(line, 0)] == [15.0, 15.0]
    assert [one.arriving for one in moments(line, 1)] == [5.0, 8.0]
    assert summarize(line).wire == 20.0  # 2 messages of 10 bytes


def test_a_message_waits_for_a_thread_on_every_rank_and_shares_the_link() -> None:
    line = timeline(
        ("all_reduce", (0.0, 10.0), (0.0, 14.0)),
        ("all_reduce", (0.0, 30.0), (0.0, 30.0)),
        ("all_reduce", (0.0, 30.0), (0.0, 30.0)),  # rank 1 has a free thread at 14
    )
    assert [one.carried for one in moments(line, 0)] == [0.0, 0.0, 14.0]
    summary = summarize(line)
    assert summary.wire == 30.0
    assert [row.wire for row in summary.buckets] == [30.0]  # not the sum of overlapping messages


def test_a_slow_link_of_one_rank_is_no_wait_for_the_peer() -> None:
    """Rank 0 sends ten times as slowly as rank 1, which joins last."""
    line = timeline(("all_to_all", (0.0, 2.0), (1.0, 12.0)))
    assert [one.arriving for one in (*moments(line, 0), *moments(line, 1))] == [1.0, 2.0]
    line = timeline(("all_to_all", (1.0, 12.0), (0.0, 11.0)))  # rank 0 joins last
    assert [one.arriving for one in (*moments(line, 0), *moments(line, 1))] == [2.0, 1.0]


def test_the_text_fits_80_columns() -> None:
    names = ", ".join(f"transformer.h.{number}.attention.weight" for number in range(30))
    rows = tuple(BucketRow("shard", str(number), names, 1e6, 0.1, 0.2, 0.1, 0.3) for number in range(2))
    times = {"step": 1.0, "backward": 0.6, "wire": 0.4, "exposed": 0.2, "waiting": 0.1}
    known = {
        "hook": "policy({'*.bias': allreduce, '*': two_level(quant4)})",
        "ranks": (0, 1),
        "expected": 2,
        "steps": 5,
        "buckets": rows,
        "during": "inner steps",
        "critical": {"link": 0.1, "hook": 0.1, "backward": 0.1, "forward": 0.1, "rest": 0.1},
        "dropped": 0,
        **times,
    }
    others = {field.name: None for field in dataclasses.fields(Summary) if field.name not in known}
    text = str(Summary(**{**others, "late": 0.0, **known}))  # type: ignore[arg-type]
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("transformer.h.0.attention.weight") == 2
    assert "transformer.h.29." not in text
