"""The loader finds plugins in two ways and sorts them. One bad plugin never breaks the others."""

import subprocess
import sys
import textwrap

import pytest

from commhooks import AmbiguousHookError, PluginLoadError, UnknownHookError, get
from commhooks.registry import hookspecs
from commhooks.registry.discovery import discover
from commhooks.registry.distributions import editable_roots

GOOD = textwrap.dedent("""
    from commhooks import HookSpec, Option, hookimpl

    @hookimpl
    def commhooks_specs():
        return [HookSpec("{name}", "ddp", "{target}", "summary of {name}", aliases=("{name}_alias",))]
""")


def good(name: str, target: str = "math:fsum") -> str:
    return GOOD.format(name=name, target=target)


def test_both_doors(publish, registry):
    publish("acme-full", {"commhooks": {"anything": "acme_full_plugin"}}, acme_full_plugin=good("full_hook"))
    publish("acme-line", {"commhooks.ddp": {"line_hook": "math:floor"}})
    full, line = registry.resolve("full_hook"), registry.resolve("line_hook")
    assert (full.provider, full.version, full.summary) == ("acme-full", "1.0", "summary of full_hook")
    assert (line.provider, line.kind, line.summary) == ("acme-line", "ddp", "")
    assert registry.resolve("full_hook_alias") == full
    assert get("line_hook", registry=registry)(1.5) == 1
    assert not registry.failures()


def test_the_entry_name_of_a_plugin_does_not_matter(publish, registry):
    publish("acme-a", {"commhooks": {"plugin": "acme_a_plugin"}}, acme_a_plugin=good("hook_a"))
    publish("acme-b", {"commhooks": {"plugin": "acme_b_plugin"}}, acme_b_plugin=good("hook_b"))
    assert {s.name for s in registry.list_hooks("hook_?")} == {"hook_a", "hook_b"}


BROKEN = {
    "import": ("import no_such_module_anywhere", "no_such_module_anywhere"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "raises": (
        "from commhooks import hookimpl\n@hookimpl\ndef commhooks_specs(): raise OSError('boom')",
        "boom",
    ),
    "panic": ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
    "unreadable": (
        "class Odd(Exception):\n    def __str__(self): raise OSError\nraise Odd",
        "Odd",
    ),
    "exits": ("from commhooks import hookimpl\n@hookimpl\ndef commhooks_specs(): raise SystemExit(5)", "SystemExit: 5"),
    "forgets": ("from commhooks import hookimpl\n@hookimpl\ndef commhooks_specs(): pass", "returned None"),
    "wrongfield": (good("new").replace('"summary of new"', "5"), "summary is 5"),
    "nospec": ("from commhooks import hookimpl\n@hookimpl\ndef commhooks_specs(): return ['x']", "HookSpec"),
    "typo": ("from commhooks import hookimpl\n@hookimpl\ndef commhooks_spec(): return []", "commhooks_spec"),
    "unmarked": ("def commhooks_specs(): return []", "@hookimpl"),
    "argument": ("from commhooks import hookimpl\n@hookimpl\ndef commhooks_env(spek): return []", "spek"),
    "toonew": (
        good("new").replace("aliases", "api=99, aliases"),
        "uses plugin API 99, this commhooks supports 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_a_record(case, publish, registry):
    text, words = BROKEN[case]
    publish("acme-bad", {"commhooks": {"p": f"acme_bad_{case}"}}, **{f"acme_bad_{case}": text})
    publish("acme-good", {"commhooks": {"p": "acme_good_plugin"}}, acme_good_plugin=good("still_here"))
    assert get("still_here", registry=registry)([1.0]) == 1.0
    [failure] = registry.failures()
    assert failure.dist == "acme-bad"
    assert words in failure.error and "COMMHOOKS_DISABLE=acme-bad" in str(failure)
    with pytest.raises(UnknownHookError, match=r"1 plugin failed to load and may have provided it: acme-bad 1\.0"):
        get("missing_hook", registry=registry)


def test_misnamed_group_and_hook(publish, registry):
    publish(
        "acme-bad",
        {"commhooks.redction": {"x": "math:pi"}, "commhooks.ddp": {"Bad-Name": "math:pi", "ok": "math:pi"}},
    )
    errors = [f.error for f in registry.failures()]
    assert any("did you mean 'commhooks.reduction'" in e for e in errors)
    assert any("Bad-Name" in e for e in errors)
    assert registry.resolve("ok").provider == "acme-bad"


def test_two_providers_are_refused_by_name(publish, registry):
    publish("acme-one", {"commhooks.ddp": {"same": "math:floor"}})
    publish("acme-two", {"commhooks.ddp": {"same": "math:ceil"}}, version="2.0")
    with pytest.raises(AmbiguousHookError, match=r"acme-one/same 1\.0 \(ddp\), acme-two/same 2\.0 \(ddp\)"):
        get("same", registry=registry)
    assert get("acme-two/same", registry=registry)(1.5) == 2
    assert get("Acme_One/same", registry=registry)(1.5) == 1
    with pytest.raises(UnknownHookError, match="the name exists as acme-one/same"):
        get("acme-three/same", registry=registry)


def test_kinds_share_a_name(publish, registry):
    publish(
        "acme",
        {
            "commhooks.ddp": {"both": "math:floor"},
            "commhooks.fsdp": {"both": "math:ceil", "only": "math:ceil"},
        },
    )
    assert get("both", registry=registry)(1.5) == 1
    assert get("both", kind="fsdp", registry=registry)(1.5) == 2
    assert get("only", registry=registry)(1.5) == 2
    with pytest.raises(UnknownHookError, match=r"acme/only \(fsdp\)"):
        get("only", kind="wrapper", registry=registry)
    publish("acme-w", {"commhooks.wrapper": {"both": "math:sqrt"}})
    registry.refresh()
    with pytest.raises(AmbiguousHookError, match="name the kind"):
        get("both", registry=registry)


def test_one_distribution_cannot_claim_a_name_twice(publish, registry):
    publish(
        "acme",
        {"commhooks": {"p": "acme_twice_plugin"}, "commhooks.ddp": {"twice": "math:ceil"}},
        acme_twice_plugin=good("twice", "math:fsum"),
    )
    assert registry.resolve("twice").target == "math:fsum"
    assert "twice" in registry.failures()[0].error


def test_switches(publish, monkeypatch):
    publish("acme-one", {"commhooks.ddp": {"one": "math:floor"}})
    publish("acme-two", {"commhooks": {"p": "acme_two_plugin"}}, acme_two_plugin="import no_such_module_anywhere")

    def seen(**environ: str) -> set[str]:
        found = discover(environ)
        return {s.provider for s in found.specs} | {f.dist for f in found.failures}

    assert {"acme-one", "acme-two"} <= seen()
    assert "acme-two" not in seen(COMMHOOKS_DISABLE="other, Acme_Two")
    assert not {"acme-one", "acme-two"} & seen(COMMHOOKS_PLUGINS="")
    assert seen(COMMHOOKS_PLUGINS="acme-one") >= {"acme-one"}
    assert "acme-two" not in seen(COMMHOOKS_PLUGINS="acme-one")
    with pytest.raises(PluginLoadError, match=r"acme-two 1\.0"):
        discover({"COMMHOOKS_STRICT": "1"})
    assert "acme-two" in seen(COMMHOOKS_STRICT="0")


def test_refresh_sees_packages_installed_since(publish, registry):
    assert not registry.list_hooks("late_hook")
    publish("acme-late", {"commhooks.ddp": {"late_hook": "math:floor"}})
    assert not registry.list_hooks("late_hook")
    registry.refresh()
    assert registry.list_hooks("late_hook")


@pytest.mark.parametrize(
    ("function", "body"),
    [
        ("commhooks_adapter", "return None"),
        ("commhooks_wraps", "yield 5"),
        ("commhooks_local_gradients", "return 3"),
        ("commhooks_env", "return None"),
        ("commhooks_env", "raise SystemExit(3)"),
        ("commhooks_adapter", "raise OSError('boom')"),
        ("commhooks_wraps", "yield 'a:b'; raise OSError('boom')"),
    ],
)
def test_a_bad_answer_is_a_record_and_silences_no_other(function, body, publish, registry, caplog):
    text = f"from commhooks import hookimpl\n@hookimpl\ndef {function}(): {body}"
    publish("acme-bad", {"commhooks": {"p": "acme_bad_answer"}}, acme_bad_answer=text)
    publish("acme-good", {"commhooks": {"p": "acme_good_plugin"}}, acme_good_plugin=good("still_here"))
    answers = dict(registry.ask(function))
    providers = {name.partition(":")[0] for name in answers}
    assert {"commhooks", "ch-ddp"} & providers and "acme-bad" not in providers and registry.resolve("still_here")
    [failure] = registry.failures()
    assert (failure.dist, failure.phase) == ("acme-bad", function)
    assert caplog.text.count("a plugin failed: acme-bad 1.0") == 1


@pytest.mark.parametrize(
    "answer", ["'module:name'", "['no_target']", "[('acme.Model', 'no_target')]", "[('a', 'b:c', 'd')]"]
)
def test_a_malformed_row_is_refused(answer, publish, registry):
    function = "commhooks_wraps" if "(" not in answer else "commhooks_adapter"
    text = f"from commhooks import hookimpl\n@hookimpl\ndef {function}(): return {answer}"
    publish("acme-bad", {"commhooks": {"p": "acme_bad_row"}}, acme_bad_row=text)
    [failure] = registry.failures()
    assert f"it has to return {hookspecs.LEGAL[function]}" in failure.error


def test_an_object_with_odd_attributes_is_no_function(publish, registry):
    odd = "class Odd:\n    def __getattr__(self, name): raise OSError\n    def __call__(self): pass\ncommhooks_odd = Odd()\n"
    publish("acme", {"commhooks": {"p": "acme_odd_plugin"}}, acme_odd_plugin=odd + good("odd_but_well"))
    assert registry.resolve("odd_but_well") and not registry.failures()


METADATA = b"Metadata-Version: 2.1\nName: stray\n"


@pytest.mark.parametrize(
    ("about", "points"),
    [
        (None, None),  # a half removed package
        (METADATA, b"[commhooks.ddp]\nx = math:pi\n"),  # no version
        (b"Metadata-Version: 2.1\nVersion: 1\n", b"[commhooks.ddp]\nx = math:pi\n"),  # no name
        (METADATA + b"Version: 1\nSummary: caf\xe9\n", None),
        (METADATA + b"Version: 1\n", b"[another.tool]\nno value\n"),
    ],
    ids=["empty", "no version", "no name", "Latin-1", "no value"],
)
def test_broken_metadata_of_any_distribution_is_a_record(about, points, tmp_path, publish, registry):
    folder = tmp_path / "stray-1.0.dist-info"
    folder.mkdir()
    for name, data in (("METADATA", about), ("entry_points.txt", points)):
        if data is not None:
            (folder / name).write_bytes(data)
    (folder / "direct_url.json").write_bytes(b"\xff[")
    publish("acme", {"commhooks.ddp": {"fine": "math:floor"}})
    assert get("fine", registry=registry)(1.5) == 1
    [failure] = registry.failures()
    assert (failure.dist, failure.phase, failure.entry) == ("stray", "metadata", str(folder))
    assert "reinstall stray, or remove this folder" in failure.error
    assert "stray" not in editable_roots()
    assert not discover({"COMMHOOKS_DISABLE": "stray"}).failures


def test_a_broken_copy_hides_no_whole_one(tmp_path, publish, registry):
    (tmp_path / "acme-0.9.dist-info").mkdir()
    publish("acme", {"commhooks.ddp": {"fine": "math:floor"}})
    assert registry.resolve("fine").provider == "acme"


@pytest.mark.full
def test_plugins_that_pull_torch_in_are_known(tmp_path, publish):
    """Runs in a separate process, because this one may have loaded torch."""
    publish(
        "acme-heavy",
        {"commhooks": {"p": "acme_heavy_plugin"}},
        acme_heavy_plugin="import torch\n" + good("heavy"),
    )
    code = "from commhooks.registry.registry import REGISTRY; print([p.dist for p in REGISTRY.plugins() if p.imported_torch])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert run.stdout.strip() == "['acme-heavy']", run.stderr


def test_listing_and_describing_import_no_torch():
    code = (
        "import sys, commhooks\n"
        "for spec in commhooks.list_hooks():\n"
        "    commhooks.describe(spec.id)\n"
        "commhooks.failures(); commhooks.HookSpec; dir(commhooks)\n"
        "try: commhooks.get('powersdg')\n"
        "except commhooks.UnknownHookError: pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_importing_commhooks_scans_nothing():
    code = "import sys, commhooks; assert not {'pluggy', 'importlib_metadata', 'torch'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
