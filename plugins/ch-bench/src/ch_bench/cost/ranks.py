"""Bytes, status, agreement and memory by the number of ranks, counted for up to 256 ranks without processes or a clock.

    python -m ch_bench.cost.ranks [--record]

Bytes follow from the plans. Simulated ranks, in threads, send the status as processes would. The agreement of `attach` runs
unchanged over one store in memory, which counts the bytes that each rank writes and reads. Memory is that of Python's
objects which live from step to step (layouts, views), without the tensors' numbers.
"""

import argparse
import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ch_bench.pytorch_hooks import reduction_of
from ch_bench.record import command, markdown_table, run_main, write
from ch_bench.shapes import Sizes, gpt_shapes
from commhooks import Bucket, BucketLayout, HookState, Plain, RankMismatchError, StepContext
from commhooks.adapters import StoreExchange, agree
from commhooks.simulate import SimulatedRank, simulate

GPT2, GPT, SMALL = (12, 768, 50257, 1024), (6, 384, 96, 128), (1, 64, 96, 16)
WORLDS = (2, 4, 8, 32, 64, 256)
VIEWS = ["allreduce", "bf16_compress", "powersgd(rank=1)", "powersgd(rank=4)", "quant8", "topk(density=0.01)"]
HOOKS = [*VIEWS, "bf16_compress(accumulate='fp32')", "quant4", "randomk", "quantize_per_tensor"]
BUCKETS = (1, 3, 10, 40)


def planned(hooks: Sequence[str], worlds: Sequence[int], sizes: Sizes) -> str:
    """Return the MB that one rank sends in a step, and the number of requests of the plan."""
    layout = BucketLayout.of_shapes(gpt_shapes(*sizes))
    rows = []
    for hook in hooks:
        reduction, cells, counts = reduction_of(hook), [], set()
        for world in worlds:
            requests = [r for stage in reduction.plan(layout, StepContext(world_size=world)) for r in stage]
            counts.add(len(requests))
            cells.append(f"{wire_bytes(sum(r.trip_bytes for r in requests), world) / 1e6:.2f}")
        rows.append([f"`{hook}`", *cells, "/".join(map(str, sorted(counts)))])
    return markdown_table(["hook", *(f"{w} ranks" for w in worlds), "requests"], rows)


def wire_bytes(trip_bytes: float, world: int) -> float:
    """Return the bytes that one rank sends with a bandwidth-optimal algorithm.

    >>> wire_bytes(2 * 400, 4)  # an all-reduce of 100 fp32 numbers
    600.0
    """
    return trip_bytes * (world - 1) / world


def status(worlds: Sequence[int]) -> str:
    """Return the bytes of the status that each rank sends in a step, and of the texts after a failure."""
    rows = []
    for world in worlds:
        found = simulate(world, _two_steps)
        [sent], [texts] = ({*column} for column in zip(*found, strict=True))  # equal on all ranks
        rows.append([str(world), str(4 * (world + 1)), f"{sent:.0f}", str(texts)])
    heads = ["ranks", "status, payload", "sent round a ring", "after a failure, each rank receives"]
    return markdown_table(heads, rows)


class _FailsOnce(Plain):
    """Plain averaging whose second step fails on rank 0."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        if ctx.step == 1 and ctx.rank == 0 and not bucket.buffer.is_meta:
            raise ArithmeticError("injected")
        yield from super().run(bucket, ctx)


def _two_steps(rank: SimulatedRank) -> tuple[float, int]:
    """Return the bytes beyond the gradient that a rank sends in a good step, and the bytes of texts after a bad one."""
    engine = rank.engine(_FailsOnce())
    sent = []
    for _ in range(2):
        before = engine.counters.traffic.wire_bytes
        engine.submit(Bucket.from_tensors({"w": torch.ones(1, dtype=torch.float32, device="cpu")}))
        engine.finish()
        sent.append(engine.counters.traffic.wire_bytes - before)
    gradient = wire_bytes(2 * 4, rank.world_size)
    good, bad = (each - gradient for each in sent)
    return good, round((bad - good) * rank.world_size / (rank.world_size - 1))


class CountingStore:
    """A store in memory that counts calls, written bytes and read bytes for each thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.written: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def _note(self, counts: Counter[str], value: bytes) -> None:
        name = threading.current_thread().name
        counts[name] += len(value)
        self.calls[name] += 1

    def set(self, key: str, value: Any) -> None:
        self._put(key, _bytes(value))

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._note(self.written, value)
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._note(self.read, self._values[key])
            return self._values[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == _bytes(expected):
                self._values[key] = _bytes(desired)
                self._changed.notify_all()
            self._note(self.written, _bytes(desired))
            self.read[threading.current_thread().name] += len(self._values[key])
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        with self._changed:
            complete = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds())
        if not complete:
            raise RuntimeError(f"{keys} were not set in time")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def agreeing(worlds: Sequence[int], sizes: Sizes) -> str:
    """Return calls and bytes of the agreement of `attach`, with equal ranks and with one that differs."""
    fields = _fields(sizes)
    rows = []
    for world in worlds:
        same, differing = (_agreement(world, fields, odd) for odd in (None, world - 1))
        others = [f"rank {rank}" for rank in range(1, world)]
        bytes_ = {name: same.written[name] + same.read[name] for name in ("rank 0", *others)}
        figures = [world, same.calls["rank 0"], max(same.calls[name] for name in others), bytes_["rank 0"]]
        figures += [max(bytes_[name] for name in others), sum(bytes_.values())]
        rows.append([*map(str, figures), str(differing.written.total() + differing.read.total())])
    heads = ["ranks", "calls, rank 0", "calls, another", "bytes, rank 0", "bytes, another", "bytes, all"]
    return markdown_table([*heads, "with one that differs, all"], rows)


def _fields(sizes: Sizes) -> dict[str, list[str]]:
    """Return the fields that `attach` compares: the hook, every parameter three times, and seven fields of one line."""
    shapes = gpt_shapes(*sizes)
    each = {field: [f"{name}: {shape}" for name, shape in shapes.items()] for field in ("names", "shapes", "dtypes")}
    return {"hook": ["powersgd(rank=4)"], **each, **{f"other {i}": [""] for i in range(7)}}


def _agreement(world: int, fields: dict[str, list[str]], odd: int | None) -> CountingStore:
    store: Any = CountingStore()  # has the methods that the agreement calls
    outcomes = Counter[str]()

    def take_part(rank: int) -> None:
        mine = fields if rank != odd else {**fields, "hook": ["powersgd(rank=1)"]}
        try:
            agree("the hook", mine, StoreExchange.over(store, rank, world, 300.0))
        except RankMismatchError:
            outcomes["differ"] += 1
        else:
            outcomes["agree"] += 1

    threads = [threading.Thread(target=take_part, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"agree" if odd is None else "differ": world}, outcomes
    found: CountingStore = store
    return found


def views(hooks: Sequence[str], buckets: Sequence[int], sizes: Sizes) -> str:
    """Return the bytes of Python objects that an engine keeps after three steps, for each tensor of the model."""
    count = len(gpt_shapes(*sizes))
    rows = [[f"`{hook}`", *(f"{_kept(hook, n, sizes) / count:.0f}" for n in buckets)] for hook in hooks]
    return markdown_table(["hook", *(f"{n} buckets" for n in buckets)], rows)


def _kept(hook: str, buckets: int, sizes: Sizes) -> int:
    shapes = gpt_shapes(*sizes)
    names = list(shapes)
    _three_steps(hook, [shapes])  # pays for the imports
    gc.collect()
    tracemalloc.start()
    try:
        kept = _three_steps(hook, [{name: shapes[name] for name in names[part::buckets]} for part in range(buckets)])
        gc.collect()
        found = tracemalloc.get_traced_memory()[0]
        del kept
        return found
    finally:
        tracemalloc.stop()


def _three_steps(hook: str, buckets: list[dict[str, tuple[int, ...]]]) -> object:
    """Run three steps and return every object that lives between steps."""

    def body(rank: SimulatedRank) -> object:
        engine = rank.engine(reduction_of(hook), HookState())
        made = []
        for i, shapes in enumerate(buckets):
            layout = BucketLayout.of_shapes(shapes)
            buffer = torch.zeros(layout.numel, dtype=torch.float32, device="cpu")
            made.append(Bucket(layout, buffer, i, is_last=i == len(buckets) - 1))
        for _ in range(3):
            for bucket in made:
                engine.submit(bucket)
            assert engine.finish() is None
        engine.settle()
        return engine, made

    return simulate(1, body)


def tables(*, small: bool) -> str:
    """Return all tables as Markdown."""
    worlds, planned_for, kept_of = (WORLDS[:3], SMALL, SMALL) if small else (WORLDS, GPT2, GPT)
    parts: list[tuple[str, Callable[[], str]]] = [
        ("MB that a rank sends in a step of GPT-2 small", lambda: planned(HOOKS, (*worlds, 1000), planned_for)),
        ("bytes of the status", lambda: status(worlds)),
        ("agreement at attach, over the group's store", lambda: agreeing(worlds, planned_for)),
        ("bytes of Python objects per parameter", lambda: views(VIEWS, BUCKETS[: 2 if small else None], kept_of)),
    ]
    return "\n\n".join(f"### {title}\n\n{make()}" for title, make in parts)


def main(argv: list[str] | None = None) -> None:
    """Count, print, and write the record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few ranks, tiny shapes")
    parser.add_argument("--record", action="store_true", help="write the tables to docs/measured/scale.md")
    chosen = parser.parse_args(argv)
    found = tables(small=chosen.small)
    print(found)
    if chosen.record:
        write("scale", "Counted with simulated ranks", command("ch_bench.cost.ranks", argv), found)


if __name__ == "__main__":
    run_main(main)
