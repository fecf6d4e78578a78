"""Trains, kills and resumes under every framework: `python tests/frameworks/matrix.py [--only NAME] [--record FILE]`.

Each framework's script of 20 steps is run four times over gloo processes: uninterrupted; killed with SIGKILL after step
13, the checkpoint being of step 10; resumed on two ranks; resumed on three. The table says what held.
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
    package: str  # that must be installed
    script: str  # SCRIPTS / f"{script}_hook.py", and _plain.py without the hook


FRAMEWORKS = (
    Framework("Lightning Trainer", "lightning", "lightning"),
    Framework("Fabric", "lightning", "fabric"),
    Framework("Accelerate", "accelerate", "accelerate"),
    Framework("Hugging Face Trainer", "transformers", "transformers"),
)


def installed(framework: Framework) -> bool:
    return importlib.util.find_spec(framework.package) is not None


def version(framework: Framework) -> str:
    from importlib.metadata import version as of

    return of(framework.package)


def changed(script: str) -> int:
    """Lines of the plain script that the hook adds or changes, empty ones left out."""
    plain, hooked = ((SCRIPTS / f"{script}_{which}.py").read_text().splitlines() for which in ("plain", "hook"))
    return sum(1 for line in difflib.ndiff(plain, hooked) if line.startswith("+ ") and line[2:].strip())


def train(script: str, ranks: int, out: Path, folder: Path, *arguments: str, kill_after: int = 0) -> None:
    """Run a script over some ranks; what it held is in `out`."""
    out.mkdir()
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    program = [HERE / "observe.py", out, kill_after, SCRIPTS / f"{script}_hook.py", folder, *arguments]
    command = [*launch, f"--nproc-per-node={ranks}", *map(str, program)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=False)
    if (done.returncode != 0) != bool(kill_after):
        raise SystemExit(f"{script} over {ranks} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def held(out: Path, when: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(out / f"{when}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def residuals(kept: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Parameter -> mean over ranks of the residual: all of it that enters the averaged update."""
    rows = [{name: row["residual"] for name, row in each["state"]["entries"].items()} for each in kept]
    return {name: torch.stack([row[name].double() for row in rows]).mean(0) for name in rows[0]}


def equal(one: Any, other: Any) -> bool:
    """To the bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def claims(script: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """What must hold, and whether it does."""
    runs = {name: folder / name for name in ("whole", "killed", "resumed", "three")}
    checkpoints = folder / "checkpoints"
    train(script, 2, runs["whole"], folder / "elsewhere")
    train(script, 2, runs["killed"], checkpoints, kill_after=KILLED)
    train(script, 2, runs["resumed"], checkpoints, "--resume")
    saved, loaded = held(runs["killed"], "saved", 2), held(runs["resumed"], "loaded", 2)
    whole, resumed = held(runs["whole"], "end", 2), held(runs["resumed"], "end", 2)
    stats = [each["stats"] for each in whole]
    yield "every step compressed", all(each["compressed_steps"] == each["steps"] == STEPS for each in stats)
    yield "two buckets or more", all(each["calls"] >= 2 * STEPS - 2 for each in stats)
    yield "saved at the step", all(each["state"]["step"] == SAVED for each in saved)
    apart = saved[0]["state"]["entries"], saved[1]["state"]["entries"]
    yield "each rank's own residual", equal(loaded, saved) and not equal(*apart)
    yield "same bits as uninterrupted", equal([e["weights"] for e in resumed], [e["weights"] for e in whole])
    yield "same state as uninterrupted", equal([e["state"] for e in resumed], [e["state"] for e in whole])
    train(script, 3, runs["three"], checkpoints, "--resume")
    there, here = residuals(saved), residuals(held(runs["three"], "loaded", 3))
    yield "mean residual kept on 3 ranks", all(torch.equal(here[name].float(), there[name].float()) for name in there)
    ended = held(runs["three"], "end", 3)
    yield "trains on with 3 ranks", all(each["state"]["step"] == STEPS for each in ended)


def row(framework: Framework) -> tuple[str, bool]:
    """A line of the table, and whether all claims held."""
    print(framework.name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for claim, holds in claims(framework.script, Path(folder)):
            print(f"  {'yes' if holds else 'NO '}  {claim}", flush=True)
            found.append(holds)
    cells = ["yes" if holds else "**no**" for holds in found]
    return f"| {framework.name} {version(framework)} | {changed(framework.script)} | {' | '.join(cells)} |", all(found)


HEAD = (
    "| framework | lines changed | 20 of 20 steps compressed | two buckets or more | saved at step 10 | each rank's own "
    "residual back | same weights as uninterrupted | same hook state | mean residual kept on 3 ranks | trains on |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="frameworks whose script's name has NAME in it")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args()
    rows, missing, sound = [], [], True
    for framework in FRAMEWORKS:
        if chosen.only and chosen.only not in framework.script:
            continue
        if not installed(framework):
            missing.append(framework.name)
            continue
        line, holds = row(framework)
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
