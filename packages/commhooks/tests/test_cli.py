"""The command line has stable JSON keys and exit statuses, and works while plugins are broken."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from commhooks.cli import listing, main
from commhooks.cli.text import shortened
from commhooks.registry.spec import KINDS, OWN_COMMANDS

PLUGIN = """
from commhooks import HookSpec, hookimpl

@hookimpl
def commhooks_specs():
    return [
        HookSpec("hangs", "ddp", "acme_cli_hooks:hangs", "never completes"),
        HookSpec("dies", "ddp", "acme_cli_hooks:dies", "ends its process"),
        HookSpec("works", "reduction", "acme_cli_hooks:works", "averages", options={}),
        HookSpec("returns_none", "ddp", "acme_cli_hooks:returns_none", "forgets the future"),
    ]
"""
HOOKS = """
import os, time
from commhooks import AllReduce

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
    """Run the command. It sees only this project's packages and those in PYTHONPATH."""
    environ = {**os.environ, "COMMHOOKS_PLUGINS": "", "COLUMNS": "200", **environ}
    command = [sys.executable, "-m", "commhooks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environ)


@pytest.mark.parametrize("set_up", [listing.list_, listing.describe])
def test_the_help_names_every_kind(set_up):
    parser = argparse.ArgumentParser()
    set_up(parser)
    [action] = [one for one in parser._actions if one.dest == "kind"]
    assert set(re.findall(r"\w+", action.help or "")) == {*KINDS, "or"}


@pytest.mark.full
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


SEVERAL = """
def first(bucket, ctx):
    '''Send the first entries. Keep the others.

    More.
    '''
    yield

def second(bucket, ctx):
    "Send LONG"
    yield

def third(bucket, ctx): yield
"""


def test_a_line_is_listed_by_its_docstring_or_as_broken(tmp_path, publish):
    targets = {name: f"acme_several:{name}" for name in ("first", "second", "third", "missing")}
    lines = {**targets, "exits": "acme_exits:f", "lost": "acme_no_such_module:f"}
    source = SEVERAL.replace("LONG", "x" * 60 + " " + "y" * 60)
    publish("acme", {"commhooks.reduction": lines}, acme_several=source, acme_exits="raise SystemExit(0)")
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    run = commhooks("list", "--json", **environ)
    found = json.loads(run.stdout)
    assert run.returncode == 1
    summaries = {hook["name"]: hook["summary"] for hook in found["hooks"] if hook["provider"] == "acme"}
    assert summaries == {"first": "Send the first entries", "second": f"Send {'x' * 60} ...", "third": "(no summary)"}
    broken = {failure["entry"]: failure["error"] for failure in found["failures"]}
    assert broken.keys() == {f"commhooks.reduction: {name}" for name in ("missing", "exits", "lost")}
    assert "acme_no_such_module" in broken["commhooks.reduction: lost"]
    text = commhooks("list", "acme", **environ).stdout
    assert "failed acme 1.0 (commhooks.reduction: lost, import): " in text
    assert commhooks("describe", "first", **environ).stdout.startswith(
        "first (reduction): Send the first entries. Keep"
    )
    assert "PluginLoadError: acme 1.0 (hook 'lost')" in commhooks("describe", "lost", **environ).stderr


def test_list_describe_and_help_load_no_torch_and_no_rich():
    code = (
        "import sys\nfrom commhooks.cli import main\nfor words in (['list'], ['describe', 'powersgd']): main(words)\n"
    )
    code += "try: main(['--help'])\nexcept SystemExit: pass\nassert not {'torch', 'rich'} & {*sys.modules}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


@pytest.mark.full
def test_all_is_well_without_strangers():
    assert commhooks("list").returncode == 0
    run = commhooks("env", "--json")
    assert run.returncode == 0, run.stdout
    keys = {"python", "platform", "torch", "commhooks", "providers", "plugins", "failures", "environment"}
    assert keys <= set(json.loads(run.stdout))


def test_describe_unknown():
    run = commhooks("describe", "powersdg", "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout)["error"] == "UnknownHookError"
    run = commhooks("describe", "powersdg")
    assert run.returncode == 1
    assert "did you mean 'powersgd'" in run.stderr


def test_a_wrong_command_suggests_the_right_one():
    run = commhooks("lst")
    assert run.returncode == 2
    assert "unknown command 'lst'; did you mean 'list'?" in run.stderr
    assert "commhooks --help" in run.stderr


def test_without_a_command_it_prints_help_with_an_example_and_the_docs():
    run = commhooks(COLUMNS="200")
    assert run.returncode == 0
    assert "commhooks run --hook" in run.stdout
    assert "documentation: https://" in run.stdout


def test_a_command_of_ours_says_which_package_to_install():
    run = commhooks("advise", COMMHOOKS_DISABLE="ch-bench")
    assert run.returncode == 2
    assert "the command 'advise' comes with ch-bench, not installed here" in run.stderr
    assert "comes with ch-bench, not installed here" in run.stderr
    assert "did you mean 'advise'" in commhooks("advice", COMMHOOKS_DISABLE="ch-bench").stderr


def test_help_summarises_each_command_of_a_package():
    lines = [" ".join(line.split()) for line in commhooks("--help").stdout.splitlines()]
    assert any(line.startswith("advise Predict step times") for line in lines)
    assert any(line.startswith("bench Time hooks") for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("list", "-h"),
        ("describe", "-h"),
        ("env", "-h"),
        ("doctor", "-h"),
        ("run", "-h"),
        ("advise", "-h"),
        ("bench", "-h"),
    ],
)
def test_help_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):  # of argparse
        main(words)
    text = capsys.readouterr().out
    assert text
    assert max(map(len, text.splitlines())) <= 80


def test_list_groups_hooks_by_use_and_marks_first_choices():
    lines = commhooks("list").stdout.splitlines()
    assert (
        lines.index("16 bits per element")
        < lines.index("low-rank factors")
        < lines.index("wrappers: put another hook inside")
    )
    assert any(line.startswith("* bf16_compress") for line in lines)
    assert any(line.startswith("  fp16_compress") for line in lines)
    run = commhooks("list", "no such hook")
    assert run.returncode == 1
    assert "no hook matches 'no such hook'" in run.stdout
    assert commhooks("list", "no such hook", "--json").returncode == 1


def test_every_hook_documents_its_use_and_cost():
    hooks = json.loads(commhooks("list", "--json").stdout)["hooks"]
    assert not [hook["name"] for hook in hooks if not (hook["when"] and hook["loss"])]
    text = commhooks("describe", "powersgd").stdout
    assert "  when " in text
    assert "  loss " in text


def test_env_lists_every_package_of_ours():
    found = json.loads(commhooks("env", "--json").stdout)["commhooks"]
    assert {"ch-wrappers", "ch-ddp", "ch-powersgd"} <= set(found)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(150)
def test_doctor_survives_hooks_that_hang_and_die(tmp_path, publish):
    publish("acme", {"commhooks": {"p": "acme_cli_plugin"}}, acme_cli_plugin=PLUGIN, acme_cli_hooks=HOOKS)
    ours = "ch-powersgd,ch-fsdp,ch-quant"
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme", "COMMHOOKS_DISABLE": ours}
    run = commhooks("doctor", "--json", "--timeout", "20", **environ)
    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    status = {hook["id"]: (hook["status"], hook["why"]) for hook in found["hooks"] if hook["id"].startswith("acme/")}
    assert status["acme/works"] == ("ok", "")
    assert status["acme/hangs"] == ("failed", "did not finish within 20 s")
    assert "status 7" in status["acme/dies"][1]
    assert status["acme/returns_none"][0] == "failed"
    assert {"acme", "ch-wrappers"} <= {plugin["dist"] for plugin in found["plugins"]}


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(150)
def test_doctor_on_the_installed_plugins():
    run = commhooks("doctor", "--json")
    found = json.loads(run.stdout)
    assert found["ok"], found
    assert run.returncode == 0
    assert not any(plugin["imported_torch"] for plugin in found["plugins"])


@pytest.mark.full
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


TARGETS = """
from commhooks import hookimpl

@hookimpl
def commhooks_adapter():
    return [
        ("acme.Model", "acme_targets:no_adapter"),
        ("acme.Other", "math:floor"),
        ("acme.Manager", "math:pi"),
    ]

@hookimpl
def commhooks_wraps():
    return ["collections:NoSuchModel", "not_installed_anywhere.models:Model", "collections:OrderedDict"]
"""


@pytest.mark.full
def test_doctor_tries_adapters_and_wrappers(tmp_path, publish):
    publish("acme", {"commhooks": {"p": "acme_targets"}}, acme_targets=TARGETS)
    run = commhooks("doctor", "--json", "--no-smoke", PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert run.returncode == 1
    rows = {row["id"].partition(": ")[2]: row for row in json.loads(run.stdout)["targets"] if "acme" in row["id"]}
    failed = {name: row["why"] for name, row in rows.items() if row["status"] == "failed"}
    assert failed.keys() == {
        "adapter of acme.Model = acme_targets:no_adapter",
        "adapter of acme.Manager = math:pi",
        "wraps = collections:NoSuchModel",
    }
    assert "has no attribute 'no_adapter'" in failed["adapter of acme.Model = acme_targets:no_adapter"]
    assert "not callable" in failed["adapter of acme.Manager = math:pi"]
    assert "nothing to wrap" in rows["wraps = not_installed_anywhere.models:Model"]["why"]
    assert not rows["adapter of acme.Other = math:floor"]["why"]


COMMAND = """
import warnings
from commhooks import HookConfigError

def greet(parser):
    '''Greet by name.'''
    parser.add_argument("--name")
    parser.add_argument("--json", action="store_true")
    return run

def script(parser):
    parser.set_defaults(runs_script=True, name="raise")
    return run

def run(arguments):
    warnings.warn("heard")
    print("hello", arguments.name)
    if arguments.name == "raise":
        raise HookConfigError("given raise")
    return 3 if arguments.name else None
"""
LINES = {"commhooks.commands": {"greet": "acme_greet:greet"}}


def test_a_package_adds_a_command(tmp_path, publish):
    publish("acme", LINES, acme_greet=COMMAND)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    assert commhooks("greet", **environ).returncode == 0
    run = commhooks("greet", "--name", "Ada", **environ)
    assert (run.returncode, run.stdout, run.stderr) == (3, "hello Ada\n", "")
    run = commhooks("greet", "--nam", **environ)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: commhooks greet ")
    assert "Greet by name." in commhooks("greet", "--help", **environ).stdout
    run = commhooks("greet", "--name", "raise", "--json", **environ)
    assert run.returncode == 1
    assert json.loads(run.stdout.splitlines()[-1]) == {"error": "HookConfigError", "message": "given raise"}
    assert "    greet     Greet by name." in commhooks("--help", **environ).stdout
    assert commhooks("greet", **environ, COMMHOOKS_DISABLE="acme").returncode == 2


def test_exceptions_and_warnings_of_a_script_pass_through(tmp_path, publish):
    publish("acme", {"commhooks.commands": {"script": "acme_greet:script"}}, acme_greet=COMMAND)
    run = commhooks("script", PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert run.returncode == 1
    assert "UserWarning: heard" in run.stderr
    assert "Traceback" in run.stderr and run.stderr.endswith("HookConfigError: given raise\n")


def test_a_command_that_fails_to_import_leaves_the_others_in_the_help(tmp_path, publish):
    points = {"commhooks.commands": {"greet": "acme_greet:greet", "broken": "acme_broken:f"}}
    publish("acme", points, acme_greet=COMMAND, acme_broken="raise SystemExit(4)")
    run = commhooks("--help", PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert run.returncode == 0
    assert "Greet by name." in run.stdout and "Run a training script" in run.stdout
    said = " ".join(run.stdout.split())
    assert "broken failed: acme 1.0 (command 'broken'): 'acme_broken:f' failed to load: SystemExit: 4" in said


@pytest.mark.full
def test_a_broken_command_is_a_recorded_failure(tmp_path, publish):
    points = {
        "missing": "acme_no_such_module:main",
        "list": "acme_greet:greet",
        "Bad": "acme_greet:greet",
        "bare": "acme",
    }
    publish("acme", {"commhooks.commands": points}, acme_greet=COMMAND)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    run = commhooks("missing", **environ)
    assert run.returncode == 1
    assert "PluginLoadError: acme 1.0 (command 'missing'): 'acme_no_such_module:main' failed to load" in run.stderr
    found = json.loads(commhooks("list", "--json", **environ).stdout)  # the command shows commhooks' list
    said = {failure["entry"].split(": ")[1]: failure["error"] for failure in found["failures"]}
    assert set(said) == {"list", "Bad", "bare"}
    assert "'list' of acme has the name of one of commhooks' own" in said["list"]
    run = commhooks("doctor", "--json", "--no-smoke", **environ)
    assert run.returncode == 1
    [row] = [row for row in json.loads(run.stdout)["commands"] if row["id"] == "acme/missing"]
    assert row["status"] == "failed"
    assert "acme_no_such_module" in row["why"]


@pytest.mark.full
def test_two_packages_with_one_command_are_refused_by_name(tmp_path, publish):
    publish("acme", LINES, acme_greet=COMMAND)
    publish("zeta", LINES)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme,zeta"}
    run = commhooks("greet", **environ)
    assert run.returncode == 1
    assert "AmbiguousHookError: the command 'greet' is ambiguous: acme/greet 1.0, zeta/greet 1.0" in run.stderr
    assert commhooks("zeta/greet", **environ).returncode == 0
    assert "zeta/greet" in commhooks("--help", **environ).stdout
    rows = json.loads(commhooks("doctor", "--json", "--no-smoke", **environ).stdout)["commands"]
    assert {row["status"] for row in rows if row["id"].endswith("/greet")} == {"failed"}


def test_own_commands_are_in_the_help():
    usage = commhooks("--help").stdout
    assert all(f"\n    {name} " in usage for name in OWN_COMMANDS)


LONG = """
from commhooks import HookSpec, hookimpl, Option

@hookimpl
def commhooks_specs():
    return [
        HookSpec("a_hook_with_quite_a_long_name", "ddp", "math:floor", "does what its long summary says " * 3),
        HookSpec("short", "reduction", "math:floor", "sends few bytes", options={"rank": Option(4, "of it")}),
    ]
"""


@pytest.fixture
def narrow(tmp_path, publish):
    """Return the output of the command in a terminal of 80 columns, with hooks of long and short names."""
    publish("acme", {"commhooks": {"p": "acme_long_cli"}}, acme_long_cli=LONG)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme", "COLUMNS": "80"}
    return lambda *words: commhooks(*words, **environ)


def test_no_name_is_cut_in_a_terminal_of_80_columns(narrow):
    lines = narrow("list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [hook["name"] for hook in json.loads(narrow("list", "--json").stdout)["hooks"]]
    assert "a_hook_with_quite_a_long_name" in names
    rows = [line for line in lines if line[:2] in ("  ", "* ") and line[2:3].strip()]
    assert sorted(row[2:].split()[0] for row in rows) == sorted(names)
    said = " ".join(" ".join(line.split()) for line in lines)
    whole = " ".join(" ".join(["does what its long summary says"] * 3).split())
    assert f"a_hook_with_quite_a_long_name acme {whole}" in said  # the description takes several lines


@pytest.mark.full
def test_the_doctor_keeps_its_status_in_80_columns(narrow):
    lines = narrow("doctor", "--no-smoke").stdout.splitlines()
    rows = [line for line in lines if line.split()[:1] == ["loaded"]]
    assert any(row.split()[1] == "acme/a_hook_with_quite_a_long_name" for row in rows)
    assert "…" not in "".join(lines)


def test_list_takes_a_word(narrow):
    def names(*words):
        return [hook["name"] for hook in json.loads(narrow("list", *words, "--json").stdout)["hooks"]]

    assert names("FEW bytes") == ["short"]
    assert names("acme") == ["a_hook_with_quite_a_long_name", "short"]
    assert names("a_hook*") == ["a_hook_with_quite_a_long_name"]
    assert names("nothing of the kind") == []


def test_describe_takes_an_expression(narrow):
    text = narrow("describe", "error_feedback(short(rank=7))").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("error_feedback(short(rank=7))\n\nerror_feedback (wrapper): ")
    assert "rank=7  an int: of it (given; default 4)" in text
    levels = json.loads(narrow("describe", "error_feedback(short(rank=7))", "--json").stdout)["levels"]
    assert [level["name"] for level in levels] == ["error_feedback", "short"]
    assert levels[1]["given"] == {"rank": 7}
    wrong = narrow("describe", "short(rnak=7)")
    assert wrong.returncode == 1
    assert "did you mean 'rank'" in wrong.stderr
    assert json.loads(narrow("describe", "short", "--json").stdout)["name"] == "short"


def test_version():
    run = commhooks("--version")
    assert run.returncode == 0
    assert run.stdout.split()[0] == "commhooks"
    assert run.stdout.split()[1][0].isdigit()


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(150)
def test_doctor_of_one_hook_or_expression():
    run = commhooks("doctor", "warmup(allreduce, steps=2)", "--json", COMMHOOKS_DISABLE="ch-fsdp")
    [row] = json.loads(run.stdout)["hooks"]
    assert (row["id"], row["example"]) == ("ch-wrappers/warmup", "warmup(allreduce, steps=2)")
    assert row["status"] == "ok", row
    unknown = commhooks("doctor", "powersdg")
    assert unknown.returncode == 1
    assert "powersgd" in unknown.stderr


WARNS = """
import logging, warnings
warnings.warn("somebody else's warning")
logging.getLogger("somebody").warning("somebody else's log")
"""


@pytest.mark.full
def test_other_libraries_are_not_heard(tmp_path, publish):
    publish("acme", {"commhooks": {"p": "acme_warns"}}, acme_warns=WARNS)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    for command in (("env",), ("doctor", "--no-smoke")):
        run = commhooks(*command, **environ)
        assert "acme 1.0" in run.stdout or "acme: 1.0" in run.stdout or "acme " in run.stdout
        assert run.stderr == ""


def test_help_is_a_command():
    assert commhooks("help").stdout == commhooks("--help").stdout
    assert commhooks("help", "list").stdout == commhooks("list", "--help").stdout


def test_an_unknown_variable_is_named():
    run = commhooks("list", "quant4", COMMHOOKS_DISABEL="acme")
    assert run.returncode == 0
    assert "COMMHOOKS_DISABEL is unknown, and nothing reads it; did you mean 'COMMHOOKS_DISABLE'?" in run.stderr


COLOURED = """
from commhooks import HookSpec, hookimpl

@hookimpl
def commhooks_specs():
    return [HookSpec("red", "reduction", "acme_red:red", "averages \\x1b[31min red\\x1b[0m\\x07", options={})]
"""


@pytest.mark.parametrize("words", [("list",), ("describe", "red")])
def test_escape_sequences_of_other_packages_stay_out(tmp_path, publish, words):
    publish("acme", {"commhooks": {"p": "acme_red_plugin"}}, acme_red_plugin=COLOURED, acme_red="red = 1")
    run = commhooks(*words, PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert "averages in red" in run.stdout
    assert "\x1b" not in run.stdout + run.stderr


def test_escape_sequences_in_errors_of_other_packages_stay_out_of_the_doctor(tmp_path, publish):
    error = "raise RuntimeError('\\x1b[2J the screen is gone')"
    publish("acme", {"commhooks.ddp": {"bad": "acme_screen:bad"}}, acme_screen=error)
    run = commhooks("doctor", "bad", "--no-smoke", PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert run.returncode == 1
    assert "the screen is gone" in run.stdout
    assert "\x1b" not in run.stdout + run.stderr


def test_env_tells_packages_of_others_from_ours():
    lines = commhooks("env").stdout.splitlines()
    ours = lines[lines.index("commhooks:") : lines.index("packages of others:")]
    assert "  numpy" not in "\n".join(ours)


LOST = """
from commhooks import HookSpec, Needs, hookimpl

@hookimpl
def commhooks_specs():
    return [
        HookSpec("lost", "reduction", "acme_lost_plugin_code.sub:lost", "averages", options={}),
        HookSpec("deep", "reduction", "json.no_such_part:lost", "averages", options={}),
        HookSpec("poor", "reduction", "math:floor", "averages", options={}, needs=Needs(packages=("acme-no-such",))),
        HookSpec("fine", "reduction", "math:floor", "averages", options={}),
    ]
"""


def test_list_marks_hooks_that_cannot_be_loaded(tmp_path, publish):
    publish("acme", {"commhooks": {"p": "acme_lost"}}, acme_lost=LOST)
    environ = {"PYTHONPATH": str(tmp_path), "COMMHOOKS_PLUGINS": "acme"}
    run = commhooks("list", "acme", **environ)
    marks = {
        words[1]: words[0] for line in run.stdout.splitlines() if len(words := line.split()) > 2 and words[2] == "acme"
    }
    assert marks == {"lost": "!", "deep": "!", "poor": "!"} and "fine" in run.stdout
    assert (
        "! acme/lost cannot be used here: its code 'acme_lost_plugin_code.sub:lost' is not installed: there is no module "
        "acme_lost_plugin_code\n" in run.stdout
    )
    assert "there is no module json.no_such_part" in run.stdout
    assert (
        "! acme/poor cannot be used here: poor needs the package acme-no-such: pip install acme-no-such" in run.stdout
    )
    hooks = json.loads(commhooks("list", "acme", "--json", **environ).stdout)["hooks"]
    assert {hook["name"]: bool(hook["unusable"]) for hook in hooks} == {
        "lost": True, "deep": True, "poor": True, "fine": False,
    }  # fmt: skip


LOUD = """
from ch_core import HookConfigError

def refuses(bucket, ctx): yield
raise HookConfigError("\\n".join(f"line {number}" for number in range(300)))
"""


def test_an_error_ends_after_a_few_lines(tmp_path, publish):
    publish("acme", {"commhooks.reduction": {"loud": "acme_loud:refuses"}}, acme_loud=LOUD)
    run = commhooks("describe", "loud", PYTHONPATH=str(tmp_path), COMMHOOKS_PLUGINS="acme")
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) <= 13, run.stderr


@pytest.mark.parametrize("words", [("list",), ("describe", "powersgd"), ("env",)])
def test_a_pipe_gets_80_columns(words):
    run = commhooks(*words, COLUMNS="")
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_a_long_line_of_an_error_ends_too():
    assert len(shortened("x" * 10_000)) < 1100
    assert shortened("short\ntext") == "short\ntext"
