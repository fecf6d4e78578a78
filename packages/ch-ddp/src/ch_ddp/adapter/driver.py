"""Driver of one DDP model: turns DDP's hook calls into steps of one engine.

Also detects the parameters that a backward did not use.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.finalization import Finalizer, raise_finalized
from ch_ddp.adapter.futures import HookFuture, Promise, behind_backward, future_for
from ch_ddp.adapter.layout import averaged_params, bucket_layout, models_of, named_by_position
from ch_ddp.adapter.result_checks import gradient_checksum, mismatch
from ch_ddp.adapter.saved_buckets import SavedBuckets
from commhooks import Bucket, BucketLayout, CommHooksError, GradBucket, TransportError
from commhooks.adapters import (
    NO_BACKWARD,
    BucketRun,
    Engine,
    ProcessGroupTransport,
    SideStream,
    after_backward,
    at_end_of_backward,
    backward_id,
    if_interrupted,
)

TensorFuture = torch.futures.Future[torch.Tensor]


class DDPDriver:
    """Turns the hook calls of one DDP model into steps of one engine.

    DDP does not announce a step, so the driver derives its limits from the hook calls:

    - A step begins with a call after the end of the last step. It also begins if the index of the bucket does not grow: then an
      earlier backward raised before its last bucket. See :meth:`begins_step`.
    - A step ends with the bucket that DDP marks as the last. In the first iteration of a static graph no bucket is marked, and
      a user's hook may keep the last bucket for itself. Then the step ends with the backward (:meth:`_end_backward`).

    Args:
        engine: engine to drive.
        names: ``id(parameter)`` -> name. None names parameters by their position in their model.
        hook: name of a hook function that users may call inside their own hooks. Such a user may wait for the future,
            and may pass only some of the buckets.
    """

    def __init__(self, engine: Engine, names: Mapping[int, str] | None = None, *, hook: str | None = None) -> None:
        self.engine = engine
        self.calls = self.check_every = 0
        self.finalizer: Finalizer | None = None
        self.index: int | None = None  # index of the newest bucket; None between steps
        self._names: Mapping[int, str] = names if names is not None else {}
        self._by_position = names is None
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self._buckets: dict[int, Bucket] = {}  # by index, reused from step to step
        self._renames = engine.state.renames
        self._count = 0  # buckets of the current step so far
        self._futures: list[
            tuple[TensorFuture, torch.Tensor]
        ] = []  # and their buffers; the end of the step completes them
        self._promises: list[Promise] = []  # their own messages complete them
        # A hook that treats a bucket as one vector resumes from a checkpoint with the checkpoint's buckets.
        by_bucket = engine.reduction.granularity == "bucket" and not engine.transport.elastic
        self._saved = SavedBuckets(engine.state) if by_bucket else None
        self._hook, self._delivers = hook, hook is not None and engine.reduction.delivers
        self._task = NO_BACKWARD  # id of the backward of the newest bucket
        self._side = SideStream()
        self._used: UsedParameters | None = None
        self._has_local_state = "local" in engine.reduction.fields.values()
        self._model_unknown = self._has_local_state  # then the first bucket searches for the model
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._absent: dict[str, tuple[torch.Tensor, bool]] = {}  # of this step: parameter, and if it had a gradient
        self._dropped: list[str] = []  # parameters whose average DDP dropped in the last finished step
        if self._has_local_state:
            engine.set_dropped(self._dropped.copy)

    def set_model(self, model: DistributedDataParallel) -> None:
        """Set the model whose gradients are averaged. Without this call the first bucket searches for the model."""
        if self._model_unknown:
            self._watch([model], whole=True)

    def _watch(self, models: Sequence[DistributedDataParallel], *, whole: bool) -> None:
        self._model_unknown, self._used = False, watch_used_parameters(models, whole=whole)
        ends = [model for model in models if model.find_unused_parameters or model.static_graph]
        self._model = weakref.ref(ends[0]) if ends else None

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
        places = {id(p): place for place, (_, p) in enumerate(averaged_params(model))}
        if len(used) != len(places):  # a parameter was frozen or thawed after the model was wrapped
            return
        self._dropped[:] = [
            name
            for name, (param, present) in absent.items()
            if id(param) in places and not used[places[id(param)]] and not (present and model.gradient_as_bucket_view)
        ]

    def close(self) -> None:
        """Remove all hooks from the model's parameters."""
        if self._used is not None:
            self._used.close()
            self._used = None

    def __call__(self, grad_bucket: GradBucket) -> TensorFuture:
        """Submit one bucket to the engine.

        Returns:
            A future of the average. It completes when the engine has drained the step's last bucket. Inside a user's
            hook it completes with the bucket's own message if that message is the last work on the bucket.
        """
        self.calls += 1
        index, behind, task, buffer = grad_bucket.index(), behind_backward(), backward_id(), grad_bucket.buffer()
        begins = self.begins_step(index, behind)
        if begins:
            self._begin_step()
        if (begins or task != self._task) and task != NO_BACKWARD:
            if_interrupted(self._interrupt)
            if behind or self._hook is not None:
                at_end_of_backward(partial(self._end_backward, buffer))  # a last bucket may never arrive
        self.index, self._task = index, task
        future = future_for(buffer) if self._hook is None else HookFuture.of(buffer, self._hook)
        self._futures.append((future, buffer))
        with self._side.on(buffer):
            try:
                self._take(self._bucket(grad_bucket, buffer), behind)
                if grad_bucket.is_last():
                    self._complete(self._finish_engine())
            except Exception as error:  # the transport failed; an exception here would leave DDP unusable
                self._complete(_typed(error))
        if grad_bucket.is_last():
            self._close_step()
        return future

    def uses_group(self, group: object) -> bool:
        """Return True if the engine reduces over this process group. None means the current default group."""
        transport = self.engine.transport
        wanted = group if group is not None else dist.group.WORLD
        return isinstance(transport, ProcessGroupTransport) and transport.group is wanted

    def begins_step(self, index: int, behind: bool) -> bool:
        """Return True if a bucket of this index is the first of a step.

        The first index is not always 0, because a user's hook may send some buckets elsewhere. All buckets of a call after the
        graph (``behind``) have index 0, so the id of the backward tells them apart.
        """
        if self.index is None:
            return True
        return index <= self.index and not (behind and self._task == backward_id())

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
        if self.index is None:
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
        if self.index is not None and self.engine.in_step:
            self.engine.abandon()
        self.index = None

    def _close_step(self) -> None:
        """Let the next bucket begin a step."""
        self.index = None
        self._dropped.clear()
        if self._absent and self._model is not None and backward_id() != NO_BACKWARD:
            after_backward(self._read_dropped)
        if self._used is not None:
            self._used.begin_step()

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

    def check(self) -> None:
        """Raise the error of the last step. CPU models raise it from ``backward()``, CUDA models one step later."""
        error = self.engine.failure or self.engine.outcome.take_error()
        if error is not None:
            raise error

    def _begin_step(self) -> None:
        """Begin a step with its first bucket.

        The id of the backward cannot tell steps apart, because reentrant checkpoints nest backwards.
        """
        if self.engine.in_step:
            self.engine.abandon()  # an earlier backward raised before its last bucket
        self._futures.clear()
        self._promises.clear()
        self._absent = {}
        self._count = 0
        if self._saved is not None:
            self._saved.begin()
        if self._by_position and self._renames is not self.engine.state.renames:
            self._renames = self.engine.state.renames  # the user called state.bind(model) after the first step
            self._names = {}
            self._layouts.clear()
        # Under DDP.join a rank without input calls the hook outside of any backward.
        self.engine.set_participating(backward_id() != NO_BACKWARD)

    def _bucket(self, grad_bucket: GradBucket, buffer: torch.Tensor) -> Bucket:
        params = grad_bucket.parameters()
        key = (buffer.numel(), *map(id, params))
        layout = self._layouts.get(key)
        if layout is None:
            if self._by_position and not all(id(p) in self._names for p in params):
                self._names = named_by_position(self.engine.state, params)
            layout = self._layouts[key] = bucket_layout(grad_bucket, self._names)
            if self._model_unknown:
                self._watch(models_of(params), whole=False)
        unused = frozenset(self._unused(layout, params)) if self._has_local_state else frozenset[str]()
        if unused:
            rows = zip(layout.params, params, strict=True)
            self._absent.update({p.name: (param, param.grad is not None) for p, param in rows if p.name in unused})
        index, is_last = self._count, grad_bucket.is_last()
        self._count += 1
        found = self._buckets.get(index)
        if found is not None and found.storage is buffer and found.layout is layout and found.is_last == is_last:
            found.unused = unused
            return found
        if index == 0:
            self._buckets.clear()  # DDP has rebuilt its buckets, or this is a sparse one
        bucket = Bucket(layout, buffer, index, is_last, unused)
        if self.engine.buckets.keep:
            self._buckets[index] = bucket
        return bucket

    def _unused(self, layout: BucketLayout, params: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters without a gradient.

        DDP drops the average of a parameter that no rank used. A residual inside that average would be lost.
        """
        used = self._used
        if used is None:
            return [entry.name for entry, p in zip(layout.params, params, strict=True) if p.grad is None]
        return [entry.name for entry, p in zip(layout.params, params, strict=True) if used.is_unused(p)]

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


class UsedParameters:
    """Detects which parameters a step used, by DDP's definition.

    A parameter is used if a gradient was added to its ``.grad`` since the last averaged backward, under ``no_sync()``
    too. The value of ``.grad`` proves nothing, because ``zero_grad(set_to_none=False)`` leaves zeros in it.

    Args:
        model: DDP model.
        whole: True if the watch starts before the first step.
    """

    def __init__(self, model: DistributedDataParallel, *, whole: bool) -> None:
        self._whole = whole
        self._arrived: set[int] = set()
        trained = [p for _, p in averaged_params(model) if p.requires_grad]
        self._watched = {id(p) for p in trained}
        arrive = _adder(self._arrived)
        self._hooks = [p.register_post_accumulate_grad_hook(arrive) for p in trained]
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def is_unused(self, param: torch.Tensor) -> bool:
        """Return True if the parameter got no gradient in this step."""
        if param.grad is None:
            return True
        return self._whole and id(param) in self._watched and id(param) not in self._arrived

    def begin_step(self) -> None:
        """Begin the next step. The backward of the last one was averaged."""
        self._arrived.clear()
        self._whole = True

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        _remove(self._hooks)


def watch_used_parameters(models: Sequence[DistributedDataParallel], *, whole: bool) -> UsedParameters | None:
    """Watch the first model that may leave parameters without a gradient. Return None if there is no such model.

    A static graph uses a parameter in every step or in none, so ``.grad is None`` suffices there.
    """
    for model in models:
        if model.find_unused_parameters and not model.static_graph:
            return UsedParameters(model, whole=whole)
    return None


def _adder(arrived: set[int]) -> Callable[[torch.Tensor], None]:
    """Return the hook of every parameter. It references the set only, so that a dropped driver is freed."""

    def arrive(param: torch.Tensor) -> None:
        arrived.add(id(param))

    return arrive


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
