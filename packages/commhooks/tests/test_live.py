"""Live lines tell bytes, ratio, wait and error, at an interval of steps or seconds, and leave tqdm's bars whole."""

import gc
import io
import re
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commhooks
from ch_core import Engine, ProcessGroupTransport, simulate
from ch_testing import spawn
from commhooks import HookConfigError, Live, Progress, Reducer, create, interval

LINE = re.compile(
    r"powersgd\(rank=2\): step (\d+), [\d.]+ (?:µs|ms|s) each; sent [\d.]+ k?B, ratio [\d.]+; "
    r"waited [\d.]+ (?:µs|ms|s) \(\d+%\); error 0\.\d{3}\n"
)


def train(rank: Any, steps: int, every: "int | str") -> None:
    reducer = Reducer(create("powersgd(rank=2)"), {"w": torch.zeros(64, 64)}, transport=rank.transport)
    with reducer.handle.live(every):
        for _ in range(steps):
            reducer.tensors["w"].normal_()
            reducer.average()


@pytest.mark.parametrize(("every", "steps"), [(4, [1, 5, 9]), ("4", [1, 5, 9]), ("1000s", [1])])
def test_a_line_after_the_first_step_and_then_at_the_interval(
    every: "int | str", steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(2, lambda rank: train(rank, 10, every))
    shown = capsys.readouterr().err
    assert [int(step) for step in LINE.findall(shown)] == steps
    assert shown.count("\n") == len(steps)  # rank 0 alone prints


def test_the_first_line_leaves_out_what_the_script_did_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=0.0)
    now = lambda: clock.now  # noqa: E731
    monkeypatch.setattr("commhooks.report.live.time", SimpleNamespace(perf_counter=now, monotonic=now))

    def late(rank: Any) -> None:
        reducer = Reducer(create("powersgd(rank=2)"), {"w": torch.ones(64, 64)}, transport=rank.transport)
        with reducer.handle.live("30s"):
            clock.now += 1000.0  # the script reads its data
            for _ in range(31):
                reducer.average()
                clock.now += 2.0

    simulate(1, late)
    assert re.findall(r"step (\d+), (.*?) each", capsys.readouterr().err) == [
        ("1", "2.00 s"),
        ("16", "2.00 s"),
        ("31", "2.00 s"),
    ]


def test_lines_do_not_keep_the_engine_alive() -> None:
    def alone(rank: Any) -> None:
        engine = rank.engine(commhooks.Plain())
        Live(commhooks.TraceSource({"": engine}, "allreduce"), 1)
        gone = weakref.ref(engine)
        del engine
        assert gone() is None

    gc.collect()
    gc.disable()
    try:
        simulate(1, alone)
    finally:
        gc.enable()


def mesh_body(rank: int, world: int) -> bool:
    groups = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")).get_all_groups()
    engine = Engine(commhooks.Plain(), ProcessGroupTransport(groups[1]))
    Live(commhooks.TraceSource({"shard": engine}, "allreduce", groups), 1)
    return bool(engine.sampler.recordings)


@pytest.mark.gloo
@pytest.mark.full
def test_one_rank_of_a_mesh_prints() -> None:
    """Rank 0 of the shards exists once for each replica."""
    assert spawn(mesh_body, 4) == [True, False, False, False]


@pytest.mark.parametrize("every", [0, -1, "soon", "0s", "1.5"])
def test_an_interval_is_a_number_of_steps_or_seconds(every: "int | str") -> None:
    with pytest.raises(HookConfigError, match="give steps, as in 100, or seconds, as in 30s"):
        interval(every)


def test_a_line_stands_above_the_bars_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = tqdm.tqdm(total=10, file=sys.stderr, mininterval=0)
    simulate(1, lambda rank: train(rank, 3, 1))
    bar.update(1)
    bar.close()
    lines = [line.rpartition("\r")[2] for line in shown.getvalue().splitlines()]  # as a terminal shows them
    assert sum(line.startswith("powersgd(rank=2): step") for line in lines) == 3


def foreign_body(rank: int, world: int) -> str:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))

    def foreign(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future[torch.Tensor]()
        future.set_result(bucket.buffer())
        return future

    handle = commhooks.attach(model, foreign)
    with pytest.raises(commhooks.HookNotSupportedError, match="neither a trace nor live lines") as caught:
        handle.live()
    return str(caught.value)


@pytest.mark.gloo
def test_a_foreign_hook_has_no_live_lines() -> None:
    assert len(spawn(foreign_body, 2)) == 2


def test_the_lines_of_an_outer_optimizer_are_about_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    def rounds(rank: Any) -> None:
        engine = rank.engine(commhooks.Plain())
        with Live(commhooks.TraceSource({"": engine}, "diloco", during="inner steps"), 1):
            for _ in range(2):
                bucket = commhooks.Bucket.from_tensors({"w": torch.ones(8)})
                engine.submit(bucket)
                engine.finish()

    simulate(1, rounds)
    assert capsys.readouterr().err.startswith("diloco: round 1, ")


def test_progress_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    shown = SimpleNamespace(isatty=lambda: True, flush=lambda: None, write=written.append)
    monkeypatch.setattr(sys, "stderr", shown)
    with Progress("doctor", 2) as tell:
        tell("tried " + "x" * 100)
        tell("tried \x1b[31mquant4\a")  # a name of another package
    assert [len(text) <= len("\r\x1b[K") + 79 for text in written] == [True, True, True]
    assert written[1:] == ["\r\x1b[Kdoctor: 2 of 2, tried quant4", "\r\x1b[K"]


def test_progress_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer line would wrap, and only its last row would vanish."""
    written: list[str] = []
    shown = SimpleNamespace(isatty=lambda: True, flush=lambda: None, write=written.append)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "40")
    with Progress("doctor") as tell:
        tell("x" * 100)
    assert len(written[0]) == len("\r\x1b[K") + 39
