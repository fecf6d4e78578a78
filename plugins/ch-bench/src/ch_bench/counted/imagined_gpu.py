"""A GPU that is not there: what a hook's steps would have it do, and where they would make the host wait.

Tensors without numbers (meta) that say they are CUDA's go through the whole engine, over a group of two whose messages do
nothing. Seen are the operations that would be kernels or copies, those for which the host would wait (``.item()``, a copy
to or from memory that is not pinned, a result whose size depends on numbers), and the events that the host waits for.
What a GPU really does, the GPU kit tells: ``docs/cuda.md``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import commhooks
from ch_bench.cost.launches import started
from commhooks import Bucket, BucketLayout, HookState, Reduction
from commhooks.adapters import Engine

DEVICE, META = torch.device("cuda", 0), torch.device("meta")
_NUMBERS = frozenset(["_local_scalar_dense", "equal", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount"])
"""Operations whose result is a number, or of a size, that the host has to know."""


@dataclass
class Seen:
    """What one step gives the GPU.

    Attributes:
        operations: by name; a fused one over many tensors counts once, a view not at all.
        messages: collectives.
        waits: operations for which the host waits until the GPU has nothing left to do.
        events: of each event that the host waits for, the operations that it waits for in vain: those between the copy that
            it is after and the event.
    """

    operations: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    waits: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Operations and messages."""
        return self.operations.total() + self.messages


class ImaginedGPU:
    """Entered, ``torch`` has a CUDA device without numbers.

    Attributes:
        seen: since it was last replaced.
        pinned: memory of the host that copies need not wait for.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        self.pinned: Any = WeakIdKeyDictionary()
        self.since_copy = 0  # operations since the last copy to the host
        self.away = False
        self._exit = ExitStack()

    def __enter__(self) -> "ImaginedGPU":
        for name, stand_in in _streams(self).items():
            self._exit.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self._exit.enter_context(_Dispatched(self))
        self._exit.enter_context(_Called(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Meta tensors are meta tensors meanwhile: a plan is made with them."""
        before, self.away = self.away, True
        try:
            yield
        finally:
            self.away = before

    def wait(self, what: str) -> None:
        """The host waits for the queue."""
        self.seen.waits.append(what)


class _Dispatched(TorchDispatchMode):
    """Counts what is started, and notes what would wait."""

    def __init__(self, gpu: ImaginedGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, name, kwargs = self.gpu, func.overloadpacket.__name__, kwargs or {}
        given = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        if gpu.away or (not any(t.is_meta for t in given) and torch.device(kwargs.get("device") or "cpu") != META):
            return func(*args, **kwargs)
        if started(name):
            gpu.seen.operations[name] += 1
            gpu.since_copy += 1
        if name in _NUMBERS:
            gpu.wait(name)
        if name == "copy_" and not all(t.is_meta for t in given):
            return self._copied(given[0], given[1])
        if name == "_to_copy" and torch.device(kwargs.get("device") or META) != META:
            gpu.wait("a copy to pageable memory")
            return torch.empty(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype, device=kwargs["device"])
        if name == "_to_copy" and not given[0].is_meta and given[0] not in gpu.pinned:
            gpu.wait("a copy from pageable memory")
        return func(*args, **kwargs)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not target.is_meta:
            self.gpu.since_copy = 0
        if (source if target.is_meta else target) not in self.gpu.pinned:
            self.gpu.wait("a copy " + ("from" if target.is_meta else "to") + " pageable memory")
        return target


class _Called(TorchFunctionMode):
    """Has meta tensors say that they are CUDA's, and makes them where a CUDA tensor is asked for."""

    def __init__(self, gpu: ImaginedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, name, kwargs = self.gpu, getattr(func, "__name__", ""), kwargs or {}
        if gpu.away:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args)
        if name == "record_stream":
            return None
        if name == "tolist" and not args[0].is_meta:  # the status: no rank has failed, both are at one step
            return [4.0] * (args[0].numel() - 1) + [0.0]
        if name == "pin_memory":
            found = args[0].clone()
            gpu.pinned[found] = True
            return found
        pinned = kwargs.pop("pin_memory", False)
        found = func(*map(_as_meta, args), **{key: _as_meta(value) for key, value in kwargs.items()})
        if pinned:
            gpu.pinned[found] = True
        return found

    def _attribute(self, func: Any, args: Any) -> Any:
        found = func(*args)
        if found == META:
            return DEVICE
        what = getattr(func, "__self__", None)
        if what in (torch.Tensor.is_cuda, torch.Tensor.is_meta):
            with torch._C.DisableTorchFunction():
                return args[0].is_meta == (what is torch.Tensor.is_cuda)
        return found


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
        return META
    return value


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, Mapping):
        found = tuple(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from _flat(each)
    else:
        yield found


def _streams(gpu: ImaginedGPU) -> dict[str, Any]:
    """What the engine asks of ``torch.cuda``."""

    class Event:
        def record(self, stream: object = None) -> None:
            self.since_copy = gpu.since_copy

        def synchronize(self) -> None:
            gpu.seen.events.append(self.since_copy)

    class Stream:
        def __init__(self, device: object = None) -> None: ...

        def wait_stream(self, other: object) -> None: ...

    @contextmanager
    def stream(entered: object) -> Iterator[None]:
        yield

    here = Stream()
    return {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda device=None: here,
        "is_current_stream_capturing": lambda: False,
    }


class _Done:
    def wait(self, timeout: float | None) -> None: ...


class _Silent:
    """A group of two whose messages do nothing."""

    rank, world_size, free, elastic = 0, 2, False, False

    def __init__(self, gpu: ImaginedGPU) -> None:
        self.gpu = gpu

    def _start(self, *tensors: object) -> _Done:
        self.gpu.seen.messages += 1
        self.gpu.since_copy += 1
        return _Done()

    all_reduce = all_gather = all_to_all = reduce_scatter = _start

    def abort(self) -> None: ...


def steps(
    hook: str | Reduction,
    buckets: Sequence[Mapping[str, Sequence[int]]],
    count: int = 3,
    *,
    state: HookState | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Seen]:
    """What each of some steps of a hook gives the GPU, the engine's own work and its messages included.

    Args:
        hook: an expression, or a reduction.
        buckets: shapes by name, bucket by bucket.
        count: steps.
        state: to go on from; by default the hook's own, fresh.
        dtype: of the gradients.

    Raises:
        CommHooksError: the engine has stopped.
        HookResultError: the reduction raised.

    Example:
        >>> [seen] = steps("bf16_compress", [{"w": (64, 64)}], 1)
        >>> seen.waits, seen.messages
        ([], 2)
    """
    handle = commhooks.create(hook)
    assert handle.reduction is not None
    if state is None and isinstance(handle.state, HookState):
        state = handle.state
    layouts = [BucketLayout.of_shapes(shapes, dtype=dtype, device=DEVICE) for shapes in buckets]
    last, found = len(layouts) - 1, []
    with ImaginedGPU() as gpu, _planned_apart(handle.reduction, gpu):
        engine = Engine(handle.reduction, _Silent(gpu), state)
        made = [
            Bucket(layout, torch.empty(layout.numel, dtype=dtype, device=DEVICE), i, is_last=i == last)
            for i, layout in enumerate(layouts)
        ]
        for _ in range(count):
            gpu.seen = Seen()
            for bucket in made:
                engine.submit(bucket)
            engine.finish()
            if engine.outcome.failed:
                raise commhooks.HookResultError(f"{handle.expr} raised: see the log")
            found.append(gpu.seen)
    return found


@contextmanager
def _planned_apart(reduction: Reduction, gpu: ImaginedGPU) -> Iterator[None]:
    """A plan is made on meta tensors that are no GPU's."""
    plan = reduction.plan

    def hidden(*args: Any) -> Any:
        with gpu.hidden():
            return plan(*args)

    holder: Any = reduction
    holder.plan = hidden
    try:
        yield
    finally:
        del holder.plan
