"""The adapter of manager-backed models: a handle's reduction over the manager, its steps in the manager's hands."""

import hashlib

import torch

from ch_ddp.adapter import Finalizer, acquire_slot, averaged, model_layout
from ch_ft import agreement, healing
from ch_ft.ddp import DistributedDataParallel
from ch_ft.ddp_drivers import ManagedDriver
from ch_ft.managed_engine import ManagedEngine, attempts_of
from ch_ft.replica_groups import watched
from ch_ft.transport import ManagerTransport, exchange_for
from ch_ft.versions import installed
from commhooks import AttachError, BucketLayout, CommHook, HookNotSupportedError, HookState
from commhooks.adapters import AttachOptions, Binding


class ManagedBinding(Binding):
    """A handle in place on a manager-backed model."""

    engine: ManagedEngine

    def __init__(self, model: DistributedDataParallel, handle: CommHook, options: AttachOptions) -> None:
        if options.process_group is not None:
            raise AttachError("this model reduces over its manager; give attach() no process_group")
        if handle.reduction is None:
            raise HookNotSupportedError(
                f"{handle.expr} is a foreign hook: it talks to a process group, and here there is only a manager. Use "
                "a hook by name, or write it as a Reduction"
            )
        if not isinstance(handle.state, HookState):
            raise AttachError(f"the state of {handle.expr} is a HookState; got {type(handle.state).__name__}")
        self.model = model
        self.layout, self.params = model_layout(model), [p for _, p in averaged(model)]
        manager = model.full_manager()
        exchange = exchange_for(handle.reduction, manager)
        watch = watched(manager, options, model.module.parameters())
        transport = ManagerTransport(manager, model.fail_fast, exchange)
        self.engine = ManagedEngine(handle.reduction, transport, manager, handle.state)
        plan = self.engine.plan(self.layout)  # raises here, if it must, and not in the first backward pass
        self.fingerprint = fingerprint(model, handle, self.layout, repr(plan))
        names = {id(p): name for name, p in model.module.named_parameters()}
        self._slot = acquire_slot(model, model.plain)
        self._driver = ManagedDriver(
            self.engine, names, model.used, self._agree if options.verify_ranks else lambda: None
        )
        self._driver.finalizer = Finalizer.of(model)
        self._driver.follow(model)
        self._slot.driver, self._slot.holder = self._driver, handle.expr
        self.engine.votes.optimizer = watch
        if watch is not None and options.scaler is not None:
            self.engine.set_loss_scale(watch.scale)
        attempts_of(manager).voters.add(self)
        self._transferred = healing.transferred(model, manager)
        self._transferred.serve(self.engine, self.fingerprint)

    @property
    def calls(self) -> int:
        return self._driver.calls

    def check(self) -> None:
        self._driver.check()

    def detach(self) -> None:
        self._slot.driver, self._slot.holder = self.model.plain(), None
        self._driver.close()
        self._transferred.serve(None, {})
        if self.engine.votes.optimizer is not None:
            self.engine.votes.optimizer.close()

    # -- the step's transaction

    def before_vote(self) -> None:
        self.engine.known_before_vote()

    def after_vote(self, committed: bool) -> None:
        self.engine.resolve(committed)

    def _agree(self) -> None:
        agreement.agree(self.engine.transport, self.fingerprint)


def fingerprint(
    model: DistributedDataParallel, handle: CommHook, layout: BucketLayout, plan: str
) -> agreement.Fingerprint:
    """What all members must have in common, or their collectives would not match."""
    shapes = repr([(p.name, p.shape) for p in layout.params]) + str(layout.dtype)
    return {
        "hook": handle.expr,
        "options and providers": f"sha {_sha(repr(handle.identity))}",
        "collectives": f"sha {_sha(plan)}",
        "parameters": f"{len(layout.params)} tensors, {layout.size} numbers, sha {_sha(shapes)}",
        "bucket_cap_mb": f"{model.bucket_bytes_cap / 2**20:g}",
        "commhooks": installed("ch-core") or "",
        "torch": torch.__version__.split("+")[0],
    }


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> ManagedBinding:
    """The ``commhooks_adapter`` of :class:`ch_ft.DistributedDataParallel`."""
    assert isinstance(model, DistributedDataParallel)  # noqa: S101 - the registry matched the class
    return ManagedBinding(model, handle, options)


def refuse_pure(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> ManagedBinding:
    """The adapter of :class:`ch_ft.PureDistributedDataParallel`: there are no buckets to hook into."""
    raise AttachError(
        f"{type(model).__name__} averages each gradient by itself and has no buckets for {handle.expr} to work on; use "
        "ch_ft.DistributedDataParallel"
    )
