"""Options of the quantized family pass the contract of every hook. tests/test_contract.py has their common forms."""

import pytest

from ch_quant.quantized import Quantized
from ch_testing import HookContract

pytestmark = pytest.mark.full


class TestQuant4FeedbackIn8Bits(HookContract):
    expr = "quant4(error_feedback=True, residual='int8')"
    conservation = 5e-3  # the residual also rounds


class TestQuant4InPieces(HookContract):
    """In the simulated ranks, every bucket with more than a few numbers is cut into pieces."""

    expr = "quant4(error_feedback=True, residual='int8')"
    conservation = 5e-3

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Quantized, "piece_bytes", 256)


class TestQuant4Rotated(HookContract):
    expr = "quant4(rotation='hadamard', error_feedback=True)"


class TestStochastic(HookContract):
    expr = "quant4(rounding='stochastic')"
    tolerance = 0.3


class TestEverythingAtOnce(HookContract):
    expr = "quant(bits=4, exempt=False, error_feedback=True, rotation='hadamard', rounding='stochastic')"
    tolerance = 0.9


class TestOneBitDrawn(HookContract):
    expr = "sign(error_feedback=False, rounding='stochastic')"
    tolerance = 20.0  # unbiased, with noise in proportion to a block's largest number
