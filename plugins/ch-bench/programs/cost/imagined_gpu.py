"""An imagined GPU: the kernels that a hook's steps would launch, and the places where the host would wait.

Meta tensors that claim to be CUDA tensors pass through the whole engine, in a group of two with empty messages. The
program counts kernels and copies, events that the host waits for, and other operations that make the host wait
(``.item()``, a copy to or from pageable memory, a result whose size depends on numbers). It also finds accesses to
memory that no wait between streams puts in order (:mod:`programs.cost.stream_order`). ``programs.cost.on_gpu`` measures a
real GPU (``docs/cuda.md``).
"""

import pkgutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import commhooks
from ch_bench.pytorch_hooks import reduction_of
from ch_core import Engine, Link
from ch_ddp import DDPDriver
from commhooks import Bucket, BucketLayout, HookState, Reduction, Topology
from programs.cost.kernel_launches import launches_kernel
from programs.cost.stream_order import HOST, StreamOrder, accesses

DEVICE, META = torch.device("cuda", 0), torch.device("meta")
COMPOSITIONS = [
    "powersgd(rank=1)",
    "powersgd(rank=4, residual='averaged')",
    "powersgd(rank=4, warm_start=False)",
    "bf16_wrapper(powersgd(rank=4))",
    "bf16_compress(accumulate='fp32')",
    "fp16_wrapper(powersgd(rank=4))",
    "error_feedback(bf16_compress)",
    "warmup(powersgd(rank=4), steps=2)",
]
"""Hooks that are measured with every registered one."""
_NUMBERS = frozenset(["_local_scalar_dense", "equal", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount"])
"""Operations whose result, or the size of it, must be known to the host."""


@dataclass
class Seen:
    """Work that one step gives the GPU.

    Attributes:
        operations: by name; a fused operation over many tensors counts once, and views do not count.
        messages: number of collectives.
        waits: operations for which the host waits until the queue is empty.
        events: for each event that the host waits for, the number of operations between the last copy to the host and
            the event. These are waits without a use.
    """

    operations: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    waits: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Number of operations and messages."""
        return self.operations.total() + self.messages


class ImaginedGPU:
    """While it is entered, ``torch`` has a CUDA device without numbers.

    Attributes:
        seen: work since the attribute was last replaced.
        pinned: host memory for which copies need not wait.
        order: accesses to memory by all streams.
        stream: name of the current stream.
        pending: collectives that no stream has waited for.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        self.pinned: Any = WeakIdKeyDictionary()
        self.since_copy = 0  # operations since the last copy to the host
        self.away = False
        self.order, self.stream = StreamOrder(), "main"
        self.pending: list[_Done] = []
        self._exit = ExitStack()

    def __enter__(self) -> "ImaginedGPU":
        stand_ins = _streams(self)
        for name, stand_in in stand_ins.items():
            self._exit.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self._exit.enter_context(mock.patch.object(torch.accelerator, "current_stream", stand_ins["current_stream"]))

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            self.order.record(stream.name, tensor)

        # torch's own method accepts a real stream only.
        self._exit.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
        self._exit.enter_context(_Dispatched(self))
        called = self._exit.enter_context(_Called(self))
        run_backward = vars(torch.autograd)["_engine_run_backward"]

        def entered(*args: Any, **kwargs: Any) -> Any:
            with called:  # torch leaves the mode before it calls the mode's handler of backward()
                return run_backward(*args, **kwargs)

        self._exit.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", entered))
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let meta tensors be meta tensors: the engine makes plans with them."""
        before, self.away = self.away, True
        try:
            yield
        finally:
            self.away = before

    def wait(self, reason: str) -> None:
        """Note that the host waits for the queue."""
        self.seen.waits.append(reason)


class _Dispatched(TorchDispatchMode):
    """Counts operations and notes waits."""

    def __init__(self, gpu: ImaginedGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, name, kwargs = self.gpu, func.overloadpacket.__name__, kwargs or {}
        if gpu.away:
            return func(*args, **kwargs)
        given = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(t.is_meta for t in given) and torch.device(kwargs.get("device") or "cpu") != META:
            for t, writes in accesses(func, args, kwargs):
                if launches_kernel(name) and t in gpu.pinned:
                    gpu.order.access(HOST, t, name, writes=writes)
            return func(*args, **kwargs)
        found = self._run(func, name, given, args, kwargs)
        made = [t for t in _flat(found) if isinstance(t, torch.Tensor) and t.is_meta]
        if not launches_kernel(name):
            for t in made:
                gpu.order.allocate(gpu.stream, t)
            return found
        for t, writes in accesses(func, args, kwargs):
            if t.is_meta or t in gpu.pinned:
                gpu.order.access(gpu.stream, t, name, writes=writes)
                if not t.is_meta:
                    gpu.order.record(gpu.stream, t)  # torch's allocator of pinned memory waits for copies
        for t in made:
            if not any(t is each for each in given):
                gpu.order.access(gpu.stream, t, name, writes=True)
        return found

    def _run(self, func: Any, name: str, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        gpu = self.gpu
        if launches_kernel(name):
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
    """Lets meta tensors claim to be CUDA tensors, and makes meta tensors for CUDA requests."""

    def __init__(self, gpu: ImaginedGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, name, kwargs = self.gpu, getattr(func, "__name__", ""), kwargs or {}
        # A device stays what it was called. As a meta device it would not equal the device of any tensor.
        if gpu.away or func is torch.device:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args)
        if name in ("tolist", "item") and args[0] in gpu.pinned:
            gpu.order.access(HOST, args[0], name, writes=False)
        if name == "tolist":
            if not args[0].is_meta:  # the status: no rank has failed, and both are at the same step
                return [4.0] * (args[0].numel() - 1) + [0.0]
            gpu.wait("a copy to pageable memory")
            gpu.order.join(HOST, gpu.order.stamp(gpu.stream))
            gpu.order.access(HOST, args[0], name, writes=False)
            return [1.0] * args[0].numel()
        if name == "__setitem__" and isinstance(args[2], int | float) and args[0].is_meta:
            gpu.wait("a copy from pageable memory")  # measured: torch copies the number instead of filling
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
        attribute = getattr(func, "__self__", None)
        if attribute in (torch.Tensor.is_cuda, torch.Tensor.is_meta):
            with torch._C.DisableTorchFunction():
                return args[0].is_meta == (attribute is torch.Tensor.is_cuda)
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
    """Stand-ins for the parts of ``torch.cuda`` that the engine uses."""

    class Event:
        def __init__(self, **options: object) -> None: ...

        def record(self, stream: Any = None) -> None:
            self.since_copy = gpu.since_copy
            self.stamp = gpu.order.stamp(gpu.stream if stream is None else stream.name)

        def wait(self, stream: Any = None) -> None:
            gpu.order.join(gpu.stream if stream is None else stream.name, self.stamp)

        def synchronize(self) -> None:
            gpu.seen.events.append(self.since_copy)
            gpu.order.join(HOST, self.stamp)

    class Stream:
        def __init__(self, device: object = None, name: str = "", priority: int = 0) -> None:
            streams.append(self)
            self.name = name or f"side {len(streams) - 1}"
            self.device = DEVICE

        def wait_stream(self, other: Any) -> None:
            gpu.order.join(self.name, gpu.order.stamp(other.name))

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self) -> Any:
            event = Event()
            event.record(self)
            return event

    streams: list[Any] = []

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before, gpu.stream = gpu.stream, entered.name
        try:
            yield
        finally:
            gpu.stream = before

    Stream(name="main")
    return {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda device=None: next(one for one in streams if one.name == gpu.stream),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),  # there is one
    }


class _Done:
    """A collective on its own stream, as NCCL runs it. The group keeps its tensors until a stream waits for it."""

    def __init__(self, gpu: ImaginedGPU, stream: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.gpu, self.tensors = gpu, tensors
        self.stamp = gpu.order.stamp(stream)
        gpu.pending.append(self)

    def wait(self, timeout: float | None = None) -> None:
        self.gpu.order.join(self.gpu.stream, self.stamp)
        if self in self.gpu.pending:
            self.gpu.pending.remove(self)
        self.tensors = ()


COLLECTIVES = "collectives"


class SilentGroup:
    """A group of ranks with empty messages. Its collectives run on their own stream, as with NCCL.

    Args:
        gpu: the device.
        world_size: number of ranks; this is rank 0.
        stream: name of the stream of the collectives.
        ranks_per_node: ranks of each node, if hooks with two levels use the group.
    """

    rank, free, elastic = 0, False, False
    link: Link | None = None
    exchanged = 0

    def __init__(
        self, gpu: ImaginedGPU, world_size: int = 2, stream: str = COLLECTIVES, ranks_per_node: int | None = None
    ) -> None:
        self.gpu, self.world_size, self.stream = gpu, world_size, stream
        self.topology: Topology | None = None
        self._ranks_per_node = ranks_per_node

    def open_levels(self, nodes: Any, timeout: float | None) -> None:
        self.topology = Topology.even(self.world_size, self._ranks_per_node or 1)

    def scoped(self, scope: Any) -> "SilentGroup":
        if scope == "all" or self.topology is None:
            return self
        return SilentGroup(self.gpu, self.topology.size(scope), f"{self.stream} of {scope}")

    def start(self, *given: object) -> _Done:
        gpu, tensors = self.gpu, tuple(each for each in given if isinstance(each, torch.Tensor))
        gpu.seen.messages += 1
        gpu.since_copy += 1
        gpu.order.join(self.stream, gpu.order.stamp(gpu.stream))
        for number, tensor in enumerate(tensors):
            gpu.order.access(self.stream, tensor, "a collective", writes=number == 0)
        return _Done(gpu, self.stream, tensors)

    all_reduce = all_gather = all_to_all = reduce_scatter = start

    def abort(self) -> None: ...


def steps(
    hook: str | Reduction,
    buckets: Sequence[Mapping[str, Sequence[int]]],
    count: int = 3,
    *,
    state: HookState | None = None,
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
) -> list[Seen]:
    """Return the work that each of ``count`` steps of a hook gives the GPU, including the engine's own.

    Args:
        hook: an expression or a reduction.
        buckets: shapes by name, for each bucket.
        count: number of steps.
        state: initial state; by default a new one.
        dtype: of the gradients.
        weighted: True to weigh the ranks by a number on the GPU.

    Raises:
        HookNotSupportedError: the hook is a foreign hook.
        HookResultError: the reduction raised.

    Example:
        >>> [seen] = steps("bf16_compress", [{"w": (64, 64)}], 1)
        >>> seen.waits, seen.messages
        ([], 2)
    """
    if isinstance(hook, str):
        reduction_of(hook)
    handle = commhooks.create(hook)
    assert handle.reduction is not None
    if state is None and isinstance(handle.state, HookState):
        state = handle.state
    layouts = [BucketLayout.of_shapes(shapes, dtype=dtype, device=DEVICE) for shapes in buckets]
    last, found = len(layouts) - 1, []
    with ImaginedGPU() as gpu, planned_apart(gpu):
        engine = Engine(handle.reduction, SilentGroup(gpu), state)
        made = [
            Bucket(layout, torch.empty(layout.numel, dtype=dtype, device=DEVICE), i, is_last=i == last)
            for i, layout in enumerate(layouts)
        ]
        if weighted:
            engine.set_weighted()
        tokens = torch.full((), 7.0, device=DEVICE)
        for _ in range(count):
            gpu.seen = Seen()
            if engine.weighing is not None:
                engine.weighing.add(tokens, "mean")
            for bucket in made:
                engine.submit(bucket)
            engine.finish()
            if engine.outcome.failed:
                raise commhooks.HookResultError(f"{handle.expr} raised; the log has the traceback")
            found.append(gpu.seen)
    return found


def _use(storage: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
    """Copy an average to the gradients of its parameters, as DDP does on its own stream."""
    for p, average in zip(params, storage.split([p.numel() for p in params]), strict=True):
        assert p.grad is not None
        p.grad.view(-1).copy_(average)


@contextmanager
def planned_apart(gpu: ImaginedGPU) -> Iterator[None]:
    """Let every reduction make its plan, and the shapes of its state, on plain meta tensors."""

    def hidden(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with gpu.hidden():
                return function(*args, **kwargs)

        return call

    state = "commhooks.checkpoint.save_load.expected"
    with (
        mock.patch.object(Reduction, "plan", hidden(Reduction.plan)),
        mock.patch(state, hidden(pkgutil.resolve_name(state.replace(".expected", ":expected")))),
    ):
        yield


class _Future:
    """A future that lets the stream of its consumer wait, as torch's futures of a device do."""

    def __init__(self, gpu: ImaginedGPU) -> None:
        self.gpu, self.stamp = gpu, dict[str, int]()

    def set_result(self, value: torch.Tensor) -> None:
        self.stamp = self.gpu.order.stamp(self.gpu.stream)

    def wait(self) -> None:
        self.gpu.order.join(self.gpu.stream, self.stamp)


class _DDPBucket:
    """A bucket as DDP hands it to its hook."""

    def __init__(self, index: int, params: list[torch.Tensor], storage: torch.Tensor, last: bool) -> None:
        self._index, self._params, self._storage, self._last = index, params, storage, last

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.Tensor]:
        return self._params

    def buffer(self) -> torch.Tensor:
        return self._storage

    def is_last(self) -> bool:
        return self._last


def races(
    hook: str | Reduction,
    buckets: Sequence[Mapping[str, Sequence[int]]],
    count: int = 3,
    *,
    frees: bool = False,
    stops: bool = False,
    ranks_per_node: int | None = None,
) -> list[str]:
    """Return accesses that no wait puts in order, in ``count`` steps of a hook behind ch-ddp's driver.

    The main stream writes the gradients, calls the driver for each bucket, waits for the futures and reads the averages.

    Args:
        hook: an expression or a reduction.
        buckets: shapes by name, for each bucket.
        count: number of steps.
        frees: True if every step has new buckets, which are freed as soon as they have been read (DDP's
            ``lazy_bucket_allocation``).
        stops: True if the second backward raises before its last bucket. Its buckets are freed.
        ranks_per_node: ranks of each of two nodes, for a hook with two levels; ``None`` for two ranks.

    Example:
        >>> races("bf16_compress", [{"w": (64, 64)}])
        []
    """
    handle = commhooks.create(hook)
    assert handle.reduction is not None
    last = len(buckets) - 1
    with ImaginedGPU() as gpu, planned_apart(gpu), ExitStack() as patches:
        for name, stand_in in {
            "driver.future_for": lambda buffer: _Future(gpu),
            "driver.behind_backward": lambda: False,
            "driver.backward_id": lambda: 1,
            "step_limits.behind_backward": lambda: False,
            "step_limits.backward_id": lambda: 1,
            "step_limits.at_end_of_backward": lambda action: None,
            "step_limits.if_interrupted": lambda action: None,
        }.items():
            patches.enter_context(mock.patch(f"ch_ddp.adapter.{name}", stand_in))
        ranks = SilentGroup(gpu, 2 * (ranks_per_node or 1), ranks_per_node=ranks_per_node)
        engine = Engine(handle.reduction, ranks, handle.state if isinstance(handle.state, HookState) else None)
        if not frees:
            engine.keep_buckets()
        names: dict[int, str] = {}
        params = []
        for shapes in buckets:
            made = {
                name: torch.empty(tuple(shape), dtype=torch.float32, device=DEVICE) for name, shape in shapes.items()
            }
            names.update({id(p): name for name, p in made.items()})
            params.append(list(made.values()))
            for p in made.values():
                p.grad = torch.empty_like(p)
        driver = DDPDriver(engine, names)
        storages: list[torch.Tensor] = []
        for step in range(count):
            if frees or stops or not storages:
                storages = [
                    torch.zeros(sum(p.numel() for p in ps), dtype=torch.float32, device=DEVICE) for ps in params
                ]
            futures: list[Any] = []
            for index, (storage, ps) in enumerate(zip(storages, params, strict=True)):
                if stops and step == 1 and index == last:
                    break
                storage.add_(torch.ones_like(storage))  # the backward allocates, too
                futures.append(driver(_DDPBucket(index, ps, storage, index == last)))  # type: ignore[arg-type]
            if len(futures) == len(params):
                for index, future in enumerate(futures):
                    future.wait()
                    _use(storages[index], params[index])
            if frees or stops:
                del storage
                storages.clear()
            if engine.outcome.failed:
                raise commhooks.HookResultError(f"{handle.expr} raised; the log has the traceback")
        del storages, futures
        return list(gpu.order.races)
