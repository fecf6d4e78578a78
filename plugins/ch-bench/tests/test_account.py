"""The account of a step and the table of the codec, on few numbers."""

import pytest
import torch
from programs.cost import account, codec

from ch_bench import launch

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def test_an_account_has_every_phase_and_the_passes() -> None:
    hooks = ["noop", "allreduce", "torch fp16", "quant4(error_feedback=True)"]
    found = launch.launch_and_read(account.worker, 2, hooks, 96, 1.0, 2)
    row = found["phases"]["quant4(error_feedback=True)"]
    assert row["step"] > row["hook"] > row["encode"] + row["decode"] > 0.0
    assert row["messages"] > 1
    passes = found["passes"]["quant4(error_feedback=True)"]
    assert {"pack and unpack", "round", "multiply and add", "cast to a narrow type", "between operations"} <= set(
        passes
    )
    assert all(seconds > 0.0 for seconds, _ in passes.values())
    assert len(account.phase_table(found).splitlines()) == 2 + len(hooks)
    assert "`quant4(error_feedback=True)`" in account.pass_table(found)


def test_the_table_of_the_codec_has_a_row_for_each_width() -> None:
    threads = torch.get_num_threads()
    found = codec.measure(0.0, 1 << 17)
    assert torch.get_num_threads() == threads
    assert len(codec.table(found).splitlines()) == 2 + len(codec.BITS) + 2
