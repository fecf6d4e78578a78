"""Every expression has one canonical dict and one string form, and runs no code."""

import gc
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks import HookConfigError, canonical
from commhooks.registry.expression import MAX_DEPTH, nodes, parse, unparse

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda s: s not in ("provider",) and not __import__("keyword").iskeyword(s)
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
configs = st.dictionaries(names, values, max_size=3)
providers = st.from_regex(r"[a-zA-Z0-9]([a-z0-9._-]{0,5}[a-z0-9])?", fullmatch=True)


def node(extra: st.SearchStrategy) -> st.SearchStrategy:
    """Return a node around the given inner node, with and without a provider."""
    return st.builds(
        lambda hook, config, provider, rest: {
            "hook": hook,
            **({} if provider is None else {"provider": provider}),
            "config": config,
            **rest,
        },
        names,
        configs,
        st.none() | providers,
        extra,
    )


def inside(child: st.SearchStrategy) -> st.SearchStrategy:
    patterns = st.lists(st.text(max_size=8), min_size=1, max_size=3, unique=True)
    rules = patterns.flatmap(lambda ps: st.tuples(*(st.tuples(st.just(p), child).map(list) for p in ps)).map(list))
    several = st.lists(child, min_size=2, max_size=3)
    return node(
        child.map(lambda c: {"inner": c}) | several.map(lambda c: {"inner": c}) | rules.map(lambda r: {"rules": r})
    )


trees = st.recursive(node(st.just({})), inside, max_leaves=5)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_dict_and_string_round_trip(tree):
    text = unparse(tree)
    assert parse(text) == tree
    assert canonical(tree) == tree
    assert canonical(json.loads(json.dumps(tree))) == tree
    assert unparse(parse(text)) == text
    again = parse(text)
    assert [type(v) for n in nodes(again) for v in n["config"].values()] == [
        type(v) for n in nodes(tree) for v in n["config"].values()
    ]


@pytest.mark.filterwarnings("ignore:invalid escape")
@given(st.text(alphabet="abz_019.,:(){}[]'\"=-+*/ \n\t\\lambdaé😀", max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_text_is_a_node_or_a_typed_error(text):
    before = set(sys.modules)
    try:
        assert parse(unparse(parse(text))) == parse(text)
    except HookConfigError as error:
        assert str(error)
    assert set(sys.modules) - before <= {"encodings.unicode_escape", "unicodedata"}


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("powersgd", {"hook": "powersgd", "config": {}}),
        (" powersgd() ", {"hook": "powersgd", "config": {}}),
        ("a(x=-1.5, y=(1, 2), z=+3)", {"hook": "a", "config": {"x": -1.5, "y": [1, 2], "z": 3}}),
        ("w(h)", {"hook": "w", "config": {}, "inner": {"hook": "h", "config": {}}}),
        ('w("h(r=1)")', {"hook": "w", "config": {}, "inner": {"hook": "h", "config": {"r": 1}}}),
        (
            "warmup(allreduce, powersgd(rank=4), steps=100)",
            {
                "hook": "warmup",
                "config": {"steps": 100},
                "inner": [{"hook": "allreduce", "config": {}}, {"hook": "powersgd", "config": {"rank": 4}}],
            },
        ),
        ('x(provider="acme")', {"hook": "x", "provider": "acme", "config": {}}),
        ("acme-hooks/x", {"hook": "x", "provider": "acme-hooks", "config": {}}),
    ],
)
def test_forms(text, tree):
    assert parse(text) == tree
    assert parse(unparse(tree)) == tree


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("policy({'\x0c😀😀': allreduce,\n'b': x.y})", "'b': x.y})"),
        ("powersgd(\x0crank=x.y)", "powersgd( rank=x.y)"),
        ("w(\r\r\n\tx.y)", " x.y)"),
        ("w(a='\u2028\x85',\nb=x.y)", "b=x.y)"),
    ],
)
def test_the_bad_part_is_underlined_in_its_own_line(text, line):
    with pytest.raises(HookConfigError) as caught:
        parse(text)
    *_, shown, carets = str(caught.value).split("\n")
    assert shown == f"  {line}"
    assert shown[carets.index("^") :][: carets.count("^")] == "x.y"


def test_a_dict_of_patterns_is_a_policy():
    tree = canonical({"*.norm*": "allreduce", "*": {"hook": "powersgd", "config": {"rank": 4}}})
    assert unparse(tree) == "policy({'*.norm*': allreduce, '*': powersgd(rank=4)})"
    assert canonical(unparse(tree)) == tree


@pytest.mark.parametrize(
    ("text", "words", "underlined"),
    [
        ("powersgd(rank=)", "", None),
        ("os.system", "dotted", "os.system"),
        ("__import__('os')", "not a hook name", "__import__"),
        ("w(lambda: 1)", "expected a hook", "lambda: 1"),
        ("w(h, 3)", "by name", "3"),
        ("w(x=h.y)", "values are", "h.y"),
        ("w(x=inf)", "finite", "inf"),
        ("w(x=1e999)", "finite", "1e999"),
        ("w(x=-True)", "sign", "-True"),
        ("w(x=1j)", "complex is not a value", "1j"),
        ("w(x=b'1')", "bytes is not a value", "b'1'"),
        ("w(x=9999999999999999999999)", "64 bits", "9999999999999999999999"),
        ("w(x=1, x=2)", "given twice", "x=2"),
        ("w(**{'x': 1})", "name=value", "{'x': 1}"),
        ("w(*h)", "expected a hook", "*h"),
        ("w(provider=3)", "distribution", "w(provider=3)"),
        ("w({})", "at least one", "{}"),
        ("w({'a': h, 'a': g})", "twice", "'a'"),
        ("w({a: h})", "quoted patterns", "a"),
        ("w(é.x)", "dotted", "é.x"),
        ("w(X)", "not a hook name", "X"),
        ("[1]", "expected a hook", "[1]"),
        ("", "empty", None),
        ("'powersgd'", "expected a hook", "'powersgd'"),
        ("f(a)(b)", "before '('", "f(a)"),
        ("w(x=f'{1}')", "values are", "f'{1}'"),
    ],
)
def test_errors_underline_the_culprit(text, words, underlined):
    with pytest.raises(HookConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert words in message
    if underlined is not None:
        _, line, carets = message.split("\n")
        start = carets.index("^")
        assert line[start : start + carets.count("^")] == underlined


@pytest.mark.parametrize(
    "what",
    [
        {"hook": "a", "inenr": {"hook": "b"}},
        {"hook": "a", "config": {"provider": "x"}},
        {"hook": "a", "config": [1]},
        {"hook": "A"},
        {"hook": "a", "inner": 3},
        {"hook": "a", "inner": []},
        {"hook": "a", "inner": "b", "rules": [["*", "c"]]},
        {"hook": "a", "rules": [["*", "b"], ["*", "c"]]},
        {"hook": "a", "config": {"x": object()}},
        {"hook": "a", "config": {"x": float("nan")}},
        {"hook": "a", "provider": "/etc"},
        {},
        {3: "allreduce"},
    ],
)
def test_bad_dicts(what):
    with pytest.raises(HookConfigError):
        canonical(what)


def test_limits():
    with pytest.raises(HookConfigError, match="deeper"):
        parse("w(" * (MAX_DEPTH + 1) + "h" + ")" * (MAX_DEPTH + 1))
    with pytest.raises(HookConfigError):
        parse("w(" * 5000 + "h" + ")" * 5000)
    with pytest.raises(HookConfigError, match="characters"):
        parse("w(x='" + "a" * 50_000 + "')")
    with pytest.raises(HookConfigError, match="characters"):
        canonical({"hook": "w", "config": {"x": "a" * 50_000}})
    deep: dict = {"hook": "h"}
    for _ in range(MAX_DEPTH + 1):
        deep = {"hook": "w", "inner": deep}
    with pytest.raises(HookConfigError, match="deeper"):
        canonical(deep)
    with pytest.raises(HookConfigError, match="deeper"):
        canonical({"*": {"hook": "w", "inner": "w(" * 14 + "h" + ")" * 14}})
    loop: list = []
    loop.append(loop)
    with pytest.raises(HookConfigError, match="deeper"):
        canonical({"hook": "w", "config": {"x": loop}})


def test_threads_may_parse_at_the_same_time() -> None:
    """CPython 3.11 raises SystemError if another thread parses during a garbage collection inside ast.parse."""

    class Collected:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            time.sleep(0)

    def work(_: int) -> None:
        for _ in range(300):
            Collected()
            parse("bf16_wrapper(policy({'*.bias': allreduce, '*': powersgd(rank=4)}))")

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
