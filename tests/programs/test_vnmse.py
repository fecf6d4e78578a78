"""The error of one exchange: the program's figures, on numbers made here, within what is promised."""

import itertools
from functools import partial

import pytest

from ch_bench.convergence import vnmse

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


def test_a_row_has_its_option_beside_the_others():
    assert vnmse.expression("quant(bits=3)%s", "GPT", True) == "quant(bits=3, rotation='hadamard')"
    assert vnmse.expression("quant4%s", "GPT", False) == "quant4"
    assert vnmse.expression("", "normal", True) == "policy({'a': quant8, '*': quant4(rotation='hadamard')})"
