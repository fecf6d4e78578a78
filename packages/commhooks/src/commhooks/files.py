"""Files that are written completely or not at all, and paths that are tried before training. Standard library only."""

import os
import tempfile
from pathlib import Path

_TRIED_BYTES = 1 << 16


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all, so that a full disk does not destroy an older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout or a pipe must not be replaced by a file
        path.write_text(text, "utf-8")
        return
    aside = path.resolve().with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, "utf-8")
        os.replace(aside, path.resolve())
    finally:
        aside.unlink(missing_ok=True)


def why_unwritable(path: Path, *, folder: bool = False) -> str:
    """Return why a file cannot be written, or with `folder` files in a folder; an empty string if they can.

    A file without a name is written next to it and vanishes. Missing folders are not made, because a script may want to
    make them itself.

    Example:
        >>> import sys
        >>> why_unwritable(Path(sys.executable, "report.json"))
        'Not a directory: ...'
        >>> why_unwritable(Path(tempfile.gettempdir(), "missing", "report.json"))
        ''
    """
    there = path
    try:
        if not folder and path.is_dir():
            return "it is a folder"
        if not folder and path.exists() and not path.is_file():
            return ""  # /dev/stdout or a pipe
        there = path if folder else path.resolve().parent
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror}: {there}"
    return ""
