"""Planned bytes of a node compared with the bytes that engines count over simulated ranks."""

import pytest
import torch

import commhooks
from ch_core import CpuTuning
from ch_testing.simulated_ranks import SimulatedRanks
from commhooks import Topology
from commhooks.report.plan_table import node_bytes

LIKE = {"up": torch.zeros(192, 256), "bias": torch.zeros(192), "down": torch.zeros(256, 192), "norm": torch.zeros(256)}


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("levels", ["{}", "two_level({})"])
@pytest.mark.parametrize("expr", ["allreduce", "bf16_compress", "quant4", "powersgd(rank=4)", "topk(density=0.05)"])
def test_the_plan_equals_the_counters(expr: str, levels: str, nodes: int, each: int) -> None:
    some = SimulatedRanks(lambda: commhooks.create(levels.format(expr)), nodes * each, LIKE, nodes=each)
    made = torch.Generator().manual_seed(0)
    for _ in range(2):
        before = [
            (engine.counters.traffic.wire_bytes, engine.counters.traffic.between_bytes) for engine in some.engines
        ]
        some.step([{n: torch.randn(t.shape, generator=made) for n, t in LIKE.items()} for _ in range(nodes * each)])
    counted = [
        (engine.counters.traffic.wire_bytes - wire, engine.counters.traffic.between_bytes - between)
        for engine, (wire, between) in zip(some.engines, before, strict=True)
    ]
    topology = Topology.even(nodes * each, each)
    reduction = some.handles[0].reduction
    assert reduction is not None
    tuning = CpuTuning.off()  # simulated ranks exchange nothing directly
    planned = node_bytes(reduction, some.engines[0].step.layouts, topology, tuning=tuning)
    for node in topology.nodes:
        wire, leaving = (sum(counted[rank][i] for rank in node) for i in (0, 1))
        assert leaving == pytest.approx(planned.leaving, rel=0.02)
        assert wire - leaving == pytest.approx(planned.inside, rel=0.02)


def test_bytes_of_a_thousand_ranks_need_no_ranks() -> None:
    layout = commhooks.BucketLayout.of_shapes({"w": (4096, 4096)})
    flat, two = (
        node_bytes(commhooks.create(expr).reduction, [layout], Topology.even(1000, 8)).leaving  # type: ignore[arg-type]
        for expr in ("quant4", "two_level(quant4)")
    )
    assert 0.1 * flat < two < 0.3 * flat


def test_a_report_tells_the_bytes_of_a_node() -> None:
    flat, two = (
        SimulatedRanks(lambda expr=expr: commhooks.create(expr), 4, LIKE, nodes=2)
        for expr in ("quant4", "two_level(quant4)")
    )
    assert flat.handles[0].report().to_dict()["node"] is None
    found = two.handles[0].report()
    assert found.node is not None
    assert 0 < found.node.leaving < found.node.inside
    assert "a node sends" in str(found)
    assert "to other nodes" in str(found)


def test_a_report_warns_if_all_ranks_are_on_one_node() -> None:
    one, two = (SimulatedRanks(lambda: commhooks.create("two_level(quant4)"), 4, LIKE, nodes=n) for n in (4, 2))
    (warning,) = (w for w in one.handles[0].report().warnings if "on one node" in w)
    assert "all 4 ranks" in warning
    assert not [w for w in two.handles[0].report().warnings if "on one node" in w]
