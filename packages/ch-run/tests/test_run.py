"""``python -m commhooks run`` and the environment variable work with scripts that do not know commhooks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .kit import run

HOOK = "powersgd(rank=2)"
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]


@pytest.mark.full
@pytest.mark.parametrize("door", [False, True], ids=["command", "environment"])
def test_a_script_with_its_own_loop(tmp_path: Path, door: bool) -> None:
    done = run(tmp_path, "ddp_loop", hook=HOOK, door=door)
    assert done.stats["compressed_steps"] == done.stats["steps"] == 8
    assert done.report["world_size"] == 2 and not done.report["notes"]
    assert "DistributedDataParallel(Sequential)" in done.err and "powersgd" in done.err.split("commhooks run:")[1]


@pytest.mark.full
@pytest.mark.parametrize("script", ["lightning_fit", "hf_trainer", "accelerate_loop"])
def test_frameworks_with_their_scripts_unchanged(tmp_path: Path, script: str) -> None:
    pytest.importorskip(
        {"hf": "transformers", "lightning": "lightning", "accelerate": "accelerate"}[script.split("_")[0]]
    )
    done = run(tmp_path, script, hook=HOOK)
    assert done.stats["compressed_steps"] == done.stats["steps"] == 6


@pytest.mark.full
def test_lightning_starts_its_processes_itself(tmp_path: Path) -> None:
    """With ``python script.py``, the second process is Lightning's child and gets the hook from the environment."""
    pytest.importorskip("lightning")
    done = run(tmp_path, "lightning_fit", ranks=0, hook=HOOK)
    assert done.stats["compressed_steps"] == done.stats["steps"] == 6
    assert done.report["world_size"] == 2


@pytest.mark.full
def test_a_manual_attach_gives_the_same_bits_and_wins(tmp_path: Path) -> None:
    run(tmp_path, "ddp_loop", hook=HOOK)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    text = (Path(__file__).parent / "scripts" / "ddp_loop.py").read_text()
    place = "optimizer = torch.optim"
    attached = text.replace(place, f'import commhooks\ncommhooks.attach(model, "{HOOK}")\n{place}')
    done = run(tmp_path, attached, hook="noop")  # the script's own wins: with noop ranks would differ
    again = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not done.report["models"]
    [note] = done.report["notes"]
    assert "a hook of the script's own, which stays" in note and HOOK in note and "handle.detach" not in note
    assert f"commhooks run: {note}" in done.err and "noop on 2 ranks" not in done.err
    assert note in done.err.split("commhooks run:")[0]  # also logged at the time


@pytest.mark.full
def test_a_registered_hook_wins(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "scripts" / "ddp_loop.py").read_text()
    hook = "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook"
    registered = text.replace("begin = 0", f"{hook}\nmodel.register_comm_hook(None, fp16_compress_hook)\nbegin = 0")
    done = run(tmp_path, registered, hook=HOOK)
    [note] = done.report["notes"]
    assert "fp16_compress_hook" in note


FSDP1 = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
teacher = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu")).requires_grad_(False)
teacher(torch.ones(2, 8, requires_grad=True)).sum().backward()
print("the teacher ran", file=__import__("sys").stderr)
model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
model(torch.ones(2, 8)).sum().backward()
print("the model trained", file=__import__("sys").stderr)
"""


@pytest.mark.full
def test_an_fsdp1_model_that_trains_is_refused_before_its_first_step(tmp_path: Path) -> None:
    done = run(tmp_path, FSDP1, hook="bf16_compress", check=False)
    assert done.code != 0
    assert "the teacher ran" in done.err and "the model trained" not in done.err
    assert "HookNotSupportedError" in done.err and "fully_shard (FSDP2)" in done.err
    assert not done.report.get("models")


@pytest.mark.full
@pytest.mark.parametrize("door", [False, True], ids=["command", "environment"])
@pytest.mark.parametrize(
    ("hook", "word"), [("powersdg", "did you mean"), ("powersgd(rnk=4)", "rank"), ("powersgd(", "^")]
)
def test_a_bad_expression_ends_before_the_script_begins(tmp_path: Path, door: bool, hook: str, word: str) -> None:
    script = "import pathlib, torch\npathlib.Path('began').touch()\n"
    done = run(tmp_path, script, ranks=0, hook=hook, door=door, check=False)
    assert done.code != 0 and word in done.err and "Traceback" not in done.err
    assert not (tmp_path / "began").exists()


TWO_MODELS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Generator(torch.nn.Linear):
    pass

class Critic(torch.nn.Linear):
    pass

dist.init_process_group("gloo")
torch.manual_seed(0)
models = [DistributedDataParallel(cls(64, 64)) for cls in (Generator, Critic)]
for step in range(3):
    for model in models:
        model(torch.ones(2, 64)).square().mean().backward()
"""


@pytest.mark.full
def test_several_models(tmp_path: Path) -> None:
    done = run(tmp_path, TWO_MODELS, hook=HOOK)
    assert [model["model"].split("(")[1] for model in done.report["models"]] == ["Generator)", "Critic)"]
    assert all(model["stats"]["compressed_steps"] == 3 for model in done.report["models"])
    [note] = done.report["notes"]
    assert "DistributedDataParallel(Critic) is model 2" in note
    done = run(tmp_path, TWO_MODELS, hook=HOOK, module_pattern="*.Crit*")
    assert done.report["models"][0]["model"] == "DistributedDataParallel(Critic)"
    assert done.stats["compressed_steps"] == 3
    [note] = done.report["notes"]
    assert "Generator" in note and "--module-pattern '*.Crit*'" in note


@pytest.mark.full
def test_one_process(tmp_path: Path) -> None:
    """A script that runs alone for debugging has exact gradients, unless the user asks for compression."""
    done = run(tmp_path, "ddp_loop", ranks=1, hook=HOOK)
    assert not done.report["models"] and "one process" in done.report["notes"][0]
    exact = torch.load(tmp_path / "weights.pt", weights_only=True)
    run(tmp_path, "ddp_loop", ranks=1)
    assert all(torch.equal(exact[k], v) for k, v in torch.load(tmp_path / "weights.pt", weights_only=True).items())
    done = run(tmp_path, "ddp_loop", ranks=1, hook=HOOK, single_process=True)
    assert done.stats["compressed_steps"] == 8


def test_a_script_that_wraps_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n", ranks=0, hook=HOOK)
    assert "no model was wrapped" in done.report["notes"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "status"),
    [("pass", 3), ("raise SystemExit(0)", 3), ("raise SystemExit('')", 1), ("raise SystemExit(7)", 7), ("1 / 0", 1)],
)
def test_a_hook_that_must_attach_ends_an_unused_run_with_a_status(tmp_path: Path, script: str, status: int) -> None:
    done = run(tmp_path, f"import torch\n{script}\n", ranks=0, hook=HOOK, must_attach=True, check=False)
    assert done.code == status, done.err
    assert done.report["models"] == [] and done.report["notes"]


@pytest.mark.full
def test_a_hook_that_must_attach_and_does_changes_no_status(tmp_path: Path) -> None:
    assert run(tmp_path, "ddp_loop", hook=HOOK, must_attach=True).stats["steps"] == 8
    done = run(tmp_path, "ddp_loop", hook=HOOK, must_attach=True, module_pattern="Other", check=False)
    assert done.code == 1 and "exitcode  : 3" in done.err  # the status of torchrun itself is 1
    assert "exitcode  : 0" not in done.err and done.err.count("exitcode  : 3") == 1  # rank 0 alone


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_script_that_starts_its_ranks_itself(tmp_path: Path, method: str) -> None:
    """The ranks write the report, also to the file. The process that only starts them writes none."""
    loop = TWO_MODELS.replace('dist.init_process_group("gloo")', "")
    ranks = "def train(rank, store):\n    dist.init_process_group('gloo', init_method=store, rank=rank, world_size=2)\n"
    head, body = loop.split("\ntorch.manual_seed(0)")
    body = "".join(f"    {line}\n" for line in ("torch.manual_seed(0)" + body).splitlines())
    start = "if __name__ == '__main__':\n    import pathlib\n    store = pathlib.Path('store').absolute().as_uri()\n"
    start += f"    torch.multiprocessing.start_processes(train, (store,), nprocs=2, start_method={method!r})\n"
    script = f"{head}\n{ranks}{body}{start}"
    done = run(tmp_path, script, ranks=0, hook=HOOK, must_attach=True)
    assert [model["stats"]["compressed_steps"] for model in done.report["models"]] == [3, 3]
    starts = [line.split(":")[0] for line in done.err.splitlines() if line.startswith(f"commhooks run: {HOOK} on ")]
    assert len(starts) == 3, done.err  # of each model once, and of the report
    assert "no model was wrapped" not in done.err


SEMANTICS = """
import sys, os, other_module
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals(), __name__
assert sys.argv[1:] == ["--lr", "1", "--hook", "mine"], sys.argv
assert os.path.samefile(sys.path[0], os.path.dirname(__file__))
def fails():
    raise KeyError("the script's own")
if other_module.how == "raise":
    fails()
sys.exit(7)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_exit_status_and_traceback_are_the_scripts(tmp_path: Path, how: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "other_module.py").write_text(f"how = '{how}'\n")
    done = run(tmp_path, SEMANTICS, "--lr", 1, "--hook", "mine", ranks=0, hook=HOOK, check=False)
    assert done.code == (7 if how == "exit" else 1)
    assert done.report["notes"]  # writes a report anyway
    assert "no model was wrapped" not in done.err
    assert "the script ended by " + ("KeyError" if how == "raise" else "exit status 7") in done.err
    if how == "raise":
        assert "start it with torchrun" in done.err
        trace = done.err[done.err.index("Traceback") :]
        assert trace.count('File "') == 2 and 'KeyError: "the script\'s own"' in trace  # the module, and fails()


def test_a_script_that_does_not_exist_ends_with_one_line(tmp_path: Path) -> None:
    for words, said in ((["no.py"], "no such script: no.py"), (["-m", "no_module"], "no such module: no_module")):
        lost = [sys.executable, "-m", "commhooks", "run", "--hook", "quant4", *words]
        done = subprocess.run(lost, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hook", "quant4", "torchrun", "--nproc-per-node", "2", "train.py"], "torchrun is a launcher, not a script"),
        (
            ["--single", "--gather", "train.py"],
            "--gather needs an expression before the script, as in --gather 'quant4'",
        ),
        (["--outer", "train.py"], "--outer needs an expression before the script"),
        (["--hook", "train.py", "--lr", "1"], "--hook needs an expression before the script"),
        (["--hook=train.py"], "--hook needs an expression before the script, as in --hook 'quant4' train.py"),
        (
            ["--hook", "powersgd(rank=4)", "python", "-u", "train.py", "--lr", "1"],
            "leave out python -u, because run starts the script itself: commhooks run --hook 'powersgd(rank=4)' train.py --lr 1",
        ),
        (
            ["--hook", "quant4", "python3", "-W", "ignore", "-Xdev", "train.py", "-W", "1"],
            "leave out python3 -W ignore -Xdev, because run starts the script itself: commhooks run --hook quant4 train.py -W 1",
        ),
        (["--hook", "quant4", "python", "-um", "train", "-u"], "commhooks run --hook quant4 -m train -u"),
        (["--hook", "quant4", "python", "-c", "import train"], "no code of python -c: write the code into a file"),
        (
            ["--hook", "quant4", "python"],
            "leave out python, because run starts the script itself: commhooks run --hook quant4 train.py",
        ),
        (["--hook", "quant4"], "the following arguments are required: script"),
        (["--hook", "quant4", "--outer", "diloco", "train.py"], "exclude each other"),
        (["train.py", "--hook=quant4"], "--hook stands behind train.py, so the script gets it"),
    ],
)
def test_a_wrong_command_line_says_the_right_one(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')\n")
    command = [sys.executable, "-m", "commhooks", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 2 and said in " ".join(done.stderr.split())
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.full
def test_options_of_the_script_may_have_the_names_of_ours(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (tmp_path / "train").write_text("import sys\nprint(sys.argv[1:])\n")
    for words in (["-m", "my_module", "--hook", "config.py"], ["--single-process", "train", "--outer=config.py"]):
        command = [sys.executable, "-m", "commhooks", "run", "--hook", "quant4", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout == f"{words[2:]}\n", done.stderr


@pytest.mark.full
@pytest.mark.parametrize("how", ["python -m", "console script"])
def test_a_traceback_starts_in_the_users_code(tmp_path: Path, how: str) -> None:
    """A console script adds one frame above the package's."""
    (tmp_path / "train.py").write_text("def fails():\n    raise KeyError('mine')\nfails()\n")
    (tmp_path / "unfinished.py").write_text("x = = 3\n")
    console = "import sys\nfrom commhooks.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    (tmp_path / "commhooks").write_text(console)
    command = [sys.executable, *(["-m", "commhooks"] if how == "python -m" else [str(tmp_path / "commhooks")])]

    def trace(script: str) -> list[str]:
        words = [*command, "run", "--hook", "quant4", script]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 1
        return [line.split(", ")[0].strip() for line in done.stderr.splitlines() if line.startswith('  File "')]

    assert trace("train.py") == ['File "train.py"'] * 2
    assert trace("unfinished.py") == ['File "unfinished.py"']


def test_the_environment_costs_nothing_unless_it_asks_for_a_hook(tmp_path: Path) -> None:
    """The installation has a .pth line that reads the variable. Without the variable, it imports no module of this
    project.
    """
    code = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules} & {'commhooks', 'torch'}))"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMMHOOKS_")}
    for hook, told in ((None, ""), ("powersgd", "commhooks")):
        given = environ if hook is None else {**environ, "COMMHOOKS_HOOK": hook}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=given)
        assert done.stdout.strip() == told, done.stderr


@pytest.mark.full
def test_parameters_are_compared_across_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", hook=HOOK, check_ranks_every=2, on_drift="raise", link="far")
    assert done.report["models"][0]["link"] == "200mbit,80ms"
    checks = done.report["models"][0]["rank_checks"]
    assert checks == "parameters compared across ranks 4 times, every 2 steps: equal"
    assert checks in " ".join(done.err.split())


@pytest.mark.full
def test_each_model_gets_a_trace(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", hook=HOOK, trace=tmp_path / "traces")
    [file] = (tmp_path / "traces").iterdir()
    assert file.name == "1-DistributedDataParallel.json"
    data = json.loads(file.read_text())
    assert data["otherData"]["ranks"] == [0, 1] and data["otherData"]["dropped_events"] == {"0": 0, "1": 0}
    trace = done.report["models"][0]["trace"]
    assert trace["summary"]["steps"] == 7 and "on the wire" in done.err and str(file) in done.err


@pytest.mark.full
def test_the_rounds_of_an_outer_optimizer_get_a_trace(tmp_path: Path) -> None:
    outer = "streaming_diloco(every=4, fragments=2, overlap=1)"
    done = run(tmp_path, "ddp_loop", outer=outer, trace="traces", link="far")
    assert done.report["models"][0]["link"] == "200mbit,80ms"
    [file] = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"fragment 0: steps", "fragment 1: steps", "model"} <= threads
    inner = [event for event in events if event["name"] == "inner steps"]
    assert len({event["pid"] for event in inner}) == 2 and all(event["dur"] > 0 for event in inner)
    assert "behind the inner steps" in done.err


@pytest.mark.full
def test_a_hook_whose_messages_are_unknown_trains_without_a_trace(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", hook="post_local_sgd(start_iter=100)", trace="traces")
    assert "is not traced" in done.report["notes"][0] and not (tmp_path / "traces").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"hook": HOOK}, r"powersgd\(rank=2\): step \d+, .* each; sent .*, ratio .*; waited .* \(\d+%\); error 0\.\d+"),
        (
            {"outer": "diloco(every=2, steps=8)"},
            r"outer optimizer, exchange=allreduce: round \d+, .* each; sent .*; waited .*",
        ),
    ],
)
def test_live_lines_appear_while_the_script_trains(tmp_path: Path, options: dict[str, str], line: str) -> None:
    done = run(tmp_path, "ddp_loop", report="live=2", **options)
    start, *found, report = re.split(rf"^({line})$", done.err, flags=re.MULTILINE)
    assert len(found[::2]) >= 2
    assert "a rank sends" in start and "commhooks run: " in report
    assert not (tmp_path / "live=2").exists()


def test_an_illegal_interval_of_live_lines_ends_the_command(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", ranks=0, hook=HOOK, report="live=soon", check=False)
    assert done.code == 2
    assert "'soon' is no interval: give steps, as in 100, or seconds, as in 30s" in " ".join(done.err.split())
