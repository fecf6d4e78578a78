"""Every rank raises the same typed error for a refused model. The ranks stay in step afterwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard

import ch_fsdp
import commhooks
from ch_fsdp.torch_internals.param_groups import param_groups
from ch_testing import spawn
from commhooks import AttachError, HookConfigError, HookNotSupportedError, Plain, RankMismatchError

from .fsdp_kit import batch, gpt, line, shard1, shard2, square

pytestmark = [pytest.mark.timeout(180), pytest.mark.gloo]

Make = Callable[[], Any]
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.10 lacks the first option
PER_PARAMETER_MESHES = hasattr(_fsdp_common, "ShardPlacementResult")  # torch 2.10 lacks it


class Sums(ReduceScatter):
    """A custom reduce-scatter of the user."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def ddp_hook(state: Any, bucket: Any) -> Any:
    raise RuntimeError("never called")


def on_root(setter: str, value: Any) -> Make:
    def make() -> Any:
        model = shard2(gpt(), line(2))
        getattr(model, setter)(value)
        return model

    return make


def on_meta() -> Any:
    with torch.device("meta"):
        model = gpt()
    return shard2(model, line(2))


def two_meshes() -> Any:
    """Parameter groups over different process groups in one module, as expert parallelism makes them."""
    mesh, info = line(2), partial(_fsdp_common.FSDPMeshInfo, shard_mesh_dim=0)
    own, base = info(DeviceMesh.from_group(dist.new_group([0, 1]), torch.get_default_device().type)), info(mesh)

    def place(p: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), own if p.ndim == 1 else base)

    return fully_shard(nn.Linear(8, 8), mesh=mesh, shard_placement_fn=place)


def fsdp1() -> Any:
    return shard1(gpt(), ShardingStrategy.FULL_SHARD)


def hooked() -> Any:
    model = fsdp1()
    model.register_comm_hook(None, lambda state, grad, output: None)
    return model


def attached(make: Make) -> Make:
    def again() -> Any:
        model = make()
        commhooks.attach(model, "bf16_compress")
        return model

    return again


def fsdp2() -> Any:
    return shard2(gpt(), line(2))


POWERSGD = "powersgd(rank=2)"
CASES: list[tuple[Make, Any, dict[str, Any], type[Exception], str]] = [
    (gpt, "bf16_compress", {}, AttachError, "not wrapped"),
    # a hook of a kind that does not fit
    (fsdp2, ddp_hook, {}, HookNotSupportedError, "function"),
    (fsdp2, POWERSGD, {"axis": "shard"}, HookNotSupportedError, "cannot run on the shard axis"),
    (fsdp2, POWERSGD, {}, HookNotSupportedError, "there is none"),
    (fsdp2, "bf16_compress", {"axis": "rows"}, HookConfigError, "expected 'shard', 'replicate'"),
    # FSDP1, before any message
    *[
        (make, what, {}, HookNotSupportedError, r"fully_shard \(FSDP2\)(.|\n)*register_comm_hook")
        for make in (fsdp1, hooked, lambda: fsdp1().blocks[0])
        for what in ("bf16_compress", POWERSGD, ch_fsdp.bf16_compress_hook)
    ],
    # setters that affect the root only, and occupied slots
    (on_root("set_custom_reduce_scatter", Sums()), "bf16_compress", {}, AttachError, "one module only"),
    (on_root("set_allocate_memory_from_process_group_for_comm", True), "bf16_compress", {}, AttachError, "exclude"),
    (attached(fsdp2), "bf16_compress", {}, AttachError, "detach"),
    # models without gradients to reduce
    *([(two_meshes, "bf16_compress", {}, HookNotSupportedError, "root#0 .*root#1")] if PER_PARAMETER_MESHES else []),
    (on_meta, "bf16_compress", {}, AttachError, "meta device"),
    (
        lambda: replicate(
            nn.Linear(8, 8), mesh=init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("replicate",))
        ),
        "bf16_compress",
        {"axis": "shard"},
        HookNotSupportedError,
        "not sharded",
    ),
]


def body_refusals(rank: int, world: int) -> None:
    for number, (make, what, options, error, text) in enumerate(CASES):
        model = make()
        with pytest.raises(error, match=text):
            commhooks.attach(model, what, **options)
        check = torch.tensor([float(number)])
        dist.all_reduce(check)  # the ranks are in step
        assert check.item() == world * number


def test_every_rank_gets_the_same_error() -> None:
    spawn(body_refusals, 2, timeout=120)


def body_disagreement(rank: int, world: int) -> None:
    """If one rank differs, all ranks raise an error that names the difference."""
    fields = {
        "hook": lambda: commhooks.attach(fsdp2(), ["bf16_compress", "fp16_compress"][rank]),
        "axes": lambda: commhooks.attach(fsdp2(), "allreduce" if rank else "bf16_compress", axis="shard"),
    }
    for field, attach in fields.items():
        with pytest.raises(RankMismatchError, match="disagree on (.|\n)*" + ("hook" if field == "axes" else field)):
            attach()
    with pytest.raises(RankMismatchError, match=r"does not fit: (.|\n)*there is none"):
        commhooks.attach(fsdp2(), POWERSGD if rank else "bf16_compress")
    model = fsdp2()
    with pytest.raises(RankMismatchError):
        commhooks.attach(model, Plain(), verify_ranks=True) if rank else commhooks.attach(model, "bf16_compress")
    commhooks.attach(model, "bf16_compress")
    model(*batch(0, rank)).backward()


def body_uneven(rank: int, world: int) -> None:
    """Shard meshes of two ranks and of one rank."""
    pair, alone, across, other = (dist.new_group(ranks) for ranks in ([0, 1], [2], [0, 2], [1]))
    mesh = DeviceMesh.from_group(pair if rank < 2 else alone, torch.get_default_device().type)
    with pytest.raises(HookNotSupportedError, match="has no dimension called 'replicate'"):
        commhooks.attach(shard2(gpt(), mesh), POWERSGD)
    with pytest.raises(RankMismatchError, match=r"shard: |received along"):
        commhooks.attach(shard2(gpt(), mesh), POWERSGD, process_group=other if rank == 1 else across)


def body_replicas(rank: int, world: int) -> None:
    """Process groups whose ranks are no replicas, because they have other meshes or shards."""
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]  # ranks with different shards
    with pytest.raises(RankMismatchError, match=r"shard: rank. 0.* 0/2; rank. 1.* 1/2|received along|shard: "):
        commhooks.attach(shard2(gpt(), square()["shard"]), POWERSGD, process_group=crossed[rank in (1, 2)])
    with pytest.raises(RankMismatchError, match=r"parameters: |received along"):
        commhooks.attach(shard2(gpt(layers=1 + rank // 2), square()["shard"]), POWERSGD)
    taken = shard2(gpt(), square()["shard"])
    taken.set_all_reduce_hook(lambda shard: None)
    with pytest.raises(AttachError, match="one module only"):
        commhooks.attach(taken, "allreduce")


def test_one_wrong_rank() -> None:
    spawn(body_disagreement, 2)


def test_uneven_meshes() -> None:
    spawn(body_uneven, 3)


def test_replicas_that_are_none() -> None:
    spawn(body_replicas, 4)


def body_never_called(rank: int, world: int) -> None:
    """Check that every rank raises at the end of the first backward, and that training continues."""
    model = fsdp2()
    handle = commhooks.attach(model, "bf16_compress")
    model.set_custom_reduce_scatter(Sums())  # affects the root only
    with pytest.raises(AttachError, match="no longer in place on root"):
        model(*batch(0, rank)).backward()
    handle.detach()
    handle = commhooks.attach(shard2(gpt(), line(2)), "bf16_compress")
    with pytest.raises(AttachError, match="has not been called"):
        handle.assert_active()

    silent = fsdp2()
    handle = commhooks.attach(silent, "bf16_compress")
    comms = [group.torch_group for group in param_groups(silent)]
    ours = [group._reduce_scatter_comm for group in comms]
    loss = silent(*batch(0, rank))

    def unhook(grad: torch.Tensor) -> None:
        for group in comms:
            group._reduce_scatter_comm = Sums()
        torch.autograd.Variable._execution_engine.queue_callback(rehook)

    def rehook() -> None:
        for group, comm in zip(comms, ours, strict=True):
            group._reduce_scatter_comm = comm

    loss.register_hook(unhook)
    with pytest.raises(AttachError, match=r"never called by root, blocks\.0, blocks\.1"):
        loss.backward()


def test_a_group_that_never_called_in() -> None:
    spawn(body_never_called, 2)
