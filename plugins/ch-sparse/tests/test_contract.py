"""The contract of every hook, with options that change the messages. tests/test_contract.py covers the defaults."""

import pytest

from ch_testing import HookContract

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]


class TestTwoBits(HookContract):
    expr = "topk(density=0.2, chunk=101, bits=2, exempt=False)"


class TestFedFromOutside(HookContract):
    expr = "error_feedback(topk(density=0.1, bits=2, feedback=False))"


class TestDecay(HookContract):
    expr = "topk(density=0.2, chunk=64, decay=0.95)"
    conservation = 0.1  # decay loses gradients on purpose


class TestWrapped(HookContract):
    expr = "fp16_wrapper(topk(density=0.2, chunk=128, bits=32))"


class TestRandomKWithoutFeedback(HookContract):
    expr = "bf16_wrapper(randomk(density=0.5, feedback=False, exempt=False))"
    mean = False  # the mean is its expectation
