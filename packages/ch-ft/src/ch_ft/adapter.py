"""The adapter of manager-backed models: a handle's reduction over the manager, its steps in the manager's hands."""

import hashlib
from typing import Any

import torch

from ch_ft import agreement, transfer
from ch_ft.ddp import DistributedDataParallel
from ch_ft.drivers import ManagedDriver
from ch_ft.transaction import ManagedEngine, enrol
from ch_ft.transport import ManagerTransport, refuse_unfit
from commhooks._metadata import version
from commhooks.attaching import AttachOptions
from commhooks.bucket import BucketLayout
from commhooks.errors import AttachError, HookNotSupportedError
from commhooks.handle import CommHook
from commhooks.state import HookState
from commhooks.trampoline import claim, model_layout


class ManagedBinding:
    """A handle in place on a manager-backed model."""

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
        refuse_unfit(handle.reduction)
        self.model = model
        self.layout: BucketLayout = model_layout(model.module)
        manager = model.full_manager()
        self.engine = ManagedEngine(handle.reduction, ManagerTransport(manager, model.fail_fast), handle.state)
        plan = self.engine.plan(self.layout)  # raises here, if it must, and not in the first backward pass
        self.fingerprint = fingerprint(model, handle, self.layout, repr(plan))
        names = {id(p): name for name, p in model.module.named_parameters()}
        self._slot = claim(model, model.plain)
        self._driver = ManagedDriver(self.engine, names, self._agree if options.verify_ranks else lambda: None)
        self._slot.driver, self._slot.holder = self._driver, handle.expr
        enrol(manager, self)
        transferred(model).binding = self

    @property
    def calls(self) -> int:
        return self._driver.calls

    def stats(self) -> dict[str, float]:
        return self.engine.counters.as_dict()

    def check(self) -> None:
        self._driver.check()

    def detach(self) -> None:
        self._slot.driver, self._slot.holder = self.model.plain(), None
        transferred(self.model).binding = None

    # -- the step's transaction

    def before_vote(self) -> None:
        """On CUDA, where a failure elsewhere becomes known late, make sure that it is known before the vote."""
        error = self.engine.judge()
        if error is not None:
            self.engine.rollback()
            self.model.manager.report_error(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def after_vote(self, committed: bool) -> None:
        self.engine.resolve(committed)

    def _agree(self) -> None:
        agreement.agree(self.engine.transport, self.fingerprint)


class Transferred:
    """What the manager sends to a healing member for one model: registered once, whatever is attached later."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.binding: ManagedBinding | None = None
        manager = model.full_manager()
        count = _COUNTS.get(manager, 0)
        _COUNTS[manager] = count + 1
        manager.register_state_dict_fn(f"commhooks.{count}", self.load, self.save)

    def save(self) -> dict[str, Any]:
        if self.binding is None:
            return {}
        return transfer.save(self.binding.engine, self.binding.fingerprint)

    def load(self, saved: dict[str, Any]) -> None:
        if self.binding is not None:
            transfer.load(self.binding.engine, self.binding.fingerprint, saved)


_COUNTS = torch.utils.weak.WeakIdKeyDictionary()  # manager -> models with a hook
_TRANSFERRED = torch.utils.weak.WeakIdKeyDictionary()  # model -> Transferred


def transferred(model: DistributedDataParallel) -> Transferred:
    """The model's entry in what its manager transfers."""
    found: Transferred | None = _TRANSFERRED.get(model)
    if found is None:
        found = _TRANSFERRED[model] = Transferred(model)
    return found


def fingerprint(
    model: DistributedDataParallel, handle: CommHook, layout: BucketLayout, plan: str
) -> agreement.Fingerprint:
    """What all members must have in common, or their collectives would not match."""
    shapes = repr([(p.name, p.shape) for p in layout.params]) + str(layout.dtype)
    return {
        "hook": handle.expr,
        "options and providers": f"sha {_sha(repr(handle.full))}",
        "collectives": f"sha {_sha(plan)}",
        "parameters": f"{len(layout.params)} tensors, {layout.size} numbers, sha {_sha(shapes)}",
        "bucket_cap_mb": f"{model.bucket_bytes_cap / 2**20:g}",
        "commhooks": version("ch-core") or "",
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
