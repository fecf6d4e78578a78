"""B5, B7, B8: infinite numbers and NaN, accumulation, unused parameters, several buckets."""

import kit
import torch
import torch.distributed as dist
from kit import Run, Silent, big, compressor, deadline, gradient, row, torch_state
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import commhooks
from ch_testing import mean_residuals, unaccounted

THIN = {
    "powersgd": 1e-3,
    "two_level": 1e-3,
    "quant4": 4e-3,
}  # lost part of rank 1's gradient, whose entries are all equal
POWER = {"rank": 2, "start_iter": 2, "min_compression_rate": 1}


@row("B5.1", "fp16: gradient of 80 000 on every rank of two, mean 80 000 / 2 + 0 fits")
def fp16_overflow(run: Run) -> str:
    model = run.model(nn.Linear(4, 3, bias=False), many=False)
    run.builtin(model, "fp16_compress")
    size = 80_000.0 if run.rank < run.world // 2 else 0.0
    model(torch.full((1, 4), size)).sum().backward()
    got = gradient(model)
    if not torch.allclose(got, torch.full((12,), 40_000.0)):
        raise Silent(f"40 000 arrived as {got[0].item():g}")
    return "right"


def poison(run: Run, value: float) -> str:
    model = run.model(many=False)
    run.builtin(model, "powersgd", **POWER)
    for seed in range(4):
        run.step(model, seed)
    x = run.data(4)
    if run.rank == 0:
        x[0, 0] = value
    if run.step(model, 4, x).isfinite().all():
        raise Silent("a scaler could not have noticed it")
    bad = [seed for seed in range(5, 9) if not run.step(model, seed).isfinite().all()]
    if bad:
        raise Silent(f"not finite at {len(bad)} of the 4 steps after it")
    return "right: recovers at the next step"


@row("B5.2", "PowerSGD: NaN in one element, on one rank, at one step")
def nan_once(run: Run) -> str:
    return poison(run, float("nan"))


@row("B5.3", "PowerSGD: Inf in one element, on one rank, at one step")
def inf_once(run: Run) -> str:
    return poison(run, float("inf"))


@row("B5.4", "PowerSGD with GradScaler: one overflow")
def scaler_overflow(run: Run) -> str:
    model = run.model(many=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if run.ours:
        commhooks.attach(
            model,
            compressor(**POWER),
            optimizer=optimizer,
            scaler=scaler,
            timeout=deadline(),
        )
    else:
        run.builtin(model, "powersgd", **POWER)
    for seed in range(10):
        optimizer.zero_grad()
        x = run.data(seed)
        if seed == 4 and run.rank == 1:
            x[0, 0] = float("inf")
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    if scaler.get_scale() != 512.0:
        raise Silent(f"no step was taken any more; the scale fell to {scaler.get_scale():g}")
    return "right: one step skipped"


@row("B5.5", "PowerSGD under a changing loss scale")
def loss_scale(run: Run) -> str:
    def norms(moving: bool) -> list[float]:
        model = run.model(many=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
        if run.ours:
            commhooks.attach(model, compressor(**POWER), optimizer=optimizer, scaler=scaler, timeout=deadline())
        else:
            run.builtin(model, "powersgd", **POWER)
        found = []
        for seed in range(6):
            model.zero_grad()
            scaler.scale(model(run.data(seed)).pow(2).mean()).backward()
            found.append(gradient(model).norm().item() / scaler.get_scale())
            optimizer.step()
            if seed == 3 and moving:
                scaler.update(16.0)
        return found

    steady, moving = norms(False), norms(True)
    off = max(abs(a - b) / a for a, b in zip(steady, moving, strict=True))
    if off > 0.01:
        raise Silent(f"gradients {moving[4] / steady[4]:.0f} times as long after the scale fell by 64")
    return "right"


@row("B5.6", "PowerSGD: gradient exactly zero at the first compressed step")
def zero(run: Run) -> str:
    model = run.model(many=False)
    run.builtin(model, "powersgd", **POWER)
    for seed in range(2):
        run.step(model, seed)
    run.step(model, 2, torch.zeros(8, 80), scale=0.0)
    bad = [seed for seed in range(3, 7) if not run.step(model, seed).isfinite().all() or gradient(model).norm() == 0]
    if bad:
        raise Silent(f"gradient NaN or zero at {len(bad)} of the 4 steps after it")
    return "right"


@row("B5.7", "PowerSGD rank 2: gradient of exact rank 1")
def thin(run: Run) -> str:
    model = run.model(nn.Linear(80, 16, bias=False), many=False)
    run.builtin(model, "powersgd", rank=2, start_iter=2, min_compression_rate=1)
    for seed in range(5):
        model.zero_grad()
        x = torch.full((1, 80), 1.0 + seed)
        model(x).sum().backward()
        run.expect(gradient(model), torch.full((16 * 80,), 1.0 + seed), THIN[kit.COMPRESSOR], f"step {seed}")
    return "right"


@row("B5.8", "PowerSGD: parameter used for the first time at step 4")
def late(run: Run) -> str:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = big(), nn.Linear(16, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return self.extra(y) if step >= 4 else y

    model = run.model(Late(), many=not run.ours and False, find_unused_parameters=run.ours)
    if not run.ours:  # B8.2 covers find_unused_parameters with PowerSGD. Here the parameter has weight zero

        class Zeroed(Late):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.body(x)
                return y.sum() + self.extra(y).sum() * float(step >= 4)

        model = run.model(Zeroed(), many=False)
    run.builtin(model, "powersgd", rank=1, start_iter=2, min_compression_rate=1)
    for step in range(8):
        run.step(model, step)
        grad = model.module.extra.weight.grad
        if step >= 4 and (grad is None or not grad.isfinite().all() or grad.norm() == 0):
            raise Silent(f"step {step}: the parameter's gradient is {'NaN' if grad is not None else 'missing'}")
    return "right"


# -- accumulation


@row("B7.1", "PowerSGD: accumulation under no_sync")
def accumulate(run: Run) -> str:
    model = run.model(many=False)
    state = run.builtin(model, "powersgd", rank=16, start_iter=2, min_compression_rate=1)
    for seed in range(4):
        model.zero_grad()
        mean = run.mean(model, 10 * seed) + run.mean(model, 10 * seed + 1)
        with model.no_sync():
            model(run.data(10 * seed)).pow(2).mean().backward()
        model(run.data(10 * seed + 1)).pow(2).mean().backward()
        run.expect(gradient(model), mean, 0.9)
    steps = commhooks.state_dict(state)["step"] if run.ours else state.iter
    if steps != 4:
        raise Silent(f"{steps} steps counted instead of 4")
    return "right"


@row("B7.2", "second backward on a retained graph")
def retained(run: Run) -> str:
    model = run.model(many=False)
    run.builtin(model, "allreduce")
    loss = model(run.data(1)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return run.expect(gradient(model), 2 * run.mean(model, 1), 1e-4)


# -- buckets and unused parameters


def plain_powersgd(run: Run, *, many: bool, steps: int = 12, **options: object) -> str:
    model = run.model(many=many, **options)
    hook = run.builtin(model, "powersgd", rank=16, start_iter=2, min_compression_rate=1)
    wanted, applied = [], []
    for seed in range(steps):
        wanted.append(run.mean(model, seed))
        applied.append(run.step(model, seed))
        run.expect(applied[-1], wanted[-1], 1.5)
    if run.ours:
        nothing_is_lost(hook, model, torch.stack(wanted).sum(0), torch.stack(applied).sum(0))
    return "right"


def nothing_is_lost(handle: commhooks.CommHook, model: nn.Module, wanted: torch.Tensor, applied: torch.Tensor) -> None:
    """Check that applied gradients and mean residuals add up to the mean gradients, both ``(numel,)``."""
    like = dict(model.module.named_parameters())
    mine = {name: row["residual"] for name, row in handle.state_dict()["entries"].items() if "residual" in row}
    ranks: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    sizes = [p.numel() for p in like.values()]
    parts = [dict(zip(like, whole.split(sizes), strict=True)) for whole in (wanted, applied)]
    for name, gap in unaccounted(*parts, mean_residuals(ranks, like)).items():
        if not gap <= 1e-4 * float(wanted.norm()):
            raise Silent(f"{gap:.2g} of the gradients of {name} is lost")


@row("B8.1", "PowerSGD with several buckets, no fault at all")
def several(run: Run) -> str:
    return plain_powersgd(run, many=True, steps=30)


@row("B8.2", "PowerSGD with find_unused_parameters")
def unused(run: Run) -> str:
    return plain_powersgd(run, many=False, steps=60, find_unused_parameters=True)


@row("B8.3", "PowerSGD with static_graph, several buckets")
def static(run: Run) -> str:
    return plain_powersgd(run, many=True, static_graph=True)


@row("B8.4", "batched PowerSGD")
def batched(run: Run) -> str:
    model = run.model(many=False)
    if run.ours:
        handle = commhooks.attach(model, "batched_powersgd(rank=2, start_iter=2)", timeout=deadline())
    else:
        model.register_comm_hook(torch_state(rank=2), powerSGD_hook.batched_powerSGD_hook)
    for seed in range(5):
        if not run.step(model, seed).isfinite().all():
            raise Silent("not finite")
    if run.ours and not handle.stats()["compressed_steps"]:
        raise Silent("never compressed")
    return "right"
