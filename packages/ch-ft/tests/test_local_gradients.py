"""`commhooks run --outer` refuses models over a manager by name."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ch_ft import DistributedDataParallel
from ch_run.auto_attach import auto_attach
from ch_run.import_watch import watch
from ch_run.settings import Settings
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import HookNotSupportedError

pytest.importorskip("ch_outer")


@pytest.fixture(autouse=True)
def outer() -> Iterator[None]:
    os.environ.update(Settings("", outer="diloco(every=2)").environ())
    watch()
    auto_attach.cache_clear()
    yield
    del os.environ["COMMHOOKS_OUTER"]
    auto_attach.cache_clear()


def forward(model: torch.nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(HookNotSupportedError) as raised:
        model(torch.ones(2, 3))
    del optimizer
    return str(raised.value)


def test_a_model_over_a_manager_is_refused_with_the_way_to_train_it() -> None:
    def body(manager: SimulatedManager) -> str:
        return forward(DistributedDataParallel(manager, torch.nn.Linear(3, 1)))

    with SimulatedCluster() as cluster:
        [text] = cluster.run({"a": body}).values()
    assert "vote on every round" in text and "ranks=ch_outer.Members(manager)" in text


def test_so_is_a_model_of_torchft() -> None:
    pytest.importorskip("torchft")
    from torchft.ddp import DistributedDataParallel as Managed

    manager: Any = object()  # it is not called before the first backward
    assert "ranks=ch_outer.Members(manager)" in forward(Managed(manager, torch.nn.Linear(3, 1)))
