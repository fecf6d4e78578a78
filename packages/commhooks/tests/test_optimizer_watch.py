"""The watch tells used, skipped and pending gradients apart. One process, no DDP."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import HookConfigError, StateError
from commhooks.adapters import optimizer_steps
from commhooks.adapters.optimizer_watch import OptimizerWatch


class Watched:
    """A model and its watch, which the test calls as an engine would."""

    def __init__(self, given: bool = True, late: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.model[1].requires_grad_(not late)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, **options)
        self.watch = OptimizerWatch(self.optimizer if given else None, None, self.model.parameters)
        self.answers: list[bool | None] = []
        self.first = True

    def backward(self, scale: float = 1.0) -> torch.Tensor:
        loss = self.model(torch.ones(1, 3)).sum() * scale
        started: list[int] = []

        def begins(gradient: torch.Tensor) -> None:  # DDP's first bucket also comes after the first gradient
            if started:
                return
            started.append(1)
            if not self.first:
                self.answers.append(self.watch.used())
            if self.first or self.answers[-1] is not None:
                self.watch.begin_period()
            self.first = False

        hooks = [p.register_hook(begins) for p in self.model.parameters() if p.requires_grad]
        loss.backward()
        for hook in hooks:
            hook.remove()
        self.watch.finish_step()
        return loss.detach()


def test_used_skipped_and_waiting_steps_are_distinguished() -> None:
    run = Watched()
    for what in ("step and zero", "keep", "step", "keep", "keep", "zero", "zero in place", "step", "end"):
        run.backward()
        if "step" in what:
            run.optimizer.step()
        if "in place" in what:
            run.optimizer.zero_grad(set_to_none=False)
        elif "zero" in what:
            run.optimizer.zero_grad()
    assert run.answers == [True, None, True, None, None, False, False, True]
    assert run.watch.clock() == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_between_forward_and_backward_are_noticed_before_it_adds_to_them(set_to_none: bool) -> None:
    run = Watched()
    run.backward()
    run.optimizer.zero_grad(set_to_none)  # the next lines are one backward, whose gradients exist when it ends
    run.backward()
    assert run.answers == [False]


def test_any_optimizer_that_holds_the_parameters_counts_and_no_other() -> None:
    for given in (True, False):
        run = Watched(given)
        run.backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()  # created after attach
        run.model.zero_grad()
        run.backward()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        run.model.zero_grad()
        run.backward()
        assert run.answers == [True, False], given
        assert run.watch.clock() == 1


def test_optimizers_inside_one_another_or_side_by_side_are_one_step() -> None:
    run = Watched()

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()

    inner = torch.optim.SGD(run.model.parameters(), lr=0.1)
    outer = Outer(run.model.parameters(), lr=0.1)
    for _ in range(3):
        run.backward()
        outer.step()
        run.model.zero_grad()
    run.backward()
    assert run.answers == [True, True, True]
    assert run.watch.clock() == 3


def test_a_manual_update_of_the_parameters_counts_as_use() -> None:
    for passing_by in (False, True):
        run = Watched()
        run.backward()
        with torch.no_grad():
            for p in run.model.parameters():
                (p.data if passing_by else p).sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
        run.model.zero_grad()
        run.backward()
        run.model.zero_grad()
        run.backward()
        assert run.answers == [True, False], passing_by


def test_every_backward_of_a_closure_is_used() -> None:
    run = Watched()
    solver = torch.optim.LBFGS(run.model.parameters(), lr=0.01, max_iter=3)

    def closure() -> torch.Tensor:
        solver.zero_grad()
        return run.backward()

    solver.step(closure)
    solver.step(closure)
    assert len(run.answers) >= 4
    assert all(run.answers)


def test_a_step_with_zeroed_gradients_uses_nothing() -> None:
    for set_to_none in (True, False):
        run = Watched()
        run.backward()
        run.optimizer.zero_grad(set_to_none)
        run.optimizer.step()
        run.backward()
        assert run.answers == [False], set_to_none


def test_found_inf_of_a_fused_optimizer_is_copied_when_it_steps() -> None:
    """A copy in the next backward would come after all kernels that were launched since the step."""
    run = Watched(fused=True)
    run.backward()
    run.optimizer.found_inf = found = torch.ones(())  # type: ignore[attr-defined]  # as a GradScaler says it
    run.optimizer.step()
    found.zero_()  # the scaler's next step clears it
    del run.optimizer.found_inf  # type: ignore[attr-defined]
    run.optimizer.zero_grad()
    run.backward()
    assert run.answers == [False]


def test_a_fused_optimizer_that_a_scaler_holds_back_uses_nothing() -> None:
    for scale, used in ((1.0, True), (float("inf"), False)):
        run = Watched(fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(run.backward(scale))
        scaler.step(run.optimizer)
        run.optimizer.zero_grad()
        run.backward()
        assert run.answers == [used]


def test_gradients_of_which_some_are_gone_are_an_error_unless_an_optimizer_has_stepped() -> None:
    run = Watched()
    run.backward()
    run.model[0].zero_grad()
    run.optimizer.step()  # these gradients stay out on purpose
    run.optimizer.zero_grad()
    run.backward()
    assert run.watch.doubt() is None
    run.model[0].zero_grad()
    run.backward()
    assert run.answers == [True, False]
    run.watch.begin_period()
    run.backward()
    run.model[0].zero_grad()
    assert run.watch.used() is None, "outside of a backward they may still be used"
    loss = run.model(torch.ones(1, 3)).sum()
    loss.backward()
    doubt = run.watch.doubt()
    assert isinstance(doubt, StateError)
    assert "of the 4 gradients of the last step 2 were dropped" in str(doubt)


def late_optimizer(run: Watched, how: str) -> torch.optim.Optimizer:
    """Make parameters trainable after the watch began. Return an optimizer that holds only these."""
    if how == "added":
        run.model.append(nn.Linear(2, 2))
    for p in run.model.parameters():
        p.requires_grad_(p in set(run.model[-1].parameters()))
    return torch.optim.SGD(run.model[-1].parameters(), lr=0.1)


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_an_optimizer_of_parameters_that_came_later_counts(how: str, stepped: bool) -> None:
    run = Watched(given=False, late=how == "thawed")
    run.backward()
    if stepped:  # from now on the watch does not compare parameters
        run.optimizer.step()
    run.model.zero_grad()
    optimizer = late_optimizer(run, how)
    for what in ("step", "drop", "step", "drop", "end"):
        run.backward()
        if what == "step":
            optimizer.step()
        run.model.zero_grad()
    assert run.answers == [stepped, True, False, True, False]
    assert run.watch.clock() == 2 + stepped


def test_an_optimizer_of_other_parameters_counts_once_the_model_has_them() -> None:
    run, head = Watched(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    run.backward()
    optimizer.step()
    run.model.zero_grad()
    run.backward()
    run.model.zero_grad()
    run.model.append(head)
    run.backward()
    optimizer.step()
    run.model.zero_grad()
    run.backward()
    assert run.answers == [False, False, True]


def test_an_optimizer_of_frozen_parameters_uses_nothing() -> None:
    run = Watched(given=False)
    run.model[1].requires_grad_(False)
    frozen = torch.optim.SGD(run.model[1].parameters(), lr=0.1)
    run.backward()
    run.optimizer.step()
    run.model.zero_grad()
    run.backward()
    frozen.step()
    run.model.zero_grad()
    run.backward()
    assert run.answers == [True, False]


def test_gradients_of_thawed_parameters_are_dropped_with_the_others() -> None:
    """The last layer's gradient arrives first. It must not count as an accumulated gradient."""
    run = Watched()
    run.model[1].requires_grad_(False)
    run.backward()
    run.optimizer.step()
    run.model[1].requires_grad_(True)
    run.optimizer.zero_grad()
    run.backward()
    run.watch.begin_period()
    run.watch.finish_step()
    run.optimizer.zero_grad()
    run.model(torch.ones(1, 3)).sum().backward()
    assert run.watch.doubt() is None
    assert run.watch.used() is False


def test_a_thawed_parameter_that_is_written_by_hand_is_used() -> None:
    run = Watched(late=True)
    run.backward()
    run.model.zero_grad()
    late_optimizer(run, "thawed")
    for written in (True, False):
        run.backward()
        if written:
            with torch.no_grad():
                for p in run.model[-1].parameters():
                    p.sub_(p.grad, alpha=0.1)
        else:
            with torch.no_grad():
                run.model[0].weight.mul_(0.9)  # frozen, such as a moving average
        run.model.zero_grad()
    run.backward()
    assert run.answers == [False, True, False]


def test_an_adapter_reports_a_backward_that_no_hook_of_autograd_sees() -> None:
    run = Watched()
    params = list(run.model.parameters())

    def backward(*written: int) -> None:
        """Run a backward and write the gradients of some parameters directly, as FSDP2 does."""

        def write(gradient: torch.Tensor) -> None:
            for number in written:
                run.watch.before_gradient()
                params[number].grad = torch.ones_like(params[number])
            run.answers.append(run.watch.used())
            assert run.watch.doubt() is None
            if run.answers[-1] is not None:
                run.watch.begin_period()
            run.watch.finish_step()

        x = torch.ones(1, requires_grad=True)
        x.register_hook(write)
        x.backward()

    backward(0, 1, 2, 3)
    run.watch.begin_period()
    run.watch.finish_step()
    run.model.zero_grad()
    backward(0, 1)
    run.optimizer.step()
    run.model.zero_grad()
    backward(2, 3)
    backward(0, 1, 2, 3)
    assert run.answers == [None, False, True, None]


def test_parameters_that_no_optimizer_holds_are_not_waited_for() -> None:
    run = Watched()
    del run.optimizer.param_groups[0]["params"][2:]  # the second layer's gradients are never zeroed
    run.backward()
    run.optimizer.zero_grad()
    run.backward()
    assert run.answers == [False]


def test_parameters_of_an_optimizer_that_is_gone_are_not_waited_for() -> None:
    """A script trains one layer after the other, each with its own optimizer."""
    run = Watched(given=False)
    first, second = run.model
    optimizers = [torch.optim.SGD([layer.weight], lr=0.1) for layer in (first, second)]
    run.backward()
    optimizers[0].step()
    run.model.zero_grad()
    run.backward()  # both optimizers are alive, and only the first has stepped
    del optimizers[0]
    gc.collect()
    optimizers[0].step()
    run.model.zero_grad()
    first.requires_grad_(False)
    run.backward()
    run.model.zero_grad()
    assert run.watch.used() is False


def test_master_copies_that_take_the_gradients_over_before_the_step_use_them() -> None:
    run = Watched()
    masters = [p.detach().clone() for p in run.model.parameters()]
    run.optimizer = torch.optim.SGD(masters, lr=0.1)
    run.watch = OptimizerWatch(run.optimizer, None, run.model.parameters)
    for step in (True, True, False, True):
        run.backward()
        for master, p in zip(masters, run.model.parameters(), strict=True):
            master.grad, p.grad = p.grad, None
        if step:
            run.optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, run.model.parameters(), strict=True):
                    p.copy_(master)
    run.backward()
    assert run.answers == [True, True, False, True]


def test_gradients_taken_over_before_the_step_has_ended_are_open_until_an_optimizer_steps() -> None:
    run = Watched()
    kept: list[torch.Tensor | None] = []

    def taken(param: torch.Tensor) -> None:
        kept.append(param.grad)
        param.grad = None

    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(taken)
    run.backward()
    assert run.watch.used() is None
    for p, gradient in zip(run.model.parameters(), kept[::-1], strict=True):
        p.grad = gradient if gradient is not None and gradient.shape == p.shape else torch.ones_like(p)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.backward()
    assert run.answers == [True]


def test_parameters_changed_without_an_optimizer_use_no_gradients() -> None:
    run = Watched()
    run.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.zero_grad()
    with torch.no_grad():
        for p in run.model.parameters():
            p.clamp_(-0.01, 0.01)  # weight clipping, as for a critic. It uses no gradients
    run.backward()
    assert run.answers == [True, False]


def test_a_step_that_raises_is_over() -> None:
    def fails() -> float:
        raise MemoryError("out of memory")

    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise MemoryError("out of memory")

    for kind in ("closure", "keyword", "step", "step again"):
        run = Watched()
        run.backward()
        optimizer = run.optimizer if kind in ("closure", "keyword") else Fails(run.model.parameters(), lr=0.1)
        step = partial(optimizer.step, closure=fails) if kind == "keyword" else partial(optimizer.step, fails)
        with pytest.raises(MemoryError):
            step()
        run.optimizer.zero_grad()
        if kind == "step again":
            Fails.fails = False
            optimizer.step()  # without gradients
        run.backward()
        run.optimizer.zero_grad()
        run.backward()
        assert run.answers == [False, False], kind


def test_an_ordinary_step_costs_no_work_on_tensors_for_each_parameter() -> None:
    class Counts(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls(layers: int, watched: bool) -> int:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = OptimizerWatch(optimizer, None, model.parameters) if watched else None
        for number in range(4):
            if number == 1:  # the watch compares parameters until an optimizer has stepped
                counts = Counts()
                counts.__enter__()
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if watch is not None:
                assert watch.used() is (None if number == 0 else True)
                watch.begin_period()
                watch.finish_step()
            optimizer.step()
        counts.__exit__(None, None, None)
        return counts.calls

    assert calls(2, True) - calls(2, False) == calls(20, True) - calls(20, False) <= 3 * 6


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_seen() -> None:
    run = Watched()
    step = torch.compile(run.optimizer.step, backend="eager")
    for _ in range(3):
        run.backward()
        step()
        run.optimizer.zero_grad()
    run.backward()
    run.optimizer.zero_grad()
    run.backward()
    assert run.answers == [True, True, True, False]
    assert run.watch.clock() == 3


def test_dropped_it_leaves_nothing_behind() -> None:
    gc.collect()
    before = len(optimizer_steps.watching())
    run = Watched()
    model = run.model
    assert len(optimizer_steps.watching()) == before + 1
    del run
    gc.collect()
    assert len(optimizer_steps.watching()) == before
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("ends", ["dropped", "closed"])
def test_it_may_end_while_an_optimizer_tells_of_its_step(ends: str) -> None:
    """The garbage collector or another thread may end it then. torch iterates over its hooks."""
    run, others = Watched(), list[Watched]()

    def end(*_: object) -> None:
        for other in others:
            if ends == "closed":
                other.watch.close()
        others.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(end)
    others.append(Watched())
    try:
        run.backward()
        run.optimizer.step()
    finally:
        hook.remove()
    assert run.watch.used()


def test_closed_it_leaves_nothing_behind() -> None:
    before = optimizer_steps.watching()
    run = Watched()
    assert optimizer_steps.watching() != before
    run.watch.close()
    assert optimizer_steps.watching() == before
    assert not any(p._backward_hooks for p in run.model.parameters())


def test_other_objects_than_optimizers_are_refused() -> None:
    with pytest.raises(HookConfigError, match=r"expected a torch\.optim\.Optimizer"):
        OptimizerWatch(3, None, tuple)
    with pytest.raises(HookConfigError, match=r"expected a torch\.optim\.Optimizer"):  # it can be called, too
        OptimizerWatch(torch.nn.Linear(1, 1), None, list)  # type: ignore[arg-type]
    with pytest.raises(HookConfigError, match=r"expected a torch\.amp\.GradScaler"):
        OptimizerWatch(None, 3, tuple)


def test_gradients_that_cannot_be_examined_are_a_doubt_and_end_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error from an autograd hook would end the backward on this rank alone."""

    def fails(params: list[torch.Tensor]) -> bool:
        raise NotImplementedError("aten::any")

    run = Watched()
    run.backward()
    monkeypatch.setattr("commhooks.adapters.optimizer_watch.any_nonzero_gradient", fails)
    doubts, begin = [], run.watch.begin_period
    monkeypatch.setattr(run.watch, "begin_period", lambda: (doubts.append(run.watch.doubt()), begin()))
    run.backward()
    assert run.answers == [False]
    assert "aten::any" in str(doubts[0])
