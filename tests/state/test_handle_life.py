"""The life of a handle over two models, as a state machine: attach, detach, load, step, skip, accumulate, move, fail, save.

One process compresses its own gradients. So the residual must always equal what it held when it was loaded, plus all
gradients that counted, minus all results that the optimizer used.
"""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import Faulty
from ch_testing.faulty import WHERE, Injected
from commhooks import AttachError, StateError

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
HOOKS = ("powersgd(rank=1, min_compression_rate=1)", "error_feedback(bf16_compress)", "topk(density=0.3)")
SHAPES = {"small": (6, 5), "large": (9, 7)}
Residual = dict[str, torch.Tensor]


class Ours:
    """A model, and what a handle on it must hold."""

    def __init__(self, name: str) -> None:
        rows, columns = SHAPES[name]
        torch.manual_seed(rows)
        self.ddp = DistributedDataParallel(
            nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, 4)), bucket_cap_mb=1e-4
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.5)
        self.columns = columns
        self.draws = 0

    def batch(self) -> torch.Tensor:
        self.draws += 1
        return torch.randn(3, self.columns, generator=torch.Generator().manual_seed(self.draws))

    def loss(self, module: nn.Module, data: torch.Tensor) -> torch.Tensor:
        return module(data).square().mean()

    def exact(self, data: torch.Tensor) -> Residual:
        """Gradients of a batch without DDP."""
        named = dict(self.ddp.module.named_parameters())
        found = torch.autograd.grad(self.loss(self.ddp.module, data), list(named.values()))
        return dict(zip(named, found, strict=True))

    def grads(self) -> Residual:
        return {name: p.grad.clone() for name, p in self.ddp.module.named_parameters() if p.grad is not None}


class Life(RuleBasedStateMachine):
    """One handle at a time for each of two models."""

    @initialize(hook=st.sampled_from(HOOKS), watched=st.booleans(), always=st.booleans())
    def begin(self, hook: str, watched: bool, always: bool) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.groups = [dist.group.WORLD, dist.new_group([0])]
        self.hook, self.watched, self.always = hook, watched, always
        self.models = {name: Ours(name) for name in SHAPES}
        self.faulty: dict[str, Faulty] = {}
        self.handles: dict[str, Any] = {}
        self.attached: dict[str, bool] = {}
        self.residual: dict[str, Residual] = {}
        self.count: dict[str, int] = {}
        self.saved: dict[str, list[tuple[bytes, Residual, int]]] = {name: [] for name in SHAPES}

    def teardown(self) -> None:
        if hasattr(self, "models"):
            for handle in self.handles.values():
                handle.detach()
            self.handles.clear()
            self.models.clear()
            dist.destroy_process_group()

    models: dict[str, Ours]
    which = st.sampled_from(sorted(SHAPES))

    def fresh(self, which: str) -> Any:
        inner = commhooks.create(self.hook).reduction
        assert inner is not None
        self.faulty[which] = Faulty(inner)
        return commhooks.create(self.faulty[which])

    def attach(self, which: str, handle: Any) -> None:
        ours = self.models[which]
        optimizer = ours.optimizer if self.watched else None
        self.handles[which] = commhooks.attach(ours.ddp, handle, optimizer=optimizer, single_process=True)
        self.attached[which] = True

    # -- attach and detach

    @rule(which=which)
    def attach_new(self, which: str) -> None:
        if self.attached.get(which):
            with pytest.raises(AttachError):
                commhooks.attach(self.models[which].ddp, self.hook, single_process=True)
            return
        self.attach(which, self.fresh(which))
        self.residual[which], self.count[which] = {}, 0

    @precondition(lambda self: bool(self.handles))
    @rule(which=which)
    def attach_again(self, which: str) -> None:
        """A detached handle goes on with its state; an attached one is refused."""
        handle = self.handles.get(which)
        if handle is None:
            return
        if self.attached[which]:
            with pytest.raises(AttachError):
                commhooks.attach(self.models[which].ddp, handle, single_process=True)
        else:
            self.attach(which, handle)

    @precondition(lambda self: bool(self.handles))
    @rule(which=which)
    def attach_to_the_other_model(self, which: str) -> None:
        handle = self.handles.get(which)
        other = next(name for name in SHAPES if name != which)
        if handle is None or self.attached.get(other):
            return
        with pytest.raises((AttachError, StateError)):
            commhooks.attach(self.models[other].ddp, handle, single_process=True)

    @rule(which=which)
    def detach(self, which: str) -> None:
        if which in self.handles:
            self.handles[which].detach()
            self.attached[which] = False

    # -- steps

    def backward(self, which: str, micro: int = 1) -> Residual:
        """Run micro-batches, the last one with the hook. Return their exact gradient."""
        ours = self.models[which]
        ours.optimizer.zero_grad()
        batches = [ours.batch() for _ in range(micro)]
        exact = [ours.exact(data) for data in batches]
        with ours.ddp.no_sync():
            for data in batches[:-1]:
                ours.loss(ours.ddp, data).backward()
        ours.loss(ours.ddp, batches[-1]).backward()
        return {name: sum(one[name] for one in exact) for name in exact[0]}

    @rule(which=which, micro=st.integers(1, 3), now=st.booleans())
    def step(self, which: str, micro: int, now: bool) -> None:
        exact = self.backward(which, micro)
        ours = self.models[which]
        grads = ours.grads()
        if not self.attached.get(which):
            for name, grad in grads.items():
                torch.testing.assert_close(grad, exact[name])
            ours.optimizer.step()
            return
        before = self.residual[which]
        self.residual[which] = {n: before.get(n, torch.zeros_like(g)) + exact[n] - g for n, g in grads.items()}
        self.count[which] += 1
        ours.optimizer.step()
        if now:
            assert self.handles[which].commit() is True

    @rule(which=which, now=st.booleans())
    def skip(self, which: str, now: bool) -> None:
        """The optimizer does not use a step: a watch sees it, or the user says so."""
        self.backward(which)
        self.models[which].optimizer.zero_grad()
        if self.attached.get(which):
            if not self.watched:
                self.handles[which].rollback()
            if now:
                assert self.handles[which].commit() is False

    @rule(which=which, where=st.sampled_from(WHERE))
    def fail(self, which: str, where: Any) -> None:
        """The reduction raises, and the training loop goes on with the next batch."""
        if self.attached.get(which):
            self.faulty[which].arm(where)
            with pytest.raises(Injected):
                self.backward(which)
            self.models[which].optimizer.zero_grad()

    @rule(which=which)
    def fail_outside(self, which: str) -> None:
        """The model itself raises in the middle of a backward."""
        ours = self.models[which]
        first = next(iter(ours.ddp.module.parameters()))

        def stop(_: torch.Tensor) -> None:
            raise Injected("outside")

        hook = first.register_hook(stop)
        try:
            with pytest.raises(Injected):
                self.backward(which)
        finally:
            hook.remove()
            ours.optimizer.zero_grad()
        ours.loss(ours.ddp.module, ours.batch())

    # -- move, save and load

    @rule(which=which, group=st.integers(0, 1))
    def move(self, which: str, group: int) -> None:
        self.models[which].ddp._update_process_group(self.groups[group])

    @precondition(lambda self: bool(self.handles))
    @rule(which=which)
    def save(self, which: str) -> None:
        if which in self.handles:
            file = io.BytesIO()
            torch.save(self.handles[which].state_dict(), file)
            self.saved[which].append((file.getvalue(), copy.deepcopy(self.residual[which]), self.count[which]))

    @precondition(lambda self: any(self.saved.values()))
    @rule(which=which, data=st.data())
    def load(self, which: str, data: st.DataObject) -> None:
        if self.saved[which] and which in self.handles:
            raw, residual, count = data.draw(st.sampled_from(self.saved[which]), label="which state")
            self.handles[which].load_state_dict(torch.load(io.BytesIO(raw), weights_only=True))
            self.residual[which], self.count[which] = copy.deepcopy(residual), count

    @precondition(lambda self: any(self.saved.values()))
    @rule(which=which)
    def load_the_state_of_the_other_model(self, which: str) -> None:
        other = next(name for name in SHAPES if name != which)
        if self.saved[other] and self.attached.get(which) and self.saved[other][-1][1]:
            with pytest.raises(StateError):
                self.handles[which].load_state_dict(torch.load(io.BytesIO(self.saved[other][-1][0]), weights_only=True))

    # -- what always holds

    @invariant()
    def the_state_holds_what_was_not_used(self) -> None:
        for which, handle in getattr(self, "handles", {}).items():
            assert handle.attached is self.attached[which]
            if self.always or not handle.attached:  # a look at an attached handle resolves its last step
                self.look(which)

    @rule(which=which)
    def look(self, which: str) -> None:
        if which not in self.handles:
            return
        handle = self.handles[which]
        assert handle.state_dict()["step"] == handle.hook_state.step == self.count[which]
        held = {name: tensor for name, field, tensor in handle.hook_state.entries() if field == "residual"}
        for name, wanted in self.residual[which].items():
            found = held.get(name, torch.zeros_like(wanted))
            torch.testing.assert_close(found.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def test_the_life_of_a_handle() -> None:
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
