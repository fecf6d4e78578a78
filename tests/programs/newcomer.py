"""Time a newcomer's path with the commands of the documents: `python newcomer.py [--there FOLDER] [--record]`.

The path starts in an empty folder with a clone and an environment. It runs the README's commands that install, train a
script and give advice, on the script of docs/run.md and the model of docs/network.md. `--there` names a site-packages folder
with the dependencies, to avoid their download.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = re.compile(r'^SCRIPT = """\n(.*?)^"""', re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"^`my_module.py`:\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^(pip install .*)$", re.MULTILINE)
RUN = re.compile(r"^\$ (torchrun .*)$", re.MULTILINE)
ADVISE = re.compile(r"^`(commhooks advise .*?)`", re.MULTILINE)


def found(pattern: re.Pattern[str], page: str) -> str:
    match = pattern.search((ROOT / page).read_text())
    if match is None:
        raise SystemExit(f"{page} has nothing like {pattern.pattern!r}")
    return match[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--there", type=Path, help="site-packages with the dependencies")
    parser.add_argument("--record", action="store_true", help="write docs/measured/newcomer.md")
    chosen = parser.parse_args()
    install, run, advise = (found(command, "README.md") for command in (INSTALL, RUN, ADVISE))
    lines, whole = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "commhooks")

        def step(command: str, shown: int = 0) -> None:
            begun = time.perf_counter()
            path = f"{clone}/.venv/bin{os.pathsep}{os.environ['PATH']}"
            where = clone if clone.exists() else Path(folder)
            done = subprocess.run(
                command, shell=True, cwd=where, env={**os.environ, "PATH": path}, capture_output=True, text=True
            )
            seconds = time.perf_counter() - begun
            told = command.replace(str(ROOT), "REPOSITORY").replace(str(chosen.there), "SITE-PACKAGES")
            lines.append(f"$ {told}\n({seconds:.1f} s)")
            if shown or done.returncode:
                lines.extend((done.stdout + done.stderr).strip().splitlines()[-shown or -40 :])
            print("\n".join(lines[-shown - 1 :]), flush=True)
            if done.returncode:
                raise SystemExit(done.returncode)

        step(f"git clone -q {ROOT} commhooks")
        step("python3 -m venv .venv")
        if chosen.there:
            [packages] = clone.glob(".venv/lib/python3*/site-packages")
            (packages / "there.pth").write_text(f"{chosen.there}\n")
            torchrun = clone / ".venv" / "bin" / "torchrun"  # torch brought it to the other environment
            torchrun.write_text(f'#!/bin/sh\nexec {clone}/.venv/bin/python -m torch.distributed.run "$@"\n')
            torchrun.chmod(0o755)
        step(f"{install}{' --no-deps --no-build-isolation' if chosen.there else ''}", 1)
        (clone / "train.py").write_text(found(SCRIPT, "docs/run.md"))
        (clone / "my_module.py").write_text(found(MODULE, "docs/network.md"))
        step(run, 16)
        step(f"python -m {advise}", 30)
    total = time.perf_counter() - whole
    there = " Torch and the other dependencies were there already." if chosen.there else ""
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    about = f"{platform.system()}, Python {platform.python_version()}, {load} at the end.{there}"
    text = "\n".join(line.rstrip() for line in lines)
    if chosen.record:
        page = ROOT / "docs" / "measured" / "newcomer.md"
        head = f"# From an empty folder to advice\n\n`python tests/programs/newcomer.py`: {total:.0f} s in all. {about}"
        page.write_text(f"{head}\n\n```text\n{text}\n```\n")
    print(f"{total:.0f} s in all. {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
