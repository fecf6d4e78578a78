"""Ordinary loops train right or are refused. ``python -m tests.loops`` runs all of them."""

import os

import pytest

from tests.loops.bounds import LOOPS, WAYS
from tests.loops.run import drawn, judge, launch, resumed, run_all, table, unseen, wrong

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

SEED = int(os.environ.get("COMMHOOKS_LOOPS_SEED", "0"))
PLAIN = LOOPS[0]


def test_a_plain_loop_has_ddps_bits_with_an_exact_hook_and_other_bits_are_red() -> None:
    plain, other = launch(PLAIN, "plain"), launch(PLAIN, "plain", seed=1)
    hooked = launch(PLAIN, "exact")
    assert judge(PLAIN, "exact", hooked, [plain]).state == "right"
    assert judge(PLAIN, "exact", hooked, [other]).state == "RED"


@pytest.mark.full
def test_a_loop_that_is_killed_ends_with_the_same_bits_and_a_lost_state_is_seen() -> None:
    whole = launch(PLAIN, "feedback")
    assert resumed(PLAIN, whole, seed=1).state == "right"
    lost = resumed(PLAIN, whole, seed=1, state=False)
    assert lost.state == "RED" and "not the bits of the run that was not killed" in lost.text


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_eight_loops_drawn_by_a_seed() -> None:
    rows = run_all(drawn(SEED, 8), WAYS, jobs=2)
    assert not wrong(rows), f"drawn by seed {SEED}\n{table(rows, WAYS)}"


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_residual_with_its_sign_flipped_is_seen() -> None:
    ways = ("feedback", "attach")
    rows = run_all([PLAIN, *(loop for loop in LOOPS if loop.name in ("sam", "master_weights"))], ways, flipped=True)
    assert not unseen(rows), table(rows, ways)
