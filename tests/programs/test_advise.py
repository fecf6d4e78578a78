"""`commhooks advise`: the virtual network keeps its rules, the advice follows from the figures, and the command runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ch_bench.advise.emulated import EmulatedTransport
from ch_bench.advise.link import Clock, Curve, Network, Wire
from ch_bench.advise.predict import Prediction, recommend
from commhooks import Bucket, Reduction, get, list_hooks
from commhooks.adapters import Engine

SECOND = 1e6  # bytes
CURVE = Curve((0.0, SECOND, 2 * SECOND), (0.5, 1.5, 2.5), (0.0, 0.0, 0.0))  # half a second, and one for a megabyte


def wire(**options: float) -> Wire:
    made = Wire(Network({("all_reduce", "float32"): CURVE}, **{"spare": 8.0, **options}))
    made.begin(0.0)
    return made


def post(made: Wire, megabytes: float):
    return made.post(megabytes * SECOND, "all_reduce", "float32")


def test_a_message_alone_takes_what_was_measured():
    made = wire()
    assert made.finish(post(made, 1.0)) == pytest.approx(1.5)
    assert made.finish(post(made, 5.0)) == pytest.approx(1.5 + 5.5)  # beyond the largest that was tried


def test_computing_hides_a_message():
    made = wire()
    message = post(made, 2.0)
    assert made.computed(1.0) == pytest.approx(0.0)
    assert made.finish(message) == pytest.approx(2.5)
    late = post(made, 1.0)
    made.computed(10.0)
    assert made.finish(late) == pytest.approx(2.5 + 10.0)  # it has come long ago


@pytest.mark.parametrize(("together", "end"), [(2.0, 2.5), (1.0, 1.5), (1.5, 2.0)])
def test_messages_share_the_network(together, end):
    made = wire(together=together)
    first, second = post(made, 1.0), post(made, 1.0)
    assert made.finish(second) == pytest.approx(end)
    assert made.finish(first) == pytest.approx(end)  # the same time, or before


def test_others_go_on_while_one_is_on_its_way():
    made = wire(together=1.0)
    first, second, third = (post(made, size) for size in (1.0, 1.0, 0.3))
    assert made.finish(first) == pytest.approx(1.5)  # half a second of it on its way, in which the third has gone
    assert made.finish(second) == pytest.approx(1.5)
    assert made.finish(third) == pytest.approx(1.8)


def test_no_more_than_two_go_at_a_time():
    made = wire(together=1.0)
    messages = [post(made, 1.0) for _ in range(4)]
    assert made.finish(messages[-1]) == pytest.approx(2.5)  # two rounds of a second, and a latency


def test_an_idle_network_gives_a_burst_and_earns_it_again():
    made = wire(burst=0.4)
    assert made.finish(post(made, 1.0)) == pytest.approx(0.6 + 0.5)
    begun = made.now
    made.computed(10.0)
    assert made.finish(post(made, 1.0)) == pytest.approx(begun + 10.0 + 0.6 + 0.5)
    assert made.finish(post(made, 1.0)) <= begun + 10.0 + 1.1 + 1.5  # the latency has earned some


def test_messages_take_the_core_that_the_rank_computes_on():
    busy = Curve((0.0, SECOND), (0.0, 1.0), (0.0, 1.0))  # keeps a core busy while it is under way
    made = Wire(Network({("all_reduce", "float32"): busy}, spare=0.0))
    made.begin(0.0)
    message = post(made, 1.0)
    assert made.computed(1.0) == pytest.approx(1.0)  # a core shared by two: it takes twice as long
    assert made.finish(message) == pytest.approx(2.0)  # and the work of both is done
    free = Wire(Network({("all_reduce", "float32"): busy}, spare=1.0))
    free.begin(0.0)
    post(free, 1.0)
    assert free.computed(1.0) == pytest.approx(0.0)


def hooks() -> list[str]:
    return [s.name for s in list_hooks(kind="reduction") if s.provider in ("ch-ddp", "ch-powersgd", "ch-quant")]


@pytest.mark.parametrize("world", [2, 4])
def test_a_hook_sends_over_the_emulated_group_what_it_plans(world):
    """Whatever it is: the engine checks every request against the plan, and no number is left that is not finite."""
    from commhooks import create

    for name in hooks():
        reduction = create(name).reduction
        assert isinstance(reduction, Reduction)
        clock = Clock(Wire(Network({("all_reduce", "float32"): CURVE})))
        transport = EmulatedTransport(1, world, clock)
        engine = Engine(reduction, transport)
        torch.manual_seed(0)
        for _ in range(2):
            clock.begin()
            bucket = Bucket.from_tensors({"w": torch.randn(96, 80), "b": torch.randn(80)})
            engine.submit(bucket)
            assert engine.finish() is None, name
            assert bool(bucket.storage.isfinite().all()), name
            virtual = clock.tick()
        counted = sum(stage[0] for stage in [(engine.counters.traffic.payload_bytes,)])
        assert (counted > 0) == (name != "noop")
        assert clock.waited == pytest.approx(virtual, abs=5.0)
        assert (clock.waited > 0.4) == (name != "noop"), (
            name
        )  # at least one latency, of half a second that nobody spent
    assert callable(get("allreduce"))


def predictions(**seconds: float) -> list[Prediction]:
    lossy = {"allreduce": (False, 100.0), "bf16_compress": (True, 50.0), "powersgd": (True, 1.0)}
    return [Prediction(hook, s, 0.0, 0.0, lossy[hook][1], lossy[hook][0]) for hook, s in seconds.items()]


def test_the_advice():
    chosen, reasons = recommend(1.0, predictions(allreduce=1.02, bf16_compress=1.01, powersgd=1.3))
    assert chosen == "allreduce"
    assert any("Do not compress" in reason for reason in reasons)
    chosen, reasons = recommend(1.0, predictions(allreduce=1.02, bf16_compress=0.985, powersgd=1.3))
    assert chosen == "allreduce"  # faster, but by less than changed gradients are worth
    assert any("worth" in reason for reason in reasons)
    chosen, _ = recommend(1.0, predictions(allreduce=3.0, bf16_compress=2.0, powersgd=1.1))
    assert chosen == "powersgd"
    chosen, reasons = recommend(1.0, predictions(allreduce=3.0, bf16_compress=1.12, powersgd=1.1))
    assert chosen == "bf16_compress"  # as fast, and loses less
    assert any("powersgd is as fast" in reason for reason in reasons)


MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)), torch.randn(4, 64)

def wrong():
    return 3
"""


@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_the_command_on_a_model_of_one_s_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MODEL)

    def advise(model: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "commhooks", "advise", "--model", model, "--seconds", "6", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)

    run = advise("mine:make", "--hooks", "bf16_compress", "powersgd(rank=1)", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    rows = {row["hook"]: row for row in found["predictions"]}
    assert list(rows) == ["allreduce", "bf16_compress", "powersgd(rank=1)"]
    assert found["recommended"] in rows
    assert found["world_size"] == 2
    assert rows["allreduce"]["payload"] == 4 * found["parameters"] == 2 * rows["bf16_compress"]["payload"]
    assert all(row["seconds"] >= row["waiting"] >= 0 for row in rows.values())
    assert {row["collective"] for row in found["network"]["collectives"]} >= {"all_reduce", "all_to_all"}
    wrong = advise("mine:wrong")
    assert wrong.returncode == 1
    assert "(module, batch)" in wrong.stderr
