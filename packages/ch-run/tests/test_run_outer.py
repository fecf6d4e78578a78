"""``python -m commhooks run --outer`` gives the same bits as a manual outer optimizer. The scripts have none.

The cases run in two gloo processes, which watch the imports as the command does. A case trains once as an unchanged
script, and once with ``OuterOptimizer`` by hand.
"""

import copy
import gc
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_outer
import commhooks
from ch_run.auto_attach import auto_attach
from ch_run.import_watch import watch
from ch_run.outer_model import OuterModel, _optimizers, outer_text
from ch_run.settings import Settings
from ch_testing import spawn

from .kit import run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]
Optim = torch.optim.Optimizer
Wrap = Callable[[nn.Module], nn.Module]
Outer = Callable[[Optim, nn.Module], Optim]
OPTIONS: dict[str, Any] = {"every": 3, "rate": 0.7, "momentum": 0.9}


class Net(nn.Module):
    """A model with BatchNorm and a branch that every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.branch(x).tanh() if branch else x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int, **options: bool) -> torch.Tensor:
    x = batch(rank, step)
    return (model(x, **options)[:, 0] - x.sum(1).sin()).square().mean()


def everything(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


# -- scripts, each of which makes a model, wraps it, and trains it with an optimizer


def plain(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # before the wrapping
    model = wrap(model)
    optimizer = outer(optimizer, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(11):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return model


def accumulating(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    """Accumulate like nanoGPT, where the script itself switches the synchronisation."""
    model = wrap(net())
    optimizer = outer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(8):
        for part in range(3):
            model.require_backward_grad_sync = part == 2
            (loss_of(model, rank, 10 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def no_sync(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    model = wrap(net())
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for step in range(8):
        if hasattr(model, "no_sync"):
            with model.no_sync():
                loss_of(model, rank, 10 * step).backward()
        else:
            loss_of(model, rank, 10 * step).backward()
        loss_of(model, rank, 10 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def scaled(rank: int, wrap: Wrap, outer: Outer, fused: bool = False, clip: bool = False) -> nn.Module:
    """A GradScaler skips steps of rank 1 only, among them the first and the last of a round."""
    model = wrap(net())
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    for step in range(9):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (float("inf") if rank == 1 and step in (0, 5) else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model


def scaled_fused(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    return scaled(rank, wrap, outer, fused=True)


def scaled_clipped(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    return scaled(rank, wrap, outer, clip=True)


def unused(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    """Ranks use the branch in different steps."""
    model = wrap(net())
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, rank, step, branch=(step + rank) % 2 == 0).backward()
        optimizer.step()
    return model


def closures(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    model = wrap(net())
    optimizer = outer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2), model)

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    for step in range(7):
        optimizer.step(lambda step=step: closure(step))
    return model


def frozen_later(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    model = wrap(net())
    optimizer = outer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(8):
        if step == 4:
            getattr(model, "module", model).first.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return model


def two_optimizers(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    """Step two optimizers. The last one is the inner optimizer."""
    model = wrap(net())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    first = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    last = outer(torch.optim.AdamW(others, lr=0.01), model)
    for step in range(8):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        first.step()
        last.step()
    return model


def evaluating_first(rank: int, wrap: Wrap, outer: Outer) -> nn.Module:
    """Run a forward with gradients before the optimizer exists, and one without gradients on one rank between steps."""
    model = wrap(net())
    loss_of(model, 0, 99)
    optimizer = outer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if rank == 0 and step:
            model.eval()
            with torch.no_grad():
                loss_of(model, rank, 50)
            model.train()
    return model


def ddp(**options: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


CASES: dict[str, tuple[Callable[[int, Wrap, Outer], nn.Module], Wrap, str]] = {
    "optimizer before the model is wrapped": (plain, ddp(), "diloco"),
    "streaming": (plain, ddp(), "streaming(fragments=2, overlap=1)"),
    "carried": (plain, ddp(), "diloco(overlap=2, mix=carry)"),
    "views": (plain, ddp(gradient_as_bucket_view=True), "diloco"),
    "static graph": (plain, ddp(static_graph=True), "diloco"),
    "compiled": (plain, compiled, "diloco"),
    "replicate": (plain, replicated, "diloco"),
    "quantized": (plain, ddp(), "diloco(exchange=quant4)"),
    "switched": (accumulating, ddp(), "diloco"),
    "no_sync": (no_sync, ddp(), "diloco"),
    "scaler": (scaled, ddp(), "diloco"),
    "scaler, fused": (scaled_fused, ddp(), "diloco"),
    "scaler, clipped": (scaled_clipped, ddp(), "diloco"),
    "unused": (unused, ddp(find_unused_parameters=True), "diloco"),
    "closures": (closures, ddp(), "local_sgd"),
    "frozen later": (frozen_later, ddp(), "diloco"),
    "two optimizers": (two_optimizers, ddp(), "diloco"),
    "evaluating": (evaluating_first, ddp(), "diloco"),
}


def expression(text: str) -> str:
    """Return an expression with the options of all cases."""
    node = commhooks.canonical(text)
    node["config"] = {**OPTIONS, **node["config"]}
    from commhooks.registry.expression import unparse

    return unparse(node)


def watching(text: str) -> None:
    """Begin as ``commhooks run --outer`` does, in a process that may have begun before."""
    os.environ.update(Settings("", outer=text).environ())
    watch()
    auto_attach.cache_clear()


def by_hand(preset: Any, options: dict[str, Any], made: list[Any], optim: Optim, model: nn.Module) -> Optim:
    made.append(preset(optim, model, **options))
    return made[0]


def bits(rank: int, world: int, names: list[str]) -> dict[str, str]:
    wrong = {}
    for name in names:
        script, wrap, text = CASES[name]
        text = expression(text)
        watching(text)
        ours = script(rank, wrap, lambda optim, model: optim)
        [found] = auto_attach().models
        del os.environ["COMMHOOKS_OUTER"]
        auto_attach.cache_clear()
        spec, options = commhooks.registry.registry.REGISTRY.outer(text)
        preset = getattr(ch_outer, spec.target.partition(":")[2])
        made: list[Any] = []
        hand = script(rank, lambda model: model, partial(by_hand, preset, options, made))
        if found.outer.count != made[0].count or found.outer.landed != made[0].landed or not made[0].landed:
            wrong[name] = f"{found.outer.count}, {found.outer.landed} against {made[0].count}, {made[0].landed}"
        pairs = zip(everything(ours), everything(hand), strict=True)
        if odd := [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]:
            wrong[name] = f"tensors {odd} differ"
    return wrong


HALVES = [list(CASES)[::2], list(CASES)[1::2]]


@pytest.mark.parametrize("names", [HALVES[0], pytest.param(HALVES[1], marks=pytest.mark.full)], ids=["even", "odd"])
def test_an_unchanged_script_has_the_bits_of_an_outer_optimizer_by_hand(names: list[str]) -> None:
    assert spawn(bits, 2, names, timeout=200) == [{}] * 2


# -- refusals, and scripts that stay unchanged


def refused(rank: int, world: int) -> list[str]:
    def attempt(body: Callable[[], object], expected: str) -> str:
        watching(expression("diloco"))
        try:
            body()
        except commhooks.CommHooksError as error:
            return "" if expected in str(error) else f"{expected!r} is not in {error}"
        return f"nothing raised instead of {expected!r}"

    def joined(before: bool) -> None:
        model = ddp()(net())
        optimizer = torch.optim.SGD(model.parameters())
        if not before:
            loss_of(model, rank, 0)
        with model.join():
            loss_of(model, rank, 0).backward()
            optimizer.step()

    def thawed() -> None:
        model = net()
        model.first.requires_grad_(False)
        model = ddp()(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.module.first.requires_grad_(rank == 1 and step > 0)  # on one rank only
            loss_of(model, rank, step).backward()
            optimizer.step()

    def too_late() -> None:
        model = ddp()(net())
        loss = loss_of(model, rank, 0)
        optimizer = torch.optim.SGD(model.parameters())
        loss.backward()
        optimizer.step()
        loss_of(model, rank, 1)

    def other_order() -> None:
        model = ddp()(net())
        one = torch.optim.SGD(model.module.first.parameters())
        other = torch.optim.SGD(model.module.last.parameters())
        loss_of(model, rank, 0).backward()
        other.step()
        one.step()

    def shared() -> None:
        model = ddp()(net())
        kept = [torch.optim.SGD(model.parameters()) for _ in range(2)]
        loss_of(model, rank, 0)
        kept.clear()

    def two_models() -> None:
        models = [ddp()(net()), ddp()(net())]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()])
        loss_of(models[0], rank, 0)
        del optimizer

    def zero() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = ddp()(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0)
        del optimizer

    def averaging() -> None:
        class Free(torch.optim.SGD):
            def eval(self) -> None: ...

        model = ddp()(net())
        optimizer = Free(model.parameters(), lr=0.1)
        loss_of(model, rank, 0)
        del optimizer

    def gathering() -> None:
        class Gathering(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step()
                dist.broadcast(self.param_groups[0]["params"][0].detach(), 0)

        model = ddp()(net())
        optimizer = Gathering(model.parameters(), lr=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()

    def masters() -> None:
        model = ddp()(net())
        copies = [nn.Parameter(p.detach().double()) for p in model.parameters()]
        optimizer = torch.optim.SGD(copies, lr=0.1)
        for step in range(2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for p, own in zip(model.parameters(), copies, strict=True):
                own.grad = p.grad.double()
            optimizer.step()
            with torch.no_grad():
                for p, own in zip(model.parameters(), copies, strict=True):
                    p.copy_(own)

    def sharded() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(net(), mesh=init_device_mesh(torch.get_default_device().type, (2,)))
        optimizer = torch.optim.SGD(model.parameters())
        loss_of(model, rank, 0)
        del optimizer

    found = [
        attempt(lambda: joined(before=True), "DDP.join() repeats"),
        attempt(lambda: joined(before=False), "DDP.join() repeats"),
        attempt(thawed, "unfreeze the same parameters on all ranks"),
        attempt(too_late, "was made after the forward"),
        attempt(other_order, "in the order of their creation"),
        attempt(shared, "cannot choose between SGD and SGD"),
        attempt(two_models, "is no parameter of"),
        attempt(zero, "sends its own messages"),
        attempt(averaging, "with Free, which has eval()"),
        attempt(gathering, "with Gathering, whose step sends its own messages"),
        attempt(masters, "no torch.optim optimizer holds them"),
        attempt(sharded, "has none: all ranks hold parts of one model"),
    ]
    return [text for text in found if text]


def replaced(rank: int, world: int) -> int:
    """Return the number of optimizers of a model whose first optimizer was replaced and is in a reference cycle."""
    watching(expression("diloco"))
    gc.disable()
    model = net()
    cycle: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    cycle.append(cycle)
    del cycle
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return len(_optimizers(model, "a model")) + 0 * len(optimizer.param_groups)


def test_a_replaced_optimizer_does_not_count_before_python_frees_its_cycle() -> None:
    assert spawn(replaced, 1, timeout=100) == [1]


@pytest.mark.full
def test_it_refuses_by_name() -> None:
    assert spawn(refused, 2, timeout=120) == [[]] * 2


def own_means(rank: int, world: int) -> list[str]:
    """A script with its own outer optimizer or hook keeps it. Return the notes."""
    notes = []
    for own in ("outer", "hook"):
        watching("diloco(every=2)")
        model = ddp()(net())
        optimizer: Optim = torch.optim.SGD(model.parameters(), lr=0.1)
        if own == "outer":
            optimizer = ch_outer.local_sgd(optimizer, model, every=5)
        else:
            commhooks.attach(model, "quant8")
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert not auto_attach().models
        notes += auto_attach().notes
    return notes


@pytest.mark.full
def test_an_outer_optimizer_or_a_hook_of_the_script_stays() -> None:
    for notes in spawn(own_means, 2, timeout=120):
        assert "has a hook of the script's own, which stays: OuterOptimizer" in notes[0] and "quant8" in notes[1]


# -- the model that the script holds


def holds(model: nn.Module) -> bool:
    """Return True if a checkpoint of the model and of its parts has the values of the model."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    parts = [(prefix + "." if prefix else "", part) for prefix, part in model.named_modules()]
    return all(
        torch.equal(value, named[prefix + name]) for prefix, part in parts for name, value in part.state_dict().items()
    )


def one_model(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Return the models after each step, then the best one loaded, and an average of the script copied in."""
    watching("diloco(every=3, steps=8)")
    model = ddp()(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = None
    found: list[list[torch.Tensor]] = []
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        assert holds(model) and holds(model.module)
        found.append(everything(model))
        average = average or torch.optim.swa_utils.AveragedModel(model.module)  # a copy of the model
        average.update_parameters(model.module)
        if step == 5:
            best = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(best)
    found.append(everything(model))
    with torch.no_grad():
        for p, mean in zip(model.module.parameters(), average.module.parameters(), strict=True):
            p.copy_(mean)
    assert holds(model) and holds(model.module)
    torch.save(model.module, io.BytesIO())
    return found


def test_checkpoints_hold_the_model_and_all_ranks_hold_one_at_the_end_of_each_round() -> None:
    one, other = spawn(one_model, 2, timeout=120)
    for step in range(8):
        equal = all(torch.equal(a, b) for a, b in zip(one[step], other[step], strict=True))
        assert equal == (step + 1 in (3, 6, 8)), step
    assert all(torch.equal(a, b) for a, b in zip(one[8], one[5], strict=True))


def wrapped_again(rank: int, world: int) -> list[int]:
    """A script that wraps its module a second time."""
    watching("diloco(every=3)")
    module = net()
    counts = []
    for phase in range(2):
        model = ddp()(module)
        assert not phase or auto_attach().models[0].row is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, 10 * phase + step).backward()
            optimizer.step()
        found = auto_attach().models[-1]
        assert isinstance(found, OuterModel)
        counts.append(found.outer.count)
    assert len(auto_attach().models) == 2, auto_attach().notes
    return counts


@pytest.mark.full
def test_a_model_that_is_wrapped_again_ends_its_first_training_in_one_model() -> None:
    assert spawn(wrapped_again, 2, timeout=120) == [[4, 4]] * 2


# -- the command


@pytest.mark.full
@pytest.mark.parametrize("door", [False, True], ids=["command", "environment"])
def test_a_script_with_its_own_loop(tmp_path: Path, door: bool) -> None:
    done = run(tmp_path, "ddp_loop", outer="diloco(every=3, exchange=quant4)", door=door)
    [model] = done.report["models"]
    assert model["steps"] == 8 and model["stats"]["rounds_done"] == 2
    assert "8 inner steps, 2 rounds" in done.err and not done.report["notes"]
    assert "of the time in exchanges" in done.err and "ranks apart at the end of a round" in done.err
    assert len(model["apart"]) == 2 and min(model["apart"]) > 0 and 0 < model["exchange_share"] < 1
    assert "diloco(every=3, exchange=quant4) has no steps=" in done.err
    assert "the script saves after step 8, inside a round" in done.err and "after step 9, and every 3 steps" in done.err
    assert model["steps_alone"] == 2 and "warning: the last 2 steps are on no other rank; give steps=8" in done.err


@pytest.mark.full
def test_a_run_without_a_round_says_that_the_ranks_differ(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", outer="diloco")
    assert done.report["models"][0]["stats"]["rounds_done"] == 0
    assert "no round was completed, so the ranks hold different models; give every= below 8, or steps=8" in done.err
    done = run(tmp_path, "ddp_loop", outer="diloco(steps=8)")
    assert done.report["models"][0]["steps_alone"] == 0 and "no other rank" not in done.err
    assert "the script saves" not in done.err and "has no steps=" not in done.err


def test_the_report_tells_of_steps_that_no_other_rank_has() -> None:
    row = {
        "outer": "diloco(every=8)",
        "steps": 60,
        "stats": {"rounds_done": 7.0},
        "apart": [0.05, 0.02],
        "steps_alone": 4,
    }
    said = outer_text(row)
    assert "the last 4 steps are on no other rank; give steps=60" in said and "times" not in said
    assert "no round was completed" in outer_text({**row, "steps": 7, "stats": {}, "apart": [], "steps_alone": 7})
    assert "warning" not in outer_text({**row, "steps_alone": 0})
    assert "2.5 times as far apart as the first" in outer_text({**row, "apart_growth": 2.5})


@pytest.mark.full
@pytest.mark.parametrize(
    ("outer", "word"),
    [("dilocco", "did you mean"), ("diloco(evry=4)", "every"), ("quant4", "diloco(exchange=quant4)")],
)
def test_a_bad_expression_ends_before_the_script_begins(tmp_path: Path, outer: str, word: str) -> None:
    script = "import pathlib, torch\npathlib.Path('began').touch()\n"
    for door in (False, True):
        done = run(tmp_path, script, ranks=0, outer=outer, door=door, check=False)
        assert done.code != 0 and word in done.err and "Traceback" not in done.err
        assert not (tmp_path / "began").exists()
