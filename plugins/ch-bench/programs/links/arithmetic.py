"""CPU time of one rank without messages: of a flat hook, and of each place of a node with ``two_level``.

Every rank is an engine in this process. Its messages do not travel (:class:`ch_bench.advise.replay.EmulatedTransport`), but its
tensors have the sizes that they have in the whole group. The clock is the CPU time of the thread that runs the engine. It stops
while the transport fills the tensors that receive a message. The ranks take turns step by step.

Two figures are measured. *Arithmetic* is the work of the reduction between its messages: for ``powersgd`` it loads Q, adds the
residual, multiplies, orthonormalises Q and P, decodes, writes the new residual, and copies uncompressed parameters into its
message. *Thread* adds the engine, which checks numbers and counts bytes, and the work of ``two_level``, which copies the
gradient into parts, adds the parts of the node's ranks, divides, and copies the average back.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch

import commhooks
from ch_bench import record, shapes
from ch_bench.advise.replay import EmulatedTransport, Recorder
from ch_bench.pytorch_hooks import reduction_of
from ch_core import Engine
from commhooks import Bucket, BucketLayout, Composite, Reduction, Stages, StepContext, Topology

WARM_UP = 3  # steps
NOTES = (
    "CPU time of the thread that runs the engine, without messages; one rank at a time, in rounds of one step of each",
    "arithmetic: everything that the reduction does between its messages, with orthonormalisation and residual",
    "thread: also the engine's checks and counts, and two_level's copies into parts, sum over the node and copies back",
)


class Clocked(Composite):
    """A reduction that adds up the CPU time of its thread, without its messages.

    Attributes:
        seconds: so far.
    """

    name = "clocked"

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.seconds = 0.0

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        stages = self.inner.start(bucket, ctx)
        while True:
            begun = time.thread_time()
            try:
                requests = next(stages)
            except StopIteration:
                return
            finally:
                self.seconds += time.thread_time() - begun
            yield requests


@dataclass
class Part:
    """Figures of one rank.

    Attributes:
        label: of the rank.
        arithmetic: CPU seconds of the reduction in each step.
        thread: CPU seconds of the thread in each step, with the engine and the copies of ``two_level``.
        residual: bytes of the rank's residuals.
    """

    label: str
    arithmetic: list[float]
    thread: list[float]
    residual: int = 0


class Rank:
    """An engine with its buckets and a gradient, which is the same for all ranks."""

    def __init__(
        self, reduction: Reduction, clocked: Clocked, rank: int, topology: Topology, layouts: Sequence[BucketLayout]
    ) -> None:
        self.clocked, self.recorder = clocked, Recorder(time.thread_time)
        self.engine = Engine(reduction, EmulatedTransport(rank, topology.world_size, self.recorder, topology))
        last = len(layouts) - 1
        cpu = torch.device("cpu")
        self.given = shapes.random_gradients(
            {str(i): (one.numel,) for i, one in enumerate(layouts)}, torch.float32, cpu
        )
        self.buckets = [
            Bucket(one, g.clone(), i, i == last) for i, (one, g) in enumerate(zip(layouts, self.given, strict=True))
        ]

    def step(self) -> tuple[float, float]:
        """Run one step, and return the CPU seconds of the hook and of the thread."""
        for bucket, given in zip(self.buckets, self.given, strict=True):
            bucket.storage.copy_(given)
        before = self.clocked.seconds
        self.recorder.begin()
        for bucket in self.buckets:
            self.engine.submit(bucket)
        error = self.engine.finish()
        notes = self.recorder.end()
        if error is not None:
            raise error
        return self.clocked.seconds - before, sum(note.seconds for note in notes)

    @property
    def residual(self) -> int:
        """Bytes of the residuals."""
        state = self.engine.state
        return sum(entry.numbers().nbytes for (_, field), entry in state.draft.newest().items() if field == "residual")


@torch.no_grad()
def measure(
    hook: str, sizes: Mapping[str, tuple[int, ...]], topology: Topology, steps: int, bucket_mb: float | None = None
) -> list[Part]:
    """Measure a flat hook and its part on each place of a node, on one thread.

    Args:
        hook: expression of a reduction, which ``two_level`` can run between nodes.
        sizes: shape of each parameter, in the order of the model.
        topology: of the ranks.
        steps: to measure after :data:`WARM_UP` steps.
        bucket_mb: DDP's ``bucket_cap_mb``; ``None`` for its default of 25.

    Returns:
        The flat hook, and then each place.
    """
    torch.set_num_threads(1)
    layouts = [BucketLayout.of_shapes(one) for one in shapes.filled(sizes, (bucket_mb or 25) * 2**20)]
    flat = Clocked(reduction_of(hook))
    parts = [(f"`{hook}`", Rank(flat, flat, 0, topology, layouts))]
    for place, rank in enumerate(topology.nodes[0]):
        inner = Clocked(reduction_of(hook))
        two = commhooks.get("two_level")(inner)
        parts.append((f"place {place}", Rank(two, inner, rank, topology, layouts)))
    made = [Part(label, [], []) for label, _ in parts]
    for number in range(WARM_UP + steps):
        for part, (_, one) in zip(made, parts, strict=True):
            inside, thread = one.step()
            if number >= WARM_UP:
                part.arithmetic.append(inside)
                part.thread.append(thread)
    for part, (_, one) in zip(made, parts, strict=True):
        part.residual = one.residual
    return made


def table(parts: Sequence[Part]) -> str:
    """Return the median of each rank with the range of its steps, the mean of the places, and their ratios to flat."""
    flat, places = parts[0], parts[1:]
    average = Part(
        "mean of the places",
        [mean(step) for step in zip(*(one.arithmetic for one in places), strict=True)],
        [mean(step) for step in zip(*(one.thread for one in places), strict=True)],
        round(mean(one.residual for one in places)),
    )
    rows = []
    for one in (*parts, average):
        cells = [one.label]
        for mine, base in ((one.arithmetic, flat.arithmetic), (one.thread, flat.thread)):
            ratio = median(a / b for a, b in zip(mine, base, strict=True))
            span = f"{min(mine) * 1e3:.1f}–{max(mine) * 1e3:.1f}"
            cells += [f"{median(mine) * 1e3:.1f}", span, "" if one is flat else f"{ratio:.2f}"]
        share = f"{one.residual / flat.residual:.3f}" if flat.residual and one is not flat else ""
        rows.append([*cells, f"{one.residual:,}", share])
    heads = [
        "hook",
        "arithmetic, ms",
        "range",
        "of flat",
        "thread, ms",
        "range",
        "of flat",
        "residual bytes",
        "of flat",
    ]
    return record.markdown_table(heads, rows)
