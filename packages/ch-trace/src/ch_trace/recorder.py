"""Records samples of an attached hook's steps."""

from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType

from ch_core import Engine, Recording
from ch_trace.writers import Writer, csv_file
from commhooks import AttachError, CommHook, HookNotSupportedError


class Recorder(AbstractContextManager["Recorder"]):
    """A running recording, as :func:`record` returns it. Close it, or leave its ``with`` block, to stop.

    Several recorders may record the same handle. Each has an interval and a writer, and ends without the others.

    Args:
        engine: the engine to sample; ``None`` on a rank that records nothing.
        write: receives the samples.
        every: steps from one sample to the next.
    """

    def __init__(self, engine: Engine | None, write: Writer, every: int) -> None:
        self._engine, self._write = engine, write
        self._recording = Recording(every, write)
        if engine is not None:
            engine.sampler.add(self._recording)

    def close(self) -> None:
        """Write the last sample, for which the host waits, and record no more."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.sampler.remove(self._recording, engine.counters)
        close = getattr(self._write, "close", None)
        if callable(close):
            close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def record(handle: CommHook, to: "Writer | str | PathLike[str]", *, every: int = 100, rank: int | None = 0) -> Recorder:
    """Sample every ``every``-th step of an attached hook, the first one included.

    A sample holds figures of one step on this rank:

    - ``payload_bytes``, ``wire_bytes``, and ``ratio``, the bytes of plain averaging divided by the bytes of the hook.
    - ``hook_seconds``, ``encode_seconds``, ``wait_seconds`` and ``decode_seconds`` of host time. On a GPU they cover launches.
    - ``relative_error`` ‖r‖ / ‖p‖, ``cosine`` of p and p - r, and ``residual_norm`` ‖r‖ in units of the gradient. Here p is the
      gradient plus the old residual, and r the part of p that was not sent. They need a hook that keeps a residual or reports
      its contribution.

    The writer receives a sample when the next step begins. A sampled step costs a copy of the gradients and three passes over
    them. Other steps cost nothing. If a writer or the sampling raises, telemetry logs it and stops; training continues.
    Several recorders may record one handle.

    Args:
        handle: an attached handle. Recording ends when it is detached, or when the recorder is closed.
        to: called as ``to(step, figures)``, for example :func:`~ch_trace.tensorboard`; or the path of a CSV file.
        every: steps from one sample to the next.
        rank: rank of the group that records; ``None`` if each rank does, with its own ``to``.

    Raises:
        AttachError: the handle is not attached.
        HookNotSupportedError: the hook is a foreign function, which runs on no engine.

    Example:
        >>> import commhooks, torch, torch.distributed as dist
        >>> import ch_trace
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> handle = commhooks.attach(model, "powersgd(rank=4)", single_process=True)
        >>> with ch_trace.record(handle, lambda step, figures: print(step, sorted(figures)[:2]), every=2):
        ...     for _ in range(3):
        ...         model(torch.randn(1, 64)).sum().backward()
        0 ['between_bytes', 'cosine']
        2 ['between_bytes', 'cosine']
        >>> dist.destroy_process_group()
    """
    if every < 1:
        raise ValueError(f"every={every}: expected a number of steps, at least 1")
    binding = handle.binding
    if binding is None:
        raise AttachError(f"{handle.expr} is not attached to a model: call commhooks.attach(...) before record(...)")
    engine = binding.engine
    if engine is None:
        raise HookNotSupportedError(
            f"{handle.expr} is a foreign hook, which cannot be recorded: its collectives are unknown. Record a hook by name"
        )
    mine = rank is None or engine.transport.rank == rank
    write: Writer = to if callable(to) else csv_file(to) if mine else lambda step, figures: None
    return Recorder(engine if mine else None, write, every)
