"""Where records go: `docs/` of a checkout of this project."""

from pathlib import Path


def docs() -> Path:
    """`docs/` of the checkout that this is run in or installed from; where there is none, of the present folder."""
    for folder in (Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents):
        if (folder / "docs" / "measured").is_dir():
            return folder / "docs"
    return Path.cwd() / "docs"
