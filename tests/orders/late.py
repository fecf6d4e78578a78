"""Completes collectives late and in a random order, below the library.

A network may complete collectives in any order. Until then it may read an input and write an output at any time. Networks of
tests are too fast to show code that depends on one order. Here each collective starts in order, but on copies. Until a random
time its output holds NaN, or random bytes if it holds integers. Then the result is written and the work completes. Code that uses
a result too early computes with NaN. A write to an output in flight and a change of an input are violations.

A late run must have no violations, and must equal a plain run to the bit.

- :func:`late_collectives` delays the collectives that Python code starts on ``torch.distributed``.
- :class:`LateTransport` is the transport of a simulated rank whose works are late.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ch_core import SimulatedGroup, SimulatedTransport
from ch_core.requests import Scope
from ch_core.transport.base import Work
from ch_testing.simulated_ranks import CountingTransport

Tensors = Sequence[torch.Tensor]


class LateWorks:
    """The late works of one rank.

    Attributes:
        started: number of collectives.
        overtaken: number of collectives that completed after one that was started later.
        violations: writes to outputs in flight, and changes of inputs.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.started = self.overtaken = 0
        self.violations: list[str] = []
        self.random = random.Random(f"{seed} {rank}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))
        self._newest = -1  # of the works that have completed

    def completed(self, number: int) -> None:
        """Count a work that has completed."""
        self.overtaken += number < self._newest
        self._newest = max(self._newest, number)


class _Result:
    """The result of one collective on one rank, which is hidden until it is delivered.

    Args:
        works: works of the rank.
        what: name of the collective, for violations.
        outputs: tensors of the caller that receive the result.
        inputs: other tensors that the collective reads.

    Attributes:
        number: number of the collective.
        received, sent: copies of outputs and inputs, on which the real collective works.
        future: completes with the result.
        done: set after the future has completed.
        error: why the real collective failed.
    """

    def __init__(self, works: LateWorks, what: str, outputs: Tensors, inputs: Tensors) -> None:
        self.number, works.started = works.started, works.started + 1
        self.what, self.works = f"{what} {self.number} of {outputs[0].numel() if outputs else 0} numbers", works
        # `.data` has a version counter of its own. A network's write does not count as an in-place change either, so autograd
        # would otherwise refuse tensors that it saved before. A sparse tensor gets other indices, which `.data` does not share.
        self.outputs = [t if t.is_sparse else t.data for t in outputs]
        self._inputs = [t.data for t in inputs]
        self.received, self.sent = [t.clone() for t in self.outputs], [t.clone() for t in self._inputs]
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.done = threading.Event()
        self.error: Exception | None = None

    @torch.no_grad()
    def hide(self) -> None:
        """Fill the outputs. The real collective has been started."""
        for output in self.outputs:
            _poison(output, self.works.generator)
        self._poison = [output.clone() for output in self.outputs]
        # An input inside an output, as in FSDP2's gathers, has just been overwritten.
        pairs = zip(self._inputs, self.sent, strict=True)
        self._read = [pair for pair in pairs if not any(_overlap(pair[0], output) for output in self.outputs)]

    @torch.no_grad()
    def deliver(self, error: Exception | None = None) -> None:
        """Write the result and complete the future, whose callbacks run on this thread. After an error nothing is written.

        The future completes before a wait returns, as in gloo. torchft 0.2.0 fails if the future of a work that was waited for
        is open.
        """
        found = [f"an input of {self.what} changed in flight" for mine, copy in self._read if not _same(mine, copy)]
        if not all(map(_same, self.outputs, self._poison)):
            found.append(f"the output of {self.what} was written to in flight")
        self.works.violations += found
        self.works.completed(self.number)
        self.error = error
        if error is None:
            for output, received in zip(self.outputs, self.received, strict=True):
                output.copy_(received)
            self.future.set_result(list(self.outputs))
        else:
            self.future.set_exception(error)
        self.done.set()


def _poison(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        (tensor._values() if tensor.is_sparse else tensor).fill_(float("nan"))
        return
    top = 2 if tensor.dtype == torch.bool else 256
    noise = torch.randint(top, (tensor.nbytes,), dtype=torch.uint8, generator=generator, device="cpu")
    tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the tensors have the same bits."""
    if one.is_sparse:
        return one._nnz() == other._nnz() and _same(one._values(), other._values())
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_sparse or other.is_sparse:
        return False
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


# -- real ranks


class _LateWork(dist.Work):
    """Stands for the work of a process group."""

    def __init__(self, result: _Result, real: Any, due: float) -> None:
        super().__init__()
        self.late, self.real, self.due = result, real, due

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        if not self.late.done.wait(seconds):
            raise RuntimeError(f"{self.late.what}: timed out after {seconds:g} s")
        if self.late.error is not None:
            raise self.late.error
        return True

    def is_completed(self) -> bool:
        return self.late.done.is_set()

    def get_future(self) -> Any:
        return self.late.future

    def result(self) -> Any:
        self.wait()
        return list(self.late.outputs)


class _Awaited:
    """A work that a thread waits for, because gloo's reduce-scatter completes in its wait."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._real.wait()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class LateCollectives(LateWorks):
    """Late works that a thread delivers. :func:`late_collectives` makes it."""

    def __init__(self, seed: int, rank: int, longest: float) -> None:
        super().__init__(seed, rank)
        self._longest = longest
        self._works: list[_LateWork] = []
        self._changed = threading.Condition()
        self._ends: float | None = None
        self._thread = threading.Thread(target=self._deliver_all, name="late collectives", daemon=True)
        self._thread.start()

    def start(self, what: str, outputs: Tensors, inputs: Tensors, collective: Callable[[Tensors, Tensors], Any]) -> Any:
        """Start a collective on copies, and return a work that completes later."""
        with self._changed:
            delay = self.random.uniform(0.0, self._longest * self.random.choice((0.1, 1.0)))
            result = _Result(self, what, outputs, inputs)
        real = collective(result.received, result.sent)
        result.hide()
        real = _Awaited(real) if "reduce_scatter" in what else real
        work = _LateWork(result, real, time.monotonic() + delay)
        with self._changed:
            self._works.append(work)
            self._changed.notify_all()
        return work

    def hold(self, seconds: float) -> None:
        """Deliver what is in flight this much later, as if a peer was frozen. A step that is dropped now leaves such works."""
        with self._changed:
            for work in self._works:
                work.due += seconds

    def close(self, patience: float = 10.0) -> None:
        """Deliver what is in flight. Works whose peers do not start within ``patience`` seconds are dropped."""
        with self._changed:
            self._ends = time.monotonic() + patience
            self._changed.notify_all()
        self._thread.join()

    def _deliver_all(self) -> None:
        while True:
            with self._changed:
                while not self._works and self._ends is None:
                    self._changed.wait()
                now = time.monotonic()
                ready = [work for work in self._works if work.due <= now and work.real.is_completed()]
                self._works = [work for work in self._works if work not in ready]
                if self._ends is not None and not ready and (not self._works or now > self._ends):
                    return
            self.random.shuffle(ready)
            for work in ready:
                try:
                    work.real.wait()
                except Exception as error:
                    work.late.deliver(error)
                else:
                    work.late.deliver()
            if not ready:
                time.sleep(0.0002)


# Methods of a process group that start collectives with outputs in the first argument, and inputs in the second one if there is
# another. torch 2.13 renames the flat collectives.
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast")
_BETWEEN = (
    *("allgather", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)


@contextmanager
def late_collectives(seed: int, *, rank: int | None = None, longest: float = 0.01) -> Iterator[LateCollectives]:
    """Complete the collectives of this process late and in a random order, while the block runs.

    It replaces methods of torch's ``ProcessGroup``, so it sees all groups, also those of torchft and FSDP2. It leaves alone what
    C++ code starts (DDP without a hook), barriers, messages between two ranks, and tensors that are not on the CPU.

    Args:
        seed: of the delays. Each rank draws its own.
        rank: number of this rank; by default that in the default group.
        longest: longest delay in seconds.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with late_collectives(seed=1) as late:
        ...     works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(40)]
        ...     done = [work.wait() for work in works]
        >>> late.started, late.overtaken > 0, late.violations
        (40, True, [])
        >>> dist.destroy_process_group()
    """
    number = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
    late = LateCollectives(seed, number, longest)
    with ExitStack() as patches:
        for name in (*_IN_PLACE, *_BETWEEN):
            real = getattr(dist.ProcessGroup, name, None)
            if real is not None:
                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, _late_method(late, name, real)))
        try:
            yield late
        finally:
            late.close()


def _late_method(late: LateCollectives, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    count = 1 if name in _IN_PLACE else 2

    def start(group: Any, *args: Any, **options: Any) -> Any:
        outputs, inputs = ([*_tensors(args[place])] if place < count else [] for place in (0, 1))
        if name == "broadcast" and args[1].rootRank == group.rank():
            outputs, inputs = [], outputs  # the source only sends
        if not all(t.is_cpu for t in (*outputs, *inputs)):
            return real(group, *args, **options)

        def collective(received: Tensors, sent: Tensors) -> Any:
            copies = iter((*received, *sent))
            return real(group, *(_refilled(arg, copies) for arg in args[:count]), *args[count:], **options)

        return late.start(name, outputs, inputs, collective)

    return start


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for part in nested:
            yield from _tensors(part)


def _refilled(nested: Any, copies: Iterator[torch.Tensor]) -> Any:
    return next(copies) if isinstance(nested, torch.Tensor) else [_refilled(part, copies) for part in nested]


# -- simulated ranks


class _SimulatedWorks(LateWorks):
    """Late works of a simulated rank. They complete while the rank starts works or waits for them."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self.flying: list[_SimulatedWork] = []

    def deliver_some(self, before: "_SimulatedWork | None" = None) -> None:
        """Deliver a random choice of the works that have arrived, in a random order."""
        arrived = [work for work in self.flying if work is not before and work.arrived]
        for work in self.random.sample(arrived, self.random.randint(0, len(arrived))):
            self.deliver(work)

    def deliver(self, work: "_SimulatedWork") -> None:
        self.flying.remove(work)
        work.late.deliver()


class _SimulatedWork:
    def __init__(self, works: _SimulatedWorks, result: _Result, real: Any) -> None:
        self._works, self.late, self._real = works, result, real

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        if not self.late.done.is_set():
            self._works.deliver_some(before=self)
            self._real.wait(timeout)
            self._works.deliver(self)
        self._works.deliver_some()

    def future(self) -> Any:
        """Return a future that completes with the work, on the thread of the rank."""
        return self.late.future

    @property
    def arrived(self) -> bool:
        """True if all ranks take part."""
        return bool(self._real._meeting.done)


class LateTransport(CountingTransport):
    """A simulated rank whose works complete late and in a random order. It draws this order from a seed, and waits for no time.

    Args:
        group: the group.
        rank: of the group.
        scope: ranks that take part in collectives.
        seed: of the order. Each rank draws its own.
        late: the works of this rank in other scopes.

    Attributes:
        late: counts works and lists violations.

    Example:
        >>> import torch
        >>> from ch_core import together
        >>> group = SimulatedGroup(2)
        >>> def body(rank):
        ...     transport, numbers = LateTransport(group, rank, seed=1), torch.ones(2)
        ...     work = transport.all_reduce(numbers, "sum")
        ...     early = numbers.clone()
        ...     work.wait(None)
        ...     return early.tolist(), numbers.tolist()
        >>> together(group, body)[0]
        ([nan, nan], [2.0, 2.0])
    """

    free = True

    def __init__(
        self,
        group: SimulatedGroup,
        rank: int,
        scope: Scope = "all",
        *,
        seed: int = 0,
        late: _SimulatedWorks | None = None,
    ) -> None:
        super().__init__(group, rank, scope)
        self.late = late if late is not None else _SimulatedWorks(seed, rank)

    def scoped(self, scope: Scope) -> SimulatedTransport:
        """Return the transport among the ranks of a scope. Its works are late, too."""
        if scope not in self._scoped:
            self._scoped[scope] = LateTransport(self.group, self.rank, scope, late=self.late)
        return self._scoped[scope]

    def _post(self, kind: str, op: str, *tensors: torch.Tensor) -> Work:
        result = _Result(self.late, kind, tensors[:1], tensors[1:])
        real = super()._post(kind, op, *result.received, *result.sent)
        result.hide()
        work = _SimulatedWork(self.late, result, real)
        self.late.flying.append(work)
        self.late.deliver_some()
        return work
