"""Attach a hook to :class:`ch_ft.DistributedDataParallel`: an engine over the manager, driven by DDP's buckets."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch

from ch_core import Engine, Work
from ch_ddp import DDPDriver, SlotBinding, acquire_slot, raise_finalized
from ch_ft import fingerprints, healing
from ch_ft.attempts import ManagedSteps
from ch_ft.ddp import DistributedDataParallel, PlainDriver
from ch_ft.transport import ManagerTransport, collectives_for
from ch_ft.used_params import UsedParams
from commhooks import (
    AttachError,
    AttachOptions,
    Bucket,
    CommHook,
    HookNotSupportedError,
    TransportError,
)


class ManagedDriver(DDPDriver):
    """Turns the hook calls of a model into steps that the manager commits.

    Args:
        engine: engine of the attached hook.
        steps: attempts of that engine.
        names: ``id(parameter)`` -> name.
        used: parameters that the model used. Its map travels with the last bucket.
        agreement: called at the beginning of every step. It raises if members differ.
    """

    def __init__(
        self,
        engine: Engine,
        steps: ManagedSteps,
        names: Mapping[int, str],
        used: UsedParams,
        agreement: Callable[[], None],
    ) -> None:
        super().__init__(engine, names)
        self.steps, self.used, self._agreement = steps, used, agreement
        self._asked: tuple[torch.Tensor, Work] | None = None  # map of used parameters in flight

    def _begin_step(self) -> None:
        super()._begin_step()
        self._asked = None
        self.used.forget()
        self.steps.enter(self._agreement)

    def _take(self, bucket: Bucket, behind: bool) -> None:
        super()._take(bucket, behind)
        if bucket.is_last:
            everywhere = self.used.map(bucket.device)  # (params,)
            self._asked = everywhere, self.engine.transport.all_reduce(everywhere, "max")

    def _complete(self, error: BaseException | None) -> None:
        asked, self._asked = self._asked, None
        error = error or self._share_used(asked)
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()
        if self.finalizer is not None:
            self.finalizer.last_bucket_arrived()
        raised = None if error is None else self.steps.lost(error)
        if raised is not None:
            raise_finalized(raised)

    def _share_used(self, asked: tuple[torch.Tensor, Work] | None) -> TransportError | None:
        """Receive the map of used parameters. Return the error if a peer was lost."""
        if asked is None:
            return None
        everywhere, work = asked
        try:
            work.wait(None)
        except TransportError as lost:
            self.engine.transport.abort()
            return lost
        self.used.share(everywhere, self.engine.participating)
        return None


class ManagedBinding(SlotBinding):
    """Hook in place on a :class:`ch_ft.DistributedDataParallel`."""

    engine: Engine

    def __init__(self, model: DistributedDataParallel, handle: CommHook, options: AttachOptions) -> None:
        if options.process_group is not None:
            raise AttachError("this model reduces over its manager: leave process_group out of attach()")
        if options.link is not None:
            raise AttachError(
                "link= needs ranks that stay, and this model's members join and leave: leave it out of attach()"
            )
        if handle.reduction is None:
            raise HookNotSupportedError(
                f"{handle.expr} is a foreign hook: it needs a process group, and this model has a manager. Use a hook by "
                "name, or write it as a Reduction"
            )
        if handle.hook_state is None:
            raise AttachError(f"the state of {handle.expr} must be a HookState; got {type(handle.state).__name__}")
        super().__init__(model)
        manager = model.full_manager()
        self._transport = ManagerTransport(manager, model.fail_fast, collectives_for(handle.reduction, manager))
        self.engine = Engine(handle.reduction, self._transport, handle.hook_state, timeout=None)
        # Errors of a plan are raised here, not in the first backward.
        plans = [self.engine.plan(layout) for layout in self._layouts]
        self.steps = ManagedSteps(self.engine, self._transport, manager, options, model.module.parameters)
        self.fingerprint = {
            **fingerprints.of_handle(handle),
            "collectives": fingerprints.short_hash(repr(plans)),
            "parameters": f"{len(self.layout.params)} tensors, {self.layout.size} numbers, "
            + fingerprints.short_hash(
                repr([(p.name, p.shape, str(one.dtype)) for one in self._layouts for p in one.params])
            ),
            "bucket_cap_mb": f"{model.bucket_bytes_cap / 2**20:g}",
        }
        agreement = partial(_agree, self.engine, self._transport, self.fingerprint if options.verify_ranks else {})
        driver = ManagedDriver(self.engine, self.steps, self.names, model.used, agreement)
        driver.set_model(model)
        self.place(acquire_slot(model, model.plain), driver, handle.expr)
        self._transferred = healing.transferred(model, manager)
        self._transferred.serve(self.engine, self.fingerprint)
        weakref.finalize(model, self._transferred.serve, None, {}).atexit = False  # the manager may outlive the model

    def check(self) -> None:
        """Raise nothing: the next attempt repeats a lost step."""

    def plain(self) -> PlainDriver | None:
        model = self._model()
        return model.plain() if isinstance(model, DistributedDataParallel) else None

    def detach(self) -> None:
        super().detach()
        self._transferred.serve(None, {})
        self.steps.close()


def _agree(engine: Engine, transport: ManagerTransport, fingerprint: fingerprints.Fingerprint) -> None:
    """Compare the members, and find the first reference of their weights."""
    if fingerprint:
        engine.set_first_weights(fingerprints.agree(transport, fingerprint, engine.first_weight()))


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> ManagedBinding:
    """Attach a hook to a :class:`ch_ft.DistributedDataParallel`. The plugin hook ``commhooks_adapter`` names it."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return ManagedBinding(model, handle, options)


def refuse_pure(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> ManagedBinding:
    """Refuse to attach to :class:`ch_ft.PureDistributedDataParallel`, which has no buckets."""
    raise AttachError(
        f"{type(model).__name__} averages each gradient by itself and has no buckets for {handle.expr}. Use "
        "ch_ft.DistributedDataParallel"
    )
