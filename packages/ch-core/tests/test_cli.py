"""The command line: stable JSON keys, exit statuses, and usable while plugins are broken."""

import json
import os
import subprocess
import sys

import pytest

PLUGIN = """
from commhooks import HookSpec, hookimpl

@hookimpl
def commhooks_specs():
    return [
        HookSpec("hangs", "ddp", "acme_cli_hooks:hangs", "never completes"),
        HookSpec("dies", "ddp", "acme_cli_hooks:dies", "ends its process"),
        HookSpec("works", "reduction", "acme_cli_hooks:works", "averages", params={}),
        HookSpec("returns_none", "ddp", "acme_cli_hooks:returns_none", "forgets the future"),
    ]
"""
HOOKS = """
import os, time
from commhooks.requests import AllReduce

def hangs(state, bucket):
    time.sleep(1000)

def dies(state, bucket):
    os._exit(7)

def returns_none(state, bucket):
    return None

def works(bucket, ctx):
    print("a hook may print")
    yield AllReduce(bucket.buffer)
"""


def commhooks(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command, seeing this project's packages and those in PYTHONPATH only."""
    environ = {**os.environ, "COMMHOOKS_PLUGINS": "", "COLUMNS": "200", **environ}
    command = [sys.executable, "-m", "commhooks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environ)


def test_list_and_env_with_a_broken_plugin(tmp_path, publish):
    publish("acme-bad", {"commhooks": {"p": "acme_bad_cli"}}, acme_bad_cli="import no_such_module_anywhere")
    publish("acme", {"commhooks.ddp": {"line_hook": "math:floor"}})
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme,acme-bad"}
    run = commhooks("list", "--json", **environ)
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert set(found) == {"hooks", "failures", "skipped"}
    [hook] = [hook for hook in found["hooks"] if hook["name"] == "line_hook"]
    assert hook["provider"] == "acme"
    assert found["failures"][0]["dist"] == "acme-bad"
    assert "Traceback" in found["failures"][0]["traceback"]
    text = commhooks("list", **environ)
    assert "line_hook" in text.stdout
    assert "no_such_module_anywhere" in text.stdout
    block = commhooks("env", **environ)
    assert block.returncode == 1
    assert "acme-bad 1.0" in block.stdout
    assert commhooks("describe", "line_hook", **environ).returncode == 0


def test_all_is_well_without_strangers():
    assert commhooks("list").returncode == 0
    run = commhooks("env", "--json")
    assert run.returncode == 0, run.stdout
    keys = {"python", "platform", "torch", "providers", "plugins", "failures", "environment"}
    assert keys <= set(json.loads(run.stdout))


def test_describe_unknown():
    run = commhooks("describe", "powersdg", "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout)["error"] == "UnknownHookError"
    run = commhooks("describe", "powersdg")
    assert run.returncode == 1
    assert "did you mean 'powersgd'" in run.stderr
    assert commhooks("frobnicate").returncode == 2


@pytest.mark.gloo
@pytest.mark.timeout(150)
def test_doctor_survives_hooks_that_hang_and_die(tmp_path, publish):
    publish("acme", {"commhooks": {"p": "acme_cli_plugin"}}, acme_cli_plugin=PLUGIN, acme_cli_hooks=HOOKS)
    ours = "ch-ddp,ch-powersgd,ch-fsdp,ch-quant,ch-template"
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme", "COMMHOOKS_DISABLE": ours}
    run = commhooks("doctor", "--json", "--timeout", "20", **environ)
    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    status = {hook["id"]: (hook["status"], hook["why"]) for hook in found["hooks"] if hook["id"].startswith("acme/")}
    assert status["acme/works"] == ("ok", "")
    assert status["acme/hangs"] == ("failed", "did not finish within 20 s")
    assert "status 7" in status["acme/dies"][1]
    assert status["acme/returns_none"][0] == "failed"
    assert {"acme", "ch-core"} <= {plugin["dist"] for plugin in found["plugins"]}


@pytest.mark.gloo
@pytest.mark.timeout(150)
def test_doctor_on_what_is_installed():
    run = commhooks("doctor", "--json")
    found = json.loads(run.stdout)
    assert found["ok"], found
    assert run.returncode == 0
    assert not any(plugin["imported_torch"] for plugin in found["plugins"])


def test_doctor_names_mistakes(tmp_path, publish):
    project = tmp_path / "source"
    project.mkdir()
    text = '[project]\nname = "acme"\n[project.entry-points."commhooks.ddp"]\nnew = "a:b"\n'
    (project / "pyproject.toml").write_text(text)
    heavy = "import torch\nfrom commhooks import hookimpl\n"
    publish("acme", {"commhooks": {"p": "acme_heavy_cli"}}, acme_heavy_cli=heavy)
    record = {"url": f"file://{project}", "dir_info": {"editable": True}}
    (tmp_path / "acme-1.0.dist-info" / "direct_url.json").write_text(json.dumps(record))
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    run = commhooks("doctor", "--json", "--no-smoke", **environ)
    problems = "\n".join(json.loads(run.stdout)["problems"])
    assert run.returncode == 1
    assert "acme imports torch while hooks are listed" in problems
    assert "commhooks.ddp: new = a:b" in problems
