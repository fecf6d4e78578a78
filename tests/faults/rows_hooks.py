"""B1, B2, B3: hooks that raise, and hooks that return anything but a future of the bucket."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kit import FUNCTION, Run, Silent, averaged, row, then


def lingering(run: Run, hook: Callable[[Any, Any], Any]) -> str:
    """Run one step with a good hook, one with a bad one, and one after it."""
    model = run.model()
    armed: list[bool] = []

    def both(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket) if armed else averaged(bucket)  # type: ignore[no-any-return]

    run.hook(model, both)
    run.step(model, 1)
    run.step(model, 2)
    armed.append(True)
    mean = run.mean(model, 3)
    found: list[torch.Tensor] = []

    def afterwards() -> None:
        armed.clear()
        run.step(model, 4)

    then(run, lambda: found.append(run.step(model, 3)), afterwards)
    return run.expect(found[0], mean, 1e-4)


@row("B1.1", "hook raises on every rank", flat=FUNCTION)
def raise_all(run: Run) -> str:
    def hook(state: Any, bucket: Any) -> Any:
        raise ValueError("boom in hook")

    return lingering(run, hook)


@row("B1.2", "hook raises on one rank, which lives on", flat=FUNCTION)
def raise_one(run: Run) -> str:
    def hook(state: Any, bucket: Any) -> Any:
        if run.rank == 1:
            raise ValueError("boom in hook")
        return averaged(bucket)

    return lingering(run, hook)


@row("B1.3", "compression raises on one rank between its two collectives; then the next step")
def raise_between(run: Run) -> str:
    from commhooks import AllReduce, Reduction

    armed = [False]

    class TwoStage(Reduction):
        name, lossy = "two_stage", True

        def run(self, bucket: Any, ctx: Any) -> Any:
            one = ctx.scratch("one", (1,), device=bucket.device).fill_(1.0)
            yield AllReduce(one)
            if armed[0] and ctx.rank == 1 and not bucket.buffer.is_meta:
                raise ValueError("boom between")
            yield AllReduce(bucket.buffer)

    def waiting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(torch.ones(1))
        if armed[0] and run.rank == 1:
            raise ValueError("boom between")
        return averaged(bucket)

    model = run.model()
    run.hook(model, TwoStage() if run.ours else waiting)
    run.step(model, 1)
    run.step(model, 2)
    armed[0] = True

    def afterwards() -> None:
        armed[0] = False
        mean = run.mean(model, 4)
        run.expect(run.step(model, 4), mean, 1e-4)

    return then(run, lambda: run.step(model, 3), afterwards)


@row("B2.1", "callback of the future raises on every rank", flat=FUNCTION)
def callback_all(run: Run) -> str:
    def boom(value: Any) -> Any:
        raise ValueError("boom in then")

    return lingering(run, lambda state, bucket: averaged(bucket).then(boom))


@row("B2.2", "callback of the future raises on one rank only", flat=FUNCTION)
def callback_one(run: Run) -> str:
    def boom(done: Any) -> Any:
        if run.rank == 1:
            raise ValueError("boom in then")
        return done.value()

    try:
        return lingering(run, lambda state, bucket: averaged(bucket).then(boom))
    except ValueError:
        raise
    except Exception:
        if run.rank == 1 and not run.ours:
            run.seen.append("the other rank is not told")
        raise


@row("B2.3", "Ctrl-C inside a callback", flat=FUNCTION)
def interrupt(run: Run) -> str:
    def boom(value: Any) -> Any:
        raise KeyboardInterrupt

    try:
        return lingering(run, lambda state, bucket: averaged(bucket).then(boom))
    except KeyboardInterrupt:
        return "KeyboardInterrupt arrives"


def turned(change: Callable[[torch.Tensor], Any]) -> Callable[[Any, Any], Any]:
    return lambda state, bucket: averaged(bucket).then(lambda done: change(done.value()))


def raw(state: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()


def none(state: Any, bucket: Any) -> None:
    averaged(bucket).wait()


def never(state: Any, bucket: Any) -> Any:
    averaged(bucket).wait()
    return torch.futures.Future()


RESULTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "B3.1": ("returns None", none),
    "B3.2": ("returns a tensor", lambda state, bucket: averaged(bucket).wait()),
    "B3.3": ("returns a Work", lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True)),
    "B3.4": ("returns the raw future of all_reduce", raw),
    "B3.5": ("future of None", turned(lambda x: None)),
    "B3.6": ("future of a str", turned(lambda x: "x")),
    "B3.7": ("future of a list of two tensors", turned(lambda x: [x, x])),
    "B3.8": ("result too short", turned(lambda x: x[:16].clone())),
    "B3.9": ("result too long", turned(lambda x: torch.cat([x + 1, x]))),
    "B3.10": ("result in float64", turned(lambda x: x.double())),
    "B3.11": ("result in int32", turned(lambda x: x.int())),
    "B3.12": ("result complex", turned(lambda x: torch.complex(x, x))),
    "B3.13": ("result with a stride", turned(lambda x: torch.stack([x, x + 1], 1)[:, 0])),
    "B3.14": ("result on the meta device", turned(lambda x: x.to("meta"))),
    "B3.15": ("future that is never completed", never),
}


def _enter(name: str, title: str, hook: Callable[[Any, Any], Any]) -> None:
    @row(name, f"hook {title}" if title.startswith("returns") else title, flat=FUNCTION)
    def body(run: Run) -> str:
        return lingering(run, hook)


for _name, (_title, _hook) in RESULTS.items():
    _enter(_name, _title, _hook)


@row("B3.16", "result differs between ranks (checked every step)", flat=FUNCTION)
def differs(run: Run) -> str:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return averaged(bucket).then(lambda done: done.value() * (1 + 0.1 * run.rank))

    model = run.model()
    handle = run.hook(model, hook)
    if run.ours:
        handle.verify_gradients(every=1)
    mean = run.mean(model, 1)
    got = run.step(model, 1)
    if run.rank == 0:
        raise Silent("gradients differ between the ranks by 10 %")
    return run.expect(got, mean, 1e-4)
