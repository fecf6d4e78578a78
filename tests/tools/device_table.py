"""Count the tests of ranks in each package, and those that ``pytest --device cuda`` runs.

    python tests/tools/device_table.py

Prints a table, and the reasons of the tests that stay on the CPU.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from ch_testing.pytest_plugin import starts_ranks

ROOT = Path(__file__).resolve().parents[2]


class Count:
    """Plugin of pytest that counts collected tests."""

    def __init__(self) -> None:
        self.ranks: Counter[str] = Counter()
        self.gpu: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            inside = item.path.relative_to(ROOT).parts
            package = inside[1] if inside[0] != "tests" else "tests"
            if item.get_closest_marker("nccl") is not None:
                self.gpu[package] += 1
            elif starts_ranks(item):
                self.ranks[package] += 1
                if (mark := item.get_closest_marker("cpu")) is not None:
                    self.reasons[package][str(mark.args[0])] += 1


def main() -> int:
    count = Count()
    folders = [str(path) for path in sorted([*ROOT.glob("packages/*/tests"), *ROOT.glob("plugins/*/tests")])]
    status = pytest.main(
        ["--collect-only", "-qq", "--disable-warnings", "-p", "no:cacheprovider", *folders, str(ROOT / "tests")],
        [count],
    )
    print("\n| package | tests of ranks | with --device cuda | need a GPU |\n|---|---|---|---|")
    short = []
    for package in sorted({*count.ranks, *count.gpu}):
        ranks, away = count.ranks[package], count.reasons[package].total()
        print(f"| {package} | {ranks} | {ranks - away} | {count.gpu[package]} |")
        short += [package] if away * 4 > ranks else []
    for package, reasons in count.reasons.items():
        for reason, number in reasons.items():
            print(f"- {package}: {number} x {reason}")
    print("fewer than three quarters run:", ", ".join(short) or "none")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
