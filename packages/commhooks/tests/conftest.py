"""Fixtures of the registry tests. They write real package metadata to a temporary folder on the import path."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commhooks.registry.registry import Registry


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`publish(dist, points, **modules)` writes the files that pip leaves behind for a distribution of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(dist: str, points: dict[str, dict[str, str]], version: str = "1.0", **modules: str) -> None:
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\nSummary: {dist} here\n"
        )
        lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def registry() -> Registry:
    """A separate registry, which scans at its first lookup."""
    return Registry()
