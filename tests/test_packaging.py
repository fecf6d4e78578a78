"""Real wheels and real pip in a fresh environment, with ch-powersgd and a stranger's package.

Links give the environment torch and the other requirements of this one, so that it downloads no package. It has none of
this project's packages.
"""

import json
import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POWERSGD = ("ch-core", "commhooks", "ch-wrappers", "ch-ddp", "ch-powersgd")  # what ch-powersgd brings
RUN = ("ch-trace", "ch-run")  # what `commhooks run` needs more
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(240)]


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / "packages" / name for name in (*POWERSGD, *RUN)]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, *sources)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that this environment has, except this project's packages."""
    folder = tmp_path_factory.mktemp("base")
    for site in (Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")):
        for entry in site.iterdir():
            ours = (
                entry.name.startswith(("ch_", "_ch_", "commhooks", "__editable__", "_editable"))
                or entry.suffix == ".pth"
            )
            if not ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def environment(home: Path, base: Path, wheels: list[Path]) -> Path:
    """Return the interpreter of a new environment with these wheels and no other package of this project."""
    venv.create(home, with_pip=False)
    [site] = home.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")
    interpreter = home / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels)
    return interpreter


def of(wheels: list[Path], *names: str) -> list[Path]:
    """Return the wheels of these distributions."""
    return [wheel for wheel in wheels if wheel.name.split("-")[0].replace("_", "-") in names]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, base: Path, wheels: list[Path]) -> Path:
    """Return the interpreter of an environment with ch-powersgd and its requirements alone."""
    return environment(tmp_path_factory.mktemp("env"), base, of(wheels, *POWERSGD))


def ask(python: Path, code: str, cwd: Path) -> object:
    """Run code that prints one JSON value. Return the value."""
    prelude = "import json, commhooks\ndef error(f):\n    try: f()\n"
    prelude += "    except Exception as e: return [type(e).__name__, str(e)]\n"
    return json.loads(run(python, "-c", prelude + textwrap.dedent(code), cwd=cwd).splitlines()[-1])


def publish(python: Path, folder: Path, dist: str, line: str, module: str) -> None:
    """Make a package with one entry-point line and install it."""
    name = dist.replace("-", "_")
    source = folder / dist
    (source / name).mkdir(parents=True)
    (source / name / "__init__.py").write_text(module)
    (source / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{dist}"\nversion = "0.3"\n{line}\n'
    )
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", source)


@pytest.mark.full
def test_a_wheel_holds_one_package(wheels):
    assert len(wheels) == len(POWERSGD) + len(RUN)
    for wheel in wheels:
        package = wheel.name.split("-")[0]
        names = zipfile.ZipFile(wheel).namelist()
        door = {"commhooks-hook.pth"} if package == "ch_run" else set()  # COMMHOOKS_HOOK activates this line
        assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {package} | door
        assert f"{package}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.full
def test_the_core_alone_imports_torch_alone_and_installs_no_plugin(tmp_path, base, wheels):
    python = environment(tmp_path / "env", base, of(wheels, "ch-core"))
    code = """
        import json, sys
        from importlib.metadata import distribution
        before = set(sys.modules)
        import ch_core
        listed = {name.split(".")[0] for name in set(sys.modules) - before}
        for name in ch_core.__all__:
            getattr(ch_core, name)
        found = sorted({name.split(".")[0] for name in sys.modules if name.startswith(("ch_", "commhooks", "rich", "pluggy"))})
        core = distribution("ch-core")
        needs = [line for line in core.requires if "extra ==" not in line]
        files = [str(file) for file in core.files if file.suffix == ".pth"]
        print(json.dumps([sorted(listed), found, files, [str(point) for point in core.entry_points], needs]))
    """
    listed, found, files, points, requires = json.loads(run(python, "-c", textwrap.dedent(code), cwd=tmp_path))
    assert "torch" not in listed  # names are imported when first used
    assert (found, files, points, requires) == (["ch_core"], [], [], ["torch>=2.10"])


def test_the_door_is_shut_unless_a_hook_is_asked_for(tmp_path, base, wheels):
    python = environment(tmp_path / "env", base, wheels)
    code = "import sys; print('commhooks' in sys.modules, 'ch_run.import_watch' in sys.modules, 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMMHOOKS_")}
    for hook, told in (({}, "False False False"), ({"COMMHOOKS_HOOK": "powersgd"}, "True True False")):
        command = [str(python), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environ | hook)
        assert done.stdout.split() == told.split(), done.stderr


@pytest.mark.full
def test_powersgd_is_installed_and_the_error_for_quant8_names_its_package(python, tmp_path):
    found = ask(
        python,
        """
        specs = [s.id for s in commhooks.list_hooks()]
        missing = error(lambda: commhooks.get("quant8"))
        wrapped = commhooks.create("bf16_wrapper(powersgd(rank=2))").expr
        from importlib.metadata import distributions
        import subprocess, sys
        ours = {d.name for d in distributions() if d.name.startswith(("ch-", "commhooks"))}
        tried = subprocess.run([sys.executable, "-m", "commhooks", "run", "x.py"], capture_output=True, text=True)
        name, needs = commhooks.get("powersgd").__name__, [tried.returncode, tried.stderr]
        print(json.dumps([specs, missing, name, wrapped, sorted(ours), needs]))
        """,
        tmp_path,
    )
    specs, missing, name, wrapped, installed, run_needs = found
    own = [spec for spec in specs if spec.startswith("ch-powersgd/")]
    assert own == ["ch-powersgd/batched_powersgd", "ch-powersgd/powersgd"]
    assert missing[0] == "UnknownHookError"
    assert "comes with ch-quant, not installed here" in missing[1]
    assert sorted(installed) == sorted(POWERSGD)  # no launcher, tracer, test kit or rich
    assert run_needs[0] == 2
    assert "comes with ch-run, not installed here" in run_needs[1]
    assert name == "powerSGD_hook"
    assert wrapped == "bf16_wrapper(powersgd(rank=2))"


@pytest.mark.full
def test_a_line_is_enough_and_a_second_claim_is_refused(python, tmp_path):
    line = '[project.entry-points."commhooks.ddp"]\nacme_hook = "{}:hook"'
    hook = "def hook(state, bucket):\n    return {!r}\n"
    publish(python, tmp_path, "acme-one", line.format("acme_one"), hook.format("one"))
    assert ask(python, "print(json.dumps(commhooks.get('acme_hook')(None, None)))", tmp_path) == "one"
    publish(python, tmp_path, "acme-two", line.format("acme_two"), hook.format("two"))
    code = """
        other = commhooks.get('acme-two/acme_hook')(None, None)
        print(json.dumps([error(lambda: commhooks.get('acme_hook')), other]))
    """
    refused, two = ask(python, code, tmp_path)
    assert refused[0] == "AmbiguousHookError"
    assert "acme-one/acme_hook 0.3" in refused[1]
    assert "acme-two/acme_hook 0.3" in refused[1]
    assert two == "two"


def test_a_package_that_fails_to_import_changes_nothing(python, tmp_path):
    line = '[project.entry-points.commhooks]\nbroken = "acme_broken"'
    publish(python, tmp_path, "acme-broken", line, "import a_module_that_is_not_there\n")
    code = """
        names = [s.id for s in commhooks.list_hooks("*powersgd")]
        print(json.dumps([names, [f.dist for f in commhooks.failures()], error(lambda: commhooks.get("no_hook"))]))
    """
    names, failed, unknown = ask(python, code, tmp_path)
    assert names == ["ch-powersgd/batched_powersgd", "ch-powersgd/powersgd"]
    assert failed == ["acme-broken"]
    assert "acme-broken 0.3" in unknown[1]
    listed = subprocess.run(
        [python, "-m", "commhooks", "list"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert listed.returncode == 1
    assert "a_module_that_is_not_there" in listed.stdout
    assert "powersgd" in listed.stdout
