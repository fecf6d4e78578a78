"""The API for authors of adapters, which put a hook in place on other kinds of wrapped models.

An adapter is a function ``adapter(model, handle, options) -> Binding``. The plugin hook ``commhooks_adapter`` registers it
with the name of the wrapper's class, and :func:`commhooks.attach` calls it. The ranks have not agreed yet at that time, so an
adapter starts no collective. It returns a :class:`Binding`, which represents the hook on the model and can remove it.

**Arguments.** The model; the :class:`~commhooks.CommHook`; the :class:`AttachOptions`. The handle has a ``reduction``
(``None`` for a foreign function), a ``state``, and an ``identity``, by which ranks are compared.

**Drive an engine.** An :class:`Engine` runs one reduction over the ranks of one :class:`Transport`, such as a
:class:`ProcessGroupTransport`. Give it each part of a backward's gradient as a :class:`~commhooks.Bucket`, in the same order
on every rank.

- :meth:`~Engine.submit` takes a bucket and returns its :class:`BucketRun`. Use it if more buckets follow that may overlap.
- :meth:`~Engine.run` takes a bucket and returns when it holds the average.
- :meth:`~Engine.advance` moves the buckets in flight forward while other work runs.
- :meth:`~Engine.finish` ends the step and returns the error to raise, on all ranks or on none. Raise it with
  :func:`raise_after_backward`, not inside the wrapper's hook.
- :meth:`~Engine.abandon` drops the step of a backward that an exception has ended.

On a GPU, run the engine inside a :class:`SideStream`, unless the wrapper calls on a stream that it made for this. Give each
tensor that another stream allocated to :func:`record_use`. An :class:`EngineGroup` joins engines that end their steps
together, one for each axis of a mesh. A :class:`StatelessEngine` reduces a single bucket without steps. After ``detach`` a
:func:`plain_engine` averages with the messages of a wrapper without a hook. For sharded models, in which each rank needs its
part of the average only, put :class:`Scattered` around the reduction. For gathers of weights it runs a :class:`Gathered` in a
:class:`GatherEngine`.

**End of a backward.** :func:`backward_id` identifies the running backward (:data:`NO_BACKWARD` if none runs).
:func:`at_end_of_backward` and :func:`after_backward` call a function before and after the wrapper's own callback,
:func:`if_interrupted` if an exception ends the backward.

**Outcome of a step.** ``engine.outcome`` is a :class:`StepOutcome`. It says if a rank failed and if the numbers are finite. A
:class:`StepJudge` says if the step was used. :func:`watch_optimizer` makes one of the optimizer and scaler given to
``attach``: an :class:`OptimizerWatch`. An adapter sets it as :attr:`Binding.watch`, and the handle closes it at the end.
:meth:`Engine.set_judge` sets any other judge, such as a vote.

**Drift.** ``attach(check_ranks_every=)`` gives :meth:`Binding.check_ranks` a :class:`RankCheck`. The adapter tells it the tensors
that are equal on all ranks, and sets it on the engine of these ranks.

**Transports.** Another transport implements :class:`Transport`, and its collectives implement :class:`Work`.
:class:`ProcessGroupWork` gives torch's works a deadline and typed errors. A transport that also carries requests inside nodes has
their :class:`Topology`. :class:`CpuTuning` controls how an engine sends messages of a CPU. :data:`TUNED` is its default, and
``TUNED.wait`` waits for a collective as an engine does. :func:`call_on_arrival` calls a function on the thread that receives a
message, and makes the end of the process wait for it. A collective that no engine starts writes to the memory of a
:class:`Loan`, and :func:`take_back` takes that memory from dropped collectives.

**Managers** (``attach(manager=)``). Groups of ranks may join and leave. An adapter of a model inside one group asks
:func:`manager_adapter` for the :class:`ManagerAdapter` of the manager's class, passes the :data:`Layouts` of its model, and
drives the engine of the :class:`ManagedAxis` that it returns. ``commhooks.Reducer(manager=)`` does the same.

**Agreement of ranks.** ``attach`` compares the ranks of ``Binding.group``. An adapter with several groups compares each with
:func:`agree_along`, which exchanges a :class:`Fingerprint` of fields and lines over the group's store. :func:`checksum` makes a
line of a tensor. :func:`agree` works over any other exchange. A :class:`StoreExchange` carries other data that the ranks
need before the first collective.

Example: an adapter of a wrapper that calls one function with all gradients at the end of each backward.

    >>> import torch, torch.distributed as dist
    >>> import commhooks
    >>> from ch_core import Engine, ProcessGroupTransport
    >>> from commhooks import AttachOptions, Binding, raise_after_backward, watch_optimizer
    >>> class Wrapper(torch.nn.Module):  # of another library
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
    ...         self.watch = watch_optimizer(self.engine, options, model.module.parameters)
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
