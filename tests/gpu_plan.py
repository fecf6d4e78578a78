"""What to run first on a machine with one GPU, in at most four minutes, without a network, pip or nox.

    python tests/gpu_plan.py --out record                        # all parts of the first command, 230 s
    python tests/gpu_plan.py --out record --parts streams,costs  # some parts, such as those of the second command
    python tests/gpu_plan.py --out record --device cpu           # a rehearsal

It needs torch, numpy, pluggy, pytest, pytest-timeout, hypothesis and this checkout, and nothing installed from it: a folder
of generated metadata declares the entry points. Each part has its own time limit. Its output is in ``PART.txt`` while it
runs, and ``summary.txt`` has a line for each part that has ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FSDP, DDP, OUTER = ROOT / "packages/ch-fsdp/tests", ROOT / "packages/ch-ddp/tests", ROOT / "plugins/ch-outer/tests"


@dataclass(frozen=True)
class Part:
    """One part of the plan.

    Attributes:
        seconds: time limit.
        tests: for pytest.
        words: arguments of Python instead of tests; ``DEVICE`` stands for the device.
        settings: environment variables.
        first: True if the first command runs it.
    """

    seconds: int
    tests: tuple[object, ...] = ()
    words: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    first: bool = True


EVERY_HOOK = (ROOT / "tests/test_every_hook.py",)
AXES = (
    f"{FSDP}/test_replicate_axis.py::test_powersgd_is_the_same_on_ddp",
    f"{FSDP}/test_shard_axis_quantized.py::test_near_the_average_with_the_bytes_promised",
    f"{FSDP}/test_gather_axis.py::test_bytes",
    f"{DDP}/test_two_level_processes.py::test_ddp",
    f"{OUTER}/test_by_hand.py::test_it_is_the_loop_written_by_hand_over_gloo",
)
FAULTS = (
    f"{DDP}/test_surviving_errors.py",
    f"{FSDP}/test_replicate_axis.py::test_a_failure_reaches_every_rank",
    f"{DDP}/test_two_level_processes.py::test_an_error_between_the_levels_reaches_every_node",
)
PARTS = {
    "environment": Part(20, words=("-c", "import runpy; runpy.run_path('tests/gpu_plan.py')['tell']()")),
    "several": Part(40, (f"{ROOT}/packages/ch-testing/tests/test_spawn.py::test_ranks_meet_and_return",)),
    "hooks": Part(60, EVERY_HOOK),
    "axes": Part(80, AXES),
    "faults": Part(30, FAULTS),
    "streams": Part(100, (ROOT / "plugins/ch-bench/tests/test_streams.py",), first=False),
    # A missing record_stream shows only if memory is given back at once; the sanitizer sees accesses without order.
    "uncached": Part(60, EVERY_HOOK, settings=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),), first=False),
    "sanitizer": Part(60, EVERY_HOOK, settings=(("TORCH_CUDA_SANITIZER", "1"),), first=False),
    "costs": Part(200, words=("-m", "programs.cost.on_gpu", "--device", "DEVICE"), first=False),
}


def tell() -> None:
    """Print versions, the device, and the hooks that load."""
    import platform

    import torch

    import commhooks

    print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    if torch.cuda.is_available():
        print(torch.cuda.device_count(), "x", torch.cuda.get_device_properties(0), "NCCL", torch.cuda.nccl.version())
    else:
        print("no GPU")
    for spec in commhooks.list_hooks():
        commhooks.describe(spec.name, spec.kind)
        print(spec.kind, spec.name, spec.provider)


def write_metadata(folder: Path) -> list[Path]:
    """Declare every package of the checkout in the folder, as pip does. Return the folders to import from."""
    sources = []
    for path in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]):
        project = tomllib.loads(path.read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            f"Summary: {project['description']}\n"
        )
        groups = project.get("entry-points", {})
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        sources.append(path.parent / "src")
    return [*sources, ROOT / "plugins/ch-bench", folder]


def run(name: str, part: Part, device: str, out: Path, paths: list[Path]) -> str:
    """Run a part, and return its line of the summary."""
    command = [sys.executable, *(device if word == "DEVICE" else word for word in part.words)]
    if part.tests:
        command += ["-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "--device", device, "-m", "not soak"]
        command += ["--durations", "20", *map(str, part.tests)]
    if name == "costs":
        command += ["--seconds", str(part.seconds - 15), "--out", str(out / "costs.jsonl")]
        command += ["--tiny"] if device != "cuda" else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **dict(part.settings),
    }
    begun = time.monotonic()
    with (out / f"{name}.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = str(process.wait(part.seconds))
        except subprocess.TimeoutExpired:
            status = f"cut after {part.seconds} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks, too
            process.wait()
    last = (out / f"{name}.txt").read_text(errors="replace").strip().splitlines()[-1:]
    return f"{name}: exit {status}, {time.monotonic() - begun:.0f} s of {part.seconds}: {' '.join(last)}"


def main() -> int:
    """Run the chosen parts one after another. Return 0 if all ended with status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("record"))
    parser.add_argument("--device", choices=("cuda", "cpu", "imagined"), default="cuda")
    parser.add_argument("--parts", help=f"some of {', '.join(PARTS)}")
    options = parser.parse_args()
    names = options.parts.split(",") if options.parts else [name for name, part in PARTS.items() if part.first]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no parts {unknown}: choose from {', '.join(PARTS)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder, (out / "summary.txt").open("a") as summary:
        paths = write_metadata(Path(folder))
        for name in names:
            line = run(name, PARTS[name], options.device, out, paths)
            print(line, flush=True)
            print(line, file=summary, flush=True)
            failed = failed or f"{name}: exit 0," not in line
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
