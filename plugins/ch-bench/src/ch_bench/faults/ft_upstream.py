"""torchft's own tests on the classes of ch-ft.

With ``--newer WHEEL`` the DDP tests of that wheel run on ch-ft's class and on the class of the installed torchft. Nothing else
of the wheel is used.

    python -m ch_bench.faults.ft_upstream [--newer torchft_nightly-….whl] [--record]
"""

import argparse
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import record
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
        made_by = record.command(
            "ch_bench.faults.ft_upstream", ["--newer", options.newer.name] if options.newer else []
        )
        record.write("ft", f"torchft's own tests, over {installed}", made_by, record.printed(console))
    return 1 if wrong else 0


def shown(title: str, columns: dict[str, dict[str, str]]) -> Table:
    """Return a table with a row per test and a column per tested class."""
    table = Table("test", *columns, title=title, title_justify="left", box=box.SIMPLE)
    for test in next(iter(columns.values())):
        table.add_row(test, *(outcome.get(test, "not run") for outcome in columns.values()))
    return table


def name_and_version() -> str:
    """Return name and version of the installed torchft, a release or a nightly build."""
    try:
        return f"torchft-nightly {version('torchft-nightly')}"
    except PackageNotFoundError:
        return f"torchft {version('torchft')}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--newer", type=Path, metavar="WHEEL", help="wheel whose DDP tests run, too")
    parser.add_argument("--record", action="store_true", help="write the output to docs/measured/ft.md")
    return parser.parse_args()


if __name__ == "__main__":
    record.run_main(main)
