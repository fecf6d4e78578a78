"""Print the readings that compare two structures of the source: files and moves between files, and lines of source.

`python tests/readings.py [ROOT]` reads lines of source under ROOT. It traces the code that the interpreter imports: one
gradient through a hook of DDP, `attach`, a save of a hook's state, and a load of it.
A move is a call from one file into another one, or the return from it.
"""

import argparse
import copy
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OURS = re.compile(r"/src/((?:commhooks|ch_\w+)/.*)")
EXPRESSION = "powersgd(rank=4, min_compression_rate=1)"


class Reading(NamedTuple):
    """Figures of one traced call."""

    files: int
    moves: int
    depth: int  # of frames in our files
    names: tuple[str, ...]  # of the files, in order of the first visit


class Trace:
    """Record the files of this project through which a call passes."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.passed: list[str] = []
        self.depth = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        ours = OURS.search(frame.f_code.co_filename)
        if ours is None or frame.f_code.co_name.startswith("<"):  # comprehensions and module bodies
            return
        if event == "call":
            self.stack.append(ours[1])
            self.passed.append(ours[1])
            self.depth = max(self.depth, len(self.stack))
        elif event == "return" and self.stack:
            self.stack.pop()
            if self.stack:
                self.passed.append(self.stack[-1])

    @property
    def reading(self) -> Reading:
        moves = sum(a != b for a, b in pairwise(self.passed))
        return Reading(len(set(self.passed)), moves, self.depth, tuple(dict.fromkeys(self.passed)))


def traced() -> dict[str, Reading]:
    """Return the readings of one gradient, `attach`, save and load, on one gloo rank with powersgd."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import commhooks

    def model() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))

    def step(trace: Trace | None = None) -> None:
        for parameter in ddp.parameters():
            parameter.grad = None
        loss = ddp(torch.ones(2, 64)).square().mean()
        with trace.on() if trace else nullcontext():
            loss.backward()

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        commhooks.attach(model(), EXPRESSION, single_process=True).detach()  # fill the caches of the registry
        ddp = model()
        trace = Trace()
        with trace.on():
            handle = commhooks.attach(ddp, EXPRESSION, single_process=True)
        found["attach"] = trace.reading
        step()
        step()
        trace = Trace()
        step(trace)  # a CPU backward runs in this thread, so the profile sees the hook
        found["one gradient"] = trace.reading
        trace = Trace()
        with trace.on():
            saved = handle.state_dict()
        found["save"] = trace.reading
        saved = copy.deepcopy(saved)
        trace = Trace()
        with trace.on():
            handle.load_state_dict(saved)
        found["load"] = trace.reading
        dist.destroy_process_group()
    return found


def lines_of_source(root: Path) -> dict[str, tuple[int, int]]:
    """Return package -> (files, lines) of the packages under a root."""
    found: dict[str, tuple[int, int]] = {}
    for source in sorted(root.glob("p*/*/src")):
        files = list(source.rglob("*.py"))
        found[source.parent.name] = len(files), sum(len(file.read_text().splitlines()) for file in files)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the readings of the structure of the source.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--files", action="store_true", help="list the files of every traced call")
    parser.add_argument("--lines", action="store_true", help="count lines of source only, without torch")
    options = parser.parse_args(arguments)
    counted = lines_of_source(options.root)
    counted["all"] = sum(n for n, _ in counted.values()), sum(n for _, n in counted.values())
    print(f"{'package':<14} {'files':>6} {'lines':>7}")
    for package, (files, lines) in counted.items():
        print(f"{package:<14} {files:>6} {lines:>7}")
    if options.lines:
        return 0
    print(f"\n{'reading':<14} {'files':>6} {'moves':>7} {'depth':>6}")
    for name, reading in traced().items():
        print(f"{name:<14} {reading.files:>6} {reading.moves:>7} {reading.depth:>6}")
        if options.files:
            print(*(f"    {file}" for file in reading.names), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
