"""Turn a copy of this folder into your own package: ``python rename.py my-hooks``.

Renames the distribution, the import package and every mention; run it once, in your copy.
"""

import sys
from pathlib import Path


def rename(root: Path, distribution: str) -> list[Path]:
    """Rename in ``root``, and return the files that changed."""
    package = distribution.replace("-", "_")
    if not package.isidentifier() or package != package.lower():
        raise SystemExit(f"{distribution!r} cannot be a package name: lower-case letters, digits and '-'")
    (root / "src" / "ch_template").rename(root / "src" / package)
    changed = []
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml", ".md") and p.name != "rename.py"):
        text = path.read_text()
        new = text.replace("ch-template", distribution).replace("ch_template", package)
        if new != text:
            path.write_text(new)
            changed.append(path)
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    rename(Path(__file__).parent, sys.argv[1])
