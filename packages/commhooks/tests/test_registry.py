"""Lookup gives typed errors with advice, supports register and unregister, and is safe in threads."""

import math
import threading

import pytest

import commhooks
from commhooks import (
    AmbiguousHookError,
    HookConfigError,
    HookNotSupportedError,
    HookSpec,
    Needs,
    Option,
    PluginLoadError,
    UnknownHookError,
    get,
)


def test_every_public_name_resolves():
    for name in commhooks.__all__:
        assert getattr(commhooks, name) is not None
    assert set(commhooks.__all__) <= set(dir(commhooks))
    with pytest.raises(AttributeError, match="no attribute 'gett'"):
        commhooks.gett  # noqa: B018


def test_unknown_names_give_advice(publish, registry):
    publish("acme", {"commhooks.ddp": {"sparse_hook": "math:floor"}})
    with pytest.raises(UnknownHookError, match="did you mean 'sparse_hook'"):
        get("sparse_hok", registry=registry)
    with pytest.raises(UnknownHookError, match="commhooks list shows"):
        get("zzzzz", registry=registry)
    with pytest.raises(UnknownHookError, match="did you mean 'quant4'\\?"):
        get("qunt4", registry=registry)
    with pytest.raises(HookConfigError, match="not an expression"):
        get("sparse_hook(x=1)", registry=registry)
    with pytest.raises(HookConfigError, match="unknown kind"):
        get("sparse_hook", kind="DDP", registry=registry)
    with pytest.raises(HookNotSupportedError, match=r"commhooks\.attach"):
        get("sparse_hook", kind="fsdp2", registry=registry)


def test_a_name_of_ours_says_which_package_to_install(monkeypatch):
    """Run as in an environment with ch-core alone."""
    monkeypatch.setenv("COMMHOOKS_DISABLE", "ch-ddp,ch-powersgd")
    registry = commhooks.registry.registry.Registry()
    with pytest.raises(UnknownHookError, match=r"comes with ch-ddp, not installed here: pip install \./packages/"):
        get("bf16_wrapper", registry=registry)
    with pytest.raises(UnknownHookError, match="did you mean 'powersgd'") as caught:
        get("powersdg", registry=registry)
    assert "comes with ch-powersgd, not installed here" in str(caught.value)
    assert "left out by COMMHOOKS_DISABLE" in str(caught.value)


def test_a_target_that_fails_to_import_names_its_provider(publish, registry):
    publish("acme", {"commhooks.ddp": {"gone": "no_such_module_anywhere:hook", "no_attr": "math:nothing"}})
    for name, cause in (("gone", ModuleNotFoundError), ("no_attr", AttributeError)):
        with pytest.raises(PluginLoadError, match=r"acme 1\.0") as caught:
            get(name, registry=registry)
        assert isinstance(caught.value.__cause__, cause)


def test_register_and_unregister(publish, registry):
    publish("acme", {"commhooks.ddp": {"taken": "math:floor"}})
    mine = HookSpec("mine", "ddp", "math:floor", "s", provider="liar")
    registry.register(mine)
    assert registry.resolve("mine").provider == "local"
    with pytest.raises(AmbiguousHookError, match="overwrite=True"):
        registry.register(mine)
    registry.register(mine, lambda state, bucket: "object", overwrite=True)
    assert get("mine", registry=registry)(None, None) == "object"
    registry.refresh()
    assert get("local/mine", registry=registry)(None, None) == "object"
    with pytest.raises(AmbiguousHookError, match="acme"):
        registry.register(HookSpec("taken", "ddp", "math:floor", "s"), overwrite=True)
    for name, aliases in (("other", ("x", "mine")), ("mine", ("taken",))):  # an alias is a name like any other
        with pytest.raises(AmbiguousHookError, match=f"'{aliases[-1]}' exists already"):
            registry.register(HookSpec(name, "ddp", "math:floor", "s", aliases=aliases), overwrite=True)
    registry.register(HookSpec("mine", "wrapper", "math:floor", "s"))
    registry.unregister("mine", "wrapper")
    assert get("mine", registry=registry)(None, None) == "object"
    registry.unregister("mine")
    with pytest.raises(UnknownHookError):
        get("mine", registry=registry)
    with pytest.raises(UnknownHookError, match="registered: none"):
        registry.unregister("mine")
    with pytest.raises(HookConfigError, match="takes a HookSpec, got 'mine'"):
        registry.register("mine", math.floor)


def test_lookups_do_not_change_the_registry(registry):
    before = registry.specs()
    for name in ("nothing", "also/nothing"):
        with pytest.raises(UnknownHookError):
            get(name, registry=registry)
    assert registry.specs() == before


def test_threads_share_one_scan(registry):
    scans = []
    scan = registry._scan
    registry._scan = lambda: scans.append(1) or scan()
    results: list[int] = []

    def look() -> None:
        for n in range(20):
            name = f"t{threading.get_ident()}_{n}"
            registry.register(HookSpec(name, "ddp", "math:floor", "s"))
            get(name, registry=registry)
            registry.list_hooks()
            registry.unregister(name)
        results.append(1)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert len(scans) == 1


def test_describe_and_json(registry):
    from commhooks.api.hooks import describe_spec as text
    from commhooks.cli.listing import as_dict

    params = {"rate": Option(0.1, "fraction kept", above=0.0, at_most=1.0)}
    spec = HookSpec("x", "reduction", "a:b", "sends less", options=params, needs=Needs(backends=("nccl",)), paper="P")
    assert "rate=0.1  a float > 0 and <= 1: fraction kept" in text(spec)
    assert "backends nccl" in text(spec)
    assert as_dict(spec)["options"]["rate"]["accepts"] == "a float > 0 and <= 1"
    assert "options   not known: " in text(HookSpec("x", "reduction", "a:b", "s"))  # there is no module a


def test_adapters_are_collected(publish, registry):
    assert registry.adapters()["torch.nn.parallel.distributed.DistributedDataParallel"].startswith("ch_ddp.")
    text = (
        "from commhooks import hookimpl\n@hookimpl\n"
        "def commhooks_adapter(): return [('torch.nn.parallel.distributed.DistributedDataParallel', 'acme:x')]"
    )
    publish("acme", {"commhooks": {"p": "acme_adapter"}}, acme_adapter=text)
    registry.refresh()
    with pytest.raises(AmbiguousHookError, match="acme:x"):
        registry.adapters()
