"""Local SGD against a manual loop on gloo processes, and its parts alone."""

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_ddp import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer, PostLocalSGDState
from ch_testing import spawn

pytestmark = pytest.mark.timeout(120)

STEPS, START, PERIOD = 9, 3, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 12, generator=generator) for _ in range(STEPS)]


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).pow(2).mean().backward()


def average_by_hand(model: nn.Module, group: Any = None) -> None:
    values = flat(model) / dist.get_world_size(group)
    dist.all_reduce(values, group=group)
    with torch.no_grad():
        for p, piece in zip(model.parameters(), values.split([p.numel() for p in model.parameters()]), strict=True):
            p.copy_(piece.view_as(p))


def by_hand(rank: int, pair: Any, later: str, levels: dict[int, Any]) -> list[torch.Tensor]:
    """The loop that post-local SGD and an averager replace."""
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    optimizer, seen = adam(model), []
    for step, x in enumerate(batches(rank)):
        optimizer.zero_grad()
        if step < START:
            backward(model, x)
        else:
            with model.no_sync():
                backward(model, x)
            if later == "subgroup":
                for p in model.parameters():
                    p.grad.div_(2)
                    dist.all_reduce(p.grad, group=pair)
        optimizer.step()
        due = [period for period in levels if step >= START and (step - START) % period == 0]
        if due:
            average_by_hand(model.module, levels[max(due)])
        seen.append(flat(model))
    return seen


def ours(rank: int, averager: Any, later: str, by_name: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    if by_name:
        commhooks.attach(
            model, f"post_local_sgd(start_iter={START}, subgroup_size=2, gradient_allreduce={later == 'subgroup'})"
        )
    else:
        state = PostLocalSGDState(None, None, START, later == "subgroup", subgroup_size=2)
        model.register_comm_hook(state, ch_ddp.post_localSGD_hook)
    optimizer, seen = PostLocalSGDOptimizer(adam(model), averager), []
    for x in batches(rank):
        optimizer.zero_grad()
        backward(model, x)
        optimizer.step()
        seen.append(flat(model))
    return seen


def body_loops(rank: int, world: int) -> None:
    pair = None
    for first in range(0, world, 2):
        made = dist.new_group([first, first + 1])
        pair = made if rank in (first, first + 1) else pair
    for later in ("subgroup", "nothing"):
        expected = by_hand(rank, pair, later, {PERIOD: None})
        for by_name, averager in (
            (True, PeriodicModelAverager(PERIOD, START)),
            (False, PeriodicModelAverager(PERIOD, START)),
            (False, HierarchicalModelAverager({PERIOD: world}, START)),
        ):
            got = ours(rank, averager, later, by_name)
            for step, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
                assert torch.equal(mine, theirs), (later, type(averager).__name__, step)
        if later == "nothing" or world > 2:  # between two averages the ranks differ
            everyone = [torch.empty_like(got[-2]) for _ in range(world)]
            dist.all_gather(everyone, got[START + 1])
            assert not torch.equal(everyone[0], everyone[-1])
    if world == 4:
        expected = by_hand(rank, pair, "nothing", {1: pair, 4: None})
        got = ours(rank, HierarchicalModelAverager({1: 2, 4: 4}, START), "nothing", True)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_step_has_the_parameters_of_the_hand_written_loop(world: int) -> None:
    spawn(body_loops, world)


def body_averaging(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    wide = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    odd = nn.Parameter(torch.randn(5, 3).t())
    params = [*wide.parameters(), odd, nn.Parameter(torch.randn(3, dtype=torch.bfloat16))]
    params += [nn.Parameter(torch.randn(2, dtype=torch.complex64)), nn.Parameter(torch.randn(4), requires_grad=False)]
    before = [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes(), p.dtype) for p in params]
    values = [p.detach().clone() for p in params]
    if rank == 0:
        params[0].grad = torch.ones_like(params[0])  # averaging needs no gradients
    ch_ddp.average_parameters([*params, odd])
    ch_ddp.average_parameters(iter([]))
    assert [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes(), p.dtype) for p in params] == before
    for p, value in zip(params, values, strict=True):
        every: list[Any] = [None] * world
        dist.all_gather_object(every, value)
        mean = torch.stack([v.to(torch.complex128) for v in every]).mean(0) if p.requires_grad else value
        torch.testing.assert_close(p.detach().to(torch.complex128), mean.to(torch.complex128), rtol=1e-2, atol=1e-2)
    outsider = dist.new_group([0])
    kept = odd.detach().clone()
    ch_ddp.average_parameters([{"params": [odd]}], outsider)
    assert torch.equal(odd, kept)
    theirs, mine = net(), net()
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as Theirs

    for model in (theirs, mine):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + rank)
                p.grad = torch.zeros_like(p)
    one, two = Theirs(3, 1), PeriodicModelAverager(3, 1)
    for _ in range(2):
        one.average_parameters(theirs.parameters())
        two.average_parameters(mine.parameters())
        assert torch.equal(flat(theirs), flat(mine))
    assert torch.allclose(flat(mine), flat(net()) * 1.5)


@pytest.mark.gloo
def test_averaging_keeps_storage_and_strides() -> None:
    spawn(body_averaging, 2)


def body_groups(rank: int, world: int) -> None:
    from torch.distributed.distributed_c10d import _get_process_group_name

    whole = dist.group.WORLD
    state = PostLocalSGDState(whole, None, 5, subgroup_size=2)
    assert dist.get_process_group_ranks(state.subgroup) == [rank // 2 * 2, rank // 2 * 2 + 1]  # before any backward
    with pytest.raises(commhooks.HookConfigError, match="4 ranks cannot be divided into groups of 3"):
        PostLocalSGDState(whole, None, 5, subgroup_size=3)
    assert PostLocalSGDState(whole, None, 5, False).subgroup is None
    averager = HierarchicalModelAverager({1: 2, 2: 4})
    names = {p: _get_process_group_name(g) for p, g in averager.period_process_group_dict.items()}
    assert names.keys() == {1, 2}
    assert averager.period_process_group_dict[2] is whole
    with pytest.raises(commhooks.HookConfigError, match="last group size is 2, but there are 4 ranks"):
        HierarchicalModelAverager({1: 2})
    with pytest.raises(commhooks.HookConfigError, match="cannot be divided into groups of 3"):
        HierarchicalModelAverager({1: 3, 2: 4})
    # Two levels of one size, like PyTorch's own test over four ranks.
    three = HierarchicalModelAverager({2: 2, 4: 4, 8: 4}).period_process_group_dict
    pair, everyone = [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]
    assert [dist.get_process_group_ranks(g) for g in three.values()] == [pair, everyone, everyone]
    narrow = HierarchicalModelAverager({2: 2, 4: 2, 8: 4}).period_process_group_dict
    assert narrow[2] is narrow[4]
    averager = HierarchicalModelAverager({2: 2, 4: 2, 8: 4})
    for step in range(9):
        value = nn.Parameter(torch.full((3,), float(rank)))
        averager.average_parameters([value])
        expected = 1.5 if step % 8 == 0 else rank // 2 * 2 + 0.5 if step % 2 == 0 else float(rank)
        assert value.tolist() == [expected] * 3, step
    # A model on some of the ranks. Attach gives the state the model's group, not the default group.
    half = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    model = DistributedDataParallel(net(), process_group=half, bucket_cap_mb=0.001)
    handle = commhooks.attach(model, "post_local_sgd(start_iter=0, subgroup_size=2)")
    assert handle.state.process_group is half
    backward(model, batches(rank)[0])
    copied = copy.deepcopy(model.module)
    for p in copied.parameters():
        p.grad = None
    backward(copied, batches(rank)[0])
    for mine, p in zip(model.parameters(), copied.parameters(), strict=True):
        dist.all_reduce(p.grad, group=half)
        assert torch.allclose(mine.grad, p.grad / 2, atol=1e-7)
    assert handle.state.iter == 1


@pytest.mark.gloo
def test_subgroups_are_made_at_once() -> None:
    spawn(body_groups, 4)


# -- without processes


def test_averagers_agree_on_the_phase() -> None:
    periodic, one_level = PeriodicModelAverager(4, 13), HierarchicalModelAverager({4: 8}, 13)
    assert [s for s in range(30) if periodic.due(s)] == [s for s in range(30) if one_level.group_size(s)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PeriodicModelAverager(0), "period=0: expected a whole number, 1 or more"),
        (lambda: PeriodicModelAverager(2, -1), "warmup_steps=-1"),
        (lambda: HierarchicalModelAverager({}), "needs period -> group size"),
        (lambda: HierarchicalModelAverager({4: 2, 2: 4}), "periods .* must grow"),
        (lambda: HierarchicalModelAverager({2: 4, 4: 2}), "group sizes .* must grow"),
        (lambda: PostLocalSGDState(None, None, -1), "start_localSGD_iter=-1"),
        (lambda: PostLocalSGDOptimizer(net(), PeriodicModelAverager(2)), "Give a torch.optim.Optimizer"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(commhooks.HookConfigError, match=message):
        make()


def test_states_need_no_process_group_and_survive_a_checkpoint() -> None:
    state = PostLocalSGDState(None, None, 5, subgroup_size=2)
    state.iter = 7
    fresh = PostLocalSGDState(None, None, 5)
    fresh.load_state_dict(state.state_dict())
    assert fresh.local
    assert pickle.loads(pickle.dumps(state)).state_dict() == state.state_dict()
    for wrong in ({}, {**state.state_dict(), "start_localSGD_iter": 9}):
        with pytest.raises(commhooks.StateError):
            fresh.load_state_dict(wrong)
    averager = HierarchicalModelAverager({2: 4})
    averager.load_state_dict({"step": 3})
    assert pickle.loads(pickle.dumps(averager)).step == 3
    with pytest.raises(commhooks.StateError):
        averager.load_state_dict({"iter": 3})


class Never(ch_ddp.ModelAverager):
    """Counts calls, so that tests of the optimizer need no processes."""

    def average_parameters(self, params: Any) -> None:
        assert [p for group in params for p in group["params"]]
        self.step += 1


def optimizer_and_model() -> tuple[PostLocalSGDOptimizer, nn.Module]:
    model = net()
    return PostLocalSGDOptimizer(adam(model), Never()), model


def test_the_optimizer_is_one() -> None:
    optimizer, model = optimizer_and_model()
    plain_model = net()
    plain = adam(plain_model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, plain)]
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append(f"pre {optimizer.averager.step}"))
    optimizer.register_step_post_hook(lambda *_: order.append(f"post {optimizer.averager.step}"))

    def closure_of(net_: nn.Module, owner: torch.optim.Optimizer) -> Any:
        def closure() -> torch.Tensor:
            owner.zero_grad()
            loss = net_(batches(0)[0]).pow(2).mean()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        mine = optimizer.step(closure_of(model, optimizer))
        theirs = plain.step(closure_of(plain_model, plain))
        assert torch.equal(mine, theirs)
        for schedule in schedules:
            schedule.step()
    assert torch.equal(flat(model), flat(plain_model))
    assert order == ["pre 0", "post 1", "pre 1", "post 2", "pre 2", "post 3"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.optim.param_groups) == len(optimizer.param_groups) == 2


def test_the_optimizers_checkpoint_loads_safely_and_leaves_nothing_stale() -> None:
    optimizer, model = optimizer_and_model()
    backward(model, batches(0)[0])
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, other_model = optimizer_and_model()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.averager.step == 1
    for group in other.param_groups:
        group["lr"] = 0.25
    assert other.optim.param_groups[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = 0.25
    for o, m in ((optimizer, model), (other, other_model)):
        o.zero_grad()
        backward(m, batches(0)[1])
        o.step()
    assert torch.equal(flat(model), flat(other_model))
    twin = copy.deepcopy(other)
    assert twin.averager.step == 2
    assert twin.optim is not other.optim
    assert twin.state.keys() != other.state.keys()
    plain = adam(net())
    with pytest.warns(UserWarning, match="does not contain a step counter for an averager. Setting step counter to 0"):
        other.load_state_dict(plain.state_dict())
    assert other.averager.step == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(optimizer.state_dict())
    assert other.averager.step == optimizer.averager.step


def test_averaging_at_every_step_is_warned_of_as_by_pytorch() -> None:
    with pytest.warns(UserWarning, match="period is 1.* no model averaging is needed") as caught:
        PeriodicModelAverager(1)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="the largest period is 1"):
        HierarchicalModelAverager({1: 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HierarchicalModelAverager({1: 2, 2: 4})


def test_signatures_are_pytorchs() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
    from torch.distributed.optim import PostLocalSGDOptimizer as TheirOptimizer

    for mine, original in (
        (PostLocalSGDState, theirs.PostLocalSGDState),
        (ch_ddp.post_localSGD_hook, theirs.post_localSGD_hook),
        (PeriodicModelAverager, averagers.PeriodicModelAverager),
        (HierarchicalModelAverager, hierarchical_model_averager.HierarchicalModelAverager),
        (PostLocalSGDOptimizer, TheirOptimizer),
    ):
        wanted = inspect.signature(original).parameters
        found = {k: p for k, p in inspect.signature(mine).parameters.items() if p.kind is not p.KEYWORD_ONLY}
        assert list(found) == list(wanted)
        assert [p.default for p in found.values()] == [p.default for p in wanted.values()]
