"""A model of the script that `commhooks run` has found, its report and its state."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ch_core import log
from ch_run.saved_states import HookKept, Kept, LoneKept, StateFolder
from ch_trace import Trace, Traced
from commhooks import CommHook, Live, start_line


class KeptModel(ABC):
    """A model of the script of which `--state` writes something.

    Attributes:
        state: writes and resumes the state, or None without `--state`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: StateFolder | None = None

    @abstractmethod
    def kept(self) -> Kept:
        """Return the state that `--state` writes."""

    def keep_state(self, folder: Path, every: int, taken: Collection[Path] = ()) -> None:
        """Resume the state from a folder, and write it there after every Nth step. Other models have the folders ``taken``."""
        state = StateFolder(folder, self.kept(), every, taken)
        state.resume()
        self.state = state  # only now, because a refused resume must write no last state

    def write_last_state(self) -> None:
        """Write the state of the last step. A failure must not hide the end, or the error, of the script."""
        if self.state is not None:
            try:
                self.state.end()
            except Exception:
                log.exception("--state: the last state of %s could not be written", self.name)

    def drop(self) -> None:
        """Write the last state, and release the parameters."""
        self.write_last_state()
        self.state = None


class FoundModel(KeptModel):
    """A model of the script that trains with a hook or an outer optimizer.

    Attributes:
        trace: records the model with `--trace`, or None.
        live: prints lines with `--report live`, or None.
        written: file of the trace, once it is written.
        row: the model's part of the report once the model is gone.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.trace: Trace | None = None
        self.live: Live | None = None
        self.written: Path | None = None
        self.row: dict[str, Any] | None = None

    def report(self) -> dict[str, Any]:
        """Return this model's part of the report, or the reason why it has none."""
        if self.row is not None:
            return self.row
        try:
            return {"model": self.name, **self.figures(), **self._traced()}
        except Exception as error:
            log.exception("commhooks run: no report of %s", self.name)
            return {"model": self.name, "error": f"{type(error).__name__}: {error}"}

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Return the figures of the report as plain values."""

    @abstractmethod
    def start_line(self, model: torch.nn.Module) -> str:
        """Return the sentence for the start of the training: what trains the model, its bytes and its state."""

    @abstractmethod
    def source(self) -> Traced:
        """Return the handle or the outer optimizer, whose engines a trace records and live lines tell of."""

    def begin_trace(self, path: str) -> None:
        """Start a trace. All ranks make this call at the same place."""
        self.trace = Trace(self.source(), path)

    def begin_live(self, every: str) -> None:
        """Start to print lines."""
        self.live = Live(self.source().trace_source(), every)

    def end_trace(self) -> None:
        """Print the last line, and write the trace. A failure must not hide the end, or the error, of the script."""
        if self.live is not None:
            self.live.close()
        if self.trace is not None:
            try:
                self.written = self.trace.close(together=False)
            except Exception:
                log.exception("--trace: the trace of %s could not be written", self.name)

    def _traced(self) -> dict[str, Any]:
        if self.trace is None:
            return {}
        final = self.trace.final
        file = str(self.written) if self.written is not None else None
        return {"trace": {"file": file, "summary": final.to_dict(), "text": str(final)}}

    def end_for(self, module: torch.nn.Module) -> None:
        """End the training of this model if it trains parameters of a module that is about to be wrapped again."""

    def drop(self) -> None:
        """Write the last state and the trace, store the report, and release the parameters."""
        super().drop()
        self.end_trace()
        self.row, self.trace, self.live = self.report(), None, None


class HookedModel(FoundModel):
    """A model whose gradients a hook averages."""

    def __init__(self, name: str, handle: CommHook) -> None:
        super().__init__(name)
        self.handle: CommHook | None = handle

    def figures(self) -> dict[str, Any]:
        assert self.handle is not None  # noqa: S101 - `report` asks once more only before `drop`
        return self.handle.report().to_dict()

    def start_line(self, model: torch.nn.Module) -> str:
        assert self.handle is not None  # noqa: S101
        return start_line(self.handle, model, self.state.resumed if self.state is not None else "")

    def source(self) -> Traced:
        assert self.handle is not None  # noqa: S101
        return self.handle

    def kept(self) -> Kept:
        assert self.handle is not None  # noqa: S101
        return HookKept(self.handle)

    def drop(self) -> None:
        super().drop()
        self.handle = None


class LoneModel(KeptModel):
    """A model that one process trains alone, without the hook. `--state` only names its parameters after each step."""

    def __init__(self, name: str, expr: str, params: list[torch.Tensor]) -> None:
        super().__init__(name)
        self.expr, self.params = expr, params

    def kept(self) -> Kept:
        return LoneKept(self.expr, self.params)

    def drop(self) -> None:
        super().drop()
        self.params = []
