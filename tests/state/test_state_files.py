"""Loading refuses wrong, damaged or hostile state files before it changes anything."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import commhooks
from ch_testing import SimulatedRanks
from commhooks import HookState, StateError
from commhooks.checkpoint.world_change import merge

EXPR = "powersgd(rank=2, min_compression_rate=1)"
LIKE = {"w": torch.zeros(24, 16), "b": torch.zeros(24), "v": torch.zeros(16, 32)}


def ranks(world: int = 2, expr: str = EXPR) -> SimulatedRanks:
    made = SimulatedRanks(lambda: commhooks.create(expr), world, LIKE)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        made.step([{n: torch.randn(t.shape, generator=generator) for n, t in LIKE.items()} for _ in range(world)])
    made.resolve_step()
    return made


@pytest.fixture(scope="module")
def pair() -> SimulatedRanks:
    return ranks()


def snapshot(handle: commhooks.CommHook) -> list[tuple[str, str, list[Any]]]:
    assert isinstance(handle.state, HookState)
    return [(n, f, t.tolist()) for n, f, t in handle.state.entries()] + [("", "step", [handle.state.step])]


def refused(pair: SimulatedRanks, saved: Any, words: str = "", **options: Any) -> None:
    before = snapshot(pair.handles[0])
    with pytest.raises(StateError, match=words):
        pair.handles[0].load_state_dict(saved, **options)
    assert snapshot(pair.handles[0]) == before


def changed(saved: dict[str, Any], name: str, field: str, tensor: Any) -> dict[str, Any]:
    entries = {n: dict(row) for n, row in saved["entries"].items()}
    entries.setdefault(name, {})[field] = tensor
    return saved | {"entries": entries}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"config": value}
    return value


WRONG = {
    "not a dict": (lambda s: [1, 2], "is a dict"),
    "empty": (lambda s: {}, "missing"),
    "unknown key": (lambda s: s | {"extra": 1}, "unknown keys"),
    "key that is no string": (lambda s: s | {3: 1}, "unknown keys"),
    "empty bucket": (lambda s: s | {"buckets": [["w"], []]}, "none of them empty"),
    "bucket named twice": (lambda s: s | {"buckets": [["w"], ["b", "w"]]}, "names a parameter twice"),
    "later version": (lambda s: s | {"format": 3}, "format 3"),
    "version True": (lambda s: s | {"format": True}, "format True"),
    "another hook": (lambda s: s | {"expr": "topk", "config": {"hook": "topk", "config": {}}}, "topk"),
    "another option": (lambda s: s | {"config": {**s["config"], "config": {"rank": 9}}}, "other options"),
    "config of tensors": (lambda s: s | {"config": {**s["config"], "config": torch.ones(3)}}, "other options"),
    "deep config": (lambda s: s | {"config": nested(100_000)}, "other options"),
    "deep entries": (lambda s: s | {"entries": nested(100_000)}, "field"),
    "negative step": (lambda s: s | {"step": -1}, "step"),
    "huge step": (lambda s: s | {"step": 1 << 80}, "64 bits"),
    "step that is a bool": (lambda s: s | {"step": True}, "step"),
    "rank out of range": (lambda s: s | {"rank": 2}, "rank"),
    "another rank": (lambda s: s | {"rank": 1}, "rank 1 of 2, this is rank 0 of 2"),
    "another world": (lambda s: s | {"world_size": 3}, "of 3"),
    "another model": (lambda s: s | {"params": [["x", [3]]]}, "not in the model"),
    "other shapes": (lambda s: s | {"params": [["w", [24, 17]], *s["params"][1:]]}, "shape"),
    "parameter twice": (lambda s: s | {"params": s["params"] * 2}, "twice"),
    "params of junk": (lambda s: s | {"params": [["w", "24"]]}, "sizes"),
    "another locality": (lambda s: s | {"fields": {"residual": "shared", "q": "shared"}}, "shared"),
    "unknown locality": (lambda s: s | {"fields": {"residual": "everywhere"}}, "legal"),
    "unknown field": (lambda s: changed(s, "w", "momentum", torch.zeros(2)), "momentum"),
    "unknown parameter": (lambda s: changed(s, "ghost", "residual", torch.zeros(2)), "ghost"),
    "another shape": (lambda s: changed(s, "w", "residual", torch.zeros(3, 3)), "keeps"),
    "another dtype": (lambda s: changed(s, "w", "residual", torch.zeros(24, 16, dtype=torch.int32)), "keeps"),
    "too large": (lambda s: changed(s, "w", "residual", torch.zeros(24, 1600)), "plausible"),
    "expanded": (lambda s: changed(s, "w", "residual", torch.zeros(1).expand(1 << 40)), "claims"),
    "NaN": (lambda s: changed(s, "w", "residual", torch.full((24, 16), float("nan"))), "NaN"),
    "infinite": (lambda s: changed(s, "w", "residual", torch.full((24, 16), float("inf"))), "NaN"),
    "no tensor": (lambda s: changed(s, "w", "residual", [0.0] * 384), "tensor"),
    "sparse": (lambda s: changed(s, "w", "residual", torch.zeros(24, 16).to_sparse()), "dense"),
    "meta": (lambda s: changed(s, "w", "residual", torch.zeros(24, 16, device="meta")), "dense"),
    "parameter": (lambda s: changed(s, "w", "residual", torch.nn.Parameter(torch.zeros(24, 16))), "tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_and_nothing_changed(pair, case):
    make, words = WRONG[case]
    refused(pair, make(pair.save()[0]), words)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code in a state file was run",))


def test_a_pickle_that_runs_code_is_not_loaded(pair):
    file = io.BytesIO()
    torch.save(changed(pair.save()[0], "w", "residual", Bomb()), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file)


def test_policies(pair):
    saved = pair.save()
    merged = merge(saved)
    refused(pair, merged, "world_change='mean'")
    refused(pair, saved[1], "merge", world_change="mean")
    refused(pair, saved[0], "legal", world_change="whatever")
    three = ranks(3)
    for handle in three.handles:
        handle.load_state_dict(merged, world_change="mean")
    mean = (saved[0]["entries"]["w"]["residual"].double() + saved[1]["entries"]["w"]["residual"].double()) / 2
    assert torch.equal(three.save()[2]["entries"]["w"]["residual"], mean.float())
    for handle in three.handles:
        handle.load_state_dict(saved[0], world_change="reset")
    assert set(three.save()[0]["entries"]["w"]) == {"q"}


def test_merge_wants_every_rank_once_and_one_step(pair):
    a, b = pair.save()
    for wrong in ([], [a], [a, a], [a, b | {"step": 7}], [a, b | {"expr": "x", "config": None}], [a, 3]):
        with pytest.raises(StateError):
            merge(wrong)
    other = {**b["config"], "config": {"rank": 3}}
    with pytest.raises(StateError, match="expr of rank 0"):
        merge([a, b | {"expr": "powersgd(rank=3)", "config": other}])
    assert merge([a, b | {"expr": "powersgd(rank=2)"}])["entries"]  # the same options in another spelling
    with pytest.raises(StateError, match="same on all ranks"):
        merge([a, changed(b, "w", "q", b["entries"]["w"]["q"] + 1)])


def test_positions_and_names_are_translated(pair):
    saved = pair.save()[0]
    by_position = {"w": "0:24x16", "b": "1:24", "v": "2:16x32"}
    bare = saved | {
        "params": [[by_position[name], shape] for name, shape in saved["params"]],
        "entries": {by_position[name]: row for name, row in saved["entries"].items()},
    }
    before = snapshot(pair.handles[0])
    pair.handles[0].load_state_dict(bare)
    assert snapshot(pair.handles[0]) == before
    state = HookState()
    commhooks.load_state_dict(state, bare | {"fields": saved["fields"]})
    state.identity.bind([(name, tuple(t.shape)) for name, t in LIKE.items()])
    assert {n for n, _, _ in state.entries()} == {"w", "v"}
    with pytest.raises(StateError, match="does not fit"):
        state.identity.bind([("w", (24, 17))])


def test_state_is_copied_and_pickled_without_a_process_group(pair):
    state = pair.handles[0].state
    assert isinstance(state, HookState)
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        found, wanted = ([(n, f, t.tolist()) for n, f, t in s.entries()] for s in (again, state))
        assert found == wanted
        assert (again.step, again.identity.params, again.engine) == (state.step, state.identity.params, None)


def test_one_state_serves_one_model():
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    state = HookState()
    state.bind(first)
    with pytest.raises(StateError, match="another model"):
        state.bind(second)
    state.bind(first)
    state.identity.unbind()
    state.bind(second)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.builds(lambda n: torch.zeros(n), st.integers(0, 5)),
    st.builds(lambda: torch.full((24, 16), float("nan"))),
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*prefix, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += paths(inner, (*prefix, index))
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_fuzz(pair, data):
    """Any part of a valid state is replaced, removed or added. Loading raises a StateError, or
    loads the whole state.
    """
    saved = copy.deepcopy(pair.save()[0])
    path = data.draw(st.sampled_from(paths(saved)))
    holder: Any = saved
    for key in path[:-1]:
        holder = holder[key]
    action = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if action == "replace":
        holder[path[-1]] = data.draw(JUNK)
    elif action == "remove":
        del holder[path[-1]]
    elif isinstance(holder, dict):
        holder[data.draw(st.one_of(st.text(max_size=4), st.integers()))] = data.draw(JUNK)
    else:
        holder.append(data.draw(JUNK))
    before, good = snapshot(pair.handles[0]), pair.save()[0]
    try:
        pair.handles[0].load_state_dict(saved)
    except StateError:
        assert snapshot(pair.handles[0]) == before
    else:  # harmless, because the loaded state is finite and fits this model
        state = pair.handles[0].state
        assert isinstance(state, HookState)
        for name, _, tensor in state.entries():
            assert name in LIKE
            assert bool(tensor.isfinite().all())
        pair.handles[0].load_state_dict(good)
