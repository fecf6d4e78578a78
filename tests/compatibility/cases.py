"""Cases that try a public name for a few steps on two ranks, with the same code for their name and for ours.

A case is a function ``case(found, module, **options)``. ``found`` is the value of the name, and ``module`` its module. It returns
its observations, or raises. Both ranks must return the same ``checksum``.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, STEPS = 6, 64, 5
EXACT, HALF = 1e-6, 1e-2


class Wrong(Exception):
    """The name ran and gave wrong numbers."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(
        8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float32, device="cpu"
    )
    return (model(x) - x.flip(1)).pow(2).mean()


def expected(values: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return the average gradient over both ranks at these parameters."""
    model = network()
    model.load_state_dict(values)
    (sum(loss_of(model, step, rank) for rank in range(2)) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def bare(model: nn.Module) -> nn.Module:
    return model.module


def checksum(tensors: Iterator[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def wrap() -> DistributedDataParallel:
    """Return six layers in DDP with at least three buckets."""
    return DistributedDataParallel(network(), bucket_cap_mb=0.03)


def buckets(model: DistributedDataParallel) -> int:
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("initial_bucket_sizes", "")
    return len(sizes.split(","))


def train(
    model: DistributedDataParallel, tolerance: float | None, *, compresses: bool = False, steps: int = STEPS
) -> dict:
    """Train with a hook, and compare the averaged gradient with the exact one at every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, error = dist.get_rank(), 0.0
    for step in range(steps):
        values = {name: t.clone() for name, t in bare(model).state_dict().items()}
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        error = max(error, distance(dict(bare(model).named_parameters()), expected(values, step)))
        optimizer.step()
    if tolerance is not None and not error <= tolerance:
        raise Wrong(f"gradients differ from the average by {error:.1g}")
    if compresses and error < 1e-4:
        raise Wrong("nothing was compressed")
    return {"checksum": checksum(bare(model).parameters()), "buckets": buckets(model), "error": error}


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of gradients, infinite if one is missing."""
    if any(p.grad is None for p in found.values()):
        return float("inf")
    difference = torch.cat([(p.grad - exact[name]).flatten() for name, p in found.items()]).norm()
    return float(difference / torch.cat([g.flatten() for g in exact.values()]).norm())


# -- DDP hooks


def hook(found: Any, module: Any, tolerance: float = EXACT) -> dict:
    model = wrap()
    model.register_comm_hook(None, found)
    return train(model, tolerance)


def noop(found: Any, module: Any) -> dict:
    """Every rank keeps its gradient, so ranks differ on purpose."""
    model = wrap()
    model.register_comm_hook(None, found)
    for _ in range(3):  # DDP rebuilds its buckets in the second step
        model.zero_grad()
        loss_of(model, 0, dist.get_rank()).backward()
    own = network()
    loss_of(own, 0, dist.get_rank()).backward()
    if distance(dict(bare(model).named_parameters()), {n: p.grad for n, p in own.named_parameters()}) > EXACT:
        raise Wrong("the gradient is not this rank's own")
    return {"checksum": "", "buckets": buckets(model)}


def wrapper(found: Any, module: Any) -> dict:
    model = wrap()
    model.register_comm_hook(None, found(module.allreduce_hook))
    return train(model, HALF, compresses=True)


def powersgd(found: Any, module: Any) -> dict:
    """Compresses from step 2 of 5."""
    model = wrap()
    model.register_comm_hook(module.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), found)
    return train(model, 1.5, compresses=True)


def powersgd_state(found: Any, module: Any) -> dict:
    return powersgd(module.powerSGD_hook, module)


def by_type(found: Any, module: Any, member: str, tolerance: float | None = EXACT) -> dict:
    model = wrap()
    module.register_ddp_comm_hook(module.DDPCommHookType[member], model)
    if member == "NOOP":
        return {**train(model, None), "checksum": ""}  # ranks differ on purpose
    return train(model, tolerance)


def overlapped(found: Any, module: Any) -> dict:
    """Updates in the backward must equal a separate SGD on the average."""
    model = wrap()
    if module.__name__.startswith("torch"):
        model._register_fused_optim(torch.optim.SGD, lr=0.05)
        finish = int
    else:
        import commhooks

        optimizer = found(torch.optim.SGD(model.parameters(), lr=0.05), commhooks.attach(model, "allreduce"))
        finish = optimizer.step
    for step in range(STEPS):
        before = {name: t.clone() for name, t in bare(model).state_dict().items()}
        model.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        finish()
        exact = expected(before, step)
        for name, t in bare(model).state_dict().items():
            if not torch.allclose(t, before[name] - 0.05 * exact[name], atol=1e-6):
                raise Wrong("the update is not that of a separate optimizer")
    return {"checksum": checksum(bare(model).parameters()), "buckets": buckets(model)}


def zero_overlap(found: Any, module: Any) -> dict:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    model.register_comm_hook(None, found(allreduce_hook, model, zero))
    return train(model, None)


# -- local SGD


def local_sgd(found: Any, module: Any, subgroup: bool) -> dict:
    """Average over all ranks for two steps, then over the subgroup (also all ranks here)."""
    group = dist.new_group([0, 1]) if subgroup else None
    model = wrap()
    model.register_comm_hook(module.PostLocalSGDState(None, group, 2), module.post_localSGD_hook)
    return train(model, EXACT)


def averager(found: Any, module: Any, levels: bool = False) -> dict:
    """Parameters that differ by rank must become their mean at every second step, each in its own storage."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(dist.get_rank()))
            p.grad = torch.zeros_like(p)
    made = found({2: 2}) if levels else found(period=2)
    for _ in range(3):
        made.average_parameters(model.parameters())
    return averaged(model)


def averaging(found: Any, module: Any, grouped: bool = False) -> dict:
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(dist.get_rank()))
            p.grad = torch.zeros_like(p)
    params = list(model.parameters())
    found([{"params": params}] if grouped else iter(params), dist.group.WORLD)
    return averaged(model)


def averaged(model: nn.Module) -> dict:
    params = list(model.parameters())
    if any(not bool((p == 0.5).all()) for p in params):
        raise Wrong("the parameters are not the mean")
    if params[0].untyped_storage().nbytes() > params[0].numel() * params[0].element_size():
        raise Wrong("the values are right, but all parameters share one storage afterwards")
    return {"checksum": checksum(iter(params))}


def chosen(found: Any, module: Any) -> dict:
    model = network()
    loss_of(model, 0, 0).backward()
    if len(list(found(model.parameters()))) != 2 * LAYERS:
        raise Wrong("parameters are missing")
    return {"checksum": ""}


def local_optimizer(found: Any, module: Any, closure: bool = False) -> dict:
    """The result must equal a loop by hand: a local step, then the mean of the parameters."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as Theirs

    periodic = getattr(module, "PeriodicModelAverager", Theirs)
    model = network()
    optimizer = found(torch.optim.SGD(model.parameters(), lr=0.05), periodic(period=1))
    for step in range(STEPS):
        if closure:
            optimizer.step(lambda step=step: backward(model, step))
        else:
            backward(model, step)
            optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = checksum(model.parameters())
    backward(model, STEPS)
    optimizer.step()
    if checksum(model.parameters()) != before:
        raise Wrong("after load_state_dict, a new learning rate does not reach the optimizer")
    return {"checksum": before}


def backward(model: nn.Module, step: int) -> torch.Tensor:
    model.zero_grad()
    loss = loss_of(model, step, dist.get_rank())
    loss.backward()
    return loss


# -- FSDP1


def fsdp(found: Any, module: Any, hook: str, tolerance: float = 1e-4) -> dict:
    """Reduce several units separately; compare a step of SGD with that of one process."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    whole = hook == "allreduce_hook"
    strategy = ShardingStrategy.NO_SHARD if whole else ShardingStrategy.FULL_SHARD
    policy = ModuleWrapPolicy({nn.Linear})
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(
        network(), sharding_strategy=strategy, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )
    group = dist.group.WORLD
    state = module.LowPrecisionState(group) if "compress" in hook else module.DefaultState(group)
    model.register_comm_hook(state, getattr(module, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = {n: t.clone() for n, t in network().state_dict().items()}
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        exact = expected(start, step)
        start = {n: t - 0.05 * exact[n] for n, t in start.items()}
    with FullyShardedDataParallel.summon_full_params(model):
        found_now = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    worst = max(float((found_now[n] - t).norm() / (t - network().state_dict()[n]).norm()) for n, t in start.items())
    if not worst <= tolerance:
        raise Wrong(f"the update differs by {worst:.1g}")
    return {"checksum": checksum(iter(found_now.values())), "units": LAYERS}


# -- Lightning


def lightning_register(found: Any, module: Any) -> dict:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper

    model = wrap()
    found(model, ddp_comm_state=None, ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)
    return train(model, HALF, compresses=True)


def lightning_strategy(found: Any, module: Any) -> dict:
    """Lightning must call a hook on CPU."""
    calls = []

    def counted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        calls.append(1)
        return allreduce_hook(None, bucket)

    model = wrap()
    if module.__name__.startswith("lightning"):
        strategy = found(parallel_devices=[torch.device("cpu")] * 2, ddp_comm_hook=counted)
        strategy._model = model
        strategy._local_rank = dist.get_rank()
        strategy._register_ddp_hooks()
    else:
        callback = found(counted)
        strategy = type("Strategy", (), {"model": model})
        callback.on_fit_start(type("Trainer", (), {"strategy": strategy}), model)
    result = train(model, EXACT)
    if not calls:
        raise Wrong("the hook was not registered, and no error was raised")
    return result


def gather_grad(found: Any, module: Any) -> dict:
    x = torch.full((3,), float(dist.get_rank() + 1), dtype=torch.float32, device="cpu", requires_grad=True)
    everyone = found.apply(x, None)
    (everyone.pow(2).sum() * (dist.get_rank() + 1)).backward()
    if not torch.equal(everyone.detach(), torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.float32, device="cpu")):
        raise Wrong("not stacked in rank order")
    if not torch.equal(x.grad, 3 * 2 * x.detach()):
        raise Wrong("not the gradient of the sum of all ranks' losses")
    return {"checksum": ""}


# -- torchft


def managed(found: Any, module: Any, pure: bool = False) -> dict:
    """Train two replicas of one rank each, with torchft's Manager and lighthouse."""
    from ch_ft import local

    rank, place = dist.get_rank(), [None]
    options = {"min_replicas": 2, "replica": f"replica_{rank}", "use_async_quorum": False}
    net = network()
    state = {"state_dict": net.state_dict, "load_state_dict": net.load_state_dict}
    member = None
    if rank == 0:
        member = local(**state, **options)
        place = [member.address]
    dist.broadcast_object_list(place, 0)
    if member is None:
        member = local(lighthouse=place[0], **state, **options)
    with member:
        manager = member.manager
        model = found(manager, net) if pure else found(manager, net, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(STEPS):
            manager.start_quorum()
            values = {name: t.clone() for name, t in net.state_dict().items()}
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if not manager.should_commit():
                raise Wrong(f"step {step} was not committed")
            error = distance(dict(net.named_parameters()), expected(values, step))
            if not error <= EXACT:
                raise Wrong(f"gradients differ from the average by {error:.1g}")
            optimizer.step()
        dist.barrier()
    return {"checksum": checksum(net.parameters())}


# -- collective quantization


def quantized_gather(found: Any, module: Any) -> dict:
    outputs = [torch.empty(4, 4, dtype=torch.float32, device="cpu") for _ in range(2)]
    found(dist.all_gather, module.DQuantType.FP16)(
        outputs, torch.full((4, 4), float(dist.get_rank()), dtype=torch.float32, device="cpu")
    )
    if float(outputs[1].sum()) != 16.0:
        raise Wrong("not gathered")
    return {"checksum": ""}


def run(case: Callable[..., dict], target: Callable[[], tuple[Any, Any]], options: dict, rank: int, store: str) -> dict:
    """Run one case on one rank, in a new process."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as torchrun sets it
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found, module = target()
    return case(found, module, **options)
