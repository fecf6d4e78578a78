"""Order of streams, waits of the host, TF32 and captures, which only a GPU shows. ``pytest --device cuda`` runs them.

``test_stream_order.py`` and ``test_imagined_gpu.py`` check order and waits on a CPU, on tensors without numbers.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.pytorch_hooks import reduction_of
from ch_core import SideStream
from ch_testing import spawn
from ch_testing.conservation import mean_residuals, unaccounted
from commhooks import Bucket, Composite, Reduction, Stages, StepContext

pytestmark = [pytest.mark.timeout(200), pytest.mark.nccl]
WIDTH, STEPS = 512, 4
CYCLES = 20_000_000  # of a delaying kernel: about 10 ms, longer than the work that the host starts after it
HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=4)", "quant8", "error_feedback(bf16_compress)"]
PLACES = ("gradient", "encode", "resume")


class Delayed(Composite):
    """A reduction that delays its stream before it encodes or after it is resumed."""

    name = "delayed"

    def __init__(self, inner: Reduction, place: str) -> None:
        super().__init__(inner)
        self._place = place

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        real = bucket.device.type != "meta"
        if real and self._place == "encode":
            torch.cuda._sleep(CYCLES)
        for requests in self.inner.start(bucket, ctx):
            yield requests
            if real and self._place == "resume":
                torch.cuda._sleep(CYCLES)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=1.5 * 4 * WIDTH**2 / 2**20, gradient_as_bucket_view=True)


def trained(model: nn.Module, rank: int) -> torch.Tensor:
    """Return the gradients of several steps, ``(steps, numbers)``."""
    found = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=False)
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        found.append(torch.cat([getattr(g, "_local_tensor", g).flatten() for g in grads]).clone())
    return torch.stack(found)


def on_ddp(rank: int, world: int, hook: str, places: tuple[str, ...], waits: bool = True) -> list[bool]:
    """Return, for each place of a delay, if the gradients have the bits of a run without delay."""
    found = []
    for place in ("", *places):
        model = ddp()
        commhooks.attach(model, Delayed(reduction_of(hook), place))
        for layer in model.module:
            if place == "gradient":
                layer.register_full_backward_hook(lambda *_: torch.cuda._sleep(CYCLES))
        waiting = mock.patch.object(SideStream, "_on", own_stream) if place and not waits else mock.patch.dict({}, {})
        with waiting:
            found.append(trained(model, rank))
    return [torch.equal(each, found[0]) for each in found[1:]]


def own_stream(side: SideStream, tensor: torch.Tensor) -> Any:
    """Stand for ``SideStream._on`` that does not wait for the current stream: the control of the test."""
    return torch.cuda.stream(side._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device)))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_slow_kernel_before_any_hand_over_changes_no_bit(hook: str) -> None:
    assert spawn(on_ddp, 2, hook, PLACES, timeout=180.0) == [[True] * len(PLACES)] * 2


def test_without_the_wait_of_the_side_stream_bits_change() -> None:
    assert spawn(on_ddp, 2, "powersgd(rank=4)", ("gradient",), False, timeout=180.0) != [[True]] * 2


def on_replicas(rank: int, world: int, hook: str) -> bool:
    """Delay the stream on which FSDP2 calls the hook of its replicas."""
    from ch_fsdp.replicate_axis import ReplicateHook

    found, call = [], ReplicateHook.__call__
    for cycles in (0, CYCLES):

        def delayed(self: Any, shard: Any, cycles: int = cycles) -> None:
            torch.cuda._sleep(cycles)
            call(self, shard)

        model = net()
        mesh = init_device_mesh(torch.get_default_device().type, (world, 1), mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        commhooks.attach(model, hook, axis="replicate")
        with mock.patch.object(ReplicateHook, "__call__", delayed):
            found.append(trained(model, rank))
    return torch.equal(*found)


@pytest.mark.parametrize("hook", ["allreduce", "quant4", "powersgd(rank=4)"])
def test_a_slow_stream_of_fsdp2_changes_no_bit(hook: str) -> None:
    assert spawn(on_replicas, 2, hook, timeout=180.0) == [True, True]


def waits(rank: int, world: int, hook: str, watched: str) -> None:
    """Run whole backwards in which torch reports each wait of the host as an error."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    options: dict[str, Any] = {"": {}, "optimizer": {"optimizer": optimizer}, "scaler": {"scaler": scaler}}[watched]
    handle = commhooks.attach(model, hook, **options)
    for step in range(7):
        model.zero_grad(set_to_none=False)
        loss = scaler.scale(model(torch.ones(8, WIDTH)).square().mean())
        torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")  # warm-up may copy tables
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        scaler.step(optimizer)
        scaler.update()
    handle.check()


@pytest.mark.parametrize("watched", ["", "optimizer", "scaler"])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_host_waits_for_nothing_in_a_backward(hook: str, watched: str) -> None:
    spawn(waits, 2, hook, watched, timeout=180.0)


def in_tf32(rank: int, world: int, hook: str) -> float:
    """Return the part of the gradients that is neither passed on nor in the residual."""
    torch.set_float32_matmul_precision("medium")
    model = ddp()
    handle = commhooks.attach(model, hook)
    like = {name: p.detach() for name, p in model.module.named_parameters()}
    applied, own = ({name: torch.zeros_like(p) for name, p in like.items()} for _ in range(2))
    plain = net()
    for step in range(8):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        for one, total in ((model.module, applied), (plain, own)):
            one.zero_grad()
            (model if one is model.module else plain)(x).square().mean().backward()
            for name, p in one.named_parameters():
                total[name] += p.grad
    handle.commit()
    rows = {name: row["residual"].cpu() for name, row in handle.state_dict()["entries"].items() if "residual" in row}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, ({name: t.cpu() for name, t in own.items()}, rows))
    host = {name: t.cpu() for name, t in like.items()}
    wanted = {name: torch.stack([mine[name] for mine, _ in every]).sum(0).div(world) for name in like}
    done = {name: t.cpu() for name, t in applied.items()}
    gaps = unaccounted(wanted, done, mean_residuals([kept for _, kept in every], host))
    return max(gap / float(wanted[name].norm()) for name, gap in gaps.items())


@pytest.mark.parametrize("hook", ["powersgd(rank=4)", "batched_powersgd(rank=4)"])
def test_nothing_is_lost_under_tf32(hook: str) -> None:
    assert max(spawn(in_tf32, 2, hook, timeout=180.0)) < 1e-4


def captured(rank: int, world: int) -> str:
    """Return the error of a backward inside a capture."""
    model = ddp()
    commhooks.attach(model, "allreduce")
    trained(model, rank)
    x = torch.ones(8, WIDTH)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x).square().mean().backward()
    except commhooks.CommHooksError as error:
        return str(error)
    except RuntimeError as error:  # torch adds its own error about the cut capture
        return str(error.__context__ or error)
    return ""


def test_a_capture_is_refused_with_a_reason() -> None:
    for said in spawn(captured, 2, timeout=100.0):
        assert "graph" in said
