"""`advise --cluster` compared with figures worked out by hand, and with measured steps of the records."""

import re
from pathlib import Path

import pytest
import torch

import commhooks
from ch_bench.advise.cluster import (
    Cluster,
    Training,
    answer,
    imagined,
    in_buckets,
    in_units,
    line,
    stages_of,
)
from ch_bench.advise.workload import MODELS
from ch_bench.links.link import Link
from ch_core import BucketLayout, CpuTuning
from commhooks import HookNotSupportedError, Topology
from commhooks.cli import main

RECORDS = Path(__file__).resolve().parents[3] / "docs" / "measured"
MEGABYTE = BucketLayout.of_shapes({"0.weight": (500, 500)})  # 250 000 numbers of 4 bytes
TWO = Cluster(2, 1, 8e6, round_trip=0.2)  # a megabyte per second, and 0.1 s for each message in a row


def test_two_buckets_over_a_slow_link() -> None:
    # The forward takes 1 s and the backward 2 s, so buckets are full at 2 s and 3 s. Each sends its megabyte once in all (two
    # halves) in 1 s and arrives 0.2 s later. The first arrives at 3.2 s, the second at 4.2 s.
    found = line(TWO, Training((MEGABYTE, MEGABYTE), 3.0), "allreduce")
    assert found.seconds == pytest.approx(4.2)
    # Without computation, both megabytes take 2 s, and the latencies pass together.
    assert (found.link, found.left, found.hidden) == pytest.approx((2.2, 1.2, 1.0))
    # The plan adds one status of 3 fp32 numbers for each distinct layout.
    assert found.leaving == pytest.approx(2e6, rel=1e-4)


def test_a_queue_delays_later_buckets() -> None:
    # Over half a megabyte per second the first bucket leaves from 2 s to 4 s, so the second, which is full at 3 s, leaves from
    # 4 s to 6 s and arrives 0.2 s later.
    found = line(Cluster(2, 1, 4e6, round_trip=0.2), Training((MEGABYTE, MEGABYTE), 3.0), "allreduce")
    assert found.seconds == pytest.approx(6.2)


def test_every_message_in_a_row_costs_half_a_round_trip() -> None:
    # A link without a limit. A bucket of two stages waits for two messages (codes go directly to every rank, and 4 ranks gather
    # round a ring of 3 messages): 0.1 + 0.3 s. A sum goes twice round the ring: 0.6 s.
    four = Cluster(4, 1, 1e18, round_trip=0.2)
    for hook, left in (("quant4", 0.4), ("allreduce", 0.6)):
        assert line(four, Training((MEGABYTE,), 3.0), hook).left == pytest.approx(left, abs=1e-3)
    # In nodes of 4 ranks only every fourth message of the ring leaves a node: 2 * 7 / 4, rounded up, are 4.
    assert line(Cluster(2, 4, 1e18, 0.2, 1e18), Training((MEGABYTE,), 3.0), "allreduce").left == pytest.approx(0.4)


def test_the_link_inside_a_node_can_be_the_slower_one() -> None:
    # Two ranks of one node send a megabyte each (two halves) at a megabyte per second.
    found = line(Cluster(1, 2, 1.0, round_trip=9.0, node_bits=8e6), Training((MEGABYTE,), 3.0), "allreduce")
    assert (found.left, found.leaving) == pytest.approx((1.0, 0.0))
    assert found.sent == pytest.approx(1e6, rel=1e-4)


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    # Each of two units is 1 MB, and a rank sends half of it in 0.5 s. The forward of a unit takes 0.5 s, its backward 1 s.
    # The first gather is exposed until 0.5 s. The second one hides behind the forward of unit 0 until 1 s, and the first one of
    # the backward behind the forward of unit 1 until 1.5 s. The last gather hides behind the backward of unit 1, which ends at
    # 2.5 s. The scatter of unit 1 hides behind the backward of unit 0 until 3.5 s. The last scatter ends at 4 s.
    found = line(Cluster(2, 1, 8e6), Training((MEGABYTE, MEGABYTE), 3.0, sharded=True), "allreduce")
    assert found.seconds == pytest.approx(4.0)
    assert found.link == pytest.approx(6 * 0.5)
    assert found.leaving == pytest.approx(3e6)  # two units, each half a megabyte three times
    with pytest.raises(HookNotSupportedError, match="powersgd does not divide"):
        line(TWO, Training((MEGABYTE,), 3.0, sharded=True), "powersgd(rank=4)")


@pytest.mark.parametrize(
    "hook", ["allreduce", "quant4", "powersgd(rank=4)", "two_level(quant4)", "two_level(powersgd(rank=1))"]
)
def test_messages_of_a_step_send_the_planned_bytes(hook: str) -> None:
    topology = Topology.even(8, 4)
    layout = BucketLayout.of_shapes({"0.weight": (512, 256), "1.weight": (1, 300)})
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    planned = commhooks.node_bytes(reduction, [layout], topology, tuning=CpuTuning.off())
    leaving = 0.0
    for stage in stages_of(reduction, layout, topology):
        for message in stage:
            size, ring = topology.size(message.scope), message.kind != "all_to_all"
            sent = message.size * (2 if message.kind == "all_reduce" else 1) * (size - 1) / size
            leaving += sent * sum(topology.leaving(rank, message.scope, ring=ring) for rank in topology.nodes[0])
    assert leaving == pytest.approx(planned.leaving, abs=100)  # the status, and halves of bytes


def test_the_answer_names_a_hook_or_none_and_the_border() -> None:
    slow = answer(TWO, Training((MEGABYTE, MEGABYTE), 3.0), ["quant4"])
    assert slow.choice.chosen.hook == "quant4"
    fast = answer(Cluster(2, 1, 8e9), Training((MEGABYTE, MEGABYTE), 3.0), ["quant4"])
    assert fast.rival is not None
    assert (fast.choice.chosen.hook, fast.rival.hook) == ("allreduce", "quant4")
    border = fast.pays_below
    assert border is not None

    def saved(bits: float) -> float:
        a, b = (
            line(Cluster(2, 1, bits), Training((MEGABYTE, MEGABYTE), 3.0), hook) for hook in ("quant4", "allreduce")
        )
        return 1 - a.seconds / b.seconds

    assert saved(border) >= 0.05 > saved(border * 1.02)


def test_an_exact_hook_is_recommended_only_if_it_saves_time() -> None:
    """With enough of the link, two levels take a little longer than plain averaging, and send more bytes inside the nodes."""
    training = Training(imagined(7e9, torch.bfloat16, False), 0.9)
    found = answer(Cluster(2, 8, 400e9, round_trip=2e-5), training, ["two_level(allreduce)", "quant4"])
    plain, two_level, _ = found.lines
    assert plain.seconds < two_level.seconds < plain.seconds * 1.03
    assert found.choice.chosen.hook == "allreduce"


def predicted(model: str, bits: float, hook: str, alone: float) -> float:
    shapes = [tuple(p.shape) for p in MODELS[model]()[0].parameters()]
    return line(Cluster(2, 1, bits), Training(in_buckets(shapes, torch.float32), alone), hook).seconds


def test_recorded_steps_are_predicted_within_a_quarter() -> None:
    """Steps over shaped links. The record is older than the way in which `quant8` sends its codes now."""
    text = (RECORDS / "advise.md").read_text().partition("Loopback again")[0]
    rows = re.findall(r"^(\w+) +(\S+) +(\S+) +[\d.]+ ms +([\d.]+) ms", text, re.MULTILINE)
    alone: dict[str, float] = {}  # the fastest step over loopback
    for model, link, _, measured in rows:
        if link == "loopback":
            alone[model] = min(alone.get(model, 1e9), float(measured) / 1e3)
    tried = [row for row in rows if row[1] != "loopback" and row[2] != "quant8"]
    assert len(tried) == 36
    for model, link, hook, measured in tried:
        found = predicted(model, Link.parse(link).rate or 0.0, hook, alone[model])
        assert found == pytest.approx(float(measured) / 1e3, rel=0.25), (model, link, hook)


def test_recorded_steps_of_codes_are_predicted_within_a_quarter() -> None:
    """The prediction leaves the arithmetic of codes out, which is little in these steps."""
    text = (RECORDS / "bench.md").read_text()
    sections = re.findall(
        r"^─+ (1gbit|200mbit) \(a transfer reached (\d+) Mbit/s\) ─+$(.*?)(?=^─|^```)", text, re.MULTILINE | re.DOTALL
    )
    assert {link for link, _, _ in sections} == {"1gbit", "200mbit"}
    for link, reached, table in sections[:2]:
        alone = float(re.search(r"step without communication \(([\d.]+) ms\)", table)[1]) / 1e3  # type: ignore[index]
        for hook in ("bf16_compress", "quant8", "quant4"):
            measured = float(re.search(rf"^  {hook} +([\d.]+) ", table, re.MULTILINE)[1]) / 1e3  # type: ignore[index]
            found = predicted("gpt", float(reached) * 1e6, hook, alone)
            assert found == pytest.approx(measured, rel=0.25), (link, hook, found, measured)


def test_an_imagined_model_has_all_parameters() -> None:
    for parameters in (100, 1.3e6, 1.3e9):
        for sharded in (False, True):
            layouts = imagined(parameters, torch.bfloat16, sharded)
            assert sum(layout.numel for layout in layouts) == parameters


def test_the_units_of_a_sharded_model_have_the_order_of_the_forward() -> None:
    found = in_units([(2 * number, 3) for number in range(1, 49)], torch.float32)
    firsts = [layout.params[0].shape for layout in found]
    assert firsts == sorted(firsts) and 12 < len(found) <= 24
    assert found[-1].params[0].shape == (96, 3)


CLUSTERS = [
    ["4x8", "--link", "25gbit,0.1ms", "--parameters", "1.3e9", "--dtype", "bf16"],
    ["4x8", "--link", "25gbit,0.1ms", "--parameters", "1.3e9", "--dtype", "bf16", "--fsdp"],
    ["2x1", "--link", "200mbit,80ms", "--model", "mlp"],
]


@pytest.mark.parametrize("options", CLUSTERS)
def test_the_command_answers_in_80_columns(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--step", "250ms", "--cluster", *options]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^answer: \S", shown, re.MULTILINE)
    assert "assumed:" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "4", "--link", "1gbit"], "expected nodes and ranks of each, as in 4x8"),
        (["--cluster", "1x1", "--link", "1gbit"], "at least two ranks"),
        (["--cluster", "4x8"], "--cluster needs --link"),
        (
            ["--cluster", "4x8", "--link", "1gbit,5", "--step", "1s", "--parameters", "1e6"],
            "'5' is not a part of a link",
        ),
        (["--cluster", "4x8", "--link", "1gbit", "--step", "1s"], "either --parameters"),
        (["--fsdp"], "--fsdp describes a cluster"),
        (["--node-link", "900gbit"], "--node-link describes a cluster"),
        (["--cluster", "4x8", "--nodes", "2x4"], "give one of them"),
        (["--nodes", "1x1"], "at least two ranks"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["advise", *options])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
