"""A state handed from any hook to any other loses no residual, in any memory format and dtype."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commhooks
from ch_core import SimulatedRank, simulate
from ch_wrappers.policy import policy
from commhooks import (
    Bucket,
    BucketLayout,
    HookConfigError,
    HookState,
    ParamLayout,
    Reduction,
    load_state_dict,
    state_dict,
)
from commhooks.checkpoint.world_change import merge

KEEPERS = (  # every way to store a residual: order, dtype, packing, block, composition
    "powersgd(rank=1, min_compression_rate=1)",
    "topk(density=0.05, exempt=False)",
    "randomk(density=0.2, exempt=False)",
    "error_feedback(topk(density=0.05, feedback=False, exempt=False))",
    "sign(exempt=False)",
    "quant2(exempt=False)",
    "quant2(exempt=False, residual='int8', block=64)",
    "quant2(exempt=False, residual='int8', block=16)",
    "policy({'a*': quant2(exempt=False, residual='int8', block=32), 'b*': error_feedback(topk(density=0.05, feedback=False,"
    " exempt=False)), '*': quant2(exempt=False, residual='int8', block=48)})",
)
PAIRS = tuple(itertools.product(KEEPERS, KEEPERS))
FORMATS = {  # shape, strides
    "rows": ((16, 24), (24, 1)),
    "columns": ((16, 24), (1, 16)),
    "square columns": ((16, 16), (1, 16)),
    "convolution": ((8, 6, 3, 3), (54, 9, 3, 1)),
    "channels last": ((8, 6, 3, 3), (54, 1, 18, 6)),
    "vector": ((33,), (1,)),
}
ROUTES = ("warmup", "attach", "checkpoint", "merged", "pickled")
STEPS, SWITCH = 5, 3


def layout_of(formats: dict[str, str], dtype: torch.dtype) -> BucketLayout:
    params, offset = [], 0
    for name, form in formats.items():
        params.append(ParamLayout(name, *FORMATS[form], offset))
        offset += params[-1].numel
    return BucketLayout(params, offset, dtype)


def built(expr: str) -> Reduction:
    reduction = commhooks.create(expr).reduction
    assert reduction is not None
    return reduction


def lost(first: str, second: str, route: str, layouts: tuple[BucketLayout, BucketLayout]) -> float:
    """Return the part of the gradients' sum that is neither applied nor owed after the switch from hook to hook."""
    folders: dict[int, dict[str, object]] = {}

    def body(rank: SimulatedRank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        state = HookState()
        steps = f"warmup({first}, {second}, steps={SWITCH})" if route == "warmup" else first
        engine = rank.engine(built(steps), state)
        generator = torch.Generator().manual_seed(rank.rank)
        true, applied = torch.zeros(2, sum(p.numel for p in layouts[0].params), dtype=torch.float64)
        for step in range(STEPS):
            if step == SWITCH and route != "warmup":
                state = handed(state, rank, route, engine)
                engine = rank.engine(built(second), state)
            bucket = Bucket(layouts[step >= SWITCH], torch.zeros(layouts[0].numel, dtype=layouts[0].dtype))
            for _, view in bucket.views():
                view.copy_(torch.randn(view.shape, generator=generator))
            true += torch.cat([view.reshape(-1).double() for _, view in bucket.views()])
            engine.submit(bucket)
            error = engine.finish()
            if error is not None:
                raise error
            applied += torch.cat([view.reshape(-1).double() for _, view in bucket.views()])
        engine.resolve_step()
        found = {name: tensor for name, field, tensor in state.entries() if field == "residual"}
        assert all(found[p.name].shape == p.shape for p in layouts[1].params if p.name in found)
        owed = torch.cat([found.get(p.name, torch.zeros(p.shape)).reshape(-1).double() for p in layouts[1].params])
        return true, applied, owed

    def handed(state: HookState, rank: SimulatedRank, route: str, engine: object) -> HookState:
        state.resolve_step()
        if route == "attach":
            return state
        if route == "pickled":
            return copy.deepcopy(state)
        fields = {"residual": "local", "q": "shared"}
        saved = state_dict(state)
        saved["entries"] = {n: {f: t for f, t in row.items() if f == "residual"} for n, row in saved["entries"].items()}
        saved |= {"fields": fields, "world_size": 2, "rank": rank.rank}
        made = HookState()
        if route == "merged":
            folders[rank.rank] = saved
            with rank.transport.group.waiting(rank.rank):
                while len(folders) < 2:
                    pass
            load_state_dict(made, merge([folders[0], folders[1]]), world_change="mean")
        else:
            load_state_dict(made, saved)
        return made

    ranks = simulate(2, body)
    true, owed = ((ranks[0][i] + ranks[1][i]) / 2 for i in (0, 2))
    return float((ranks[0][1] + owed - true).norm() / true.norm())


def bound(first: str, second: str, dtype: torch.dtype) -> float:
    rounding = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    return rounding + (3e-2 if "int8" in first + second else 0.0)  # 1/254 of a block's largest number in a step


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    route=st.sampled_from(ROUTES),
    formats=st.tuples(*[st.sampled_from(sorted(FORMATS))] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    turned=st.booleans(),
)
def test_nothing_is_lost(
    pair: tuple[str, str], route: str, formats: tuple[str, ...], dtype: torch.dtype, turned: bool
) -> None:
    names = dict(zip(("a", "b", "c"), formats, strict=True))
    other = {"rows": "columns", "columns": "rows", "convolution": "channels last", "channels last": "convolution"}
    after = {name: other.get(form, form) for name, form in names.items()} if turned else names
    layouts = layout_of(names, dtype), layout_of(after, dtype)
    assert lost(*pair, route, layouts) < bound(*pair, dtype)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_keeps_residuals_if_rows_and_columns_differ(pair: tuple[str, str]) -> None:
    layout = layout_of({"a": "channels last", "b": "square columns", "c": "columns"}, torch.float32)
    for route in ("warmup", "attach"):
        assert lost(*pair, route, (layout, layout)) < bound(*pair, torch.float32)


class Keeps(Reduction):
    """Averages and declares one field."""

    def __init__(self, kind: str, power: int) -> None:
        self.fields, self.scaled_fields = {"kept": kind}, {"kept": power}  # type: ignore[dict-item]

    def run(self, bucket: Bucket, ctx: object) -> object:  # type: ignore[override]
        yield from ()


@pytest.mark.parametrize(("other", "words"), [(Keeps("shared", 1), "fields"), (Keeps("local", 2), "scaled_fields")])
def test_parts_that_keep_one_field_in_two_ways_are_refused(other: Reduction, words: str) -> None:
    policy({"a": Keeps("local", 1), "*": Keeps("local", 1)})
    with pytest.raises(HookConfigError, match=rf"{words}\['kept'\].*another name"):
        policy({"a": Keeps("local", 1), "*": other})
