"""What grows with the number of ranks, counted up to 256 of them: no process, no clock.

    python -m ch_bench.counted.ranks --out docs/measured/scale-simulated.md

Bytes follow from the plans. The status is sent by as many simulated ranks, in threads, as it would be by processes. The
agreement at attach runs as it is, all ranks over one store in memory that counts what each of them writes and reads. Memory
is that of Python's objects: layouts, views and what else is kept from step to step, without the tensors' numbers.
"""

import argparse
import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import commhooks
from ch_bench.bench_report import command, heading
from ch_bench.shapes import gpt_shapes
from commhooks import Bucket, BucketLayout, HookState, Plain, RankMismatchError, Reduction, StepContext
from commhooks.adapters import StoreExchange, agree
from commhooks.simulate import SimulatedRank, simulate

Sizes = tuple[int, int, int, int]  # layers, width, vocabulary, context
GPT2, GPT, SMALL = (12, 768, 50257, 1024), (6, 384, 96, 128), (1, 64, 96, 16)
WORLDS = (2, 4, 8, 32, 64, 256)
HOOKS = [
    "allreduce",
    "bf16_compress",
    "bf16_compress(accumulate='fp32')",
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "quant8",
    "quant4",
    "randomk",
    "topk(density=0.01)",
    "quantize_per_tensor",
]
VIEWS = ["allreduce", "bf16_compress", "powersgd(rank=1)", "powersgd(rank=4)", "quant8", "topk(density=0.01)"]
BUCKETS = (1, 3, 10, 40)


def reduction_of(hook: str) -> Reduction:
    """Of an expression."""
    found = commhooks.create(hook).reduction
    assert found is not None
    return found


def planned(hooks: Sequence[str], worlds: Sequence[int], sizes: Sizes) -> list[str]:
    """MB that one rank sends in a step, and the requests of the plan, those of a stage being one message if they are alike."""
    lines = [f"| hook | {' | '.join(f'{w} ranks' for w in worlds)} | requests |", "|---" * (len(worlds) + 2) + "|"]
    layout = BucketLayout.of_shapes(gpt_shapes(*sizes))
    for hook in hooks:
        reduction, cells, counts = reduction_of(hook), [], set()
        for world in worlds:
            requests = [r for stage in reduction.plan(layout, StepContext(world_size=world)) for r in stage]
            counts.add(len(requests))
            cells.append(f"{wire_bytes(sum(r.trip_bytes for r in requests), world) / 1e6:.2f}")
        lines.append(f"| `{hook}` | {' | '.join(cells)} | {'/'.join(map(str, sorted(counts)))} |")
    return lines


def wire_bytes(trip_bytes: float, world: int) -> float:
    """What a bandwidth-optimal algorithm sends per rank, where the payload crosses the network as often as it has to.

    >>> wire_bytes(2 * 400, 4)  # an all-reduce of 100 fp32 numbers
    600.0
    """
    return trip_bytes * (world - 1) / world


def status(worlds: Sequence[int]) -> list[str]:
    """Bytes of the status of one step, as each rank sends it, and of the texts that follow a failure."""
    lines = [
        "| ranks | status, payload | sent round a ring | after a failure, each rank receives |",
        "|---|---|---|---|",
    ]
    for world in worlds:
        found = simulate(world, _one_step)
        told = {sent for sent, _ in found}
        assert len(told) == 1, "every rank sends the same"
        texts = {text for _, text in found}
        lines.append(f"| {world} | {4 * (world + 1)} | {told.pop():.0f} | {texts.pop()} |")
    return lines


class _FailsOnce(Plain):
    """Plain averaging whose second step fails on rank 0."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        if ctx.step == 1 and ctx.rank == 0 and not bucket.buffer.is_meta:
            raise ArithmeticError("as told")
        yield from super().run(bucket, ctx)


def _one_step(rank: SimulatedRank) -> tuple[float, int]:
    """What this rank sends besides its gradient's four bytes in a good step, and receives of texts in a bad one."""
    engine = rank.engine(_FailsOnce())
    sent = []
    for _ in range(2):
        before = engine.counters.traffic.wire_bytes
        engine.submit(Bucket.from_tensors({"w": torch.ones(1)}))
        engine.finish()
        sent.append(engine.counters.traffic.wire_bytes - before)
    gradient = wire_bytes(2 * 4, rank.world_size)
    good, bad = (each - gradient for each in sent)
    return good, round((bad - good) * rank.world_size / (rank.world_size - 1))


class CountingStore:
    """A store in memory that counts, by thread, the bytes of what is written to it and read from it, and the calls."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.written: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def _note(self, counts: Counter[str], value: bytes) -> None:
        who = threading.current_thread().name
        counts[who] += len(value)
        self.calls[who] += 1

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
            there = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds())
        if not there:
            raise RuntimeError(f"{keys} did not come")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def agreeing(worlds: Sequence[int], sizes: Sizes) -> list[str]:
    """The agreement of `attach` over a store: calls and bytes of a rank, and of all, where ranks agree and where one does not."""
    lines = [
        "| ranks | calls, rank 0 | calls, another | bytes, rank 0 | bytes, another | bytes, all | where one differs, all |",
        "|---|---|---|---|---|---|---|",
    ]
    fields = _fields(sizes)
    for world in worlds:
        same, differing = (_agreement(world, fields, odd) for odd in (None, world - 1))
        others = [f"rank {rank}" for rank in range(1, world)]
        bytes_ = {who: same.written[who] + same.read[who] for who in ("rank 0", *others)}
        lines.append(
            f"| {world} | {same.calls['rank 0']} | {max(same.calls[who] for who in others)} | {bytes_['rank 0']} "
            f"| {max(bytes_[who] for who in others)} | {sum(bytes_.values())} "
            f"| {differing.written.total() + differing.read.total()} |"
        )
    return lines


def _fields(sizes: Sizes) -> dict[str, list[str]]:
    """As `attach` compares them: the hook, and every parameter three times; five more fields of one line."""
    shapes = gpt_shapes(*sizes)
    each = {what: [f"{name}: {shape}" for name, shape in shapes.items()] for what in ("names", "shapes", "dtypes")}
    return {"hook": ["powersgd(rank=4)"], **each, **{f"other {i}": [""] for i in range(7)}}


def _agreement(world: int, fields: dict[str, list[str]], odd: int | None) -> CountingStore:
    store: Any = CountingStore()  # as far as the agreement uses a store
    told = Counter[str]()

    def take_part(rank: int) -> None:
        mine = fields if rank != odd else {**fields, "hook": ["powersgd(rank=1)"]}
        try:
            agree("the hook", mine, StoreExchange.over(store, rank, world, 300.0))
        except RankMismatchError:
            told["differ"] += 1
        else:
            told["agree"] += 1

    threads = [threading.Thread(target=take_part, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {"agree" if odd is None else "differ": world}, told
    found: CountingStore = store
    return found


def views(hooks: Sequence[str], buckets: Sequence[int], sizes: Sizes) -> list[str]:
    """Bytes of Python objects per parameter (a tensor of the model) that an engine keeps after three steps."""
    count = len(gpt_shapes(*sizes))
    lines = [f"| hook | {' | '.join(f'{n} buckets' for n in buckets)} |", "|---" * (len(buckets) + 1) + "|"]
    for hook in hooks:
        lines.append(f"| `{hook}` | {' | '.join(f'{_kept(hook, n, sizes) / count:.0f}' for n in buckets)} |")
    return lines


def _kept(hook: str, buckets: int, sizes: Sizes) -> int:
    shapes = gpt_shapes(*sizes)
    names = list(shapes)
    _three_steps(hook, [shapes])  # imports what it needs
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
    """All that is alive between steps."""

    def body(rank: SimulatedRank) -> object:
        engine = rank.engine(reduction_of(hook), HookState())
        made = []
        for i, shapes in enumerate(buckets):
            layout = BucketLayout.of_shapes(shapes)
            made.append(Bucket(layout, torch.zeros(layout.numel), i, is_last=i == len(buckets) - 1))
        for _ in range(3):
            for bucket in made:
                engine.submit(bucket)
            assert engine.finish() is None
        engine.resolve_step()
        return engine, made

    return simulate(1, body)


def record(*, small: bool) -> str:
    """All tables, as Markdown."""
    worlds, planned_for, kept_of = (WORLDS[:3], SMALL, SMALL) if small else (WORLDS, GPT2, GPT)
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("MB that a rank sends in a step of GPT-2 small", lambda: planned(HOOKS, (*worlds, 1000), planned_for)),
        ("bytes of the status", lambda: status(worlds)),
        ("agreement at attach, over the group's store", lambda: agreeing(worlds, planned_for)),
        ("bytes of Python objects per parameter", lambda: views(VIEWS, BUCKETS[: 2 if small else None], kept_of)),
    ]
    lines = []
    for title, make in parts:
        found = make()
        print(f"== {title}", *found, sep="\n", flush=True)
        lines += [f"## {title}", "", *found, ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Count, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few ranks, tiny shapes")
    parser.add_argument("--out", type=Path, help="write the tables, with machine and versions, to this file")
    chosen = parser.parse_args(argv)
    found = record(small=chosen.small)
    if chosen.out is not None:
        about = heading("What grows with the ranks", command("ch_bench.counted.ranks", argv))
        chosen.out.write_text(f"{about}\n{__doc__}\n{found}\n")


if __name__ == "__main__":
    main()
