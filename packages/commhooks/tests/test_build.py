"""Building expressions checks options, applies wrappers inside out, and refuses with typed errors."""

from functools import partial

import pytest

import commhooks
from commhooks import AttachError, HookConfigError, HookSpec, Needs, Option, Plain, PluginLoadError, Reduction, why_not
from commhooks.registry.build import FunctionReduction, build

HOOKS = """
from commhooks import Reduction
from commhooks import AllReduce


class Scaled(Reduction):
    name = "scaled"

    def __init__(self, factor=1.0, mode="a"):
        if factor == 13:
            raise ValueError("13 is unlucky")
        self.factor = factor

    def run(self, bucket, ctx):
        bucket.buffer.mul_(self.factor)
        yield AllReduce(bucket.buffer)


def halve(bucket, ctx, *, times=1):
    yield AllReduce(bucket.buffer)


def needs_one(bucket, ctx, *, must):
    yield AllReduce(bucket.buffer)


class Outer(Reduction):
    def __init__(self, *inner, depth=1):
        if inner[0].name == "halve":
            raise TypeError("halve cannot be wrapped")
        self.inner, self.depth = inner, depth

    def run(self, bucket, ctx):
        return self.inner[0].run(bucket, ctx)


class Policy(Outer):
    def __init__(self, rules):
        self.rules = rules


def foreign(state, bucket):
    return state, bucket


def around(inner, *, extra=0):
    return lambda state, bucket: (extra, inner(state, bucket))


class State:
    def __init__(self, process_group, decay=0.5):
        self.process_group, self.decay = process_group, decay
"""


@pytest.fixture
def acme(publish, registry):
    lines = {"scaled": "Scaled", "halve": "halve", "needs_one": "needs_one"}
    publish(
        "acme",
        {
            "commhooks.reduction": {name: f"acme_hooks:{attr}" for name, attr in lines.items()},
            "commhooks.ddp": {"foreign": "acme_hooks:foreign"},
            "commhooks.fsdp": {"sharded": "acme_hooks:foreign", "halve": "acme_hooks:foreign"},
            "commhooks.wrapper": {
                "outer": "acme_hooks:Outer",
                "around": "acme_hooks:around",
                "rules": "acme_hooks:Policy",
            },
        },
        acme_hooks=HOOKS,
    )
    params = {"factor": Option(1.0, "the scale", above=0.0), "mode": Option("a", "a mode", choices=("a", "b"))}
    registry.register(HookSpec("spec_scaled", "reduction", "acme_hooks:Scaled", "s", options=params, aliases=("ss",)))
    registry.register(HookSpec("stateful", "ddp", "acme_hooks:foreign", "s", state="acme_hooks:State"))
    return registry


def test_reductions_from_classes_and_generator_functions(acme):
    built = build("scaled(factor=2.0)", registry=acme)
    assert built.value.factor == 2.0
    assert built.kind == "reduction"
    assert built.full == {
        "hook": "scaled",
        "provider": "acme",
        "version": "1.0",
        "config": {"factor": 2.0, "mode": "a"},
    }
    function = build("halve(times=3)", registry=acme).value
    assert isinstance(function, FunctionReduction)
    assert function.config() == {"times": 3}


def test_declared_options_fill_in_and_alias_resolves(acme):
    built = build("ss(factor=2)", registry=acme)
    assert built.expr == "spec_scaled(factor=2)"
    assert built.full["config"] == {"factor": 2.0, "mode": "a"}
    assert isinstance(built.value, Reduction)


def test_local_options_are_not_compared(acme):
    params = {"factor": Option(1.0, "the scale"), "mode": Option("a", "a mode", choices=("a", "b"), local=True)}
    acme.register(HookSpec("own", "reduction", "acme_hooks:Scaled", "s", options=params))
    one, other = build("own", registry=acme), build("own(mode='b')", registry=acme)
    assert other.expr == "own(mode='b')"
    assert (one.full, one.full["config"]) == (other.full, {"factor": 1.0})
    assert build("outer(own)", registry=acme).full == build("outer(own(mode='b'))", registry=acme).full
    with pytest.raises(HookConfigError, match="one of"):
        build("own(mode='c')", registry=acme)


def test_wrappers_policies_and_several_inner(acme):
    nested = build("outer(outer(scaled(factor=3.0)), depth=2)", registry=acme)
    assert nested.value.depth == 2
    assert nested.value.inner[0].inner[0].factor == 3.0
    assert nested.kind == "reduction"
    assert build(nested.expr, registry=acme).full == nested.full
    several = build("outer(scaled, scaled(factor=2.0))", registry=acme)
    assert [r.factor for r in several.value.inner] == [1.0, 2.0]
    policy = build({"hook": "rules", "rules": [["*.bias", "scaled"], ["*", "halve"]]}, registry=acme)
    assert [pattern for pattern, _ in policy.value.rules] == ["*.bias", "*"]
    assert policy.expr == "rules({'*.bias': scaled, '*': halve})"


def test_foreign_hooks_and_their_state(acme):
    wrapped = build("around(foreign, extra=5)", registry=acme)
    assert wrapped.kind == "ddp"
    assert wrapped.value("s", "b") == (5, ("s", "b"))
    built = build("stateful(decay=0.25)", registry=acme)
    state = built.make_state("group")
    assert (state.process_group, state.decay) == ("group", 0.25)
    assert build("sharded", registry=acme).kind == "fsdp"
    assert build("halve", kind="fsdp", registry=acme).kind == "fsdp"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("spec_scaled(factr=1)", "did you mean 'factor'"),
        ("spec_scaled(factor=0)", "factor must be a float > 0"),
        ("spec_scaled(mode='c')", "one of 'a', 'b'"),
        ("scaled(factr=1)", "did you mean 'factor'"),
        ("scaled(factor=13)", "13 is unlucky"),
        ("needs_one", "needs the option 'must'"),
        ("foreign(x=1)", "takes no options"),
        ("outer", "needs an inner hook, for example outer"),
        ("scaled(halve)", "not a wrapper"),
        ("outer(halve)", "halve cannot be wrapped"),
        ("outer(sharded)", "FSDP1"),
        ("outer(scaled, dpth=1)", "did you mean 'depth'"),
        ("stateful(dekay=1)", "did you mean 'decay'"),
    ],
)
def test_refusals(acme, what, words):
    with pytest.raises(HookConfigError) as caught:
        build(what, registry=acme)
    assert words in str(caught.value)


def test_a_target_that_is_no_reduction(acme):
    acme.register(HookSpec("pi", "ddp", "math:pi", "s"))
    with pytest.raises(PluginLoadError, match="not callable"):
        build("pi", registry=acme)


def test_provider_pins_survive(acme):
    built = build("acme/scaled", registry=acme)
    assert built.expr == "scaled(provider='acme')"
    assert build(built.expr, registry=acme).node == built.node


def test_why_not_gives_every_reason(acme):
    registry = acme
    needs = Needs(backends=("nccl",), devices=("cuda",), torch="99.1", packages=("no-such-package-anywhere",))
    registry.register(HookSpec("fussy", "reduction", "acme_hooks:Scaled", "s", needs=needs))
    reasons = why_not("outer(fussy)", backend="gloo", device="cpu", registry=registry)
    assert len(reasons) == 4
    for words in (
        "backend nccl, not gloo",
        "device cuda, not cpu",
        "torch >= 99.1",
        "no-such-package-anywhere",
    ):
        assert any(words in reason for reason in reasons)
    for backend in ("nccl2", "cpu:gloo,cuda:nccl"):
        assert not any("backend" in reason for reason in why_not("fussy", backend=backend, registry=registry))
    assert any("over nccl" in reason for reason in why_not("scaled", backend="nccl2", device="cpu", registry=registry))
    assert why_not("scaled", backend="cpu:gloo,cuda:nccl", device="cpu", registry=registry) == []
    assert why_not("outer(scaled)", backend="gloo", device="cpu", registry=registry) == []
    assert "did you mean 'scaled'" in why_not("outer(scald)", registry=registry)[0]
    assert "factor" in why_not("spec_scaled(factor=-1)", registry=registry)[0]
    registry.register(HookSpec("gone", "ddp", "no_such_module_anywhere:x", "s"))
    assert "no_such_module_anywhere" in why_not("gone", registry=registry)[0]


def test_create(acme, monkeypatch):
    monkeypatch.setattr("commhooks.api.create.build", partial(build, registry=acme))
    handle = commhooks.create("scaled", factor=4.0)
    assert handle.expr == "scaled(factor=4.0)"
    assert handle.reduction.factor == 4.0
    assert commhooks.create("stateful(decay=0.1)").state.decay == 0.1
    with pytest.raises(HookConfigError, match="in the expression and as a keyword"):
        commhooks.create("scaled(factor=1.0)", factor=2.0)
    with pytest.raises(HookConfigError, match="need a hook by name"):
        commhooks.create(Plain(), factor=2.0)
    assert commhooks.create(Plain()).reduction.name == "allreduce"


def test_a_class_is_refused_before_any_step() -> None:
    with pytest.raises(AttachError, match=r"Plain is a class, and a hook is an object of it: give Plain\(\)"):
        commhooks.create(Plain)
