"""The file that each rank leaves for the report, for every kind of end."""

import faulthandler
import json
import time
from pathlib import Path
from typing import Any


class Notes:
    """One rank's file, with its current phase, later its outcome, and its stacks shortly before the deadline."""

    def __init__(self, folder: str, rank: int, world: int, deadline: float) -> None:
        self.folder, self.rank, self.world = Path(folder), rank, world
        self._stacks = (self.folder / f"stacks{rank}").open("w")
        faulthandler.dump_traceback_later(max(1.0, deadline - 2.0), file=self._stacks)

    def phase(self, name: str) -> None:
        (self.folder / f"phase{self.rank}").write_text(name)

    def outcome(self, **row: Any) -> None:
        target = self.folder / f"outcome{self.rank}"
        part = target.with_suffix(".part")
        part.write_text(json.dumps(row))
        part.rename(target)  # no reader sees it half written

    def wait_for_others(self, seconds: float = 3.0) -> None:
        """Wait until every rank has written its outcome, because this rank's end kills the others."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(list(self.folder.glob("outcome*[0-9]"))) < self.world:
            time.sleep(0.02)
