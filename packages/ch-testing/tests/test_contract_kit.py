"""The contract kit passes correct methods of every kind, and fails wrong ones with advice on the setting to change."""

import re

import pytest
import torch

import commhooks
from ch_testing import HookContract
from ch_testing.contract_shards import Scattering
from ch_testing.pytest_plugin import isolated
from commhooks import AllReduce, HookSpec, ReduceScatter, Reduction


class Coarse(Reduction):
    """Rounds to whole numbers. The large residual shows any element that lands in the wrong place."""

    name, lossy, reports_sent = "coarse", True, True

    def run(self, bucket, ctx):
        flat = bucket.buffer.round()
        if ctx.sent is not None:
            ctx.sent.buffer = flat
        yield AllReduce(flat)
        bucket.buffer = flat


class Aliased(Reduction):
    """Multiplies its message by W in place if the bucket has 16 bits. Its report then shares memory with the message."""

    name, lossy, reports_sent = "aliased", True, True

    def run(self, bucket, ctx):
        small = bucket.buffer.to(torch.bfloat16, copy=True).mul_(1.0 / ctx.world_size)
        if ctx.sent is not None:
            ctx.sent.buffer = small.to(bucket.dtype).mul_(ctx.world_size)
        yield AllReduce(small, "sum")
        bucket.buffer = small.to(bucket.dtype)


class WrongUnits(Reduction):
    """Reports its message after the division by W."""

    name, lossy, reports_sent = "wrong_units", True, True

    def run(self, bucket, ctx):
        flat = bucket.buffer * (1.0 / ctx.world_size)
        if ctx.sent is not None:
            ctx.sent.buffer = flat
        yield AllReduce(flat, "sum")
        bucket.buffer = flat


class Vote(Reduction):
    """Returns the sign of the majority, which is no mean."""

    name, lossy = "vote", True

    def run(self, bucket, ctx):
        votes = torch.where(bucket.buffer.isfinite(), bucket.buffer.sign(), bucket.buffer)
        yield AllReduce(votes, "sum")
        bucket.buffer = torch.where(votes.isfinite(), votes.sign(), votes)


class Momentum(Reduction):
    """Momentum correction (DGC, arXiv:1712.01887). It applies a sum of momenta, not of gradients."""

    name, lossy = "momentum", True
    fields = {"velocity": "local", "residual": "local"}

    def run(self, bucket, ctx):
        flat = torch.empty_like(bucket.storage)
        kept = []
        for p, gradient in bucket.views():
            before = [ctx.read(p.name, field) for field in ("velocity", "residual")]
            parts = [ctx.write(p.name, field, p.shape, device=bucket.device) for field in ("velocity", "residual")]
            velocity, residual = parts
            velocity.copy_(gradient.float() + (0 if before[0] is None else 0.5 * before[0]))
            residual.copy_(velocity + (0 if before[1] is None else before[1]))
            gradient.copy_(residual.round())
            kept.append((residual, gradient.clone()))
        flat = bucket.buffer
        yield AllReduce(flat)
        bucket.buffer = flat
        for residual, sent in kept:
            residual.sub_(sent)


class CoarseParts(Coarse):
    """Coarse on shards. Each rank keeps its part, and its residual covers whole parameters."""

    name = "coarse_parts"
    fields = {"residual": "local"}
    reports_sent = False
    shift, keeps = 0, True

    def run_scatter(self, shards, ctx):
        kept = []
        for p in shards.params:
            whole = shards.whole(p)
            before, after = (
                ctx.read(p.name, "residual"),
                ctx.write(p.name, "residual", whole.shape, device=shards.device),
            )
            kept.append((p, shards.cut(p, before) if before is not None and self.keeps else None, shards.cut(p, after)))
        for r, part in enumerate(shards.vectors()):
            for vector, (_, before, after) in zip(part, kept, strict=True):
                n = after[r].numel()
                if before is not None:
                    vector[:n].add_(before[r])
                exact = vector[:n].clone()
                vector.round_()
                after[r].copy_(exact - vector[:n])
        yield ReduceScatter(shards.storage.roll(self.shift), shards.output)


class Forgetful(CoarseParts):
    """Stages a residual and never reads it."""

    name, keeps = "forgetful", False


class Shifted(CoarseParts):
    """Gives each rank numbers that belong one place further on."""

    name, shift = "shifted", 1


METHODS = (Coarse, Aliased, WrongUnits, Vote, Momentum, CoarseParts, Forgetful, Shifted)


def register_all() -> None:
    for method in METHODS:
        capabilities = {"lossy"} | ({"stateful"} if method.fields else set())
        spec = HookSpec(
            method.name, "reduction", "tests:here", "for this test", options={}, capabilities=frozenset(capabilities)
        )
        commhooks.register(spec, method)


@pytest.fixture(autouse=True)
def registered(isolated_registry):
    register_all()


with isolated():  # the classes ask their hooks which checks apply
    register_all()

    class TestResidualOfATransposedParameter(HookContract):
        expr = "error_feedback(coarse)"
        compresses = False

    class TestMajorityVote(HookContract):
        expr = "vote"
        mean = False
        compresses = False

    class TestMomentumCorrection(HookContract):
        expr = "momentum"
        mean = False
        compresses = False


def failure(check: str, *args: str, **attributes: object) -> str:
    made = type("Case", (HookContract,), attributes)()
    with pytest.raises(AssertionError) as caught:
        getattr(made, check)(*args)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_report_that_shares_memory_with_the_message_is_found(dtype: torch.dtype) -> None:
    other = {"dtypes": (dtype,), "expr": "aliased"}
    if dtype == torch.float16:  # the kit copies buckets of other dtypes than the wire's
        HookContract.test_reports_what_it_sent(type("Case", (HookContract,), other)())
    else:
        assert "share memory" in failure("test_reports_what_it_sent", **other)


def test_a_report_in_other_units_is_found() -> None:
    assert "in the gradient's units" in failure("test_reports_what_it_sent", expr="wrong_units")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residual_is_checked_in_16_bits(dtype: torch.dtype) -> None:
    message = failure(
        "test_input_is_sent_plus_residual", "used_by_all", expr="error_feedback(wrong_units)", dtypes=(dtype,)
    )
    assert str(dtype) in message


PARTS = [name for name in dir(Scattering) if name.startswith("test_")]


@pytest.mark.parametrize("check", PARTS)
@pytest.mark.parametrize("expr", ["coarse_parts", "coarse"])
def test_a_reduction_that_leaves_parts_passes_and_one_without_is_refused(expr: str, check: str) -> None:
    made = type("Case", (HookContract,), {"expr": expr})()
    if (expr == "coarse") == (check == "test_without_run_scatter_it_is_refused"):
        getattr(made, check)()
    else:
        assert getattr(made, check) is None, "pytest would collect a check that does not apply"


@pytest.mark.parametrize(
    ("check", "expr"),
    [
        ("test_a_part_is_the_average_on_uneven_shards", "shifted"),
        ("test_parts_and_residuals_add_up_to_what_was_given", "shifted"),
        ("test_parts_and_residuals_add_up_to_what_was_given", "forgetful"),
    ],
)
def test_wrong_parts_are_found(check: str, expr: str) -> None:
    assert "exact average" in failure(check, expr=expr)


@pytest.mark.parametrize(
    ("check", "expr", "attributes"),
    [
        ("test_equals_the_average_within_tolerance", "vote", ("tolerance", "mean = False")),
        ("test_dtypes", "vote", ("tolerance", "mean = False", "dtypes")),
        ("test_compresses", "coarse", ("first_step", "compresses = False")),
        ("test_input_is_sent_plus_residual", "momentum", ("conservation", "mean = False")),
        ("test_reports_what_it_sent", "wrong_units", ("conservation", "mean = False")),
    ],
)
def test_a_failure_names_the_setting_to_change(check: str, expr: str, attributes: tuple[str, ...]) -> None:
    args = ("used_by_all",) if "residual" in check else ()
    message = failure(check, *args, expr=expr)
    for attribute in attributes:
        assert re.search(rf"`{attribute}`", message), message


def test_the_attributes_that_are_named_exist() -> None:
    for name in ("tolerance", "conservation", "mean", "compresses", "first_step", "steps", "dtypes"):
        assert hasattr(HookContract, name)


class Leaky(Coarse):
    """Keeps the average's error on rank 0 for all ranks, and loses it for parameters that rank 0 does not use."""

    name, reports_sent = "leaky", False
    fields = {"residual": "local"}

    def run(self, bucket, ctx):
        kept = []
        for p, gradient in bucket.views():
            before = ctx.read(p.name, "residual")
            after = ctx.write(p.name, "residual", p.shape, device=bucket.device)
            after.copy_(gradient.float() + (0 if before is None else before))
            gradient.copy_(after.round())
            after.sub_(gradient)
            kept.append((p.name, after))
        flat = bucket.buffer
        yield AllReduce(flat)
        bucket.buffer = flat * 1.01
        if ctx.rank == 0:
            for name, after in kept:
                if ctx.sends(name):
                    after.sub_(bucket.view(name), alpha=ctx.world_size * 0.01 / 1.01)


def test_an_error_that_is_lost_with_an_unused_parameter_is_found() -> None:
    spec = HookSpec("leaky", "reduction", "tests:here", "", options={}, capabilities=frozenset({"lossy", "stateful"}))
    commhooks.register(spec, Leaky)
    made = type("Case", (HookContract,), {"expr": "leaky"})()
    made.test_input_is_sent_plus_residual("used_by_all")
    assert "as_owner" in failure("test_input_is_sent_plus_residual", "unused_by_some", expr="leaky")


class Flattened(Reduction):
    """The tutorial's hook with view(-1), which fails on the transposed view of a gradient."""

    name, lossy = "flattened", True

    def run(self, bucket, ctx):
        for _, gradient in bucket.views():
            gradient.view(-1).round_()
        flat = bucket.buffer
        yield AllReduce(flat)
        bucket.buffer = flat


class Copied(Reduction):
    """Writes the average into `bucket.buffer`. Under a policy that buffer is a gathered copy."""

    name, lossy = "copied", True

    def run(self, bucket, ctx):
        small = bucket.buffer.to(torch.bfloat16)
        yield AllReduce(small)
        bucket.buffer.copy_(small)


class Assigned(Copied):
    """Assigns the average, which also works under a policy."""

    name = "assigned"

    def run(self, bucket, ctx):
        small = bucket.buffer.to(torch.bfloat16)
        yield AllReduce(small)
        bucket.buffer = small.to(bucket.dtype)


def test_a_write_to_a_copy_of_the_bucket_is_found() -> None:
    for method in (Copied, Assigned):
        commhooks.register(HookSpec(method.name, "reduction", "tests:here", "", options={}), method)
    HookContract.test_writes_to_a_part_of_the_bucket(type("Case", (HookContract,), {"expr": "assigned"})())
    HookContract.test_all_ranks_get_the_same_bits(type("Case", (HookContract,), {"expr": "copied"})())
    message = failure("test_writes_to_a_part_of_the_bucket", expr="copied")
    assert "`bucket.buffer = small.to(bucket.dtype)`" in message and "head.weight" in message


def test_one_cause_is_reported_once_with_its_remedy() -> None:
    commhooks.register(HookSpec("flattened", "reduction", "tests:here", "", options={}), Flattened)
    made = type("Case", (HookContract,), {"expr": "flattened"})()
    with pytest.raises(AssertionError, match=r"reshape\(-1\)"):
        made.test_one_step()


class Drawing(Reduction):
    """Rounds stochastically without state. It draws from ctx.step."""

    name, lossy = "drawing", True

    def run(self, bucket, ctx):
        flat = bucket.buffer
        chance = torch.Generator().manual_seed(1000 * ctx.step + ctx.rank)
        draw = torch.rand(flat.shape, generator=chance).to(flat.device)
        flat = torch.where(flat.isfinite(), (flat * 64 + draw).floor() / 64, flat)
        yield AllReduce(flat)
        bucket.buffer = flat


def test_a_stateless_hook_may_draw_from_the_step() -> None:
    commhooks.register(
        HookSpec("drawing", "reduction", "tests:here", "", options={}, capabilities=frozenset({"lossy"})), Drawing
    )
    made = type("Case", (HookContract,), {"expr": "drawing"})()
    made.test_non_finite_passes_and_leaves_no_trace()
    made.test_rollback()
    made.test_deterministic()


class Counting(Drawing):
    """Draws from a private counter, which also advances in a step with NaN."""

    name = "counting"

    def __init__(self):
        self.calls = 0

    def start(self, bucket, ctx):
        self.calls += 1
        return super().start(bucket, commhooks.StepContext(ctx.rank, ctx.world_size, self.calls))


def test_a_draw_that_the_step_does_not_decide_is_found() -> None:
    spec = HookSpec("counting", "reduction", "tests:here", "", options={}, capabilities=frozenset({"lossy"}))
    commhooks.register(spec, Counting)
    assert "draw random numbers from ctx.step" in failure("test_rollback", expr="counting")
