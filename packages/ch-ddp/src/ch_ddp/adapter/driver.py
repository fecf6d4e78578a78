"""Turns the hook calls of one DDP model into steps of one engine."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.finalization import Finalizer, raise_finalized
from ch_ddp.adapter.futures import HookFuture, Promise, behind_backward, future_for
from ch_ddp.adapter.layout import averaged, bucket_layout, models_of, named_by_position
from ch_ddp.adapter.result_checks import differing, digest
from commhooks import Bucket, BucketLayout, CommHooksError, GradBucket, TransportError
from commhooks.adapters import (
    NO_BACKWARD,
    Engine,
    ProcessGroupTransport,
    SideStream,
    at_end_of_backward,
    backward_id,
)

TensorFuture = torch.futures.Future[torch.Tensor]


class DDPDriver:
    """Turns the hook calls of one DDP model into steps of one engine.

    Args:
        engine: the engine to drive.
        names: ``id(parameter)`` -> name; ``None`` names them by their position in the model that has them.
        hook: name of the hook function that a user may call from a hook of their own. It may then be waited for, and
            may be given some of the buckets only.
    """

    def __init__(self, engine: Engine, names: Mapping[int, str] | None = None, *, hook: str | None = None) -> None:
        self.engine = engine
        self.calls = self.check_every = 0
        self.finalizer: Finalizer | None = None
        self.index: int | None = None  # of the newest bucket; None between steps
        self._names: Mapping[int, str] = names if names is not None else {}
        self._by_position = names is None
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._buckets: dict[int, Bucket] = {}  # by index, where the engine keeps the last step's anyway
        self._renames = engine.state.renames
        self._count = 0  # buckets of the running step
        self._futures: list[tuple[TensorFuture, torch.Tensor]] = []  # completed at the end of the step
        self._promises: list[Promise] = []  # completed by their own messages
        self._hook, self._delivers = hook, hook is not None and engine.reduction.delivers
        self._task = NO_BACKWARD
        self._side = SideStream()
        self._arrivals: UsedParameters | None = None
        self._keeps = "local" in engine.reduction.fields.values()  # something of this rank's own, by parameter
        self._searches = self._keeps  # for the model, unless it is given

    def follow(self, model: DistributedDataParallel) -> None:
        """Whose gradients are averaged; without it the model is looked for when its first bucket comes."""
        if self._searches:
            self._searches, self._arrivals = False, watch_used_parameters([model], whole=True)

    def close(self) -> None:
        """Leave the model's parameters alone."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    def __call__(self, grad_bucket: GradBucket) -> TensorFuture:
        """Take one bucket.

        The future is completed when the step's last bucket has been drained. Called by a user's hook, by the bucket's
        own message where nothing follows it.
        """
        self.calls += 1
        index, behind, task, buffer = grad_bucket.index(), behind_backward(), backward_id(), grad_bucket.buffer()
        begins = self.begins(index, behind)
        if begins:
            self._first()
        if (begins or task != self._task) and task != NO_BACKWARD and (behind or self._hook is not None):
            at_end_of_backward(partial(self._end, buffer))  # no last bucket may come
        self.index, self._task = index, task
        future = future_for(buffer) if self._hook is None else HookFuture.of(buffer, self._hook)
        self._futures.append((future, buffer))
        with self._side.on(buffer):
            try:
                self._take(self._bucket(grad_bucket, buffer), behind)
                if grad_bucket.is_last():
                    self._finish(self.engine.finish() or self._compare())
            except Exception as error:  # the transport is lost; DDP itself must survive the backward
                self._finish(_as_ours(error))
        if grad_bucket.is_last():
            self._over()
        return future

    def uses_group(self, group: object) -> bool:
        """Whether it reduces over this process group; ``None`` is the default group of the moment."""
        transport = self.engine.transport
        wanted = group if group is not None else dist.group.WORLD
        return isinstance(transport, ProcessGroupTransport) and transport.group is wanted

    def begins(self, index: int, behind: bool) -> bool:
        """Whether a bucket of this index is the first of a step. Its number is not always 0: a user's hook may send
        some buckets elsewhere.
        """
        if self.index is None:
            return True
        return index <= self.index and not (behind and self._task == backward_id())

    def _take(self, bucket: Bucket, behind: bool) -> None:
        if behind:  # DDP waits for this future before it calls anything else
            self.engine.run(bucket)
            self._futures.pop()[0].set_result(bucket.storage)
            return
        live = self.engine.submit(bucket)
        future, buffer = self._futures[-1]
        if live is None or not isinstance(future, HookFuture):
            return
        arrives = self._delivers and live.pending is not None and live.due is None
        if arrives or live.done:  # done at once: it has failed, or sends nothing
            self._futures.pop()
            promise = Promise(future, buffer)
            self._promises.append(promise)
            if live.pending is not None and not buffer.is_cuda:
                live.pending.then(promise.keep)
                return
            if live.pending is not None:
                live.pending.wait(None)  # the side stream waits, not the host
            promise.keep()

    def _end(self, buffer: torch.Tensor) -> None:
        """The backward has ended; perhaps without a last bucket for this driver."""
        if self.index is None:
            return
        self._over()
        with self._side.on(buffer):
            try:
                error = (self.engine.finish() or self._compare()) if self.engine.in_step else None
            except Exception as lost:
                error = _as_ours(lost)
            self._finish(error)

    def _over(self) -> None:
        self.index = None
        if self._arrivals is not None:
            self._arrivals.averaged()

    def check(self) -> None:
        """On CPU errors are raised from ``backward()`` itself; on CUDA at the next step, or here."""
        error = self.engine.failure or self.engine.outcome.take_error()
        if error is not None:
            raise error

    def _first(self) -> None:
        """The first bucket of a step has come. Not told by the backward's number: reentrant checkpoints nest them."""
        if self.engine.in_step:
            self.engine.abandon()  # an earlier backward raised before its last bucket
        self._futures.clear()
        self._promises.clear()
        self._count = 0
        if self._by_position and self._renames is not self.engine.state.renames:
            self._renames = self.engine.state.renames  # of a state.bind(model) after the first step
            self._names = {}
            self._layouts.clear()
        # A rank that has run out of input replays the hook outside of any backward (DDP.join).
        self.engine.set_participating(backward_id() != NO_BACKWARD)

    def _bucket(self, grad_bucket: GradBucket, buffer: torch.Tensor) -> Bucket:
        params = grad_bucket.parameters()
        key = (buffer.numel(), *map(id, params))
        layout = self._layouts.get(key)
        if layout is None:
            if self._by_position and not all(id(p) in self._names for p in params):
                self._names = named_by_position(self.engine.state, params)
            layout = self._layouts[key] = bucket_layout(grad_bucket, self._names)
            if self._searches:
                self._searches, self._arrivals = False, watch_used_parameters(models_of(params), whole=False)
        unused = frozenset(self._unused(layout, params)) if self._keeps else frozenset[str]()
        index, is_last = self._count, grad_bucket.is_last()
        self._count += 1
        found = self._buckets.get(index)
        if found is not None and found.storage is buffer and found.layout is layout and found.is_last == is_last:
            found.unused = unused
            return found
        if index == 0:
            self._buckets.clear()  # DDP has rebuilt them, or it is a sparse one
        bucket = Bucket(layout, buffer, index, is_last, unused)
        if self.engine.buckets.keep:
            self._buckets[index] = bucket
        return bucket

    def _unused(self, layout: BucketLayout, params: Sequence[torch.Tensor]) -> list[str]:
        """Names of the parameters without a gradient. DDP drops the average of what no rank has used, and with it what was
        in it of a residual.
        """
        found = self._arrivals
        if found is None:
            return [entry.name for entry, p in zip(layout.params, params, strict=True) if p.grad is None]
        return [entry.name for entry, p in zip(layout.params, params, strict=True) if found.none_of(p)]

    def _compare(self) -> BaseException | None:
        """Every :attr:`check_every` steps, whether all ranks hold the same reduced gradients."""
        if not self.check_every or self.engine.counters.steps % self.check_every:
            return None
        mine = digest(buffer for _, buffer in self._futures)
        return differing(self.engine.reduction.name, self.engine.gather(mine))

    def _finish(self, error: BaseException | None) -> None:
        if self.finalizer is not None:
            self.finalizer.ready()
        for future, buffer in self._futures:
            with self._side.on(buffer):
                future.set_result(buffer)
        for promise in self._promises:
            promise.keep()  # lost messages keep none
        self._futures.clear()
        self._promises.clear()
        if error is not None:
            raise_finalized(error)


def _as_ours(error: Exception) -> CommHooksError:
    if isinstance(error, CommHooksError):
        return error
    lost = TransportError(f"{type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost


class UsedParameters:
    """Counts a parameter as used as DDP does: a gradient has been added to its ``.grad`` since the last averaged
    backward, under ``no_sync()`` too. ``.grad`` itself cannot tell: ``zero_grad(set_to_none=False)`` leaves zeros in it.

    Args:
        model: the DDP model.
        whole: whether the first step is seen from its beginning.
    """

    def __init__(self, model: DistributedDataParallel, *, whole: bool) -> None:
        self._whole = whole
        self._arrived: set[int] = set()
        trained = [p for _, p in averaged(model) if p.requires_grad]
        self._watched = {id(p) for p in trained}
        arrive = _adder(self._arrived)
        self._hooks = [p.register_post_accumulate_grad_hook(arrive) for p in trained]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def none_of(self, param: torch.Tensor) -> bool:
        """Whether a parameter got no gradient."""
        if param.grad is None:
            return True
        return self._whole and id(param) in self._watched and id(param) not in self._arrived

    def averaged(self) -> None:
        """A backward has been averaged."""
        self._arrived.clear()
        self._whole = True

    def close(self) -> None:
        """Leave the parameters alone."""
        _remove(self._hooks)


def watch_used_parameters(models: Sequence[DistributedDataParallel], *, whole: bool) -> UsedParameters | None:
    """Watch the model among these that may leave parameters without a gradient, if there is one.

    A static graph's parameters are used in every step or in none, and ``.grad`` tells that.
    """
    for model in models:
        if model.find_unused_parameters and not model.static_graph:
            return UsedParameters(model, whole=whole)
    return None


def _adder(arrived: set[int]) -> Callable[[torch.Tensor], None]:
    """The hook of every parameter. It holds the set only: a driver that is dropped must not live on in them."""

    def arrive(param: torch.Tensor) -> None:
        arrived.add(id(param))

    return arrive


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
