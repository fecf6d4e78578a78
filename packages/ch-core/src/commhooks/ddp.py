"""The DDP adapter: buckets from torch's ``GradBucket``, and a driver that turns hook calls into engine steps.

Two ways in. :func:`commhooks.attach` registers one trampoline per model and knows the parameters' names.
:func:`as_hook` gives a plain ``(state, bucket)`` function with PyTorch's signature; there no name is seen, so
parameters are keyed by their position in model order and their shape.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.after import OUTSIDE, graph_task, raise_after_backward
from commhooks.bucket import Bucket, BucketLayout, ParamLayout, contiguous_stride, dense
from commhooks.engine import Engine
from commhooks.errors import AttachError, CommHooksError, StateError
from commhooks.guard import differing, digest
from commhooks.naming import position_name
from commhooks.reduction import Reduction
from commhooks.state import HookState
from commhooks.streams import SideStream, future_for
from commhooks.transport import ProcessGroupTransport, Transport
from commhooks.typing import GradBucket

TensorFuture = torch.futures.Future[torch.Tensor]


def bucket_layout(grad_bucket: GradBucket, names: Mapping[int, str]) -> BucketLayout:
    """The layout of a ``GradBucket``.

    Args:
        grad_bucket: torch's bucket.
        names: ``id(parameter)`` -> name.

    DDP lays a dense parameter's gradient in its own strides, and a complex one as pairs of reals.
    """
    buffer = grad_bucket.buffer()
    if buffer.is_sparse:
        param = grad_bucket.parameters()[0]
        shape = tuple(param.shape)
        layout = ParamLayout(names[id(param)], shape, contiguous_stride(shape), 0, "sparse")
        return BucketLayout([layout], param.numel(), buffer.dtype, buffer.device)
    params, offset = [], 0
    for param in grad_bucket.parameters():
        shape, stride, kind = tuple(param.shape), tuple(param.stride()), "dense"
        if not dense(param):
            stride = contiguous_stride(shape)
        if param.is_complex() and not buffer.is_complex():
            shape, stride, kind = (*shape, 2), (*(2 * s for s in stride), 1), "complex"
        elif param.is_complex():
            kind = "complex"
        entry = ParamLayout(names[id(param)], shape, stride, offset, kind)
        params.append(entry)
        offset += entry.numel
    return BucketLayout(params, buffer.numel(), buffer.dtype, buffer.device)


class DDPDriver:
    """Turns the hook calls of one DDP model into steps of one engine.

    Args:
        engine: the engine to drive.
        names: ``id(parameter)`` -> name; ``None`` names parameters by position once a backward has shown them all.
    """

    def __init__(self, engine: Engine, names: Mapping[int, str] | None = None) -> None:
        self.engine = engine
        self.calls = self.check_every = 0
        self._names: dict[int, str] = dict(names or {})
        self._by_position = names is None
        self._seen: list[list[torch.Tensor]] = []
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._buckets: dict[int, Bucket] = {}  # by index, where the engine keeps the last step's anyway
        self._renames = engine.state.renames
        self._futures: list[tuple[TensorFuture, torch.Tensor]] = []
        self._side = SideStream()

    def __call__(self, grad_bucket: GradBucket) -> TensorFuture:
        """Take one bucket; the future is completed when the step's last bucket has been drained."""
        self.calls += 1
        if grad_bucket.index() == 0:
            self._first()
        buffer = grad_bucket.buffer()
        future = future_for(buffer)
        self._futures.append((future, buffer))
        with self._side.on(buffer):
            try:
                self.engine.submit(self._bucket(grad_bucket, buffer))
                if grad_bucket.is_last():
                    self._finish(self.engine.finish() or self._compare())
            except CommHooksError as error:  # the transport is lost; DDP itself must survive the backward
                self._finish(error)
        return future

    def check(self) -> None:
        """On CPU errors are raised from ``backward()`` itself; on CUDA at the next step, or here."""
        error = self.engine.failure or self.engine.judge()
        if error is not None:
            raise error

    def _first(self) -> None:
        """The first bucket of a step has come. Not told by the backward's number: reentrant checkpoints nest them."""
        if self.engine.in_step:
            self.engine.abandon()  # an earlier backward raised before its last bucket
        self._futures.clear()
        if self._by_position and self._renames is not self.engine.state.renames:
            self._renamed()
        # A rank that has run out of input replays the hook outside of any backward (DDP.join).
        self.engine.participating = graph_task() != OUTSIDE

    def _bucket(self, grad_bucket: GradBucket, buffer: torch.Tensor) -> Bucket:
        params = grad_bucket.parameters()
        key = (buffer.numel(), *map(id, params))
        layout = self._layouts.get(key)
        if layout is None:
            if self._by_position:
                self._provisional(grad_bucket, params)
            layout = self._layouts[key] = bucket_layout(grad_bucket, self._names)
        index, is_last = grad_bucket.index(), grad_bucket.is_last()
        found = self._buckets.get(index)
        if found is not None and found.storage is buffer and found.layout is layout and found.is_last == is_last:
            return found
        if index == 0:
            self._buckets.clear()  # DDP has rebuilt them, or it is a sparse one
        bucket = Bucket(layout, buffer, index, is_last)
        if self.engine.keep_buckets:
            self._buckets[index] = bucket
        return bucket

    def _compare(self) -> BaseException | None:
        """Every :attr:`check_every` steps, whether all ranks hold the same reduced gradients."""
        if not self.check_every or self.engine.counters.steps % self.check_every:
            return None
        mine = digest(buffer for _, buffer in self._futures)
        return differing(self.engine.reduction.name, self.engine.gather(mine))

    def _finish(self, error: BaseException | None) -> None:
        for future, buffer in self._futures:
            with self._side.on(buffer):
                future.set_result(buffer)
        self._futures.clear()
        if self._seen:
            self._name_by_position()
        if error is not None:
            raise_after_backward(error)

    # -- names, where none are known

    def _provisional(self, grad_bucket: GradBucket, params: list[torch.Tensor]) -> None:
        new = [p for p in params if id(p) not in self._names]
        if new and not self._seen and self._names:
            raise StateError(
                "this hook state belongs to one model already, and was called with parameters of another: make one "
                "state per model"
            )
        names = self._from_state(new) or [f"?{grad_bucket.index()}.{i}" for i in range(len(new))]
        self._names.update(zip(map(id, new), names, strict=True))
        if new:
            self._seen.append(new)

    def _from_state(self, new: list[torch.Tensor]) -> list[str]:
        """The names of a state that was loaded or bound before the first step, so that it is read from that step on."""
        state = self.engine.state
        bound = state.names()
        if bound and all(id(p) in bound for p in new):
            return [bound[id(p)] for p in new]
        taken = len(state.params) - sum(map(len, self._seen))
        rows = state.params[max(taken - len(new), 0) : taken]
        if not bound and [shape for _, shape in rows] == [tuple(p.shape) for p in new]:
            return [name for name, _ in rows]
        if not bound and not any(state.entries()):
            return []
        raise StateError(
            "this hook state was kept for a model with other parameters, or in an order that cannot be told from DDP's "
            "buckets: call state.bind(ddp_model) before the first step, or make a new state for this model"
        )

    def _name_by_position(self) -> None:
        """Before the first rebuild, DDP's buckets taken in reverse hold the parameters in model order."""
        ordered = [param for bucket in reversed(self._seen) for param in bucket]
        self._seen.clear()
        self._layouts.clear()
        state = self.engine.state
        if any(self._names[id(p)].startswith("?") for p in ordered):
            final = {self._names[id(p)]: position_name(i, p.shape) for i, p in enumerate(ordered)}
            self._names = {id(p): final[self._names[id(p)]] for p in ordered}
            state.rename(final)
            state.params = ()
        if not state.names():
            state.bind_params([(self._names[id(p)], p.shape) for p in ordered], ordered)
        self._renames = state.renames

    def _renamed(self) -> None:
        """Follow a ``state.bind(model)`` after the first step."""
        self._renames = self.engine.state.renames
        self._names = {key: self._renames.get(name, name) for key, name in self._names.items()}
        self._layouts.clear()


# -- PyTorch's own signature


class BareHook:
    """A reduction as a hook with PyTorch's signature, ``hook(state, bucket)``, for ``register_comm_hook``.

    The state is a process group, ``None`` (the default group), or a :class:`~commhooks.state.HookState`, which serves
    one model and may have a ``process_group``. Can be pickled; carries its ``reduction`` so that wrappers recognise it.

    Args:
        reduction: what to run, or a function that makes it from the hook's state.
        name: what torch and its frameworks show.
    """

    def __init__(self, reduction: Reduction | Callable[[Any], Reduction], name: str) -> None:
        self.reduction = reduction
        self.__name__ = self.__qualname__ = name
        self._forget()

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(bucket, GradBucket):
            raise AttachError(
                f"{self.__name__} was called with {type(bucket).__name__} instead of a GradBucket: it does not support "
                "torch._dynamo.config.optimize_ddp='python_reducer'; use torch.compile's default DDP mode"
            )
        return self._driver(state, bucket)(bucket)

    def __repr__(self) -> str:
        return f"<hook {self.__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"reduction": self.reduction, "__name__": self.__name__, "__qualname__": self.__qualname__}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._forget()

    def _forget(self) -> None:
        self._of_param = WeakIdKeyDictionary()  # parameter -> DDPDriver
        self._current: DDPDriver | None = None

    def _driver(self, state: object, bucket: GradBucket) -> DDPDriver:
        """The driver of this state, or, where the state is a group, of the model that the parameters belong to."""
        if isinstance(state, HookState):
            driver: DDPDriver | None = state.drivers.get(self)  # kept there, so that it lives as long as the state
            if driver is None:
                driver = state.drivers[self] = DDPDriver(self._engine(state))
            return driver
        params = bucket.parameters()
        found: DDPDriver | None = self._of_param.get(params[0])
        if found is not None and not over(found.engine.transport, state):
            found = None  # the model was wrapped anew, over another group
        if found is None:
            found = self._current if bucket.index() > 0 else None
            found = found if found is not None else DDPDriver(self._engine(state))
        self._current = None if bucket.is_last() else found
        for param in params:
            self._of_param[param] = found
        return found

    def _engine(self, state: object) -> Engine:
        if isinstance(state, HookState):
            group, kept = getattr(state, "process_group", None), state
        elif state is None or isinstance(state, dist.ProcessGroup):
            group, kept = state, HookState()
        else:
            raise AttachError(
                f"the state of {self.__name__} is a process group, None, or a HookState; got {type(state).__name__}"
            )
        made = self.reduction if isinstance(self.reduction, Reduction) else self.reduction(state)
        transport = ProcessGroupTransport(group, free=True)
        return Engine(made, transport, kept, timeout=None)  # the group has a timeout of its own


def over(transport: Transport, group: object) -> bool:
    """Whether a transport goes over this process group; ``None`` is the default group of the moment."""
    wanted = group if group is not None else dist.group.WORLD
    return isinstance(transport, ProcessGroupTransport) and transport.group is wanted


def as_hook(reduction: Reduction | Callable[[Any], Reduction], name: str | None = None) -> BareHook:
    """A reduction, or a function that makes one from the hook's state, as a hook with PyTorch's signature.

    Example:
        >>> from commhooks.reduction import Plain
        >>> as_hook(Plain(), "my_hook")
        <hook my_hook>
    """
    if name is None:
        name = reduction.name if isinstance(reduction, Reduction) else getattr(reduction, "__name__", "hook")
    return BareHook(reduction, name)
