"""Installed distributions and their entry points. No other module reads package metadata.

On Python before 3.12 this module imports the `importlib_metadata` backport, which replaces the standard library's finder
for the whole process and costs 12 to 34 ms. Nothing is cached, because `refresh()` in a notebook must see a package that
was installed a moment ago.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from commhooks.registry.packages import PACKAGES

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata


class Entry(NamedTuple):
    """One entry point and the distribution that declares it.

    If the metadata of a distribution cannot be read, `error` says why, `name` is its folder, and the rest is empty.
    """

    dist: str
    name: str
    group: str = ""
    value: str = ""
    version: str = ""
    error: Exception | None = None


def normalize(name: str) -> str:
    """Return a distribution name as packaging tools compare it.

    Example:
        >>> normalize("Ch_PowerSGD")
        'ch-powersgd'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _distributions() -> Iterator[tuple[str, Any, Exception | None]]:
    """Yield each distribution once, and why its metadata cannot be read. It then has the name of its folder.

    A stale second copy further down the path would double its hooks. A broken copy hides no other.
    """
    seen: set[str] = set()
    for dist in metadata.distributions():
        error: Exception | None = None
        try:
            name = normalize(dist.metadata["Name"])
        except Exception as found:  # no metadata, no name in it, or bytes that are no UTF-8
            name, error = normalize(_folder(dist).name.partition("-")[0]), found
        if name not in seen:
            if error is None:
                seen.add(name)
            yield name, dist, error


def _folder(dist: Any) -> Path:
    return Path(getattr(dist, "_path", "unknown"))  # a distribution that no folder holds has none


def entries(prefix: str) -> list[Entry]:
    """Return the entry points of the group `prefix` and of `prefix.*`, sorted by distribution, group and name.

    The order of the file system differs between machines, and ranks must agree on the order of hooks. One entry with an
    `error` stands for a distribution with broken metadata, such as a half removed one.
    """
    found = []
    for name, dist, error in _distributions():
        try:
            if error is not None:
                raise error
            points = [one for one in dist.entry_points if one.group == prefix or one.group.startswith(prefix + ".")]
            if points and not dist.version:
                raise ValueError("its metadata has no version")
            found += [Entry(name, point.name, point.group, point.value, dist.version) for point in points]
        except Exception as broken:
            found.append(Entry(name, str(_folder(dist)), error=broken))
    return sorted(found, key=lambda entry: (entry.dist, entry.group, entry.name))


def version(dist: str) -> str | None:
    """Return the installed version of a distribution, or None, also if it cannot be read. Imports nothing of it."""
    try:
        return metadata.version(dist)
    except Exception:
        return None


def first_party() -> dict[str, str]:
    """Return the installed distributions of this project, each with its version."""
    return {name: found for name in PACKAGES if (found := version(name)) is not None}


INSTALL = "pip install ./packages/* ./plugins/ch-* in a clone of commhooks (no package index has it yet)"
"""How to install a package of this project. An index may have a stranger's package of its name, so it names folders."""
NOT_INSTALLED = f"not installed here (or left out by COMMHOOKS_DISABLE or COMMHOOKS_PLUGINS): {INSTALL}"
"""The end of a sentence on a missing package of this project."""


def editable_roots() -> dict[str, Path]:
    """Return the source folder of each distribution that pip installed editable, by distribution name."""
    roots: dict[str, Path] = {}
    for name, dist, _ in _distributions():
        with suppress(ValueError, AttributeError):  # a damaged record
            record = json.loads(dist.read_text("direct_url.json") or "{}")
            url = str(record.get("url", ""))
            if record.get("dir_info", {}).get("editable") and url.startswith("file://"):
                roots[name] = Path(url.removeprefix("file://"))
    return roots
