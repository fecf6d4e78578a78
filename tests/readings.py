"""Print the readings that compare two structures of the source: files and moves between files, and lines of source.

`python tests/readings.py [ROOT]` reads lines of source under ROOT. It traces the code that the interpreter imports: one
gradient through a hook of DDP, `attach`, a save of a hook's state, and a load of it.
A move is a call from one file into another one, or the return from it.
"""

import argparse
import ast
import copy
import io
import re
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

OURS = re.compile(r"/src/((?:commhooks|ch_\w+)/.*)")
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
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


class Lines(NamedTuple):
    """Lines of Python source by kind. A line with code and a comment counts as code."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0

    def plus(self, other: "Lines") -> "Lines":
        return Lines(*(mine + more for mine, more in zip(self, other, strict=True)))


def lines_of(file: Path) -> Lines:
    """Count the lines of one file."""
    text = file.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    comments -= code | docstrings
    whole = len(text.splitlines())
    return Lines(1, whole, len(code), len(docstrings), len(comments), whole - len(code | docstrings | comments))


def lines_of_source(root: Path) -> dict[str, Lines]:
    """Return the lines of each package under a root."""
    return {
        source.parent.name: reduce(Lines.plus, map(lines_of, source.rglob("*.py")), Lines())
        for source in sorted(root.glob("p*/*/src"))
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the readings of the structure of the source.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--files", action="store_true", help="list the files of every traced call")
    parser.add_argument("--lines", action="store_true", help="count lines of source only, without torch")
    options = parser.parse_args(arguments)
    counted = lines_of_source(options.root)
    counted["all"] = reduce(Lines.plus, counted.values(), Lines())
    print(f"{'package':<14}", *(f"{kind:>10}" for kind in Lines._fields))
    for package, lines in counted.items():
        print(f"{package:<14}", *(f"{number:>10}" for number in lines))
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
