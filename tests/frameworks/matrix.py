"""Trains, kills and resumes under every framework: `python tests/frameworks/matrix.py [--only NAME] [--record FILE]`.

Each framework's script of 20 steps runs four times over gloo processes: uninterrupted; killed with SIGKILL after step
13, with a checkpoint of step 10; resumed on two ranks; resumed on three. The table lists the properties that held.
"""

import argparse
import difflib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
STEPS, SAVED, KILLED = 20, 10, 13


class Framework(NamedTuple):
    name: str
    package: str  # required package
    script: str  # file in SCRIPTS, and after "_" a variant other than "hook"; see `variant`
    sums: bool = False  # gradients are summed over the ranks, not averaged
    starts: bool = False  # starts its own ranks, as many as RANKS says
    how: str = "adapter"
    lines: int = 2  # lines that the script may change


FRAMEWORKS = (
    Framework("Lightning Trainer", "lightning", "lightning"),
    Framework("Fabric", "lightning", "fabric"),
    Framework("Accelerate", "accelerate", "accelerate"),
    Framework("Hugging Face Trainer", "transformers", "transformers"),
    Framework("torchtitan (FSDP2)", "torchtitan", "titan", sums=True),
    Framework("a loop over `fully_shard`, torch", "torch", "fsdp2", how="`attach`, `checkpoint.dcp`", lines=5),
    Framework("Ray Train", "ray", "ray", starts=True, lines=6),
    Framework("Ray Train", "ray", "ray_environment", starts=True, how="its `runtime_env`"),
)


def installed(framework: Framework) -> bool:
    return importlib.util.find_spec(framework.package) is not None


def version(framework: Framework) -> str:
    from importlib.metadata import version as of

    return of(framework.package)


def changed(script: str) -> int:
    """Return the number of lines that the hook adds to the plain script or changes in it, without empty lines."""
    plain, hooked = (variant(script, by_run).splitlines() for by_run in (True, False))
    return sum(1 for line in difflib.ndiff(plain, hooked) if line.startswith("+ ") and line[2:].strip())


def variant(script: str, plain: bool) -> str:
    """Return the text of a script with or without its hook.

    A file holds all variants. A line that ends in ``# hook`` is only in the variant with the hook, ``# plain: X`` stands for
    the line X of the others. ``# environment: X`` and ``# not environment`` are the same for Ray's ``runtime_env``.
    """
    name, _, other = script.partition("_")
    kind = "plain" if plain else other or "hook"
    lines = []
    for line in (SCRIPTS / f"{name}.py").read_text().splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        tag, _, rest = line.strip().removeprefix("# ").partition(": ")
        if line.strip().startswith(("# plain: ", "# environment: ")):
            if tag == kind or (tag == "plain" and kind != "hook"):
                lines.append(indent + rest)
        elif line.endswith("  # hook"):
            lines += [line.removesuffix("  # hook")] if kind == "hook" else []
        elif line.endswith("  # not environment"):
            lines += [line.removesuffix("  # not environment")] if kind != "environment" else []
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


class Run(NamedTuple):
    """A framework's script with the adapter, or unchanged under `commhooks run`."""

    framework: Framework
    by_run: bool
    options: tuple[str, ...] = ("--hook", "powersgd(rank=2)")  # of `commhooks run`

    @property
    def in_its_checkpoints(self) -> bool:
        """True if the framework's checkpoints hold the hook's state. False if `--state` keeps it after every step."""
        return not self.by_run and not self.framework.script.endswith("_environment")

    def train(self, ranks: int, out: Path, folder: Path, *arguments: str, kill_after: int = 0) -> None:
        """Run the script over some ranks. `out` gets the states of the hook."""
        out.mkdir()
        launcher = ["-m", "commhooks", "run", *self.options, "--state", folder / "state"] if self.by_run else []
        starts = self.framework.starts
        script = out / "script.py"
        script.write_text(variant(self.framework.script, self.by_run))
        program = [*launcher, HERE / "observe.py", script, folder, *arguments]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        observed = {"OBSERVED_OUT": str(out), "OBSERVED_KILL": str(kill_after)}
        observed |= {"OBSERVED_BY": "ray" if starts else "torchrun", "RANKS": str(ranks), "PYTHONPATH": str(HERE)}
        observed |= {"RAY_worker_niceness": "0"}  # Ray lowers the priority of its workers by default
        launch([*([] if starts else torchrun), *program], observed, bool(kill_after))


def launch(program: list[Any], observed: dict[str, str], killed: bool) -> None:
    command = [sys.executable, "-W", "ignore", *map(str, program)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **observed}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    if (done.returncode != 0) != killed:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def held(out: Path, when: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(out / f"{when}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def owed(kept: list[dict[str, Any]], sums: bool) -> dict[str, torch.Tensor]:
    """Return the mean (or sum) over ranks of the residual by parameter, which all enters the update."""
    rows = [
        {name.partition("[")[0]: row["residual"] for name, row in each["state"]["entries"].items() if "residual" in row}
        for each in kept
    ]
    total = {name: torch.stack([row[name].double() for row in rows]).sum(0) for name in rows[0]}
    return total if sums else {name: tensor / len(kept) for name, tensor in total.items()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """True if both are equal up to the rounding of one fp32 number per element."""
    return one.keys() == other.keys() and all(torch.allclose(one[n], other[n], rtol=1e-6, atol=1e-12) for n in one)


def equal(one: Any, other: Any) -> bool:
    """True if both are equal to the bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def claims(run: Run, folder: Path) -> Iterator[tuple[str, bool]]:
    """Return the required properties, each with True if it holds."""
    sums = run.framework.sums
    runs = {name: folder / name for name in ("whole", "killed", "resumed", "three")}
    checkpoints = folder / "checkpoints"
    run.train(2, runs["whole"], folder / "elsewhere")
    run.train(2, runs["killed"], checkpoints, kill_after=KILLED)
    run.train(2, runs["resumed"], checkpoints, "--resume")
    loaded = held(runs["resumed"], "loaded", 2)
    saved = held(runs["killed"], "saved", 2) if run.in_its_checkpoints else loaded
    whole, resumed = held(runs["whole"], "end", 2), held(runs["resumed"], "end", 2)
    stats = [each["stats"] for each in whole]
    yield "every step compressed", all(each["compressed_steps"] == each["steps"] == STEPS for each in stats)
    yield "two buckets or more", all(each["calls"] >= 2 * STEPS - 2 for each in stats)
    yield "saved at the step", all(each["state"]["step"] == SAVED for each in saved)
    apart = saved[0]["state"]["entries"], saved[1]["state"]["entries"]
    yield "each rank's own residual", equal(loaded, saved) and not equal(*apart)
    yield "same bits as uninterrupted", equal([e["weights"] for e in resumed], [e["weights"] for e in whole])
    yield "same state as uninterrupted", equal([e["state"] for e in resumed], [e["state"] for e in whole])
    run.train(3, runs["three"], checkpoints, "--resume")
    there, here = owed(saved, sums), owed(held(runs["three"], "loaded", 3), sums)
    yield f"{'sum' if sums else 'mean'} of the residuals kept on 3 ranks", close(there, here)
    ended = held(runs["three"], "end", 3)
    yield "trains on with 3 ranks", all(each["state"]["step"] == STEPS for each in ended)


def row(framework: Framework, by_run: bool) -> tuple[str, bool]:
    """Return a line of the table, and True if all properties hold."""
    print(framework.name, flush=True)
    lines = 0 if by_run else changed(framework.script)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for claim, holds in claims(Run(framework, by_run), Path(folder)):
            print(f"  {'yes' if holds else 'NO '}  {claim}", flush=True)
            found.append(holds)
    cells = ["yes" if holds else "**no**" for holds in found]
    how = "`commhooks run`" if by_run else framework.how
    return f"| {framework.name} {version(framework)} | {how} | {lines} | {' | '.join(cells)} |", all(found)


HEAD = (
    "| framework | by | lines changed | 20 of 20 steps compressed | two buckets or more | saved at step 10 | each rank's own "
    "residual back | same weights as uninterrupted | same hook state | residuals kept on 3 ranks | trains on |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="run frameworks whose script's name contains NAME")
    parser.add_argument("--by-run", action="store_true", help="run unchanged scripts under `commhooks run`")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the table to this file")
    chosen = parser.parse_args()
    rows, missing, sound = [], [], True
    for framework in FRAMEWORKS:
        if chosen.only and chosen.only not in framework.script:
            continue
        if chosen.by_run and framework.script.endswith("_environment"):  # another entry has the plain script
            continue
        if not installed(framework):
            missing.append(framework.name)
            continue
        line, holds = row(framework, chosen.by_run)
        rows.append(line)
        sound = sound and holds
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo"
    table = "\n".join([HEAD, *rows, "", f"{where}." + (f" Not installed: {', '.join(missing)}." if missing else "")])
    print(table)
    if chosen.record:
        chosen.record.write_text(f"{table}\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
