"""Compares the private parts of torch that this package reads with the public API. Run it first on a new torch."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ch_fsdp
import commhooks
from ch_fsdp.torch_internals.param_groups import param_groups, premultiplier
from ch_testing import spawn

from .fsdp_kit import batch, gpt, line, shard2, square

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


def body_groups(rank: int, world: int) -> None:
    model = shard2(gpt(), line(2))
    groups = {group.name: group for group in param_groups(model)}
    assert list(groups) == ["root", "blocks.0", "blocks.1"]
    public = dict(model.named_parameters())
    seen: dict[str, tuple[int, ...]] = {}
    for group in groups.values():
        assert group.shard_group.size() == 2
        assert not group.native_replicas
        layout = group.shards(torch.float32)
        for p in layout.params:
            name, _, where = p.name.partition("[")
            assert where == f"{rank}/2]"
            assert p.shape == tuple(public[name].to_local().shape)
            seen[name] = p.shape
        seen_shapes = group.global_shapes()
        assert all(tuple(public[name].shape) == shape for name, shape in seen_shapes.items())
    assert set(seen) == set(public)

    # The private fields hold the values of the public setters, and the flat shard has the layout's length.
    lengths: dict[str, int] = {}

    def hook_of(name: str) -> Callable[[torch.Tensor], None]:
        def hook(shard: torch.Tensor) -> None:
            lengths[name] = shard.numel()
            for p in groups[name].shards(shard.dtype).params:
                lengths[p.name] = shard.as_strided(p.shape, p.stride, p.offset).numel()

        return hook

    for name, module in (("root", model), ("blocks.0", model.blocks[0]), ("blocks.1", model.blocks[1])):
        hook = hook_of(name)
        module.set_all_reduce_hook(hook)
        assert groups[name].hook is hook
        marker = object()
        module.set_custom_reduce_scatter(marker)
        assert groups[name].comm is marker
        groups[name].comm = type(param_groups(shard2(gpt(), line(2)))[0].comm)()
    model(*batch(0, rank)).backward()
    for name, group in groups.items():
        assert lengths[name] == group.shards(torch.float32).numel
        assert group.unsharded_numel() == 2 * lengths[name]
        assert group.reduces
        assert group.all_reduces
    model.set_requires_gradient_sync(False)
    assert not groups["root"].reduces


class Sorted(nn.Module):
    """Lists its parameters in another order than its modules, and shares one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.again = (nn.Linear(4, 4) for _ in range(3))
        self.again.weight = self.up.weight

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(sorted(super().named_parameters(*args, **kwargs)))


def body_names(rank: int, world: int) -> None:
    model = fully_shard(Sorted(), mesh=line(2))
    [group] = param_groups(model)
    params = group.params_by_name()
    assert params.keys() == {"up.weight", "up.bias", "down.weight", "down.bias", "again.bias"}
    assert all(params[name] is param for name, param in model.named_parameters())
    assert sorted(group.positions().values()) == list(range(5))


def body_square(rank: int, world: int) -> None:
    assert all(group.native_replicas for group in param_groups(shard2(gpt(), square())))


def test_fsdp2_groups() -> None:
    spawn(body_groups, 2)


def test_names_belong_to_parameters_and_not_to_their_places() -> None:
    spawn(body_names, 2)


def test_a_2d_mesh_has_replicas() -> None:
    spawn(body_square, 4)


def test_premultiplier_and_names() -> None:
    assert premultiplier(dist._make_nccl_premul_sum(0.125)) == 0.125
    names = {spec.name for spec in commhooks.list_hooks(kind="fsdp") if spec.provider == "ch-fsdp"}
    assert names == {"allreduce", "reduce_scatter", "fp16_compress", "bf16_compress"}
    assert commhooks.get("bf16", kind="fsdp").__name__ == "bf16_compress_hook"


def test_no_other_module_touches_private_parts_of_torch() -> None:
    root = Path(ch_fsdp.__file__).parent
    found = []
    for path in root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private = names[0] == "torch" and any(name.startswith("_") for name in names)
            else:  # a private attribute of another object than `self` or a super class
                private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[:2] != "__"
                private = private and not (isinstance(node.value, ast.Name) and node.value.id == "self")
                private = private and not isinstance(node.value, ast.Call)
            if private:
                found.append(f"{path.name}:{node.lineno}")
    assert not found, "move this into ch_fsdp.torch_internals"
