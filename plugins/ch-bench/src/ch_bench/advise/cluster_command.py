"""`advise --cluster`: checks its options, and prints a :class:`~ch_bench.advise.cluster.Answer`."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import ch_core
from ch_bench.advise.cluster import (
    BUCKET,
    FASTEST,
    FORWARD,
    SLOWEST,
    UNIT,
    Answer,
    Cluster,
    Line,
    Training,
    answer,
    imagined,
    in_buckets,
    side_of,
)
from ch_bench.advise.outer import rounds
from ch_bench.advise.predict import HOOKS, LEVELED, SHARDED_HOOKS, WORTH, recorded_loss
from ch_bench.advise.workload import find, made_by
from ch_bench.help_text import without_trailing_spaces
from ch_bench.links.link import FAR_APART, NUMBER, UNITS, Link
from commhooks import BucketLayout, HookConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Fail = Callable[[str], NoReturn]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a cluster."""
    group = parser.add_argument_group("a cluster that is not here (nothing is measured or started)")
    group.add_argument("--cluster", metavar="NxL", help="N nodes of L ranks, as in 4x8")
    group.add_argument("--parameters", metavar="P", type=float, help="parameters, as in 1.3e9, instead of --model")
    group.add_argument("--dtype", choices=DTYPES, help="of gradients without --model (fp32)")
    group.add_argument("--step", metavar="TIME", help="a step without communication, as in 250ms")
    group.add_argument("--fsdp", action="store_true", help="FSDP2 over all ranks, instead of DDP")
    group.add_argument("--node-link", metavar="RATE", default="900gbit", help="of a rank inside its node (900gbit)")


def set_options(args: argparse.Namespace) -> list[str]:
    """Return the options that only a cluster has, if they are given."""
    given = {"--parameters": args.parameters, "--dtype": args.dtype, "--step": args.step, "--fsdp": args.fsdp}
    return [name for name, value in given.items() if value]


def seconds_of(text: str) -> float:
    """Return the seconds of a text such as ``"250ms"``.

    >>> seconds_of("250ms"), seconds_of("0.1 s")
    (0.25, 0.1)

    Raises:
        ValueError: it is not a time.
    """
    found = re.fullmatch(NUMBER + r" ?(us|ms|s)", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a time; legal is a number and us, ms or s, as in 250ms")
    return float(found[1]) * UNITS[found[2]]


def cluster_of(args: argparse.Namespace, fail: Fail) -> Cluster:
    """Return the cluster of the options, or report a wrong one."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", args.cluster)
    if found is None or int(found[1]) * int(found[2]) < 2:
        fail(f"--cluster {args.cluster}: expected nodes and ranks of each, as in 4x8, and at least two ranks")
    if args.link is None or args.step is None:
        fail(
            "--cluster needs --link RATE,ROUNDTRIP (25gbit,0.1ms) and --step TIME, a step without communication (250ms)"
        )
    try:
        link, node = Link.parse(args.link), Link.parse(args.node_link)
    except ValueError as error:
        fail(str(error))
    if not link.rate or not node.rate:
        fail("--link and --node-link need a rate above 0, as in 25gbit")
    if link.jitter or link.loss:
        fail(
            f"--link {link.text}: jitter and loss are not predicted. Omit them, or shape a link here, without --cluster"
        )
    return Cluster(int(found[1]), int(found[2]), link.rate, link.round_trip or 0.0, node.rate)


def training_of(args: argparse.Namespace, fail: Fail) -> tuple[Training, str]:
    """Return the model of the options, and a sentence about it."""
    try:
        step = seconds_of(args.step)
    except ValueError as error:
        fail(f"--step: {error}")
    if step <= 0:
        fail("--step must be > 0")
    if (args.model is None) == (args.parameters is None):
        fail("--cluster needs either --parameters P (1.3e9) or --model MODULE:CALLABLE")
    cap = BUCKET if args.bucket_cap_mb is None else args.bucket_cap_mb * 2**20
    if args.model is not None:
        if args.dtype:
            fail("--dtype: the model has its own. Omit --dtype")
        try:
            module = made_by(args.model, find(args.model)())[0]
        except (RuntimeError, ValueError) as error:
            raise HookConfigError(
                f"model {args.model!r} raised {type(error).__name__}: {error}. --cluster makes it without a process group. "
                "Return the module as it is, and give --fsdp instead of fully_shard"
            ) from error
        layouts, about = _of_model(module, args.fsdp, cap), f"parameters of {args.model}"
    else:
        if not 64 <= args.parameters < 1e13:
            fail(f"--parameters {args.parameters:g}: give a number from 64 to 1e13")
        dtype = DTYPES[args.dtype or "fp32"]
        layouts = imagined(args.parameters, dtype, args.fsdp, cap)
        side = side_of(args.parameters)
        about = f"all parameters lie in {dtype_name(dtype)} matrices of {side} x {side}"
    return Training(layouts, step, args.fsdp), about


def _of_model(module: torch.nn.Module, sharded: bool, cap: float) -> tuple[BucketLayout, ...]:
    found = [p for p in module.parameters() if p.requires_grad]
    dtypes = list(dict.fromkeys(p.dtype for p in found))
    made: list[BucketLayout] = []
    for dtype in dtypes:
        shapes = [tuple(p.shape) for p in reversed(found) if p.dtype == dtype]  # the backward begins with the last ones
        bytes_ = sum(p.numel() * p.element_size() for p in found if p.dtype == dtype)
        made += in_buckets(shapes, dtype, bytes_ / 24 if sharded else cap)
    return tuple(made)


def dtype_name(dtype: torch.dtype) -> str:
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype).removeprefix("torch."))


def hooks_for(cluster: Cluster, training: Training) -> list[str]:
    """Return the hooks that can help. A cast to 16 bits saves nothing on gradients of 16 bits."""
    narrow = all(layout.dtype.itemsize == 2 for layout in training.layouts)
    names = [
        name for name in (SHARDED_HOOKS if training.sharded else HOOKS) if not (narrow and name == "bf16_compress")
    ]
    if training.sharded or cluster.ranks == 1 or cluster.nodes == 1:
        return names
    leveled = [f"two_level({name})" for name in names if name in LEVELED]
    return [*names, "two_level(allreduce)", *leveled]


def run(args: argparse.Namespace, fail: Fail) -> int:
    """Predict, and print.

    Raises:
        CommHooksError: unknown model or hook, or one that FSDP2 cannot use.
    """
    cluster = cluster_of(args, fail)
    training, about = training_of(args, fail)
    found = answer(cluster, training, args.hooks or hooks_for(cluster, training))
    notes = assumptions(cluster, training, about)
    if args.json:
        lines = [{**asdict(one), "hidden": one.hidden} for one in found.lines]
        print(json.dumps({**asdict(found), "lines": lines, "assumptions": notes}, indent=1))
    else:
        show(cluster, training, found, notes)
    return 0


def assumptions(cluster: Cluster, training: Training, about: str) -> list[str]:
    """Return what the prediction assumes, one sentence each."""
    parts = (
        f"{len(training.layouts)} units of {UNIT} matrices" if training.sharded else f"{len(training.layouts)} buckets"
    )
    made = [
        f"Model: {about}, in {parts}. Gradients have the dtype of the parameters",
        f"Step: the forward takes {FORWARD:.0%} of it, the backward the rest; gradients appear evenly over the backward",
        f"Link: a node sends and receives {_rate(cluster.bits)} at the same time, and nothing else uses it. Each message "
        f"in a row between nodes costs half a round trip ({_time(cluster.round_trip / 2)})",
        "Messages: sums and gathers go round one ring of all ranks, and codes directly to every rank",
        "Codes: they take no time here, because their time on a GPU has not been measured. Time them on your GPU, and "
        "compare with 'codes'",
    ]
    if cluster.ranks > 1:
        made.insert(3, f"Inside a node: each rank sends {_rate(cluster.node_bits)}, without latency")
    if training.sharded:
        made.append("FSDP2: two weight gathers and one gradient scatter for each unit, and one gather runs ahead")
    return made


def show(cluster: Cluster, training: Training, found: Answer, notes: Sequence[str]) -> None:
    """Print the table, the answer, and the assumptions in 80 columns."""
    console = Console(width=80, highlight=False)
    how, plain = ("FSDP2", "plain FSDP2") if training.sharded else ("DDP", "plain DDP")
    rank = " A rank sends 'rank MB'." if cluster.ranks > 1 else ""
    with console.capture() as shown:
        console.print(
            f"{training.parameters / 1e6:.5g} M parameters, {how}, {cluster.nodes} nodes of {cluster.ranks} "
            f"rank{'s' if cluster.ranks > 1 else ''}, {_rate(cluster.bits)} and {_time(cluster.round_trip)} between nodes. A "
            f"step without communication takes {_time(training.step)}. Everything here is predicted.\n"
        )
        console.print(_table(cluster, found, plain))
        console.print(
            f"\nIn a step 'node MB' leave a node.{rank} 'link' is the time of all messages, 'hidden' the part behind "
            "computation, and 'left' the part that makes the step longer. Codes may cost up to 'codes' before the hook loses to "
            f"{plain}. Times are in ms.\n"
        )
        console.print(Text(_verdict(found, plain), style="bold"))
        for sentence in _reasons(cluster, training, found):
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
        console.print("\nassumed:")
        for note in notes:
            console.print(Padding(Text(f"{note}."), (0, 0, 0, 2), expand=False))
    print(without_trailing_spaces(shown.get()), end="")


def _table(cluster: Cluster, found: Answer, plain: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("hook", overflow="fold")
    for name in ("node MB", *(("rank MB",) if cluster.ranks > 1 else ()), "link ms", "hidden", "left", "codes"):
        table.add_column(name, justify="right", no_wrap=True)
    first = found.lines[0]
    for one in found.lines:
        gain = first.left - one.left
        cells = [_mega(one.leaving), *([_mega(one.sent)] if cluster.ranks > 1 else [])]
        cells += [_milli(value) for value in (one.link, one.hidden, one.left)]
        cells.append("·" if one is first else _milli(gain) if gain > 0 else "never")
        table.add_row(Text(plain if one is first else one.hook), *cells)
    return table


def _verdict(found: Answer, plain: str) -> str:
    first, chosen = found.lines[0], _of(found, found.recommended)
    if chosen is first:
        return f"answer: none. Keep {plain}: a step takes {_time(first.seconds)}."
    return (
        f"answer: {chosen.hook}. A step takes {_time(chosen.seconds)} instead of {_time(first.seconds)}, if its codes take no "
        f"time. They may cost {_time(first.seconds - chosen.seconds)} in a step."
    )


def _reasons(cluster: Cluster, training: Training, found: Answer) -> list[str]:
    made = []
    chosen = _of(found, found.recommended)
    exact = min((one for one in found.lines if not one.lossy), key=lambda one: one.seconds)
    if found.rival is not None:
        saved = 1 - _of(found, found.rival).seconds / exact.seconds
        if not chosen.lossy:
            made.append(f"The best lossy hook, {found.rival}, would save {max(0.0, saved):.1%} of a step.")
        if found.pays_below is not None:
            border = f"saves more than {WORTH:.0%} of a step if the link is slower than {_rate(found.pays_below)}."
            made.append(f"{found.rival} {border}")
        elif chosen.lossy:
            made.append(f"{found.rival} saves {WORTH:.0%} of a step on any link up to {_rate(FASTEST)}.")
        else:
            made.append(f"No link down to {_rate(SLOWEST)} makes a lossy hook save {WORTH:.0%} of a step.")
    if chosen.lossy:
        loss = recorded_loss(chosen.hook)
        made.append(f"It changes the gradients{f'. Recorded cost in loss: {loss}' if loss else ''}. Compare the loss.")
    best = min(found.lines, key=lambda one: one.seconds)
    if cluster.round_trip >= FAR_APART and cluster.ranks == 1 and not training.sharded:
        made.append(
            f"On CPUs, commhooks.attach(link='{ch_core.Link(cluster.bits, cluster.round_trip)}') or run --link sends a step in "
            "fewer half round trips than this table has."
        )
    outer = None if training.sharded else rounds(training.step, best.link, best.hook, best.seconds)
    if outer is not None:
        made.append(f"{outer.sentence()}.")
    return made


def _of(found: Answer, hook: str) -> Line:
    return next(one for one in found.lines if one.hook == hook)


def _mega(size: float) -> str:
    return f"{size / 1e6:.{0 if size >= 1e8 else 2}f}"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}"


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 2}f} ms"


def _rate(bits: float) -> str:
    unit, size = ("Gbit/s", 1e9) if bits >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits / size:.3g} {unit}" if bits / size < 1000 else f"{bits / size:.0f} {unit}"
