"""The hooks of ch-ddp on real gloo processes, against DDP without a hook."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import commhooks
from ch_testing import spawn
from ch_testing.simulated_ranks import SimulatedRanks

pytestmark = pytest.mark.timeout(120)

MANY = 0.001  # MiB. Every parameter is a bucket


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5))


def wrapped(cap: float = MANY, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=cap, **options)


def grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def worst_error(model: nn.Module, reference: nn.Module, rank: int, steps: int = 4) -> float:
    """Return the largest relative gradient error over some steps on equal data."""
    torch.manual_seed(100 + rank)
    dtype = next(model.parameters()).dtype
    worst = 0.0
    for _ in range(steps):
        x = torch.randn(6, 20).to(dtype)
        for m in (model, reference):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        a, b = grads(model), grads(reference)
        worst = max(worst, float((a - b).norm() / b.norm()))
    return worst


TOLERANCE = {
    "allreduce": 0.0,
    "fp16_compress": 1e-3,
    "fp16": 1e-3,
    "bf16_compress": 1e-2,
    "bf16_compress(accumulate='fp32')": 1e-2,
    "fp16_wrapper(allreduce)": 1e-3,
    "bf16_wrapper(allreduce)": 1e-2,
    "bf16_wrapper(fp16_wrapper(allreduce))": 1e-2,
}

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


def body_by_name(rank: int, world: int) -> dict[str, float]:
    found = {}
    for number, expr in enumerate(TOLERANCE):
        for options in OPTIONS if expr == "allreduce" else (OPTIONS[(number + world) % len(OPTIONS)],):
            model = wrapped(**options)
            handle = commhooks.attach(model, expr)
            found[f"{expr} {options}"] = worst_error(model, wrapped(**options), rank)
            handle.assert_active()
            stats = handle.stats()
            assert (stats["compressed_steps"] > 0) == (expr != "allreduce"), (expr, stats)
    return found


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.full) for world in (3, 4))])
def test_every_hook_by_name_equals_ddp_within_its_rounding(world: int) -> None:
    for result in spawn(body_by_name, world, timeout=110):
        for case, error in result.items():
            assert error <= TOLERANCE[case.split(" {")[0]], case


def body_large(rank: int, world: int) -> dict[str, float]:
    """Buckets of 9.7 and 9.3 MB, each sent as two messages if the order of addition allows it."""
    found = {}
    for expr, dtype in (("allreduce", torch.float32), ("allreduce", torch.bfloat16), ("bf16_compress", torch.float32)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 1100), nn.Linear(1100, 2200, bias=False), nn.Linear(2200, 1053, bias=False))
        model, reference = (DistributedDataParallel(copy.deepcopy(net).to(dtype), bucket_cap_mb=MANY) for _ in range(2))
        commhooks.attach(model, expr)
        found[expr] = max(worst_error(model, reference, rank, steps=2), found.get(expr, 0.0))
        everyone = [torch.empty_like(grads(model)) for _ in range(world)]
        dist.all_gather(everyone, grads(model))
        assert all(torch.equal(one, everyone[0]) for one in everyone)
    return found


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_large_messages_give_the_same_average(world: int) -> None:
    for result in spawn(body_large, world, timeout=110):
        for expr, error in result.items():
            assert error <= TOLERANCE[expr], expr


def body_one_detached(rank: int, world: int) -> float:
    """Rank 0 had a hook, and the others never had one. Their messages must still match, large ones too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 1100), nn.Linear(1100, 1053, bias=False))
    model, reference = (DistributedDataParallel(copy.deepcopy(net)) for _ in range(2))
    if rank == 0:
        commhooks.attach(model, "bf16_compress", verify_ranks=False).detach()
    return worst_error(model, reference, rank, steps=2)


def test_a_detached_rank_matches_ranks_that_never_had_a_hook() -> None:
    assert spawn(body_one_detached, 2, timeout=60) == [0.0, 0.0]


def body_plain_functions(rank: int, world: int) -> dict[str, float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = dist.new_group(list(range(world)))
    found = {}
    for state in (None, group):
        for hook in (
            ch_ddp.allreduce_hook,
            ch_ddp.fp16_compress_hook,
            ch_ddp.bf16_compress_hook,
            commhooks.get("allreduce"),
            commhooks.get("bf16_wrapper")(ch_ddp.allreduce_hook),
            ch_ddp.fp16_compress_wrapper(ch_ddp.bf16_compress_wrapper(ch_ddp.allreduce_hook)),
            ch_ddp.bf16_compress_wrapper(default_hooks.allreduce_hook),
            ch_ddp.fp16_compress_wrapper(ch_ddp.bf16_compress_wrapper(default_hooks.allreduce_hook)),
            pickle.loads(pickle.dumps(ch_ddp.fp16_compress_wrapper(ch_ddp.allreduce_hook))),
            pickle.loads(pickle.dumps(ch_ddp.bf16_compress_wrapper(default_hooks.allreduce_hook))),
        ):
            model = wrapped()
            model.register_comm_hook(state, hook)
            name = f"{hook.__name__} {state is None}"
            found[name] = worst_error(model, wrapped(), rank)
            assert next(model.parameters()).grad.dtype == torch.float32
    return found


def test_plain_functions_have_pytorchs_signature_nest_and_pickle() -> None:
    for result in spawn(body_plain_functions, 2, timeout=110):
        for name, error in result.items():
            assert error <= (0.0 if name.startswith("allreduce") else 1e-2), name


def body_two_models_one_function(rank: int, world: int) -> float:
    first, second, reference = wrapped(), wrapped(), wrapped()
    first.register_comm_hook(None, ch_ddp.fp16_compress_hook)
    second.register_comm_hook(None, ch_ddp.fp16_compress_hook)
    return max(
        worst_error(first, reference, rank), worst_error(second, reference, rank), worst_error(first, second, rank)
    )


def test_two_models_share_a_stateless_function() -> None:
    assert max(spawn(body_two_models_one_function, 2)) < 1e-3


def body_noop_and_subgroup(rank: int, world: int) -> None:
    model = wrapped()
    commhooks.attach(model, "noop")
    model(torch.full((1, 20), float(rank + 1))).sum().backward()
    lone = net()
    lone(torch.full((1, 20), float(rank + 1))).sum().backward()
    assert torch.equal(grads(model), grads(lone))

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    model = DistributedDataParallel(net(), process_group=mine, bucket_cap_mb=MANY)
    reference = DistributedDataParallel(net(), process_group=mine, bucket_cap_mb=MANY)
    commhooks.attach(model, "allreduce")  # PyTorch's hook would average over the world here
    assert worst_error(model, reference, rank) == 0.0


def test_noop_is_local_and_the_models_own_group_is_used() -> None:
    spawn(body_noop_and_subgroup, 4)


def body_overflow(rank: int, world: int) -> list[list[float]]:
    rows = []
    for values in ([66000.0, 0.0], [70000.0 * 4, 70000.0 * 4]):
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        commhooks.attach(model, "fp16_compress")
        model(torch.full((1, 2), values[rank])).sum().backward()
        rows.append(grads(model).tolist())
    return rows


def test_fp16_averages_numbers_that_fit_and_passes_overflow_on() -> None:
    for alone, everywhere in spawn(body_overflow, 2):
        assert alone == [32992.0, 32992.0]
        assert everywhere == [float("inf"), float("inf")]


def body_reattach(rank: int, world: int) -> None:
    model = wrapped()
    handle = commhooks.attach(model, "bf16_compress")
    assert 0 < worst_error(model, wrapped(), rank) < 1e-2
    with pytest.raises(
        commhooks.AttachError, match=r"already has the hook bf16_compress. Call handle.detach\(\) first"
    ):
        commhooks.attach(model, "allreduce")
    handle.detach()
    assert worst_error(model, wrapped(), rank) == 0.0
    again = commhooks.attach(model, "fp16_compress")
    assert 0 < worst_error(model, wrapped(), rank) < 1e-3
    assert again.stats()["steps"] == 4

    taken = wrapped()
    taken.register_comm_hook(None, ch_ddp.allreduce_hook)
    with pytest.raises(commhooks.AttachError, match="hook slot holds allreduce_hook"):
        commhooks.attach(taken, "allreduce")
    with pytest.raises(commhooks.AttachError, match=r"Linear: it is not wrapped.*DistributedDataParallel\(model\)"):
        commhooks.attach(nn.Linear(2, 2), "allreduce")
    with pytest.raises(commhooks.AttachError, match=r"takes a model.*got SGD"):
        commhooks.attach(torch.optim.SGD(nn.Linear(2, 2).parameters()), "powersgd")
    copied = copy.deepcopy(wrapped())
    lost = commhooks.attach(wrapped(), "allreduce")
    copied(torch.randn(1, 20)).sum().backward()
    with pytest.raises(commhooks.AttachError, match="has not been called"):
        lost.assert_active()


def test_detach_reattach_and_refusals() -> None:
    spawn(body_reattach, 2)


class Scaled:
    """A callable object with a different argument name and string annotations. Torch refuses both."""

    def __call__(self, state: "Any", the_bucket: "Any") -> "torch.futures.Future[torch.Tensor]":
        return halve(state, the_bucket)


def halve(group: Any, b: Any, factor: float = 0.5) -> Any:
    work = dist.all_reduce(b.buffer().mul_(factor), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def body_foreign(rank: int, world: int) -> None:
    for hook in (halve, partial(halve, factor=0.5), Scaled()):
        model = wrapped()
        handle = commhooks.attach(model, hook)
        assert worst_error(model, wrapped(), rank) == 0.0
        handle.assert_active()


def test_partials_objects_and_any_argument_name_are_accepted() -> None:
    spawn(body_foreign, 2)


def body_compiled(rank: int, world: int) -> dict[str, float]:
    import torch._dynamo

    found = {}
    for mode in ("ddp_optimizer", "python_reducer"):
        for name in ("allreduce", "fp16_compress", "bf16_compress"):
            torch._dynamo.reset()
            torch._dynamo.config.optimize_ddp = mode
            model, reference = wrapped(cap=25), wrapped(cap=25)  # dynamo needs caps of at least 1 MiB
            model.register_comm_hook(None, commhooks.get(name))
            compiled = torch.compile(model, backend="aot_eager")
            with torch._dynamo.config.patch(compiled_autograd=mode == "python_reducer"):
                found[f"{name} {mode}"] = worst_error(compiled, reference, rank, steps=2)
    return found


@pytest.mark.full
def test_compiled_ddp_in_both_modes() -> None:
    for result in spawn(body_compiled, 2, timeout=110):
        for name, error in result.items():
            assert error <= (1e-6 if name.startswith("allreduce") else 1e-2), name


def test_no_process_group_is_a_typed_error() -> None:
    handle = commhooks.create("bf16_compress")  # needs no process group
    assert handle.expr == "bf16_compress"
    with pytest.raises(commhooks.AttachError, match=r"is not attached to a model: handle = commhooks\.attach"):
        handle.stats()


def body_review(rank: int, world: int) -> None:
    # a forward without gradients between forward and backward
    model = wrapped()
    handle = commhooks.attach(model, "bf16_compress")
    loss = model(torch.randn(2, 20)).sum()
    with torch.no_grad():
        model(torch.randn(2, 20))
    loss.backward()
    handle.assert_active()
    handle.detach()
    handle.detach()
    assert handle.stats()["steps"] == 1

    # the same model, wrapped over another group, with the same function
    module = net()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for group, factor in ((alone, float(rank)), (None, 0.5)):
        again = DistributedDataParallel(module, process_group=group)
        again.register_comm_hook(group, ch_ddp.allreduce_hook)
        again.zero_grad()
        again(torch.full((1, 20), float(rank))).sum().backward()
        lone = net()
        lone(torch.full((1, 20), factor)).sum().backward()
        first = next(module.parameters()).grad
        if group is not None:
            assert torch.equal(first, next(lone.parameters()).grad)
        gathered = [torch.empty_like(first) for _ in range(world)]
        dist.all_gather(gathered, first)
        assert torch.equal(gathered[0], gathered[1]) == (group is None)

    # ranks with different options in an object
    from ch_powersgd import PowerSGD

    with pytest.raises(commhooks.RankMismatchError, match="rank"):
        commhooks.attach(wrapped(), ch_ddp.bf16_compress_wrapper(PowerSGD(rank=4 if rank == 0 else 2)))
    shown = commhooks.attach(wrapped(), ch_ddp.bf16_compress_wrapper(PowerSGD(rank=2)))
    assert shown.expr.startswith("bf16_wrapper(powersgd(rank=2")

    def generated(bucket: Any, ctx: Any) -> Any:
        yield commhooks.AllReduce(bucket.buffer)

    model = wrapped()
    commhooks.attach(model, generated)
    assert worst_error(model, wrapped(), rank) == 0.0


def test_defects_that_a_review_found_stay_fixed() -> None:
    pytest.importorskip("ch_powersgd", reason="ch-powersgd is not installed")
    spawn(body_review, 2)
    assert pickle.loads(pickle.dumps(ch_ddp.bf16_compress_hook)) is ch_ddp.bf16_compress_hook


class Looked(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = nn.Embedding(17, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(x))


def sparse_beside_dense(rank: int, world: int) -> list[str]:
    plain, attached, bare = (DistributedDataParallel(Looked()) for _ in range(3))
    commhooks.attach(attached, "allreduce")
    bare.register_comm_hook(None, ch_ddp.allreduce_hook)
    wrong = []
    for step in range(3):
        for model in (plain, attached, bare):
            model.zero_grad()
            torch.manual_seed(100 * step + rank)
            model(torch.randint(0, 17, (9,))).pow(2).sum().backward()
        want = [p.grad.to_dense() for p in plain.parameters() if p.grad is not None]
        for name, model in (("attached", attached), ("bare", bare)):
            have = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
            wrong += [f"{name} step {step}"] * (not all(map(torch.equal, want, have)))
    return wrong


def test_sparse_gradients_have_ddps_bits() -> None:
    assert spawn(sparse_beside_dense, 3) == [[], [], []]


@pytest.mark.parametrize("expr", ["noop", "warmup(noop, steps=1)", "policy({'*': noop})"])
def test_noop_leaves_complex_gradients_local_too(expr: str) -> None:
    like = {"turn": torch.zeros(3, 2, dtype=torch.complex64), "weight": torch.zeros(4, 4)}
    ranks = SimulatedRanks(lambda: commhooks.create(expr), 2, like)
    for step in range(2):
        given = [{n: torch.full_like(t, rank + 1.0) for n, t in like.items()} for rank in range(2)]
        found = ranks.step(given)
        if step or "warmup" not in expr:
            assert all(torch.equal(found.gradients[r][n], given[r][n]) for r in range(2) for n in like)
