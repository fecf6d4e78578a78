"""Driver of one DDP model: turns DDP's hook calls into steps of one engine."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_core import BucketRun, Engine, ProcessGroupTransport, SideStream, transport_over
from ch_ddp.adapter.arrivals import Arrivals
from ch_ddp.adapter.finalization import Finalizer, raise_finalized
from ch_ddp.adapter.futures import HookFuture, Promise, behind_backward, future_for
from ch_ddp.adapter.layout import averaged_params, bucket_layout, held_params, models_of, named_by_position
from ch_ddp.adapter.result_checks import gradient_checksum, mismatch
from ch_ddp.adapter.saved_buckets import SavedBuckets
from ch_ddp.adapter.step_limits import StepLimits
from commhooks import (
    NO_BACKWARD,
    AttachError,
    Bucket,
    BucketLayout,
    CommHooksError,
    GradBucket,
    TransportError,
    after_backward,
    backward_id,
)

TensorFuture = torch.futures.Future[torch.Tensor]


class DDPDriver:
    """Turns the hook calls of one DDP model into steps of one engine. :class:`StepLimits` tells their limits.

    Args:
        engine: engine to drive.
        names: ``id(parameter)`` -> name. None names parameters by their position in their model.
        hook: name of a hook function that users may call inside their own hooks. Such a user may wait for the future,
            and may pass only some of the buckets.
        skips_after: see :class:`StepLimits`; None if DDP skips no bucket.

    Attributes:
        on_begin: called with this driver when a step begins, before the engine gets its first bucket.
        on_end: called when a step has ended, before DDP writes the averages.
    """

    def __init__(
        self,
        engine: Engine,
        names: Mapping[int, str] | None = None,
        *,
        hook: str | None = None,
        skips_after: Callable[[int], bool] | None = None,
    ) -> None:
        self.engine = engine
        self.calls = self.check_every = 0
        self.finalizer: Finalizer | None = None
        self.on_begin: Callable[[DDPDriver], None] | None = None
        self.on_end: Callable[[], None] | None = None
        may_miss_last = skips_after is not None or hook is not None
        self.limits = StepLimits(may_miss_last=may_miss_last, skips_after=skips_after)
        self._names: Mapping[int, str] = names if names is not None else {}
        self._by_position = names is None
        self._layouts: dict[tuple[object, ...], BucketLayout] = {}
        self._buckets: dict[int, Bucket] = {}  # by index, reused from step to step
        self._renames = engine.state.identity.renames
        self._count = 0  # buckets of the current step so far
        self._futures: list[
            tuple[TensorFuture, torch.Tensor]
        ] = []  # and their buffers; the end of the step completes them
        self._promises: list[Promise] = []  # their own messages complete them
        # A hook that treats a bucket as one vector resumes from a checkpoint with the checkpoint's buckets.
        by_bucket = engine.reduction.granularity == "bucket" and not engine.transport.elastic
        self._saved = SavedBuckets(engine.state) if by_bucket else None
        self._hook, self._delivers = hook, hook is not None and engine.reduction.delivers
        self._side = SideStream()
        self._arrivals: Arrivals | None = None  # None if ``.grad is None`` tells if a parameter is used
        self._has_local_state = "local" in engine.reduction.fields.values()
        self._model_unknown = self._has_local_state  # then the first bucket searches for the model
        self._models: list[weakref.ref[DistributedDataParallel]] = []  # that have the parameters; empty if unknown
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._places: list[int] = []  # id of each parameter in the order of DDP's own list, once it is needed
        # Of this step, parameters that may be unused: id of the parameter, and if it had a gradient.
        self._absent: dict[str, tuple[int, bool]] = {}
        self._dropped: list[str] = []  # parameters whose average DDP dropped in the last finished step
        if self._has_local_state:
            engine.set_dropped(self._dropped.copy)

    def set_model(self, model: DistributedDataParallel, arrivals: Arrivals | None = None) -> None:
        """Set the model whose gradients are averaged. Without this call the first bucket searches for the model.

        Args:
            model: DDP model.
            arrivals: record of its gradients, if there is one.
        """
        if self._model_unknown:
            self._watch([model], arrivals, whole=True)

    def _watch(
        self, models: Sequence[DistributedDataParallel], arrivals: Arrivals | None = None, *, whole: bool
    ) -> None:
        self._model_unknown, self._models = False, [weakref.ref(model) for model in models]
        for model in models:
            if model.find_unused_parameters and not model.static_graph:
                # A static graph uses a parameter in every step or in none, so ``.grad is None`` suffices there.
                if arrivals is None:
                    arrivals = self._arrivals or Arrivals(whole=whole)
                    arrivals.watch(p for _, p in held_params(model))
                self._arrivals = arrivals
                break
        ends = [model for model in models if model.find_unused_parameters or model.static_graph]
        self._model = weakref.ref(ends[0]) if ends else None

    def _forget_model(self) -> None:
        """Forget a DDP wrapper that is gone. Its module may be in a new wrapper, or a new model may use this hook function."""
        self._models, self._places, self._model_unknown = [], [], True
        self._layouts.clear()
        identity = self.engine.state.identity
        if len(identity.names()) < len(identity.params):  # parameters are gone too, and new ones may have their ids
            self._names = {}
            self.close()

    def _read_dropped(self) -> None:
        """Note the parameters whose average DDP has just dropped, because no rank used them.

        DDP sums the ranks' maps of used parameters in every backward. With ``gradient_as_bucket_view`` a present gradient is
        the average itself. Reading the map takes DDP's lock, which DDP holds while it calls a hook.
        """
        model = self._model() if self._model is not None else None
        absent, self._absent = self._absent, {}
        if model is None:
            return
        used = model.reducer._get_local_used_map().tolist()
        if not self._places:
            try:
                self._places = [id(p) for _, p in averaged_params(model)]
            except AttachError:  # the user has replaced a parameter
                return
        unused = {place for place, count in zip(self._places, used, strict=True) if not count}
        self._dropped[:] = [
            name
            for name, (param, present) in absent.items()
            if param in unused and not (present and model.gradient_as_bucket_view)
        ]

    def close(self) -> None:
        """Remove all hooks from the model's parameters."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    def __call__(self, grad_bucket: GradBucket) -> TensorFuture:
        """Submit one bucket to the engine.

        Returns:
            A future of the average. It completes when the engine has drained the step's last bucket. Inside a user's
            hook it completes with the bucket's own message if that message is the last work on the bucket.
        """
        self.calls += 1
        buffer = grad_bucket.buffer()
        if self.limits.enter(grad_bucket, partial(self._end_backward, buffer), self._interrupt):
            self._begin_step()
        future = future_for(buffer) if self._hook is None else HookFuture.of(buffer, self._hook)
        self._futures.append((future, buffer))
        with self._side.on(buffer):
            try:
                self._take(self._bucket(grad_bucket, buffer), behind_backward())
                if grad_bucket.is_last():
                    self._complete(self._finish_engine())
            except Exception as error:  # the transport failed; an exception here would leave DDP unusable
                self._complete(_typed(error))
        if grad_bucket.is_last():
            self._close_step()
        return future

    def uses_group(self, group: object) -> bool:
        """Return False if the engine reduces over another process group. None means the current default group.

        A transport of another kind stays: a caller of :meth:`.Engine.move` has chosen it.
        """
        transport = self.engine.transport
        wanted = group if group is not None else dist.group.WORLD
        return not isinstance(transport, ProcessGroupTransport) or transport.group is wanted

    def move(self, group: dist.ProcessGroup) -> None:
        """Reduce over another process group from the next step on."""
        transport, timeout = self.engine.transport, self.engine.messenger.timeout
        self.engine.move(transport_over(group, transport.link, free=transport.free, timeout=timeout))

    def _take(self, bucket: Bucket, behind: bool) -> None:
        if behind:  # DDP waits for this future before its next call
            self.engine.run(bucket)
            self._futures.pop()[0].set_result(bucket.storage)
            return
        if self._saved is not None and self._saved.hold(bucket):
            return
        run = self.engine.submit(bucket)
        future, buffer = self._futures[-1]
        if run is not None and isinstance(future, HookFuture):
            self._complete_early(run, future, buffer)

    def _complete_early(self, run: BucketRun, future: HookFuture, buffer: torch.Tensor) -> None:
        """Let the bucket's own message complete a future that a user's hook may wait for, if nothing follows the message."""
        message = run.pending
        if run.done:  # it failed, or it sends nothing
            message = None
        elif message is None or run.due is not None or not self._delivers:
            return  # the end of the step completes the future
        self._futures.pop()
        promise = Promise(future, buffer)
        self._promises.append(promise)
        if message is not None and not buffer.is_cuda:
            message.on_decoded(promise.complete)
            return
        if message is not None:
            message.wait(None)  # the side stream waits, not the host
        promise.complete()

    def _end_backward(self, buffer: torch.Tensor) -> None:
        """End the step with the backward, if this driver got no last bucket."""
        if not self.limits.open:
            return
        self._close_step()
        with self._side.on(buffer):
            try:
                holds = self._saved is not None and self._saved.holds
                error = self._finish_engine() if self.engine.in_step or holds else None
            except Exception as lost:
                error = _typed(lost)
            self._complete(error)

    def _interrupt(self) -> None:
        """Drop the step of a backward that an exception ends, before the user writes to gradients again."""
        if not self.limits.leave():
            self.engine.rollback()  # the last bucket has ended the step, but DDP does not write its averages
        elif self.engine.in_step:
            self.engine.abandon()

    def _close_step(self) -> None:
        """Let the next bucket begin a step."""
        self.limits.leave()
        self._dropped.clear()
        if self._absent and self._model is not None and backward_id() != NO_BACKWARD:
            after_backward(self._read_dropped)
        if self.on_end is not None:
            self.on_end()
        if self._arrivals is not None:
            self._arrivals.begin_step()

    def _finish_engine(self) -> BaseException | None:
        """Finish the engine's step, and return its error."""
        saved = self._saved
        if saved is None:
            return self.engine.finish() or self._compare()
        for bucket in saved.release():
            self.engine.submit(bucket)
        error = self.engine.finish()
        saved.finish()
        return error or self._compare()

    def _begin_step(self) -> None:
        """Begin a step with its first bucket.

        The id of the backward cannot tell steps apart, because reentrant checkpoints nest backwards.
        """
        if self.engine.in_step:
            self.engine.abandon()  # an earlier backward raised before its last bucket
        if self.on_begin is not None:
            self.on_begin(self)
        self._futures.clear()
        self._promises.clear()
        self._absent = {}
        self._count = 0
        if self._saved is not None:
            self._saved.begin()
        if self._by_position and self._renames is not self.engine.state.identity.renames:
            self._renames = self.engine.state.identity.renames  # the user called state.bind(model) after the first step
            self._names = {}
            self._layouts.clear()
        # Under DDP.join a rank without input calls the hook outside of any backward.
        self.engine.set_participating(backward_id() != NO_BACKWARD)
        if self._models and all(model() is None for model in self._models):
            self._forget_model()

    def _bucket(self, grad_bucket: GradBucket, buffer: torch.Tensor) -> Bucket:
        params = grad_bucket.parameters()
        key = (buffer.dtype, buffer.device, buffer.numel(), *map(id, params))
        layout = self._layouts.get(key)
        if layout is None:
            if self._by_position and not all(id(p) in self._names for p in params):
                self._names = named_by_position(self.engine.state, params)
            layout = self._layouts[key] = bucket_layout(grad_bucket, self._names)
            if self._model_unknown:
                self._watch(models_of(params), whole=False)
        unused = frozenset(self._unused(layout, params)) if self._has_local_state else frozenset[str]()
        unsure = self._arrivals is not None and not self._arrivals.whole  # then any parameter may be unused
        if unused or unsure:
            rows = [row for row in zip(layout.params, params, strict=True) if unsure or row[0].name in unused]
            self._absent.update({p.name: (id(param), param.grad is not None) for p, param in rows})
        index, is_last = self._count, grad_bucket.is_last()
        self._count += 1
        found = self._buckets.get(index)
        if found is not None and found.storage is buffer and found.layout is layout and found.is_last == is_last:
            found.unused = unused
            return found
        if index == 0:
            self._buckets.clear()  # DDP has rebuilt its buckets, or this is a sparse one
        bucket = Bucket(layout, buffer, index, is_last, unused)
        if self.engine.step.keep:
            self._buckets[index] = bucket
        return bucket

    def _unused(self, layout: BucketLayout, params: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters without a gradient.

        DDP drops the average of a parameter that no rank used. A residual inside that average would be lost.
        """
        arrivals = self._arrivals
        if arrivals is None:
            return [entry.name for entry, p in zip(layout.params, params, strict=True) if p.grad is None]
        return [entry.name for entry, p in zip(layout.params, params, strict=True) if arrivals.unused(p)]

    def _compare(self) -> BaseException | None:
        """Compare the reduced gradients of all ranks every :attr:`check_every` steps. Return the error to raise."""
        if not self.check_every or self.engine.counters.steps % self.check_every:
            return None
        mine = gradient_checksum(buffer for _, buffer in self._futures)
        return mismatch(self.engine.reduction.name, self.engine.gather(mine))

    def _complete(self, error: BaseException | None) -> None:
        """Complete all futures of the step, and raise its error from ``backward()``."""
        if self.finalizer is not None:
            self.finalizer.last_bucket_arrived()
        for future, buffer in self._futures:
            with self._side.on(buffer):
                future.set_result(buffer)
        for promise in self._promises:
            promise.complete()  # completes promises of lost messages only
        self._futures.clear()
        self._promises.clear()
        if error is not None:
            raise_finalized(error)


def _typed(error: Exception) -> CommHooksError:
    if isinstance(error, CommHooksError):
        return error
    lost = TransportError(f"{type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost
