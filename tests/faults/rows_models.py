"""B9 to B12: checkpoints, unusual parameters, one state for two models, copies and compiled models."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from kit import FUNCTION, Run, Silent, big, compressor, deadline, gradient, row, torch_state
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commhooks

POWER = {"rank": 2, "start_iter": 2, "min_compression_rate": 1}


def saved(run: Run, state: Any) -> str:
    path = f"{run.folder}/state{run.rank}"
    torch.save(commhooks.state_dict(state) if run.ours else state, path)
    dist.barrier()
    return path


@row("B9.1", "hook state loaded with torch.load's defaults")
def load_defaults(run: Run) -> str:
    model = run.model(many=False)
    state = run.builtin(model, "powersgd", **POWER)
    for seed in range(4):
        run.step(model, seed)
    loaded = torch.load(saved(run, state))
    if run.ours:
        commhooks.load_state_dict(state, loaded)
    return "right"


@row("B9.2", "resume from a saved state with several buckets")
def resume(run: Run) -> str:
    model = run.model(many=False)
    if not run.ours:  # PyTorch's run fails with several buckets (B8.1), so each hook call waits here
        state = torch_state(**POWER)
        model = run.model()
        model.register_comm_hook(state, waited)
    else:
        model = run.model()
        state = commhooks.attach(model, compressor(**POWER), timeout=deadline())
    for seed in range(4):
        run.step(model, seed)
    path = saved(run, state)
    fresh = run.model()
    loaded = torch.load(path, weights_only=run.ours)
    if run.ours:
        handle = commhooks.attach(fresh, compressor(**POWER), timeout=deadline())
        if handle.reduction.granularity == "bucket":  # equal bits need equal buckets, which DDP makes after one step
            run.step(fresh, 0)
            run.step(fresh, 0)
        handle.load_state_dict(loaded)
    else:
        fresh.register_comm_hook(loaded, waited)
    for seed in range(4, 7):
        a, b = run.step(model, seed), run.step(fresh, seed)
        if run.ours and not torch.equal(a, b):
            raise Silent("not the run that was saved")
    return "right"


def waited(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


@row("B9.3", "ranks load one another's states")
def swapped(run: Run) -> str:
    model = run.model(many=False)
    state = run.builtin(model, "powersgd", **POWER)
    for seed in range(4):
        run.step(model, seed)
    saved(run, state)
    other = torch.load(f"{run.folder}/state{run.rank ^ 1}", weights_only=run.ours)
    if run.ours:
        commhooks.load_state_dict(state, other)
    raise Silent("each rank has the other's residual")


# -- unusual parameters


def unusual(run: Run, param: nn.Parameter, use: Any, *, steps: int = 4, tolerance: float = 1e-3) -> str:
    """Run PowerSGD with a parameter whose gradient equals ``use``'s."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.odd = nn.Linear(80, 64, bias=False), param

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).sum() + use(self.odd, x)

    model = run.model(Model(), many=False)
    run.builtin(model, "powersgd", **POWER)
    for seed in range(steps):
        model.zero_grad()
        model(run.data(seed)).backward()
        parts = []
        for rank in range(run.world):
            (part,) = torch.autograd.grad(use(param, run.data(seed, rank)), [param])
            parts.append(part)
        mean = torch.stack(parts).mean(0).reshape(-1)
        if mean.numel():
            got = param.grad.reshape(-1)  # type: ignore[union-attr]
            run.expect(got, mean, tolerance, f"step {seed}")
    return "right"


@row("B10.1", "PowerSGD: empty parameter")
def empty(run: Run) -> str:
    return unusual(run, nn.Parameter(torch.zeros(0, 8)), lambda p, x: p.sum() * x.sum())


@row("B10.2", "PowerSGD: scalar parameter")
def scalar(run: Run) -> str:
    return unusual(run, nn.Parameter(torch.tensor(1.0)), lambda p, x: p * x.sum())


@row("B10.3", "PowerSGD: parameter stored by columns, gradient of rank 1")
def columns(run: Run) -> str:
    param = nn.Parameter(torch.randn(48, 80).t())  # (80, 48)
    return unusual(run, param, lambda p, x: (x.mean(0).sign() @ p * torch.arange(48.0)).sum(), tolerance=1.2)


@row("B10.4", "PowerSGD: sparse embedding")
def sparse(run: Run) -> str:
    return embedding(run, "powersgd", **POWER)


@row("B10.5", "fp16: sparse embedding")
def sparse_fp16(run: Run) -> str:
    return embedding(run, "fp16_compress")


def embedding(run: Run, hook: str, **options: Any) -> str:
    torch.manual_seed(0)
    module = nn.EmbeddingBag(9, 16, sparse=True, mode="sum")
    model = run.model(module, many=False)
    run.builtin(model, hook, **options)
    for seed in range(4):
        model.zero_grad()
        model(torch.tensor([[run.rank, 2 + run.rank]])).sum().backward()
        got = module.weight.grad.to_dense()  # type: ignore[union-attr]
        mean = torch.zeros(9, 16)
        for rank in range(run.world):
            mean[[rank, 2 + rank]] += 1.0 / run.world
        run.expect(got, mean, 1e-2, f"step {seed}")
    return "right"


@row("B10.6", "fp16: float64 parameters")
def doubles(run: Run) -> str:
    model = run.model(big().double(), many=False)
    run.builtin(model, "fp16_compress")
    model(run.data(1).double()).pow(2).mean().backward()
    if gradient(model).dtype != torch.float64:
        raise Silent("another dtype")
    return "right (lossy, as asked)"


# -- one state, two models; copies; compiled


@row("B11.1", "one PowerSGD state for two models of equal shape")
def shared(run: Run) -> str:
    first, second = run.model(many=False), run.model(many=False)
    state = run.builtin(first, "powersgd", **POWER)
    if run.ours:
        commhooks.attach(second, compressor(**POWER), state=state.state, timeout=deadline())
    else:
        second.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for seed in range(4):
        run.step(first, seed)
        run.step(second, 100 + seed)
    raise Silent("each model is given the other's residual")


@row("B11.2", "one PowerSGD state for two models, through register_comm_hook", flat=FUNCTION)
def shared_bare(run: Run) -> str:
    first, second = run.model(many=False), run.model(many=False)
    if run.ours:
        from ch_powersgd import PowerSGDState
        from ch_powersgd import powerSGD_hook as hook

        state: Any = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    else:
        state, hook = torch_state(**POWER), powerSGD_hook.powerSGD_hook
    first.register_comm_hook(state, hook)
    second.register_comm_hook(state, hook)
    for seed in range(4):
        run.step(first, seed)
        run.step(second, 100 + seed)
    raise Silent("each model is given the other's residual")


@row("B12.1", "backward(create_graph=True)")
def create_graph(run: Run) -> str:
    model = run.model(many=False)
    run.builtin(model, "allreduce")
    try:
        model(run.data(1)).pow(2).mean().backward(create_graph=True)
    except Exception:
        try:
            run.step(model, 2)
            run.seen.append("afterwards: works")
        except Exception as error:
            run.seen.append(f"afterwards: {type(error).__name__}")
        raise
    return "right"


@row("B12.2", "deep copy of the model trains without the hook")
def copied(run: Run) -> str:
    model = run.model(many=False)
    handle = run.builtin(model, "powersgd", **POWER)
    twin = copy.deepcopy(model)
    for seed in range(4):
        run.step(twin, seed)
    if run.ours:
        handle.assert_active()
    raise Silent("the copy runs plain all-reduce")


@row("B12.3", "torch.compile with optimize_ddp='python_reducer', PowerSGD", limit=60.0)
def python_reducer(run: Run) -> str:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(big())
    run.builtin(model, "powersgd", **POWER)
    fast = torch.compile(model, backend="aot_eager")
    mean = run.mean(model, 1)
    return run.expect(run.step(fast, 1), mean, 1.5)


@row("B12.4", "second hook registered on one model")
def second(run: Run) -> str:
    model = run.model(many=False)
    run.builtin(model, "fp16_compress")
    try:
        run.builtin(model, "bf16_compress")
    except Exception:
        listed = len(model._comm_hooks)
        run.seen.append(f"{listed} hook(s) listed afterwards")
        raise
    raise Silent("accepted")


@row("B12.5", "_update_process_group to another group", world=3)
def regroup(run: Run) -> str:
    pair = dist.new_group([0, 1])
    model = run.model(many=False)
    run.builtin(model, "allreduce")
    run.step(model, 1)
    model._update_process_group(pair)
    if run.rank == 2:
        return "left"
    run.world = 2
    mean = run.mean(model, 2)
    return run.expect(run.step(model, 2), mean, 1e-4)


@row("B12.6", "uneven inputs under join, PowerSGD")
def join(run: Run) -> str:
    model = run.model(many=False)
    run.builtin(model, "powersgd", **POWER)
    with model.join():
        for seed in range(4 + 3 * run.rank):
            if not run.step(model, seed).isfinite().all():
                raise Silent("not finite")
    return "right"


@row("B12.7", "model group is a part of the world, hook made with no group", world=3)
def subgroup(run: Run) -> str:
    pair = dist.new_group([0, 1])
    if run.rank == 2:
        dist.all_reduce(torch.zeros(1))  # match the world's collectives of hooks that use the world
        return "left"
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=pair)
    run.builtin(model, "allreduce")
    model(torch.tensor([[1.0 + 2 * run.rank]])).sum().backward()
    got = gradient(model).item()
    if run.ours:
        dist.all_reduce(torch.zeros(1))
    if abs(got - 2.0) > 1e-6:
        raise Silent(f"mean {got:.3g} instead of 2: averaged over the world")
    return "right"
