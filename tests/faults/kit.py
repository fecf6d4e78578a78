"""Parts of the fault table's rows: the register, a model, the two sides, and the reports of ranks.

A row is a function ``row(run)`` that runs on every rank, once with PyTorch's own hooks and once with this project's.
It returns a text about the right result, or raises :class:`Silent` for a wrong result without an error. Other errors
pass through.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commhooks

DEADLINE = 4.0  # seconds: attach(timeout=)
COMPRESSOR = "powersgd"  # the hook of this project in the rows of PowerSGD (case.py sets it)
QUANT4 = {  # options of PowerSGD in a row -> options of quant4 in which ranks can also differ
    ("rank", 1): "block=64",
    ("seed", 1): "rotation='hadamard'",
    ("error_feedback", False): "error_feedback=False",
    ("warm_start", False): "rounding='stochastic'",
    ("start_iter", 3): "exempt=False",
}
RANKS_PER_NODE = 2  # with the compressor "two_level", on two nodes
FUNCTION = "its hook is a function of PyTorch's form, and two_level takes reductions"
SLOWNESS = 1.0  # factor of limits and deadlines (case.py sets it)


def compressor(**options: Any) -> str:
    """Return the expression of the compressing hook with these options of PowerSGD, or with corresponding options."""
    if COMPRESSOR != "quant4":
        config = ", ".join(f"{key}={value!r}" for key, value in options.items())
        return leveled(f"powersgd({config})" if config else "powersgd")
    given = [QUANT4[item] for item in options.items() if item in QUANT4]
    fed = [] if "error_feedback=False" in given else ["error_feedback=True"]
    return f"quant4({', '.join(given + fed)})"


def leveled(what: Any) -> Any:
    """Return a hook of this project, inside ``two_level`` if the run has nodes."""
    if COMPRESSOR != "two_level":
        return what
    if isinstance(what, str):
        return f"two_level({what}, nodes={RANKS_PER_NODE})"
    return commhooks.get("two_level")(what, nodes=RANKS_PER_NODE)


def deadline() -> float:
    """Return the deadline of the hooks of this run, in seconds."""
    return DEADLINE * SLOWNESS


class Silent(Exception):
    """A wrong result without an error."""


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        name: ``B3.1``: topic, then number.
        title: the fault.
        body: function that runs on every rank.
        world: ranks.
        limit: seconds after which a rank that is not done hangs.
        victims: ranks that are meant to be killed or frozen.
        group_timeout: of the process group, seconds.
        without: ranks without any hook, which get torch's own error on both sides.
        only: the compressor that the row is for; empty for all.
        flat: why the row does not apply to ``two_level``; empty if it does.
    """

    name: str
    title: str
    body: Callable[["Run"], str]
    world: int = 2
    limit: float = 16.0
    victims: tuple[int, ...] = ()
    group_timeout: float = 8.0
    without: tuple[int, ...] = ()
    only: str = ""
    flat: str = ""


ROWS: dict[str, Row] = {}


def row(name: str, title: str, **options: Any) -> Callable[[Callable[["Run"], str]], Callable[["Run"], str]]:
    """Add a function to the table."""

    def enter(body: Callable[["Run"], str]) -> Callable[["Run"], str]:
        assert name not in ROWS, name
        ROWS[name] = Row(name, title, body, **options)
        return body

    return enter


def big(width: int = 80) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))


@dataclass
class Run:
    """One rank of one row on one side."""

    rank: int
    world: int
    side: str
    folder: str
    seen: list[str] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return self.side == "ours"

    def model(self, module: nn.Module | None = None, *, many: bool = True, **options: Any) -> DistributedDataParallel:
        """Return a wrapped model, with one bucket or with many from the second step on."""
        options |= {"bucket_cap_mb": 0.01} if many else {}
        return DistributedDataParallel(module if module is not None else big(), **options)

    def hook(self, model: DistributedDataParallel, what: Any, **options: Any) -> Any:
        """Install a user's hook: with ``register_comm_hook``, or with ``attach``."""
        if self.ours:
            what = leveled(what) if isinstance(what, commhooks.Reduction) else what
            return commhooks.attach(model, what, timeout=deadline(), **options)
        return model.register_comm_hook(None, what)

    def builtin(self, model: DistributedDataParallel, name: str, **options: Any) -> Any:
        """Install a built-in hook. Return the handle, or PyTorch's state."""
        if self.ours:
            expr = compressor(**options) if name == "powersgd" else leveled(name)
            return commhooks.attach(model, expr, timeout=deadline())
        if name != "powersgd":
            model.register_comm_hook(None, TORCH_HOOKS[name])
            return None
        state = torch_state(**options)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state

    def step(self, model: nn.Module, seed: int, x: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """Run forward and backward on this rank's data. Return the gradient."""
        model.zero_grad()
        (model(self.data(seed) if x is None else x).pow(2).mean() * scale).backward()
        return gradient(model)

    def data(self, seed: int, rank: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + (self.rank if rank is None else rank))
        return torch.randn(8, 80, generator=generator)

    def mean(self, model: DistributedDataParallel, seed: int) -> torch.Tensor:
        """Return the exact mean gradient of all ranks, computed on one."""
        grads = []
        for rank in range(self.world):
            loss = model.module(self.data(seed, rank)).pow(2).mean()
            parts = torch.autograd.grad(loss, list(model.module.parameters()))
            grads.append(torch.cat([g.reshape(-1) for g in parts]))
        return torch.stack(grads).mean(0)

    def expect(self, got: torch.Tensor, mean: torch.Tensor, tolerance: float, what: str = "gradient") -> str:
        """Check that a gradient is the mean, and equal on all ranks if these can still communicate."""
        error = float((got - mean).norm() / mean.norm())
        if not error <= tolerance:
            raise Silent(f"{what}: relative error {error:.2g}")
        return f"{what} right"


def torch_state(**options: Any) -> Any:
    """Return a PowerSGDState from the short names of our expressions."""
    long = {
        "rank": "matrix_approximation_rank",
        "start_iter": "start_powerSGD_iter",
        "error_feedback": "use_error_feedback",
        "seed": "random_seed",
        "epsilon": "orthogonalization_epsilon",
    }
    given = {"start_iter": 2, "min_compression_rate": 1} | options
    return powerSGD_hook.PowerSGDState(None, **{long.get(key, key): value for key, value in given.items()})


TORCH_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
}


def bf16_under_another_name(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(state, bucket)


TORCH_HOOKS["bf16_compress"] = bf16_under_another_name


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def averaged(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean, as a correct user's hook computes it."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def step_without(run: Run, model: nn.Module, absent: str) -> str:
    """Run a step that cannot end, because peers are ``absent``. Note how long this rank waits for its error."""
    begun = time.monotonic()
    try:
        run.step(model, 3)
    except Exception:
        run.seen.append(f"told after {time.monotonic() - begun:.1f} s")
        raise
    raise Silent(f"a step without {absent}")


def then(run: Run, action: Callable[[], object], afterwards: Callable[[], object]) -> str:
    """Run ``action``. If it raises, note the result of ``afterwards`` and raise."""
    try:
        action()
    except BaseException:
        begun = time.monotonic()
        try:
            afterwards()
            run.seen.append("afterwards: works")
        except BaseException as error:
            run.seen.append(f"afterwards: {type(error).__name__} after {time.monotonic() - begun:.1f} s")
        raise
    afterwards()
    return "right"
