"""Parameters that are frozen at wrapping and trained later, or added later."""

import pytest
import torch

from ch_ft import DistributedDataParallel, PureDistributedDataParallel
from ch_testing import SimulatedCluster, SimulatedManager
from commhooks import AttachError, Plain, Reduction


class Growing(torch.nn.Module):
    """Has two layers, of which the second starts frozen. A test may add a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        for layer in self.layers:
            torch.nn.init.eye_(layer.weight)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_pure_model_averages_parameters_thawed_or_added_after_wrapping() -> None:
    def body(manager: SimulatedManager) -> list[list[float]]:
        module = Growing()
        model = PureDistributedDataParallel(manager, module)
        module.layers[1].weight.requires_grad_(True)
        module.layers.append(torch.nn.Linear(4, 4, bias=False))
        torch.nn.init.eye_(module.layers[2].weight)
        manager.start_quorum()
        for _ in range(2):  # the second backward adds the mean once more, so the parameter is watched once
            model(torch.full((1, 4), 1.0 if manager.name == "a" else 3.0)).sum().backward()
        return [layer.weight.grad.unique().tolist() for layer in module.layers]

    with SimulatedCluster() as cluster:
        results = cluster.run(dict.fromkeys("ab", body))
    assert results["a"] == results["b"] == [[4.0]] * 3


@pytest.mark.parametrize("hook", [None, Plain()])
def test_ddp_refuses_parameters_thawed_or_added_after_wrapping(hook: Reduction | None) -> None:
    """DDP's reducer would average only the other parameters, without an error, while the members drift apart."""
    with SimulatedCluster() as cluster:
        manager = cluster.join("a")
        model = DistributedDataParallel(manager, Growing(), hook=hook)
        manager.start_quorum()
        model(torch.ones(1, 4)).sum().backward()
        model.module.layers[0].weight.requires_grad_(False)  # frozen parameters count as unused
        model(torch.ones(1, 4))
        model.module.layers[1].weight.requires_grad_(True)
        with torch.no_grad():
            model(torch.ones(1, 4))
        with pytest.raises(AttachError, match=r"layers\.1\.weight: thawed or added after the model was wrapped"):
            model(torch.ones(1, 4))
        again = DistributedDataParallel(manager, model.module)
        again(torch.ones(1, 4)).sum().backward()
