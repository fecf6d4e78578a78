"""The critical path follows messages to the rank that starts them last, and the sentence names what makes a step longer."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ch_trace
import commhooks
from ch_testing import spawn
from ch_trace.critical_path import KINDS, critical_path
from ch_trace.rank_part import EnginePart, Part, Timeline
from ch_trace.recording import BucketFacts, Message, Span
from ch_trace.summary import summarize

STEP = 100.0
"""Seconds from one step to the next in :func:`timeline`."""


def timeline(starts: tuple[float, float], done: float, decoded: tuple[float, float], nbytes: float = 1e6) -> Timeline:
    """Return two steps of two ranks with equal clocks and one bucket.

    Args:
        starts: when each rank starts the message. The backward ends then.
        done: when the result arrives on both ranks.
        decoded: when each rank has decoded the result.
        nbytes: that a rank sends.
    """
    parts = []
    for rank in (0, 1):
        engine = EnginePart("", "quant4", (0, 1), buckets={"0": BucketFacts(("w",), 8)})
        for step in (0, 1):
            at = STEP * step
            spans = (
                ("backward", "", 0.0, starts[rank]),
                ("wait", "0", starts[rank], done),
                ("decode", "0", done, decoded[rank]),
                ("step", "", 0.0, decoded[rank]),
            )
            engine.spans += [
                Span(kind, step, bucket, 0, at + begun, at + ended) for kind, bucket, begun, ended in spans
            ]
            times = at + starts[rank], at + starts[rank], at + done
            engine.messages.append(Message("all_reduce", step, 0, ("0",), 0, 10, nbytes, "all", *times))
        parts.append(Part("token", rank, 2, "host", rank, "quant4", exchanges=[("begin", 0.0, 0.0)], engines=[engine]))
    return Timeline(parts)


def test_the_path_goes_from_the_end_to_the_rank_that_started_the_message_last() -> None:
    path = critical_path(timeline(starts=(4.0, 7.0), done=12.0, decoded=(13.0, 12.5)))
    assert [(one.kind, one.rank, one.begun, one.ended) for one in path[-3:]] == [
        ("backward", 1, 100.0, 107.0),  # rank 1 computes
        ("link", 0, 107.0, 112.0),  # rank 0 waits
        ("hook", 0, 112.0, 113.0),  # rank 0 decodes, and ends last
    ]
    assert all(before.ended == after.begun for before, after in pairwise(path))


def test_the_parts_of_the_path_are_those_of_one_step() -> None:
    critical = summarize(timeline(starts=(4.0, 7.0), done=12.0, decoded=(13.0, 12.5))).critical
    assert list(critical) == list(KINDS)
    assert sum(critical.values()) == pytest.approx(STEP)
    assert critical == pytest.approx({"link": 5.0, "hook": 1.0, "backward": 7.0, "forward": 0.0, "rest": 87.0})


@pytest.mark.parametrize(
    ("starts", "done", "decoded", "nbytes", "begin"),
    [
        (
            (4.0, 4.0),
            90.0,
            91.0,
            1e6,
            "Send fewer bytes, or start the messages earlier in the backward: the link is 86%",
        ),
        ((4.0, 4.0), 90.0, 91.0, 1e3, "Send fewer messages: the link is 86%"),
        ((4.0, 4.0), 5.0, 90.0, 1e6, "Take a cheaper hook: its computation is 85%"),
        ((4.0, 60.0), 65.0, 66.0, 1e6, "Look at rank 1: other ranks wait"),
        ((4.0, 4.0), 5.0, 6.0, 1e6, "Leave the hook as it is: link and hook are 2%"),
    ],
)
def test_one_sentence_says_what_to_change(
    starts: tuple[float, float], done: float, decoded: float, nbytes: float, begin: str
) -> None:
    assert summarize(timeline(starts, done, (decoded, decoded), nbytes)).advice.startswith(begin)


def test_no_path_without_the_ends_of_messages() -> None:
    line = timeline((4.0, 7.0), 12.0, (13.0, 13.0))
    line.parts[1].engines[0].messages[-1].done = None
    assert critical_path(line) == []
    summary = summarize(line)
    assert not summary.critical and "Use torch.profiler" in summary.advice


def late_body(rank: int, world: int, folder: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    handle = commhooks.attach(model, "powersgd(rank=2)")
    with ch_trace.Trace(handle, Path(folder) / "trace.json"):
        for _ in range(6):
            if rank == 1:
                time.sleep(0.05)  # a slow data loader
            model(torch.randn(8, 64)).square().mean().backward()


@pytest.mark.gloo
def test_a_rank_with_a_slow_data_loader_is_named(tmp_path: Path) -> None:
    spawn(late_body, 2, str(tmp_path))
    [written] = ch_trace.TraceFile.read(tmp_path)
    assert written.summary.advice.startswith("Look at rank 1: other ranks wait")
    rests = [
        (event["pid"], event["dur"])
        for event in written.data["traceEvents"]
        if event.get("cat") == "critical" and event["args"]["kind"] == "rest"
    ]
    assert sum(took for rank, took in rests if rank == 1) > 0.9 * sum(took for _, took in rests)
