"""Tables of the benchmark and the claims that they decide."""

from typing import Any

from ch_bench.cost.bench_tables import Costs


def result(**steps: float) -> dict[str, Any]:
    """Return two blocks of one step each, of these milliseconds."""
    return {"runs": [{"label": label, "wire": 0.0, "blocks": [[ms], [ms]]} for label, ms in steps.items()]}


def test_whole_steps_are_compared_on_shaped_links_alone() -> None:
    costs = Costs(result(noop=50.0, bf16_compress=100.0, quant8=110.0, quant4=60.0))
    assert costs.claims(None) == []
    found = {(quantity, ours): (limit, ratio[0]) for quantity, ours, _, limit, ratio in costs.claims("200mbit")}
    assert found == {("step", "quant4"): (0.4, 0.6), ("step", "quant8"): (1.0, 1.1)}


def test_costs_are_compared_over_a_step_without_communication() -> None:
    costs = Costs(result(noop=50.0, bf16_compress=100.0))
    assert costs.claims("1gbit") == []
    costs.runs["torch bf16"] = costs.runs["bf16_compress"]
    costs.blocks["torch bf16"] = [100.0, 100.0]
    assert costs.claims(None) == [("cost", "bf16_compress", "torch bf16", 1.0, (0.5, 0.5, 0.5))]
