"""Recorders on the hook of a case: none, one or two, with writers that work or fail."""

from collections.abc import Mapping

import ch_trace
from commhooks import CommHook
from tests.campaign.checks import Wrong


class Writer:
    """Collects the steps that a recorder delivers, or fails as a full disk does."""

    def __init__(self, every: int, fails: bool) -> None:
        self.every, self.fails = every, fails
        self.steps: list[int] = []

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("no space left on device")
        self.steps.append(step)


class Recorders:
    """Recorder ``k`` samples every ``k + 1`` steps. In a case with failing writers the first one fails.

    Args:
        handle: attached hook; None or a foreign hook records nothing.
        count: number of recorders.
        fails: True if the first writer fails.
    """

    def __init__(self, handle: CommHook | None, count: int, fails: bool) -> None:
        on = count if handle is not None and handle.reduction is not None else 0
        self.writers = [Writer(k + 1, fails and k == 0) for k in range(on)]
        self.recorders = [ch_trace.record(handle, w, every=w.every, rank=None) for w in self.writers if handle]

    def close(self) -> None:
        """Close all recorders and check the steps that each writer got."""
        for recorder in self.recorders:
            recorder.close()
        for writer in self.writers:
            late = [step for step in writer.steps if step % writer.every]
            if not writer.fails and (not writer.steps or late or sorted(set(writer.steps)) != writer.steps):
                raise Wrong("every recorder gets its steps", f"every {writer.every} steps gave {writer.steps}")
        self.writers, self.recorders = [], []
