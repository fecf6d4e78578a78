"""``attach(..., rollback=False)`` on DDP halves the residual's memory, keeps the gradients, and names the uses that it
excludes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import HookNotSupportedError, HookState, as_hook
from commhooks.testing import spawn

EF = "error_feedback(bf16_compress)"


def train(rank: int, world: int, rollback: bool) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), bucket_cap_mb=0.01)
    handle = commhooks.attach(model, EF, rollback=rollback)
    for step in range(4):
        model.zero_grad()
        model(torch.full((2, 64), 1.0 + rank + step / 3)).square().mean().backward()
    handle.commit()
    state: Any = handle.state
    stores = (state._committed, state._staged, state._spare)
    held = sum(t.nbytes for t in {id(t): t for one in stores for t in one.values()}.values())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist(), held


def test_the_same_gradients_in_half_the_memory() -> None:
    (two, held_by_two), (other, _) = spawn(train, 2, True)
    (one, held_by_one), _ = spawn(train, 2, False)
    assert one == two == other
    assert 2 * held_by_one == held_by_two


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(64, 64))
    dist.destroy_process_group()


def test_objects_that_roll_steps_back_are_refused_by_name(model: DistributedDataParallel) -> None:
    judges = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "scaler": torch.amp.GradScaler("cpu")}
    for name, judge in judges.items():
        with pytest.raises(HookNotSupportedError, match=f"rollback=False and {name}= exclude each other"):
            commhooks.attach(model, EF, single_process=True, rollback=False, **{name: judge})
    with pytest.raises(HookNotSupportedError, match="with its own state"):
        commhooks.attach(model, lambda state, bucket: None, rollback=False)
    handle = commhooks.attach(model, EF, single_process=True, rollback=False)  # the model is unchanged
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(HookNotSupportedError, match=r"handle\.rollback"):
        handle.rollback()
    state = handle.state
    handle.detach()
    assert commhooks.attach(model, EF, state=state, single_process=True).state.in_place is False  # type: ignore[union-attr]


def test_a_registered_state_may_set_rollback_false(model: DistributedDataParallel) -> None:
    state = HookState()
    state.in_place = True
    model.register_comm_hook(state, as_hook(commhooks.create(EF).reduction))
    for _ in range(3):
        model(torch.randn(2, 64)).sum().backward()
    state.resolve_step()
    assert state.step == 3
    assert not state._spare
    assert {field for _, field in state.held()} == {"residual"}
