"""B4, B6: ranks that do not agree, and ranks that are killed or frozen."""

import os
import signal
from typing import Any

import torch
from kit import Run, Silent, deadline, row, step_without

import commhooks


def disagree(run: Run, first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]], tolerance: float) -> str:
    """Give rank 0 the first hook and the others the second."""
    model = run.model(many=False)
    name, options = second if run.rank else first
    run.builtin(model, name, **options)
    for seed in range(4):
        mean = run.mean(model, seed)
        got = run.step(model, seed)
        run.expect(got, mean, tolerance)
    raise Silent("trained with two configurations")


PAIRS: dict[str, tuple[str, tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], float]] = {
    "B4.1": ("ranks disagree: fp16 / fp32", ("fp16_compress", {}), ("allreduce", {}), 0.01),
    "B4.2": ("ranks disagree: fp16 / bf16 (equal sizes)", ("fp16_compress", {}), ("bf16_compress", {}), 0.01),
    "B4.3": ("ranks disagree: PowerSGD rank 1 / 2", ("powersgd", {"rank": 1}), ("powersgd", {"rank": 2}), 9.0),
    "B4.4": ("ranks disagree: PowerSGD seed", ("powersgd", {"seed": 0}), ("powersgd", {"seed": 1}), 9.0),
    "B4.5": (
        "ranks disagree: error feedback",
        ("powersgd", {"error_feedback": True}),
        ("powersgd", {"error_feedback": False}),
        9.0,
    ),
    "B4.6": (
        "ranks disagree: warm start",
        ("powersgd", {"warm_start": True}),
        ("powersgd", {"warm_start": False}),
        9.0,
    ),
    "B4.7": (
        "ranks disagree: first compressed step",
        ("powersgd", {"start_iter": 2}),
        ("powersgd", {"start_iter": 3}),
        9.0,
    ),
    "B4.8": ("ranks disagree: PowerSGD / plain", ("powersgd", {}), ("allreduce", {}), 9.0),
}


def _enter(name: str, title: str, first: Any, second: Any, tolerance: float) -> None:
    @row(name, title)
    def body(run: Run) -> str:
        return disagree(run, first, second, tolerance)


for _name, _pair in PAIRS.items():
    _enter(_name, *_pair)


@row("B4.9", "one rank trains a step under no_sync, the other does not")
def no_sync_one(run: Run) -> str:
    model = run.model(many=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if run.ours:
        commhooks.attach(model, "allreduce", optimizer=optimizer, timeout=deadline())
    else:
        run.builtin(model, "allreduce")
    for seed in range(4):
        if seed == 1 and run.rank == 0:
            with model.no_sync():
                run.step(model, seed)
        else:
            run.step(model, seed)
        if seed == 2 and run.rank == 0:
            raise Silent("step 2 of rank 0 was averaged with step 1 of rank 1")
        optimizer.step()
    return "right"


@row("B4.10", "one rank goes on from a saved state, the other starts anew")
def resume_one(run: Run) -> str:
    model = run.model(many=False)
    state = run.builtin(model, "powersgd", rank=1, start_iter=2)
    if run.rank == 1:
        if run.ours:
            state.detach()
            state.state.step = 5
        else:
            state.iter = 5
    elif run.ours:
        state.detach()
    if run.ours:
        commhooks.attach(model, state, timeout=deadline())
    for seed in range(3):
        run.step(model, seed)
    raise Silent("trained at two different steps")


@row("B4.11", "one rank attaches a hook, the other has none", without=(1,))
def attach_one(run: Run) -> str:
    model = run.model(many=False)
    if run.rank == 0:
        run.builtin(model, "fp16_compress")
    mean = run.mean(model, 1)
    return run.expect(run.step(model, 1), mean, 0.01)


@row("B4.12", "one rank skips an optimizer step")
def skip_one(run: Run) -> str:
    model = run.model(many=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if run.ours:
        commhooks.attach(model, "fp16_compress", optimizer=optimizer, timeout=deadline())
    else:
        run.builtin(model, "fp16_compress")
    for seed in range(3):
        run.step(model, seed)
        if not (seed == 1 and run.rank == 1):
            optimizer.step()
    raise Silent("the ranks' parameters differ from then on")


# -- killed and frozen peers


def lose(run: Run, how: int, name: str, many: bool, **options: Any) -> str:
    model = run.model(many=many)
    run.builtin(model, name, **options)
    for seed in range(3):
        run.step(model, seed)
    if run.rank == 1:
        os.kill(os.getpid(), how)
    return step_without(run, model, "the other rank")


@row("B6.1", "peer killed (SIGKILL), all-reduce", victims=(1,))
def killed_plain(run: Run) -> str:
    return lose(run, signal.SIGKILL, "fp16_compress", True)


@row("B6.2", "peer frozen (SIGSTOP), all-reduce", victims=(1,))
def frozen_plain(run: Run) -> str:
    return lose(run, signal.SIGSTOP, "fp16_compress", True)


@row("B6.3", "peer killed (SIGKILL), PowerSGD with several buckets", victims=(1,))
def killed_powersgd(run: Run) -> str:
    return lose(run, signal.SIGKILL, "powersgd", True, rank=1, start_iter=2)


@row("B6.4", "peer frozen (SIGSTOP), PowerSGD with several buckets", victims=(1,))
def frozen_powersgd(run: Run) -> str:
    return lose(run, signal.SIGSTOP, "powersgd", True, rank=1, start_iter=2)
