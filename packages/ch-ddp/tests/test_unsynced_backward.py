"""Gradients that DDP leaves local raise an AttachError, and all others are averaged as without a hook."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
from ch_testing import spawn

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

Found = dict[str, str]
"""Outcome by case: the type of the error, "same" if all ranks have the same gradients, or "local"."""


class Net(nn.Module):
    """Returns its output as a tensor, inside an object that torch cannot look into, or as an attribute of the model."""

    def __init__(self, output: str = "tensor", *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(2, 2)
        self.output, self.reentrant = output, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        y = checkpoint(self.a, x, use_reentrant=True) if self.reentrant else self.a(x)
        y = self.b(torch.tanh(y))
        if self.output == "object":
            return SimpleNamespace(y=y)
        if self.output == "attribute":
            self.y = y
            return None
        return y


def wrapped(net: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    options = {"find_unused_parameters": not options.get("static_graph", False), **options}
    return DistributedDataParallel(net if net is not None else Net(), **options)


def attached(net: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    model = wrapped(net, **options)
    commhooks.attach(model, "bf16_compress")
    return model


def inputs(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * seed + rank))


def step(model: nn.Module, rank: int, seed: int = 0) -> None:
    model.zero_grad()
    model(inputs(rank, seed)).square().mean().backward()


def outcome(model: nn.Module, action: Callable[[], object]) -> str:
    """Return the type of the error that ``action`` raises, or if all ranks have the same gradients after it."""
    try:
        action()
        found = ""
    except Exception as error:
        found = type(error).__name__
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    mine = torch.cat([*gradients, torch.zeros(1)])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return found or ("same" if torch.equal(rows[0], rows[1]) else "local")


# -- parameters that DDP does not know


def thaw(model: DistributedDataParallel) -> None:
    model.module.b.weight.requires_grad_(True)


def replace(model: DistributedDataParallel) -> None:
    model.module.b = nn.Linear(24, 24)


def add(model: DistributedDataParallel) -> None:
    model.module.b.bias = None
    model.module.b = nn.Sequential(model.module.b, nn.Linear(24, 24))


def convert(model: DistributedDataParallel) -> None:
    model.module.b.double().float()


def assign(model: DistributedDataParallel) -> None:
    model.module.load_state_dict({k: v.clone() for k, v in model.module.state_dict().items()}, assign=True)


def ignored(model: DistributedDataParallel) -> None:
    model.module.a.bias = nn.Parameter(torch.zeros(24))


def unknown(rank: int, world: int) -> Found:
    found: Found = {}
    for change in (replace, add, convert, assign, thaw):
        net = Net()
        net.b.weight.requires_grad_(change is not thaw)
        model = attached(net)
        step(model, rank)
        torch.manual_seed(1)
        change(model)
        found[change.__name__] = outcome(model, lambda: step(model, rank, 1))  # noqa: B023
        with model.no_sync():
            found[f"{change.__name__}, no_sync"] = outcome(model, lambda: step(model, rank, 1))  # noqa: B023
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["a.bias"])
    model = attached(net)
    ignored(model)
    found["a parameter in the place of an ignored one"] = outcome(model, lambda: step(model, rank))
    model = attached()
    model.requires_grad_(False).requires_grad_(True)
    found["frozen and thawed"] = outcome(model, lambda: step(model, rank))
    model.module.b.requires_grad_(False)
    found["frozen"] = outcome(model, lambda: step(model, rank, 2))
    for name, tensors in (("leaves", copies(model.module)), ("no leaves", {k: p * 1 for k, p in params(model)})):

        def called(tensors: dict[str, torch.Tensor] = tensors) -> None:
            value = torch.func.functional_call(model.module, tensors, (inputs(rank),)).sum()
            torch.autograd.grad(value, [tensors["a.weight"]], retain_graph=True)
            if tensors["a.weight"].is_leaf:
                value.backward()

        found[f"functional_call, {name}"] = outcome(model, called)
    return found


def params(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.module.named_parameters())


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}


def replicated(rank: int, world: int) -> Found:
    net = Net()
    net.unused.weight.requires_grad_(False)
    replicate(net, ignored_modules=[net.b], find_unused_parameters=True)
    commhooks.attach(net, "bf16_compress")
    found = {"an ignored module": outcome(net, lambda: step(net, rank))}
    net.a.weight = nn.Parameter(torch.ones(24, 24))
    return {**found, "replaced": outcome(net, lambda: step(net, rank))}


def test_a_gradient_that_ddp_never_averages_raises() -> None:
    for found in spawn(unknown, 2):
        for change in ("replace", "add", "convert", "assign", "thaw"):
            assert found.pop(change) == "AttachError", change
            assert found.pop(f"{change}, no_sync") == "local", change
        assert found == {
            "a parameter in the place of an ignored one": "local",
            "frozen and thawed": "same",
            "frozen": "same",
            "functional_call, leaves": "same",
            "functional_call, no leaves": "same",
        }


def test_replicate_leaves_out_modules_and_names_no_parameters() -> None:
    assert spawn(replicated, 2) == [{"an ignored module": "local", "replaced": "AttachError"}] * 2


def names_of_unknown(rank: int, world: int) -> str:
    model = attached()
    replace(model)
    with pytest.raises(commhooks.AttachError) as caught:
        step(model, rank)
    return str(caught.value)


def test_the_error_names_the_parameters() -> None:
    for text in spawn(names_of_unknown, 2):
        assert "bf16_compress does not average the gradient of b.weight, b.bias" in text
        assert "Wrap the model again" in text


# -- backwards that DDP leaves out


def tensor_of(model: DistributedDataParallel, output: Any) -> torch.Tensor:
    return output.y if model.module.output == "object" else model.module.y if output is None else output


def left_out(rank: int, world: int) -> Found:
    found: Found = {}
    x = inputs(rank)
    for output in ("tensor", "object", "attribute"):
        # DDP finds no gradients of a model whose outputs it does not find, so it must not look for unused parameters
        model = attached(Net(output), find_unused_parameters=False)
        for p in model.module.unused.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)

        def loss(module: nn.Module, model: DistributedDataParallel = model) -> torch.Tensor:
            return tensor_of(model, module(x)).square().mean() + sum(p.sum() for p in model.module.unused.parameters())

        def twice(model: DistributedDataParallel = model, loss: Any = loss) -> None:
            value = loss(model)
            value.backward(retain_graph=True)
            value.backward()

        found[f"{output}, once"] = outcome(model, lambda: loss(model).backward())  # noqa: B023
        found[f"{output}, twice"] = outcome(model, twice)
        found[f"{output}, the module"] = outcome(model, lambda: loss(model.module).backward())  # noqa: B023
        with model.no_sync():
            found[f"{output}, the module, no_sync"] = outcome(model, lambda: loss(model.module).backward())  # noqa: B023
        model.zero_grad()
        loss(model).backward()
        regulariser = sum(p.square().sum() for p in model.parameters())
        assert isinstance(regulariser, torch.Tensor)
        found[f"{output}, regulariser"] = outcome(model, regulariser.backward)
    return found


def test_backwards_that_ddp_leaves_out_raise_whatever_the_model_returns() -> None:
    for found in spawn(left_out, 2):
        for output in ("tensor", "object", "attribute"):
            assert found.pop(f"{output}, once") == "same", output
            assert found.pop(f"{output}, twice") == "AttachError", output
            assert found.pop(f"{output}, the module") == "AttachError", output
            assert found.pop(f"{output}, the module, no_sync") == "local", output
        assert found == {
            "tensor, regulariser": "same",
            "object, regulariser": "AttachError",
            "attribute, regulariser": "AttachError",
        }


def static(rank: int, world: int) -> Found:
    """A static graph averages in the first backward, which may be one that fills no gradient."""
    found: Found = {}
    model = attached(static_graph=True)
    x = inputs(rank).requires_grad_()

    def penalty() -> None:
        [inner] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        inner.square().sum().backward()

    found["penalty"] = outcome(model, penalty)
    model, seeds = attached(Net(reentrant=True), static_graph=True), iter(range(9))

    def with_gradient() -> None:
        model.zero_grad()
        model(inputs(rank, next(seeds)).requires_grad_()).square().mean().backward()

    for number in range(4):
        found[f"reentrant {number}"] = outcome(model, with_gradient)
    return found


def test_a_static_graph_that_averages_before_the_gradients_arrive_raises() -> None:
    for found in spawn(static, 2):
        assert found.pop("penalty") == "AttachError"
        assert set(found.values()) == {"same"}


# -- optimizers in the backward


def uses(model: nn.Module) -> list[Any]:
    """Step in hooks of the parameters, as torch's tutorial on memory does."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def use(p: torch.Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    return [p.register_post_accumulate_grad_hook(use) for p in model.parameters()]


def in_backward(rank: int, world: int) -> Found:
    found: Found = {}
    for when in ("before attach", "after attach"):
        for options in ({}, {"gradient_as_bucket_view": True}):
            model = wrapped(**options)
            if when == "before attach":
                uses(model)
            commhooks.attach(model, "bf16_compress")
            if when == "after attach":
                uses(model)
            found[f"{when}, {options}"] = outcome(model, lambda: step(model, rank))  # noqa: B023
    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = wrapped(net)
    found["torch's, before the first forward"] = outcome(model, lambda: commhooks.attach(model, "bf16_compress"))
    with torch.no_grad():
        model(inputs(rank))
    found["torch's, after the first forward"] = outcome(model, lambda: commhooks.attach(model, "bf16_compress"))
    model = attached()
    step(model, rank)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    found["torch's, after attach"] = outcome(model, lambda: step(model, rank))
    return found


def test_an_optimizer_that_steps_before_the_average_raises() -> None:
    for found in spawn(in_backward, 2):
        taken = [found.pop(f"torch's, {when} the first forward") for when in ("before", "after")]
        assert taken == ["SlotTakenError"] * 2
        assert set(found.values()) == {"AttachError"}, found
