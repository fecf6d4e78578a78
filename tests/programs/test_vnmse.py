"""The error of one exchange: the program's figures, on numbers made here, within what is promised."""

import itertools
from functools import partial

import pytest

from ch_bench.convergence import unsent, vnmse

pytestmark = pytest.mark.timeout(100)
ROTATED = "quant4(rotation='hadamard')"


def error(expr: str, first: bool) -> float:
    return vnmse.error(vnmse.normal(), partial(vnmse.handle, expr, first), first)[0]


def test_four_bits_of_independent_ranks():
    one, both = error(ROTATED, True), error(ROTATED, False)
    assert 1.0e-2 < one <= 1.4e-2
    assert 2.0e-2 < both <= 2.8e-2


def test_every_bit_is_worth_its_bytes():
    found = [error(expr, False) for expr in ("quant8", "quant4", "quant(bits=3)", "quant2(error_feedback=False)")]
    found.append(error("sign(error_feedback=False)", False))
    assert all(b > 1.5 * a for a, b in itertools.pairwise(found))
    assert found[0] < 1.2e-4
    assert found[-1] < 0.7


def test_what_a_residual_in_8_bits_forgets_over_steps():
    """And what feedback is for: the error of a sum of steps grows without it as their number, and stays with it."""
    run = (vnmse.normal(seed)[0] for seed in range(12))
    found = unsent.measure(([{"w": one["a"][:64] + 0.1} for one in every] for every in run), vnmse.RANKS)
    first, last = ({label: points[at] for label, points in found.items()} for at in (0, -1))
    assert last["4 bits, feedback"].unsent < 0.5 * first["4 bits, feedback"].unsent
    assert last["4 bits, feedback"].forgotten < 1e-6
    assert 1e-5 < last["4 bits, feedback int8"].forgotten < 0.02 * last["4 bits"].unsent + 1e-3
    assert last["4 bits"].noise < last["4 bits, feedback"].noise < 1.3 * last["4 bits"].noise
    assert last["4 bits, plain feedback"].noise > 1.7 * last["4 bits"].noise


def test_a_row_has_its_option_beside_the_others():
    assert vnmse.expression("quant(bits=3)%s", "GPT", True) == "quant(bits=3, rotation='hadamard')"
    assert vnmse.expression("quant4%s", "GPT", False) == "quant4"
    assert vnmse.expression("", "normal", True) == "policy({'a': quant8, '*': quant4(rotation='hadamard')})"
