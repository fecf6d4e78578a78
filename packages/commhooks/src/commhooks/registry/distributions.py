"""Installed distributions and their entry points. No other module reads package metadata.

On Python before 3.12 this module imports the `importlib_metadata` backport, which replaces the standard library's finder
for the whole process and costs 12 to 34 ms. Nothing is cached, because `refresh()` in a notebook must see a package that
was installed a moment ago.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commhooks.registry.packages import PACKAGES

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata


class Entry(NamedTuple):
    """One entry point and the distribution that declares it."""

    dist: str
    name: str
    group: str
    value: str
    version: str


def normalize(name: str) -> str:
    """Return a distribution name as packaging tools compare it.

    Example:
        >>> normalize("Ch_PowerSGD")
        'ch-powersgd'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions() -> Iterator[tuple[str, Any]]:
    """Yield each distribution once. A stale second copy further down the path would double its hooks."""
    seen: set[str] = set()
    for dist in metadata.distributions():
        name = dist.metadata["Name"]
        if name and normalize(name) not in seen:
            seen.add(normalize(name))
            yield normalize(name), dist


def entries(prefix: str) -> list[Entry]:
    """Return the entry points of the group `prefix` and of `prefix.*`, sorted by distribution, group and name.

    The order of the file system differs between machines, and ranks must agree on the order of hooks.
    """
    found = [
        Entry(name, point.name, point.group, point.value, dist.version)
        for name, dist in _distributions()
        for point in dist.entry_points
        if point.group == prefix or point.group.startswith(prefix + ".")
    ]
    return sorted(found, key=lambda entry: (entry.dist, entry.group, entry.name))


def version(dist: str) -> str | None:
    """Return the installed version of a distribution, or None. Imports nothing of it."""
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return None


def first_party() -> dict[str, str]:
    """Return the installed distributions of this project, each with its version."""
    return {name: found for name in PACKAGES if (found := version(name)) is not None}


def how_to_install(dist: str) -> str:
    """Return the command that installs a package of this project, published or not.

    Example:
        >>> how_to_install("ch-powersgd")
        'pip install ch-powersgd, or in a clone: pip install ./packages/* ./plugins/ch-*'
    """
    return f"pip install {dist}, or in a clone: pip install ./packages/* ./plugins/ch-*"


def not_installed(dist: str) -> str:
    """Return the end of a sentence on a missing package of this project: why it is missing, and the remedy."""
    return f"not installed here (or left out by COMMHOOKS_DISABLE or COMMHOOKS_PLUGINS): {how_to_install(dist)}"


def editable_roots() -> dict[str, Path]:
    """Return the source folder of each distribution that pip installed editable, by distribution name."""
    roots: dict[str, Path] = {}
    for name, dist in _distributions():
        record = json.loads(dist.read_text("direct_url.json") or "{}")
        url = str(record.get("url", ""))
        if record.get("dir_info", {}).get("editable") and url.startswith("file://"):
            roots[name] = Path(url.removeprefix("file://"))
    return roots
