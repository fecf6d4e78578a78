"""ch-ft over torchft's managers and a real lighthouse. Two members are threads of this process."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

os.environ.setdefault("RUST_LOG", "error")  # before the import of torchft, which logs a line per quorum

import ch_ft
import commhooks
from tests.orders.late import late_collectives

from . import ways
from .models import Given, Like, given, like, small_limits
from .ways import CAPS, STEPS, Case, Seen, hold, note, note_state
from .worker import LONGEST, Run

MEMBERS = 2


def managed(case: Case, seed: int | None) -> list[Run]:
    """Return the run of each member."""
    late = late_collectives(seed, rank=0, longest=LONGEST[case.size]) if seed is not None else nullcontext()
    server = ch_ft.start_lighthouse(min_replicas=MEMBERS, heartbeat=5.0, join_timeout=1.0)
    address = ch_ft.local_manager.loopback(server.address())

    def one(number: int) -> Seen:
        with ch_ft.local(
            lighthouse=address,
            replica=f"replica_{number}",
            min_replicas=MEMBERS,
            group_timeout=1.5 if "failed" in case.way else 20,  # the peer of a member that failed waits for it
            timeout=30,
            quorum_timeout=30,
            init_sync=False,
        ) as member:
            return WAYS[case.way](case, member, number)

    try:
        with small_limits(), late as network, ThreadPoolExecutor(MEMBERS) as pool:
            ways.network = network
            seen = [future.result(timeout=60) for future in [pool.submit(one, n) for n in range(MEMBERS)]]
    finally:
        server.shutdown()
    if network is None:
        return [Run(None, found) for found in seen]
    return [Run(seed, found, network.started, network.overtaken, network.violations) for found in seen]


def _register(manager: Any, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights = module.state_dict()
    manager.register_state_dict_fn("model", module.load_state_dict, lambda: weights)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)


def built(
    case: Case, member: ch_ft.Local, shapes: Like
) -> tuple[Given, ch_ft.DistributedDataParallel, ch_ft.OptimizerWrapper]:
    """Return a module, the model around it, and the optimizer. The model learns of no process group that it could close."""
    module = Given(shapes)
    model = ch_ft.DistributedDataParallel(
        member.manager,
        module,
        hook=case.expr or None,
        bucket_cap_mb=CAPS["small"],
        gradient_as_bucket_view=True,
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    _register(member.manager, module, inner)
    return module, model, ch_ft.OptimizerWrapper(member.manager, inner)


def ddp(case: Case, member: ch_ft.Local, number: int) -> Seen:
    """``ch_ft.DistributedDataParallel``, with and without a hook."""
    shapes, seen = like("small"), Seen()
    module, model, optimizer = built(case, member, shapes)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(given(shapes, number, step)).backward()
        note(seen, f"step {step}", [(name, p.grad) for name, p in module.named_parameters()])
        seen[f"=committed {step}"] = str(optimizer.step())
    note(seen, "end", module.named_parameters())
    if model.handle is not None:
        model.handle.commit()
        note_state(seen, model.handle.state_dict())
    return seen


def failed(case: Case, member: ch_ft.Local, number: int) -> Seen:
    """An attempt fails on one member while its messages are in flight."""
    shapes, manager, seen = like("small"), member.manager, Seen()
    module, model, optimizer = built(case, member, shapes)
    attempts = [0] * STEPS

    def fail(grad: torch.Tensor) -> None:
        if number == 0 and manager.current_step() == 2 and attempts[2] == 1:
            hold()
            manager.report_error(RuntimeError("the data of this member are bad"))

    module.get_parameter(next(iter(shapes))).register_hook(fail)  # the last gradient
    while (step := manager.current_step()) < STEPS:
        attempts[step] += 1
        optimizer.zero_grad(set_to_none=False)
        model(given(shapes, number, 90 if attempts[step] == 1 and step == 2 else step)).backward()
        grads = [(name, p.grad.clone()) for name, p in module.named_parameters()]
        if optimizer.step():
            note(seen, f"step {step}", grads)
    return seen


def pure(case: Case, member: ch_ft.Local, number: int) -> Seen:
    """``ch_ft.PureDistributedDataParallel``, which has no hook."""
    shapes, manager = like("small"), member.manager
    module = Given(shapes)
    model = ch_ft.PureDistributedDataParallel(manager, module)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ch_ft.OptimizerWrapper(manager, inner)
    _register(manager, module, inner)
    seen = Seen()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(given(shapes, number, step)).backward()
        note(seen, f"step {step}", [(name, p.grad.clone()) for name, p in module.named_parameters()])
        optimizer.step()
    return seen


def reducer(case: Case, member: ch_ft.Local, number: int) -> Seen:
    """A ``Reducer`` whose rounds the manager votes on."""
    shapes, manager = like("small"), member.manager
    manager.register_state_dict_fn("none", lambda state: None, dict)
    reducer, seen = commhooks.Reducer(case.expr, shapes, manager=manager), Seen()
    for step in range(STEPS):
        manager.start_quorum()
        pending = reducer.start(given(shapes, number, step))
        for _ in range(reducer.stages if step % 2 else 0):
            pending.advance()
        note(seen, f"step {step}", pending.wait().items())
        seen[f"=vote {step}"] = str(manager.should_commit())
    note_state(seen, reducer.state_dict())
    reducer.close()
    return seen


WAYS: dict[str, Callable[[Case, ch_ft.Local, int], Seen]] = {
    "ch-ft": ddp,
    "ch-ft, no hook": ddp,
    "ch-ft, failed attempt": failed,
    "ch-ft, pure": pure,
    "ch-ft, Reducer": reducer,
}
