"""A running trace of this rank, and the end at which the ranks write one file."""

import atexit
import os
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ch_core import Engine, StoreExchange, every_line, log
from ch_trace.chrome import write
from ch_trace.rank_part import EnginePart, Part
from ch_trace.recording import EngineTrace, Message, Span
from ch_trace.summary import Summary, summarize
from commhooks import CommHooksError, HookConfigError, HookNotSupportedError, TraceSource, why_unwritable

TOKEN_BYTES = 8
_PATIENCE = 5.0  # seconds for which the lowest rank waits for the parts of ranks that end a little later
_ROUNDS = 3  # agreements of all ranks at the begin, which also align the clocks


class Traced(Protocol):
    """A :class:`~commhooks.CommHook`, or an outer optimizer."""

    def trace_source(self) -> TraceSource: ...


class Trace(AbstractContextManager["Trace"]):
    """Records forward, backward, encode, messages, decode and waits of all ranks until it is closed.

    The file is in the Trace Event Format, which https://ui.perfetto.dev opens. Every rank must make this call, and close the
    trace or leave its ``with`` block, between the same two steps. Times are host times. On a GPU they are the times of
    launches, and the ends of messages are unknown.

    Every rank writes its part to the folder ``PATH.parts``. The lowest rank, or the last one to write, merges the parts and
    removes them. If a part is missing, because a rank was lost or the ranks share no disk, the trace has the other ranks, and
    the parts stay. :func:`ch_trace.merge` merges them later.

    Args:
        traced: an attached handle, or an outer optimizer.
        path: file to write, e.g. `trace.json`.
        limit: number of events that each engine keeps. The oldest are dropped. A bucket makes about six in a step.

    Raises:
        AttachError: not attached.
        HookNotSupportedError: a foreign hook (its messages are unknown), a manager (its members change), or a handle
            that is traced already.
        HookConfigError: a rank cannot write there.
        HookTimeoutError: another rank did not make this call.

    Example:
        >>> import commhooks, os, tempfile, torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
        >>> path = os.path.join(tempfile.mkdtemp(), "trace.json")
        >>> with Trace(handle, path) as trace:
        ...     for _ in range(3):
        ...         model(torch.randn(8, 64)).sum().backward()
        >>> os.path.exists(path), trace.final.steps
        (True, 2)
        >>> dist.destroy_process_group()
    """

    def __init__(self, traced: Traced, path: "str | PathLike[str]", *, limit: int = 100_000) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: expected a number of events, at least 1")
        source = traced.trace_source()
        engines, hook, groups = source.engines, source.hook, source.groups
        if any(engine.transport.elastic for engine in engines.values()):
            raise HookNotSupportedError(
                f"{hook} runs under a manager whose members come and go, so the messages of its ranks cannot be matched. "
                "A trace supports fixed groups. Use torch.profiler, which shows the ranges commhooks::*"
            )
        self.path, self._groups, self._timeout, self._limit = Path(path), groups, source.timeout, limit
        self._during = source.during
        first = next(iter(engines.values()))
        alone = first.transport.rank
        rank = dist.get_rank() if groups else alone
        ranks = first.transport.world_size
        for group in groups[1:]:
            ranks *= group.size()
        self._part = Part("0" * 2 * TOKEN_BYTES, rank, ranks, socket.gethostname(), os.getpid(), hook)
        self._merges = source.leads
        self._refuse_unwritable()
        for number in range(_ROUNDS):
            self._part.token = self._meet(f"begin {number}", os.urandom(TOKEN_BYTES).hex(), number == 0)
        for engine in engines.values():
            self._refuse_traced(engine)  # before hooks are left on the model
        self._watch = _ModelWatch(source.model)
        self._traces: dict[str, EngineTrace] = {}
        self._closed = False
        for name, engine in engines.items():
            self.add(name, engine)
        atexit.register(self._at_exit)

    def add(self, name: str, engine: Engine) -> None:
        """Trace another engine, such as the one of an outer optimizer's exchange. Call it on all ranks at the same place."""
        self._refuse_traced(engine)
        begun = self._watch.take if not self._traces and self._during == "backward" else _unknown
        self._traces[name] = EngineTrace(engine, self._limit, begun, self._during)

    def _refuse_unwritable(self) -> None:
        """Refuse a path on all ranks if one rank cannot write there. Otherwise the trace would be lost at its end."""
        problem = why_unwritable(self._folder, folder=True)
        if not problem and self._merges:
            problem = why_unwritable(self.path)
        for group in (one for one in self._groups if one.size() > 1):
            problem = next(filter(None, every_line(problem, StoreExchange(group, self._timeout))), "")
        if problem:
            raise HookConfigError(f"the trace {self.path} cannot be written ({problem}): give another path")

    def _refuse_traced(self, engine: Engine) -> None:
        if engine.counters.trace is not None:
            raise HookNotSupportedError(f"{self._part.hook} is traced already: close() the other trace first")

    def summary(self) -> Summary:
        """Return the figures of this rank, or of all ranks if their parts are in the file's folder."""
        return summarize(self._parts() or [self._filled()])

    def close(self, *, together: bool = True) -> Path | None:
        """Stop, and write the file.

        Args:
            together: True if all ranks make this call. They then wait for one another, and on the lowest rank the file is
                complete when the call returns. False waits for no rank.

        Returns:
            The file if this rank has written it, otherwise ``None``.
        """
        if self._closed:
            return None
        self._closed = True
        atexit.unregister(self._at_exit)
        for trace in self._traces.values():
            trace.close()
        self._watch.close()
        if together and self._part.ranks > 1:
            together = self._try_to_meet("end")
        part = self._filled()
        part.write(self._folder / f"rank-{part.rank}-of-{part.ranks}.{part.token}.json")
        if together and part.ranks > 1:
            self._try_to_meet("written")
        if not (self._merges or (not together and self._marker.exists())):
            return None
        parts = self._parts() if together else self._parts_of_all()
        if len(parts) < part.ranks:
            self._marker.touch()  # from now on, the rank that completes the parts merges them
            parts = self._parts()
        if not self._merges and len(parts) < part.ranks:
            return None
        self._final = summarize(parts)
        made = write(parts, self.path)
        if len(parts) == part.ranks:
            self._remove_parts()
        else:
            log.warning(
                "trace: %s has %d of %d ranks. Merge the parts in %s with ch_trace.merge",
                *(self.path, len(parts), part.ranks, self._folder),
            )
        return made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(together=error is None)

    # -- parts

    _final: Summary | None = None

    @property
    def final(self) -> Summary:
        """Figures of the written file, or of this rank if it wrote none."""
        return self._final if self._final is not None else summarize([self._filled()])

    @property
    def _folder(self) -> Path:
        return self.path.with_name(self.path.name + ".parts")

    @property
    def _marker(self) -> Path:
        """File that tells later ranks that the lowest rank did not wait for them."""
        return self._folder / f"incomplete.{self._part.token}"

    def _parts_of_all(self) -> list[Part]:
        """Return the parts of all ranks, or after some seconds those that have come."""
        until = time.monotonic() + (_PATIENCE if self._groups else 0.0)
        while len(self._paths()) < self._part.ranks and time.monotonic() < until:
            time.sleep(0.02)
        return self._parts()

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"rank-*-of-*.{self._part.token}.json"))

    def _parts(self) -> list[Part]:
        """Return the parts of this trace that this rank can read."""
        return [Part.read(path) for path in self._paths()]

    def _remove_parts(self) -> None:
        for path in (*self._paths(), self._marker):
            path.unlink(missing_ok=True)
        try:
            self._folder.rmdir()
        except OSError:  # parts of another trace
            return

    def _filled(self) -> Part:
        part = self._part
        part.model = list(self._watch.spans)
        part.engines = []
        for name, trace in self._traces.items():
            events = list(trace.events)
            part.engines.append(
                EnginePart(
                    name,
                    trace.engine.reduction.name,
                    _members(trace.engine),
                    trace.dropped,
                    trace.during,
                    trace.buckets,
                    [event for event in events if isinstance(event, Span)],
                    [event for event in events if isinstance(event, Message)],
                )
            )
        return part

    # -- agreements of all ranks

    def _meet(self, key: str, token: str, first: bool = True) -> str:
        """Wait for the ranks of each group, note the times, and return the token of the lowest rank."""
        mine = token if first else self._part.token
        for number, group in enumerate(self._groups):
            if group.size() == 1:
                continue
            exchange = StoreExchange(group, self._timeout)
            members = ",".join(map(str, dist.get_process_group_ranks(group)))
            begun = time.perf_counter()
            mine = exchange(bytes.fromhex(mine))[0].hex()
            self._part.exchanges.append((f"{key} {number} {members}", begun, time.perf_counter()))
        return mine if self._groups else self._part.token

    def _try_to_meet(self, key: str) -> bool:
        try:
            self._meet(key, self._part.token)
        except (CommHooksError, RuntimeError, ValueError, AssertionError) as error:  # a lost rank, or a destroyed group
            log.warning("trace: the ranks did not close it together (%s), so each one writes alone", error)
            return False
        return bool(self._groups)

    def _at_exit(self) -> None:
        if os.getpid() != self._part.pid:  # a process that was forked while the trace ran has no part of it
            return
        try:
            self.close(together=False)
        except Exception:
            log.exception("the trace %s could not be written", self.path)


class _ModelWatch:
    """Times the forward of a model and the begin of its backward."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.spans: list[Span] = []
        self._forward = 0.0
        self._backward: float | None = None
        self._hooks: list[Any] = []
        if model is not None:
            this = weakref.ref(self)
            self._hooks.append(model.register_forward_pre_hook(lambda module, args: _call(this, _ModelWatch._enter)))
            self._hooks.append(
                model.register_forward_hook(lambda module, args, out: _call(this, _ModelWatch._leave, out))
            )

    def take(self) -> float | None:
        """Return the begin of the running backward once."""
        begun, self._backward = self._backward, None
        return begun

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self) -> None:
        self._forward = time.perf_counter()

    def _leave(self, out: object) -> None:
        if len(self.spans) < 100_000:
            self.spans.append(Span("forward", -1, "", 0, self._forward, time.perf_counter()))
        tensor = _differentiable(out)
        if tensor is not None:
            tensor.register_hook(self._arrive)

    def _arrive(self, gradient: torch.Tensor) -> None:
        if self._backward is None:
            self._backward = time.perf_counter()


def _call(watch: "weakref.ref[_ModelWatch]", method: Any, *args: object) -> None:
    if not torch.compiler.is_dynamo_compiling():  # a compiled forward would trace the clock
        this = watch()
        if this is not None:
            method(this, *args)


def _differentiable(out: object) -> torch.Tensor | None:
    """Return the first tensor of an output whose gradient the backward computes."""
    if isinstance(out, torch.Tensor):
        return out if out.requires_grad else None
    inside = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    return next((found for one in inside if (found := _differentiable(one)) is not None), None)


def _members(engine: Engine) -> tuple[int, ...]:
    group = getattr(engine.transport, "group", None)
    if isinstance(group, dist.ProcessGroup):
        try:
            return tuple(dist.get_process_group_ranks(group))
        except (KeyError, RuntimeError, ValueError):  # destroyed
            return tuple(range(engine.transport.world_size))
    return tuple(range(engine.transport.world_size))


def _unknown() -> None:
    return None
