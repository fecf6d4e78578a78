"""Runs a script on one rank, as a launcher starts it: alone, under `commhooks run`, or with `attach` put into it."""

import faulthandler
import functools
import hashlib
import importlib
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOAD = ("torch.utils.data.distributed", "torch.optim.swa_utils", "commhooks.cli", "ch_run.auto_attach", __name__)
"""Modules that the processes share. None of them watches wrappers or optimizers when it is imported."""


@dataclass(frozen=True)
class Job:
    """One launch of a script.

    Attributes:
        script: its path.
        way: "plain", or one of :data:`.bounds.WAYS`.
        expression: of the hook or outer optimizer.
        seed: of the script.
        folder: of the results.
        port: of the launcher's store.
        forks: True if the script starts its ranks itself.
        scaler: True to give `attach` the script's GradScaler.
        state: True to give `commhooks run` a folder for the state.
        flipped: True to read every residual with the wrong sign.
        kill: rank that dies, the optimizer step in which it dies, and "before" or "after" the parameters change.
        patience: seconds after which the stacks of all threads are written.
    """

    script: str
    way: str
    expression: str
    seed: int
    folder: str
    port: int
    forks: bool = False
    scaler: bool = False
    state: bool = False
    flipped: bool = False
    kill: tuple[int, int, str] | None = None
    patience: float = 200.0


@dataclass(frozen=True)
class Ended:
    """The end of a script on one rank.

    Attributes:
        error: class of the exception that it raised, or an empty string.
        text: of the exception.
        typed: True for an error of commhooks.
        steps: steps of torch optimizers.
        stepped: checksum of the parameters that were stepped.
        sent: collectives that optimizers started in their steps.
    """

    error: str = ""
    text: str = ""
    typed: bool = False
    steps: int = 0
    stepped: str = ""
    sent: int = 0


class _Steps:
    """Counts the steps of all torch optimizers of this process, and the collectives that they start in them.

    Args:
        last: the step in which this process dies, and the moment; None if it lives.
    """

    def __init__(self, last: tuple[int, str] | None = None) -> None:
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.count, self.sent, self._inside, self._params = 0, 0, False, dict[int, Any]()
        self._last = last
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._stepped)
        for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor"):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def counted(*args: Any, **options: Any) -> Any:
            self.sent += self._inside
            return collective(*args, **options)

        return counted

    def _die(self, moment: str) -> None:
        if self._last == (self.count + 1, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def _begins(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._die("before")
        self._inside = True

    def _stepped(self, optimizer: Any, args: object, kwargs: object) -> None:
        self._die("after")
        self.count, self._inside = self.count + 1, False
        self._params.update((id(p), p) for group in optimizer.param_groups for p in group["params"])

    def digest(self) -> str:
        import torch

        found = hashlib.sha256()
        for param in self._params.values():
            local = param.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            found.update(local.contiguous().view(torch.uint8).numpy().tobytes() if local.numel() else b"")
        return found.hexdigest()[:16]


def work(rank: int, world_size: int, job: Job) -> Ended:
    """Run a job on one rank, and return its end."""
    folder = Path(job.folder)
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job.patience)
    _set_environment(rank, world_size, job)
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)
    steps = _Steps(job.kill[1:] if job.kill is not None and job.kill[0] == rank else None)
    if job.flipped:
        flip_residuals()
    try:
        _run(job)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            text = (folder / f"output-{rank}.txt").read_text()[-2000:]
            return Ended("SystemExit", text, bool(re.search(r"^\w+Error: ", text, re.M)), steps.count)
    except BaseException as error:
        return _error(error, steps)
    return Ended(steps=steps.count, sent=steps.sent)


def _error(error: BaseException, steps: _Steps) -> Ended:
    import traceback

    from commhooks import CommHooksError

    traceback.print_exception(error)
    sys.stderr.flush()
    kind, text, typed = type(error).__name__, str(error), isinstance(error, CommHooksError)
    inside = re.search(r"^ch_core\.errors\.(\w+): (.*)", text, re.M | re.S)  # of a process that the script started
    if inside and not typed:
        kind, text, typed = inside[1], inside[2], True
    return Ended(kind, text, typed, steps.count, steps.digest())


def _set_environment(rank: int, world_size: int, job: Job) -> None:
    """Set what torchrun sets. The store of the process that starts the ranks takes the place of the agent's."""
    if job.forks:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    else:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        names |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size}
        names |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "MASTER_PORT": job.port}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(
            MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID=Path(job.folder).name
        )
    os.environ.update(LOOP_SEED=str(job.seed), LOOP_FOLDER=job.folder, OMP_NUM_THREADS="1")


def _run(job: Job) -> None:
    if job.way in ("exact", "feedback", "outer", "resumed"):
        from commhooks.cli import main

        option = "--outer" if job.way == "outer" else "--hook"
        state = ["--state", f"{job.folder}/state"] if job.state else []
        report = ["--report", f"{job.folder}/report.json"]
        code = main(["run", option, job.expression, *report, *state, job.script])
        if code:
            raise SystemExit(code)
        return
    if job.way == "attach":
        Injection(job).watch()
    sys.argv, sys.path[0] = [job.script], str(Path(job.script).parent)
    # The end of the process, not of this call, frees the script's model. torch frees a model's process group while it holds the
    # interpreter's lock, for which the group's thread may wait: then neither ends.
    _kept.update(runpy.run_path(job.script, run_name="__main__"))


_kept: dict[str, Any] = {}


def flip_residuals() -> None:
    """Plant a defect: every residual is added to the next gradient with the wrong sign."""
    from ch_core.reduction import StepContext

    read = StepContext.read

    def flipped(self: Any, name: str, field: str, *args: Any, **options: Any) -> Any:
        found = read(self, name, field, *args, **options)
        return -found if found is not None and field == "residual" else found

    StepContext.read = flipped  # type: ignore[method-assign]


class Injection:
    """Puts `attach(model, hook, optimizer=)` into a script, in the first forward with gradients of a wrapped model.

    A user writes it after the optimizer. The optimizer that was made last and steps parameters of the model is given.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.optimizers: list[Any] = []
        self.scalers: list[Any] = []
        self.handles: list[tuple[Any, Any]] = []  # with their models

    def watch(self) -> None:
        """Watch optimizers, scalers and wrappers that the script makes."""
        import torch

        _remember(torch.optim.Optimizer, self.optimizers)
        _remember(torch.amp.GradScaler, self.scalers)
        wrapper, init = torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel.__init__

        @functools.wraps(init)
        def made(model: Any, *args: Any, **options: Any) -> None:
            init(model, *args, **options)
            self.wait(model)

        wrapper.__init__ = made  # type: ignore[method-assign]
        for name, function in (("fsdp", "fully_shard"), ("_composable.replicate", "replicate")):
            module = importlib.import_module(f"torch.distributed.{name}")  # an attribute may hide a module of that name
            setattr(module, function, self._waiting(getattr(module, function)))

    def _waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            made = function(*args, **options)
            self.wait(made)
            return made

        return wrapped

    def wait(self, model: Any) -> None:
        """Attach in the first forward with gradients."""
        import torch

        def forward(module: Any, args: object) -> None:
            if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
                hook.remove()
                torch.compiler.disable(self.attach)(model)

        hook = model.register_forward_pre_hook(forward, prepend=True)

    def attach(self, model: Any) -> None:
        """Attach, unless a model around this one has the hook."""
        import commhooks

        if any(model in list(other.modules()) for other, _ in self.handles):
            return
        mine = {id(p) for p in model.parameters()}
        optimizer = next((one for one in reversed(self.optimizers) if mine & set(_stepped(one))), None)
        # Without one of the model's parameters it steps copies of them.
        optimizer = optimizer or (self.optimizers[-1] if len(self.optimizers) == 1 else None)
        scaler = self.scalers[-1] if self.job.scaler else None
        handle = commhooks.attach(model, self.job.expression, optimizer=optimizer, scaler=scaler)
        self.handles.append((model, handle))
        Path(self.job.folder, f"attached-{os.getpid()}-{len(self.handles)}").touch()


def _stepped(optimizer: Any) -> Iterable[int]:
    return (id(p) for group in optimizer.param_groups for p in group["params"])


def _remember(cls: Any, made: list[Any]) -> None:
    init = cls.__init__

    @functools.wraps(init)
    def remembering(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    cls.__init__ = remembering
