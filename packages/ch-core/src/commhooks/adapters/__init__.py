"""The API of an adapter's author: what puts a hook in place on another kind of wrapped model builds on this alone.

An adapter is a function ``adapter(model, handle, options) -> Binding``, named with the wrapper's class by the plugin hook
``commhooks_adapter``; :func:`commhooks.attach` calls it. It starts no collective: the ranks have not agreed yet. What it
makes is a :class:`Binding`, which says what is in place, and takes it out again.

**What it is given**: the model, the :class:`~commhooks.CommHook` (its ``reduction``, ``None`` for a foreign function, its
``state``, and its ``identity``, data to compare ranks by) and the :class:`AttachOptions`.

**How to drive an engine.** An :class:`Engine` runs one reduction over one group of ranks, a :class:`Transport`: a
:class:`ProcessGroupTransport`, or one of your own. Give it every part of a backward's gradient as a
:class:`~commhooks.Bucket`, in the same order on every rank: :meth:`~Engine.submit` if more follow that it can overlap with
(what is under way of it is an :class:`BucketRun`), or :meth:`~Engine.run` if the wrapper uses the average as soon as you
return. Then say :meth:`~Engine.finish` once, which ends
the step and gives the error to raise, the same decision on every rank; in between, who has other work to do may
:meth:`~Engine.advance` what is under way. Raise it with :func:`raise_after_backward`, not from
inside the wrapper's hook. A backward that was cut short by an exception is :meth:`~Engine.abandon`-ed before the next. On
CUDA, run the engine inside a :class:`SideStream`, unless the wrapper calls you on a stream of its own. Several engines that
end their steps together, one an axis of a mesh, are an :class:`EngineGroup`; a single bucket without any step, as in a plain
function, is :class:`Immediate`. Where each rank wants its own part of the average only (a sharded model), drive the engine with
:class:`Scattered` around the reduction, and with the buckets that it makes.

**When a backward ends**: :func:`backward_id` tells one from another (:data:`NO_BACKWARD`: none runs), and
:func:`at_end_of_backward` and :func:`after_backward` call back, before and after the wrapper's own callback.

**What became of a step**: its :class:`StepOutcome`, ``engine.outcome``, is what the ranks have told one another: it failed, or
it is finite. Whether it was used is another matter. :func:`watch_optimizer` has the optimizer and scaler given to ``attach`` say
that, by an :class:`OptimizerWatch` which ``detach`` has to close. A wrapper that has another judge (a vote) gives the engine its
own :class:`StepJudge` by :meth:`~Engine.set_judge`.

**A transport of one's own** has the members of :class:`Transport`; what it starts is :class:`Work`. Over a process group that
torch does not know by name, :class:`ProcessGroupWork` gives torch's works a deadline and typed errors. :class:`CpuTuning` says
how an engine sends messages on a CPU; :data:`TUNED` is what it does unless told otherwise, and ``TUNED.wait`` waits for a
collective of an adapter's own as an engine does.

**Between groups that come and go** (``attach(manager=)``): an adapter that serves a model inside one group asks
:func:`manager_adapter` for the :class:`ManagerAdapter` of the manager's class, gives it the :data:`Layouts` of its model, and
drives the engine of the :class:`ManagedAxis` that it makes. ``commhooks.Reducer(manager=)`` does the same with its tensors.

**Whether ranks agree.** ``attach`` compares the ranks of ``Binding.group`` by itself. An adapter with several groups compares
along each with :func:`agree_along`, a :class:`Fingerprint` of fields and lines over the group's store (:func:`digest` makes a
line of a tensor), or over any other exchange with :func:`agree`; whatever else it has to
exchange before the first collective goes through a :class:`StoreExchange`.

Example: an adapter of a wrapper that calls one function with all gradients, on each rank, at the end of a backward.

    >>> import torch, torch.distributed as dist
    >>> import commhooks
    >>> from commhooks.adapters import AttachOptions, Binding, Engine, ProcessGroupTransport
    >>> from commhooks.adapters import raise_after_backward, watch_optimizer
    >>> class Wrapper(torch.nn.Module):  # somebody else's
    ...     def __init__(self, module):
    ...         super().__init__()
    ...         self.module, self.process_group, self.reduce = module, dist.group.WORLD, lambda grads: None
    ...         self.waiting = set(module.parameters())
    ...         for param in module.parameters():
    ...             _ = param.register_post_accumulate_grad_hook(self.arrived)
    ...
    ...     def arrived(self, param):
    ...         self.waiting.discard(param)
    ...         if not self.waiting:
    ...             self.reduce([p.grad for p in self.module.parameters()])
    ...             self.waiting = set(self.module.parameters())
    ...
    >>> class WrapperBinding(Binding):
    ...     calls = 0
    ...
    ...     def __init__(self, model, handle, options):
    ...         if handle.reduction is None:
    ...             raise commhooks.HookNotSupportedError(f"{handle.expr} is a foreign function: give a reduction by name")
    ...         named = dict(model.module.named_parameters())
    ...         self.layout, self.params = commhooks.BucketLayout.of_tensors(named), list(named.values())
    ...         self.group = options.process_group or model.process_group
    ...         transport = ProcessGroupTransport(self.group)
    ...         self.engine = Engine(handle.reduction, transport, handle.state, timeout=options.timeout)
    ...         self.watch = watch_optimizer(self.engine, options, self.params)
    ...         self.model, model.reduce = model, self.reduce
    ...
    ...     def reduce(self, grads):
    ...         self.calls += 1
    ...         if self.engine.in_step:
    ...             self.engine.abandon()  # an exception ended the backward before
    ...         bucket = commhooks.Bucket(self.layout, torch.empty(self.layout.numel), is_last=True)
    ...         for param, grad in zip(self.layout.params, grads):
    ...             bucket.view(param.name).copy_(grad)
    ...         self.engine.submit(bucket)
    ...         error = self.engine.finish()
    ...         for param, grad in zip(self.layout.params, grads):
    ...             grad.copy_(bucket.view(param.name))
    ...         if error is not None:
    ...             raise_after_backward(error)
    ...
    ...     def detach(self):
    ...         self.model.reduce = lambda grads: [dist.all_reduce(g, dist.ReduceOp.AVG, self.group) for g in grads]
    ...         if self.watch is not None:
    ...             self.watch.close()
    ...
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = Wrapper(torch.nn.Linear(64, 64))
    >>> handle = commhooks.create("powersgd(rank=2, min_compression_rate=1)")
    >>> handle.bind(WrapperBinding(model, handle, AttachOptions()))  # commhooks.attach does this, by the wrapper's class
    >>> for _ in range(2):
    ...     model.module(torch.ones(1, 64)).sum().backward()
    >>> handle.stats()["compressed_steps"]
    2.0
    >>> dist.destroy_process_group()
"""

from typing import TYPE_CHECKING

from commhooks._lazy import lazy

if TYPE_CHECKING:
    from commhooks.adapters.backward import (
        NO_BACKWARD,
        after_backward,
        at_end_of_backward,
        backward_id,
        raise_after_backward,
    )
    from commhooks.adapters.base import AttachOptions, Binding
    from commhooks.adapters.managed import Layouts, ManagedAxis, ManagerAdapter, manager_adapter
    from commhooks.adapters.optimizer_watch import OptimizerWatch, watch_optimizer
    from commhooks.agreement import Fingerprint, StoreExchange, agree, agree_along
    from commhooks.compositions.scattered import Scattered
    from commhooks.engine.bucket_run import BucketRun
    from commhooks.engine.engine import Engine
    from commhooks.engine.group import EngineGroup
    from commhooks.engine.immediate import Immediate
    from commhooks.engine.outcome import StepOutcome
    from commhooks.engine.schedule import TUNED, CpuTuning
    from commhooks.engine.status import StepJudge
    from commhooks.engine.streams import SideStream
    from commhooks.fingerprint import digest
    from commhooks.transport.base import Transport, Work
    from commhooks.transport.process_group import ProcessGroupTransport, ProcessGroupWork

__all__ = [
    "NO_BACKWARD",
    "TUNED",
    "AttachOptions",
    "Binding",
    "BucketRun",
    "CpuTuning",
    "Engine",
    "EngineGroup",
    "Fingerprint",
    "Immediate",
    "Layouts",
    "ManagedAxis",
    "ManagerAdapter",
    "OptimizerWatch",
    "ProcessGroupTransport",
    "ProcessGroupWork",
    "Scattered",
    "SideStream",
    "StepJudge",
    "StepOutcome",
    "StoreExchange",
    "Transport",
    "Work",
    "after_backward",
    "agree",
    "agree_along",
    "at_end_of_backward",
    "backward_id",
    "digest",
    "manager_adapter",
    "raise_after_backward",
    "watch_optimizer",
]

__getattr__, __dir__ = lazy(
    "commhooks",
    {
        "adapters.backward": "NO_BACKWARD after_backward at_end_of_backward backward_id raise_after_backward",
        "adapters.base": "AttachOptions Binding",
        "adapters.managed": "Layouts ManagedAxis ManagerAdapter manager_adapter",
        "adapters.optimizer_watch": "OptimizerWatch watch_optimizer",
        "agreement": "Fingerprint StoreExchange agree agree_along",
        "compositions.scattered": "Scattered",
        "engine.bucket_run": "BucketRun",
        "engine.engine": "Engine",
        "engine.group": "EngineGroup",
        "engine.immediate": "Immediate",
        "engine.schedule": "TUNED CpuTuning",
        "engine.status": "StepJudge",
        "engine.streams": "SideStream",
        "engine.outcome": "StepOutcome",
        "fingerprint": "digest",
        "transport.base": "Transport Work",
        "transport.process_group": "ProcessGroupTransport ProcessGroupWork",
    },
)
