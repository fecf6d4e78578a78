"""Late runs equal plain runs to the bit, and find planted defects. ``python -m tests.orders`` runs all cases."""

import pytest

import commhooks
from commhooks import canonical
from commhooks.registry.expression import nodes
from tests.orders.cases import every, sample
from tests.orders.run import run
from tests.orders.ways import FUNCTIONS, Case
from tests.seed import SEED

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

FIRST = int(SEED)
"""First seed of the late runs."""
FEEDBACK, LEVELS = "quant4(error_feedback=True)", "two_level(quant4, nodes=NODES)"
GROUPS = {
    "two ranks": [
        Case("attach to DDP", "allreduce"),
        Case("attach, views", FEEDBACK),
        Case("attach, stopped backward", "allreduce"),
        Case("register_comm_hook", "bf16_compress"),
        Case("register_comm_hook", "powersgd(rank=2, start_iter=2)"),
        Case("inside a user's hook", "bf16_compress"),
        Case("FSDP2, shard", "quant8"),
        Case("FSDP2, gather", "quant8"),
        Case("FSDP1, FULL_SHARD", "bf16_compress"),
        Case("Reducer", "topk(bits=2)"),
        Case("Reducer, dropped and moved rounds", "allreduce"),
        Case("OuterOptimizer, overlap and moves", FEEDBACK),
    ],
    "an ordinary size": [Case("register_comm_hook", "bf16_compress", size="ordinary")],
    "three ranks": [Case("register_comm_hook", hook, 3) for hook in ("bf16_compress", FEEDBACK)],
    "two nodes of two ranks": [Case("attach to DDP", LEVELS, 4)],
    "simulated ranks": [
        *(Case("simulated", hook, 3) for hook in ("allreduce", "error_feedback(bf16_compress)", FEEDBACK)),
        Case("simulated", "powersgd(rank=4)"),
        Case("simulated", LEVELS, 4),
        *(Case("simulated Reducer, dropped rounds", hook) for hook in ("allreduce", FEEDBACK)),
    ],
    "managers": [Case("ch-ft", FEEDBACK), Case("ch-ft, failed attempt", "")],
}
LONG = {"three ranks", "managers"}


def check(cases: list[Case], count: int) -> None:
    seeds = list(range(FIRST, FIRST + count))
    print(f"seeds {seeds}")
    verdicts = run(cases, seeds)
    wrong = [f"{v.case}, seed {seed}: {text}" for v in verdicts for seed, text in v.wrong.items()]
    assert not wrong, "\n".join(wrong)
    assert [v.seeds for v in verdicts] == [count] * len(cases)
    assert sum(v.overtaken for v in verdicts) > 0, "every collective completed in order, so these runs show nothing"


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in LONG])
def test_late_runs_equal_plain_runs(group: str) -> None:
    cases = GROUPS[group]
    check(cases, 1 if len(cases) > 2 else 2)  # one seed for many cases, because the full set has two


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_late_runs_of_two_seeds_equal_plain_runs(group: str) -> None:
    if group == "managers":
        pytest.importorskip("torchft")
    check(GROUPS[group], 2)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_late_runs_of_a_sample_equal_plain_runs() -> None:
    pytest.importorskip("torchft")
    check(sample(FIRST, 30), 2)


@pytest.mark.parametrize(
    "case",
    [
        Case("register_comm_hook", "bf16_compress", plant="the last half decides"),
        Case("attach to DDP", FEEDBACK, plant="decodes too early"),
        Case("simulated", FEEDBACK, plant="decodes too early"),
    ],
    ids=lambda case: f"{case.way}, {case.plant}",
)
def test_a_planted_defect_is_found_within_a_few_seeds(case: Case) -> None:
    [verdict] = run([case], list(range(FIRST, FIRST + 6)))
    assert any("results differ" in text for text in verdict.wrong.values()), verdict


def test_no_hook_is_left_out() -> None:
    tested = {node["hook"] for case in every() if case.hook and case.hook not in FUNCTIONS for node in _nodes(case)}
    listed = {spec.name for spec in commhooks.list_hooks() if spec.kind not in ("outer", "gather")}
    assert not listed - tested


def _nodes(case: Case) -> list[dict[str, object]]:
    return list(nodes(canonical(case.expr))) if not case.way.startswith("FSDP1") else [{"hook": case.hook}]
