"""Writers of samples: a CSV file and TensorBoard."""

import csv
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, makedirs
from pathlib import Path
from typing import Any

Writer = Callable[[int, Mapping[str, float]], None]
"""Receives the number of a step and its figures."""

COLUMNS = (
    "payload_bytes",
    "wire_bytes",
    "ratio",
    "relative_error",
    "cosine",
    "residual_norm",
    "hook_seconds",
    "encode_seconds",
    "wait_seconds",
    "decode_seconds",
)
"""Figures of a sample. A sample has no key for an unknown figure."""


def csv_file(path: "str | PathLike[str]", columns: Sequence[str] = COLUMNS) -> Writer:
    """Return a writer that appends one line of ``step`` and some figures per sample. A resumed run continues the file.

    Args:
        path: of the file.
        columns: names of the figures.

    Example:
        >>> import tempfile
        >>> name = tempfile.mkdtemp() + "/figures.csv"
        >>> csv_file(name)(7, {"ratio": 3.5})
        >>> print(open(name).read().splitlines()[1])
        7,,,3.5,,,,,,,
    """
    file = Path(path)

    def write(step: int, figures: Mapping[str, float]) -> None:
        makedirs(file.parent, exist_ok=True)
        fresh = not file.exists() or not file.stat().st_size
        with file.open("a", newline="") as target:
            lines = csv.writer(target, lineterminator="\n")
            if fresh:
                lines.writerow(["step", *columns])
            lines.writerow([step, *(figures.get(name, "") for name in columns)])

    return write


def tensorboard(where: Any, prefix: str = "commhooks/") -> Writer:
    """Return a writer of TensorBoard scalars.

    Args:
        where: a ``SummaryWriter``, such as Lightning's ``logger.experiment``, or the folder of a new one.
        prefix: prefix of the names.

    Raises:
        ImportError: ``where`` is a folder, and the package ``tensorboard`` is not installed.
    """
    writer = where
    if isinstance(where, str | PathLike):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        writer = SummaryWriter(str(where))

    def write(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(prefix + name, value, step)

    return write
