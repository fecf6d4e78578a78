"""torchft's own tests on our classes, test by test, and those of another torchft on the installed one's class.

With ``--newer WHEEL`` the DDP tests of that wheel are taken out of it and run on our classes and on the class of the
torchft that is installed; nothing else of the wheel is used.

    python -m ch_bench.faults.ft_upstream [--newer torchft_nightly-….whl] [--record]
"""

import argparse
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import bench_report
from ch_ft.testing import torchft_suite


def main() -> int:
    options = arguments()
    console = Console(record=True, width=130)
    installed = name_and_version()
    on_ours = {
        f"DDP tests of {installed}": torchft_suite.run(*torchft_suite.DDP),
        f"manager-integration tests of {installed}, the DDP part": torchft_suite.run(*torchft_suite.INTEGRATION),
    }
    tables = [(title, {"on ch_ft": outcome}) for title, outcome in on_ours.items()]
    if options.newer is not None:
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(options.newer).extract("torchft/ddp_test.py", folder)
            file = str(Path(folder) / "torchft" / "ddp_test.py")
            newer = {
                "on ch_ft": torchft_suite.run(file),
                f"on {installed}'s own class": torchft_suite.run(file, ours=False),
            }
        tables.append((f"DDP tests of {'-'.join(options.newer.name.split('-')[:2])}", newer))
    for title, columns in tables:
        console.print(shown(title, columns))
    outcomes = [outcome for _, columns in tables for outcome in columns["on ch_ft"].values()]
    wrong = sum(outcome != "passed" for outcome in outcomes)
    console.print(f"on ch_ft {len(outcomes) - wrong} of {len(outcomes)} passed")
    if options.record:
        words = f" --newer {options.newer.name}" if options.newer is not None else ""
        command = f"python -m ch_bench.faults.ft_upstream{words}"
        console.print(f"recorded: {bench_report.record(f'ft-upstream-{version_of(installed)}', command, console)}")
    return 1 if wrong else 0


def shown(title: str, columns: dict[str, dict[str, str]]) -> Table:
    """A row per test, a column per class that it ran on."""
    table = Table("test", *columns, title=title, title_justify="left", box=box.SIMPLE)
    for test in next(iter(columns.values())):
        table.add_row(test, *(outcome.get(test, "not run") for outcome in columns.values()))
    return table


def name_and_version() -> str:
    """The torchft that is installed: a release or a nightly build."""
    try:
        return f"torchft-nightly {version('torchft-nightly')}"
    except PackageNotFoundError:
        return f"torchft {version('torchft')}"


def version_of(name: str) -> str:
    return name.split(" ")[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--newer", type=Path, metavar="WHEEL", help="a wheel whose DDP tests are run as well")
    parser.add_argument("--record", action="store_true", help="keep the output under docs/measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
