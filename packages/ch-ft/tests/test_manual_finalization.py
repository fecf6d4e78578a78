"""Backwards of managed models that the caller finalises (torch 2.15), and that raise."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ch_ft import DistributedDataParallel
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import Plain

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="finalize_backward() came with torch 2.15"),
]


class Fails(Plain):
    """Raises on one member when armed."""

    name, armed = "fails", False

    def run(self, bucket: Any, ctx: Any) -> Any:
        if self.armed and not bucket.buffer.is_meta:
            raise ArithmeticError("too hot")
        yield from super().run(bucket, ctx)


def body(manager: SimulatedManager) -> list[str]:
    hooks = Fails(), Fails()
    towers = [DistributedDataParallel(manager, nn.Linear(4, 4), hook=hook) for hook in hooks]
    for model in towers:
        model.require_manual_backward_finalization = True
    said = []
    for step in range(4):
        hooks[0].armed = step == 1 and manager.name == "b"
        manager.start_quorum()
        try:
            (towers[0](torch.ones(2, 4)) * towers[1](torch.ones(2, 4))).sum().backward()
            for model in towers:
                model.finalize_backward()
            said.append("")
        except Exception as error:
            said.append(type(error).__name__)
        manager.should_commit()
    return said


def test_members_whose_hook_raised_continue() -> None:
    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    assert found["b"] == ["", "ArithmeticError", "", ""]
    assert found["a"][0] == found["a"][2] == found["a"][3] == ""
