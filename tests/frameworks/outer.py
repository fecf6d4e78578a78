"""Trains, kills and resumes unchanged scripts under `commhooks run --outer`: `nox -s frameworks-outer [-- --only NAME]`.

Each framework's plain script of 20 steps runs three times on two gloo processes: uninterrupted; killed with SIGKILL after step
13, after a checkpoint of step 10 by the framework's own means, which ends a round; resumed from it.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import matrix

OUTER = "diloco(every=5, steps=20, exchange='quant4(block=64, error_feedback=True, exempt=False)')"
FRAMEWORKS = (
    matrix.Framework("Lightning Trainer", "lightning", "lightning"),
    matrix.Framework("Fabric", "lightning", "fabric"),
    matrix.Framework("Accelerate", "accelerate", "accelerate"),
    matrix.Framework("Hugging Face Trainer", "transformers", "transformers"),
    matrix.Framework("a loop in torchtitan's style (`replicate`, DCP), torch", "torch", "titanstyle"),
    matrix.Framework("Ray Train", "ray", "ray", starts=True),
)
HEAD = (
    "| framework | lines changed | trains 20 steps in 4 rounds | one model at the end | killed after "
    "step 13 | resumes at step 10 | same bits as uninterrupted |\n|---|---|---|---|---|---|---|"
)


def claims(run: matrix.Run, folder: Path) -> Iterator[bool]:
    """Return the required properties, each with True if it holds."""
    runs = {name: folder / name for name in ("whole", "killed", "resumed")}
    checkpoints = folder / "checkpoints"
    run.train(2, runs["whole"], folder / "elsewhere")
    whole = matrix.held(runs["whole"], "end", 2)
    yield all(one["outer"]["count"] == matrix.STEPS and one["outer"]["landed"] == 4 for one in whole)
    yield matrix.equal(whole[0]["weights"], whole[1]["weights"])
    run.train(2, runs["killed"], checkpoints, kill_after=matrix.KILLED)
    yield not list(runs["killed"].glob("end-*"))
    run.train(2, runs["resumed"], checkpoints, "--resume")
    loaded, resumed = (matrix.held(runs["resumed"], when, 2) for when in ("loaded", "end"))
    yield all(one["outer"]["count"] == matrix.SAVED and one["outer"]["landed"] == 2 for one in loaded)
    yield matrix.equal([one["weights"] for one in resumed], [one["weights"] for one in whole])


def row(framework: matrix.Framework) -> tuple[str, bool]:
    """Return a line of the table, and True if all claims held."""
    print(framework.name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = list(claims(matrix.Run(framework, True, ("--outer", OUTER)), Path(folder)))
    cells = " | ".join("yes" if holds else "**no**" for holds in found)
    return f"| {framework.name} {matrix.version(framework)} | 0 | {cells} |", all(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="frameworks whose script's name has NAME in it")
    chosen = parser.parse_args()
    wanted = [one for one in FRAMEWORKS if not chosen.only or chosen.only in one.script]
    rows = [row(one) for one in wanted if matrix.installed(one)]
    missing = [one.name for one in wanted if not matrix.installed(one)]
    print("\n".join([HEAD, *(line for line, _ in rows)]))
    print(f"\nNot installed: {', '.join(missing)}." if missing else "")
    return 0 if all(holds for _, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
