"""Nanoseconds per number of the codec on a CPU, compared with torch's fused kernels, a copy and a read of the same memory.

    python -m programs.cost.codec [--seconds 15] [--record]

One process encodes and decodes 10.5 M numbers chunk by chunk, as the exchange does, with one thread and with two. All rows take
turns in a new random order each time. The fused kernels are FBGEMM's for rows of embeddings, in torch. No hook uses
them, because zero is no level of their format, so that unused rows of an embedding would move. They also lose NaN and Inf.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch

from ch_bench import record
from ch_quant.codec import Codec, Workspace
from commhooks import StepContext

BITS = (8, 4, 2)
BLOCK, NUMBERS = 128, 80 << 17
FUSED = {8: "byte", 4: "4bit", 2: "2bit"}
Work = Callable[[], object]


def encoding(bits: int, x: torch.Tensor, fed: bool = False) -> tuple[Work, Work, Work]:
    """Return functions that encode ``x``, decode it, and decode and add it, chunk by chunk.

    Args:
        bits: of a number.
        x: ``(rows, BLOCK)``.
        fed: True if the first function also subtracts from a copy of ``x`` what it encoded, as error feedback does.
    """
    codec = Codec(bits, BLOCK)
    work = Workspace(codec, StepContext(), x.device, codec.chunk)
    message = torch.empty(codec.bytes(len(x)), dtype=torch.uint8)
    chunks = [(first, min(codec.chunk, len(x) - first)) for first in range(0, len(x), codec.chunk)]
    out = torch.zeros_like(x)

    def encode() -> None:
        for first, rows in chunks:
            part = x[first : first + rows]
            scales, packed = codec.split(message, len(x), first, rows)
            if fed:
                part = work.x[:rows].copy_(part)
            work.encode(part, scales, packed, None, keep=fed)
            if fed:
                work.subtract(part, scales)

    def decode(add: bool) -> None:
        for first, rows in chunks:
            scales, packed = codec.split(message, len(x), first, rows)
            work.decode(scales, packed, out[first : first + rows], factor=0.5, add=add)

    encode()
    return encode, lambda: decode(False), lambda: decode(True)


def rows(x: torch.Tensor) -> dict[str, Work]:
    """Return what to time, by name."""
    other = torch.empty_like(x)
    found: dict[str, Work] = {"read": lambda: x.sum(), "copy": lambda: other.copy_(x)}
    parts = x.split((1 << 17) // BLOCK)
    for bits, name in FUSED.items():
        both = [getattr(torch.ops.quantized, f"embedding_bag_{name}_{what}") for what in ("prepack", "unpack")]
        packed = [both[0](part) for part in parts]
        encode, decode, add = encoding(bits, x)
        found |= {f"encode {bits}": encode, f"decode {bits}": decode, f"decode and add {bits}": add}
        found[f"encode and subtract {bits}"] = encoding(bits, x, fed=True)[0]
        found[f"fused encode {bits}"] = lambda both=both: [both[0](part) for part in parts]  # type: ignore[misc]
        found[f"fused decode {bits}"] = lambda both=both, packed=packed: [both[1](part) for part in packed]  # type: ignore[misc]
    return found


def measure(seconds: float, numbers: int = NUMBERS) -> dict[int, dict[str, float]]:
    """Return nanoseconds per number of each row, for one and two threads."""
    x = torch.randn(numbers // BLOCK, BLOCK, generator=torch.Generator().manual_seed(0))
    work, before = rows(x), torch.get_num_threads()
    times: dict[tuple[int, str], list[float]] = {(threads, name): [] for threads in (1, 2) for name in work}
    chance, end = random.Random(0), time.perf_counter() + seconds
    while time.perf_counter() < end or not times[1, "read"]:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name in chance.sample(list(work), len(work)):
                begin = time.perf_counter()
                work[name]()
                times[threads, name].append((time.perf_counter() - begin) / x.numel() * 1e9)
    torch.set_num_threads(before)
    return {threads: {name: median(times[threads, name]) for name in work} for threads in (1, 2)}


def table(found: dict[int, dict[str, float]]) -> str:
    """Return the figures as Markdown: one thread / two threads."""
    one, two = found[1], found[2]

    def cell(name: str) -> str:
        return f"{one[name]:.2f} / {two[name]:.2f}"

    what = ["encode", "encode and subtract", "fused encode", "decode", "decode and add", "fused decode"]
    made = record.markdown_table(["bits", *what], [[str(b), *(cell(f"{row} {b}") for row in what)] for b in BITS])
    return f"{made}\n\nread {cell('read')}, copy {cell('copy')}"


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="time to measure (default 15)")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/codec.md")
    args = parser.parse_args(argv)
    shown = table(measure(args.seconds))
    print(shown)
    if args.record:
        made_by = record.command("programs.cost.codec", argv)
        record.write("codec", "Nanoseconds per number", made_by, shown, "one thread / two threads")
    return 0


if __name__ == "__main__":
    record.run_main(main)
