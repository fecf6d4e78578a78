"""Run the kit from a folder of wheels: `python run.py --out FOLDER`.

It unpacks the wheels of this project to a temporary folder and runs `python -m ch_bench.gpu_kit` with the same arguments. This
file needs only the standard library; the kit needs torch, numpy and pluggy.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main() -> int:
    """Return the exit status of the kit."""
    wheels = sorted(Path(__file__).resolve().parent.glob("*.whl"))
    if not wheels:
        print(f"no wheels in the folder of {__file__}: make the folder with `nox -s gpu-kit`", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as site:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([site, *([inherited] if inherited else [])])
        words = [sys.executable, "-m", "ch_bench.gpu_kit", *sys.argv[1:]]
        return subprocess.run(
            words, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
