"""What the guards cost on a step without a fault, measured inside one process.

    OMP_NUM_THREADS=1 python -m ch_bench.cost.guards --json docs/measured/guards.json

Two things are timed over many calls, with the guards on and off in turns, so that whatever else the machine does falls
on both alike:

* *foreign*: the trampoline and the driver around a hook that does nothing, against calling that hook. That is the
  check of the result, DDP's own future, the wait, and the watch for unsynchronised backwards.
* *own*: the engine's step with the status message, the clock and the finiteness verdict, against the same step
  without them, over a transport whose collectives cost nothing.

Beside them: the status message itself on two gloo processes, a real all-reduce of three numbers, and the hook's own
time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_ddp.adapter import ForeignDriver
from commhooks import Bucket, Plain
from commhooks.adapters import Engine, ProcessGroupTransport, StepVerdict
from commhooks.testing import spawn

CALLS = 2000


def interleaved(on: Callable[[], object], off: Callable[[], object], calls: int) -> dict[str, float]:
    """Median of the differences of paired calls in microseconds, and its 95 % confidence interval."""
    for _ in range(50):
        on(), off()
    pairs = []
    for number in range(calls):
        first, second = (on, off) if number % 2 else (off, on)
        a, b = _timed(first), _timed(second)
        pairs.append((a, b) if number % 2 else (b, a))
    differences = sorted((a - b) * 1e6 for a, b in pairs)
    half = 0.98 * calls**0.5  # 1.96 / 2 * sqrt(n): ranks of the interval's ends around the median's
    return {
        "on_us": statistics.median(a for a, _ in pairs) * 1e6,
        "off_us": statistics.median(b for _, b in pairs) * 1e6,
        "guards_us": statistics.median(differences),
        "low_us": differences[max(0, int(calls / 2 - half))],
        "high_us": differences[min(calls - 1, int(calls / 2 + half))],
    }


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


class _Bucket:
    """A ``GradBucket``, as far as a hook looks at one; torch lets nobody make a real one."""

    def __init__(self, buffer: torch.Tensor, index: int, last: bool) -> None:
        self._buffer, self._index, self._last = buffer, index, last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def foreign(calls: int, buckets: int) -> dict[str, float]:
    """The guard around a hook of somebody else's, over one step of some buckets."""
    parts = [_Bucket(torch.zeros(1000), i, i == buckets - 1) for i in range(buckets)]

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    driver = ForeignDriver(hook, None, "hook", 60.0)

    def on() -> None:
        for part in parts:
            driver(part)  # type: ignore[arg-type]

    def off() -> None:
        for part in parts:
            hook(None, part)

    return interleaved(on, off, calls)


class _Nowhere:
    """A transport of two ranks in which every collective is done at once."""

    rank, world_size, free, elastic = 0, 2, False, False

    def all_reduce(self, tensor: torch.Tensor, op: str) -> "_Nowhere":
        return self

    def wait(self, timeout: float | None) -> None:
        return None


class _Stateful(Plain):
    fields = {"residual": "local"}


def own(calls: int, buckets: int) -> dict[str, float]:
    """Status message, clock and verdict of one of our own reductions, over one step of some buckets."""
    parts = [Bucket.from_tensors({f"w{i}": torch.zeros(1000)}, index=i) for i in range(buckets)]
    on, off = Engine(_Stateful(), _Nowhere()), Engine(Plain(), _Nowhere(), sends_status=False)  # type: ignore[arg-type]
    engines = {True: on, False: off}

    def step(flag: bool) -> None:
        for part in parts:
            engines[flag].submit(part)
        engines[flag].finish()

    return interleaved(lambda: step(True), lambda: step(False), calls)


def message(rank: int, world: int, calls: int) -> dict[str, float]:
    """The status message alone, and a hook's whole step, on gloo."""
    engine = Engine(Plain(), ProcessGroupTransport())
    times = []
    for _ in range(calls):
        verdict = StepVerdict("status", engine.transport)
        begun = time.perf_counter()
        verdict.send(1, torch.device("cpu"), engine.sender.post)
        verdict.decide(engine.sender.timeout)
        verdict.good()
        times.append(time.perf_counter() - begun)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    handle = commhooks.attach(model, Plain())
    for _ in range(40):
        model(torch.ones(4, 512)).sum().backward()
    dist.barrier()
    return {
        "status_us": statistics.median(times) * 1e6,
        "hook_ms_per_step": 1e3 * handle.stats()["hook_seconds"] / handle.stats()["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "calls": options.calls,
        "buckets": options.buckets,
        "torch": torch.__version__,
        "foreign": foreign(options.calls, options.buckets),
        "own": own(options.calls, options.buckets),
        "gloo": spawn(message, 2, min(options.calls, 1000))[0],
    }
    for name in ("foreign", "own"):
        f = found[name]
        print(
            f"{name:8} guards {f['guards_us']:.0f} us a step of {options.buckets} buckets "
            f"[95 %: {f['low_us']:.0f}, {f['high_us']:.0f}] (on {f['on_us']:.0f}, off {f['off_us']:.0f})"
        )
    gloo = found["gloo"]
    limit = max(300.0, 0.02e3 * gloo["hook_ms_per_step"])
    found["limit_us"] = limit
    print(
        f"status message on gloo, 2 ranks: {gloo['status_us']:.0f} us; "
        f"hook's own time {gloo['hook_ms_per_step']:.2f} ms a step"
    )
    worst = max(found[name]["high_us"] for name in ("foreign", "own"))
    print(f"limit: {limit:.0f} us; {'kept' if worst <= limit else 'EXCEEDED'}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
