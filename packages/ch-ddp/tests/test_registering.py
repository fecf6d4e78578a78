"""Lightning's helpers, PyTorch's registration form, and the installed frameworks themselves."""

import functools
import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_ddp import AllGatherGrad, DDPCommHookType, register_ddp_comm_hook
from ch_testing import spawn

pytestmark = pytest.mark.timeout(180)


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 4))
    return DistributedDataParallel(model, bucket_cap_mb=0.001)


def gradient(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 16, generator=generator)).pow(2).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def halved(factor: float, state: Any, bucket: dist.GradBucket) -> Any:
    """A foreign hook with a private state. It works only as a partial."""
    state.append(bucket.index())
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer().mul_(factor))
    return done


def body_forms(rank: int, world: int) -> None:
    exact = gradient(wrapped(), rank)
    forms: list[tuple[str, Any]] = [
        ("by name", lambda m: register_ddp_comm_hook(m, ddp_comm_hook="allreduce")),
        ("an expression", lambda m: register_ddp_comm_hook(m, None, "bf16_wrapper(allreduce)")),
        ("a dict", lambda m: register_ddp_comm_hook(m, ddp_comm_hook={"*.bias": "allreduce", "*": "fp16_compress"})),
        ("our callable", lambda m: register_ddp_comm_hook(m, dist.group.WORLD, ch_ddp.fp16_compress_hook)),
        ("names", lambda m: register_ddp_comm_hook(m, None, "allreduce", "bf16_wrapper(accumulate='fp32')")),
        (
            "a callable and a name",
            lambda m: register_ddp_comm_hook(m, None, ch_ddp.allreduce_hook, "fp16_wrapper"),
        ),
        (
            "a name and a callable",
            lambda m: register_ddp_comm_hook(m, None, "allreduce", ch_ddp.bf16_compress_wrapper),
        ),
        (
            "callables",
            lambda m: register_ddp_comm_hook(m, None, ch_ddp.allreduce_hook, ch_ddp.fp16_compress_wrapper),
        ),
        (
            "state= as Lightning's page prints it",
            lambda m: register_ddp_comm_hook(model=m, state=dist.group.WORLD, ddp_comm_hook=ch_ddp.fp16_compress_hook),
        ),
        ("PyTorch's, a group", lambda m: register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, m, dist.group.WORLD)),
        (
            "PyTorch's, by keyword",
            lambda m: register_ddp_comm_hook(comm_hook_type=DDPCommHookType.FP16_COMPRESS, model=m, state=None),
        ),
    ]
    for name, register in forms:
        model = wrapped()
        handle = register(model)
        got = gradient(model, rank)
        handle.assert_active()
        assert (got - exact).norm() / exact.norm() < 2e-2, name
        assert handle.stats()["steps"] == 1, name
    model = wrapped()
    seen: list[int] = []
    handle = register_ddp_comm_hook(model, seen, functools.partial(halved, 0.5))
    gradient(model, rank)
    handle.assert_active()
    assert seen
    assert register_ddp_comm_hook(wrapped(), None, None, "bf16_wrapper") is None
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType as Theirs

    assert register_ddp_comm_hook(Theirs.NOOP, wrapped()).expr == "noop"
    with pytest.raises(commhooks.AttachError):
        register_ddp_comm_hook(nn.Linear(2, 2), ddp_comm_hook="allreduce")
    half = dist.new_group([rank], use_local_synchronization=True)
    model = wrapped()
    register_ddp_comm_hook(model, half, "allreduce")  # the state is the group to reduce over
    alone = wrapped().module
    assert torch.equal(gradient(model, rank), gradient(alone, rank))


@pytest.mark.gloo
def test_every_form_of_registration() -> None:
    spawn(body_forms, 2)


def test_the_ten_members_are_pytorchs() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType as Theirs

    assert [m.name for m in DDPCommHookType] == [m.name for m in Theirs]
    for member in DDPCommHookType:
        try:
            assert commhooks.create(member.value).expr == member.value
        except commhooks.UnknownHookError as error:  # the hook's package is not installed
            assert "pip install" in str(error)


def test_neither_form() -> None:
    import enum

    other = enum.Enum("Other", "ONE")
    with pytest.raises(commhooks.HookConfigError, match="Legal members: ALLREDUCE"):
        register_ddp_comm_hook(other.ONE, nn.Linear(2, 2))
    with pytest.raises(commhooks.HookConfigError, match="Give the name of a wrapper, or a callable"):
        register_ddp_comm_hook(nn.Linear(2, 2), None, "noop", 3)
    with pytest.raises(commhooks.HookConfigError, match="ddp_comm_state= and state= are two names of one argument"):
        register_ddp_comm_hook(nn.Linear(2, 2), [1], "noop", state=[2])


def body_gather(rank: int, world: int) -> None:
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    group = dist.new_group(pair, use_local_synchronization=True)
    weights = torch.arange(1.0, 1 + world).view(-1, 1, 1) * (1 + rank)  # differs from rank to rank
    for given, members in ((None, list(range(world))), (group, pair)):
        x = torch.full((3, 2), float(rank)).t().requires_grad_()  # not contiguous
        everyone = AllGatherGrad.apply(x, given) if given is not None else AllGatherGrad.apply(x)
        assert everyone.shape == (len(members), 2, 3)
        assert everyone[:, 0, 0].tolist() == [float(r) for r in members]
        (everyone * weights[: len(members)]).sum().backward()
        position = members.index(rank)
        assert torch.equal(x.grad, torch.full((2, 3), sum(1.0 + r for r in members) * (1 + position)))
    scalar = torch.tensor(float(rank), dtype=torch.float64, requires_grad=True)
    AllGatherGrad.apply(scalar).prod().backward()
    others = torch.tensor([float(r) for r in range(world) if r != rank]).prod()
    assert scalar.grad == world * others
    y = torch.ones(2, requires_grad=True)
    (g,) = torch.autograd.grad(AllGatherGrad.apply(y).pow(2).sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.gloo
def test_all_gather_with_the_right_gradient_on_the_group_it_is_given() -> None:
    spawn(body_gather, 4)


# -- the frameworks


def as_torchrun(rank: int, world: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip


def body_lightning(rank: int, world: int, folder: str) -> None:
    as_torchrun(rank, world)
    import lightning.pytorch as pl

    from ch_ddp.frameworks.lightning import CommHookCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 4))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), batch_size=2)
    callback, module = CommHookCallback("bf16_compress"), Module()
    for epochs in (1, 2):
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, max_epochs=epochs, callbacks=[callback], default_root_dir=folder,
            strategy=pl.strategies.DDPStrategy(bucket_cap_mb=0.001), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data)
        callback.handle.assert_active()
        stats = callback.handle.stats()
        assert stats["compressed_steps"] == stats["steps"] > 0
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, torch.cat([p.detach().flatten() for p in module.parameters()]))
        assert all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_calls_the_hook(tmp_path: Any) -> None:
    spawn(body_lightning, 2, str(tmp_path), timeout=150)


def body_accelerate(rank: int, world: int) -> None:
    as_torchrun(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 800), nn.Tanh(), nn.Linear(800, 400), nn.Tanh(), nn.Linear(400, 400))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    handle = register_ddp_comm_hook(model, ddp_comm_hook="bf16_compress(accumulate='fp32')")
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 16, generator=generator)).pow(2).mean())
        optimizer.step()
    handle.assert_active()
    assert handle.stats()["compressed_steps"] == 3
    values = AllGatherGrad.apply(torch.cat([p.detach().flatten() for p in plain.parameters()]))
    assert torch.equal(values[0], values[1])


@pytest.mark.gloo
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerate_calls_the_hook() -> None:
    spawn(body_accelerate, 2, timeout=150)
