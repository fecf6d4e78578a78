"""`advise --cluster`: checks its options, and prints a :class:`~ch_bench.advise.cluster.Answer`."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NoReturn

import torch
from rich.table import Table
from rich.text import Text

import ch_core
from ch_bench.advise.cluster import (
    FASTEST,
    FORWARD,
    SLOWEST,
    Answer,
    Cluster,
    Training,
    answer,
    imagined,
    in_buckets,
    in_units,
    side_of,
)
from ch_bench.advise.outer import rounds
from ch_bench.advise.predict import HOOKS, LEVELED, SHARDED_HOOKS, WORTH, recorded_loss
from ch_bench.advise.workload import find, made_by
from ch_bench.links.link import FAR_APART, NUMBER, UNITS, Link
from ch_bench.shapes import BUCKET
from ch_bench.tables import bandwidth, columns, indented, milli, shown
from commhooks import BucketLayout, HookConfigError, duration

NODE_LINK = "900gbit"
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
    group.add_argument("--node-link", metavar="RATE", help=f"of a rank inside its node ({NODE_LINK})")


def set_options(args: argparse.Namespace) -> list[str]:
    """Return the options that only a cluster has, if they are given."""
    names = ("parameters", "dtype", "step", "fsdp", "node_link")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]


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


def nodes_of(option: str, text: str, fail: Fail) -> tuple[int, int]:
    """Return the numbers of nodes and of ranks of each in ``"4x8"``, or report a wrong text."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None or int(found[1]) * int(found[2]) < 2:
        fail(f"{option} {text}: expected nodes and ranks of each, as in 4x8, and at least two ranks")
    return int(found[1]), int(found[2])


def cluster_of(args: argparse.Namespace, fail: Fail) -> Cluster:
    """Return the cluster of the options, or report a wrong one."""
    nodes, ranks = nodes_of("--cluster", args.cluster, fail)
    if args.link is None or args.step is None:
        fail(
            "--cluster needs --link RATE,ROUNDTRIP (25gbit,0.1ms) and --step TIME, a step without communication (250ms)"
        )
    try:
        link, node = Link.parse(args.link), Link.parse(args.node_link or NODE_LINK)
    except ValueError as error:
        fail(str(error))
    if not link.rate or not node.rate:
        fail("--link and --node-link need a rate above 0, as in 25gbit")
    if link.jitter or link.loss:
        fail(
            f"--link {link.text}: jitter and loss are not predicted. Omit them, or shape a link here, without --cluster"
        )
    return Cluster(nodes, ranks, link.rate, link.round_trip or 0.0, node.rate)


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
        shapes = [tuple(p.shape) for p in found if p.dtype == dtype]
        made += in_units(shapes, dtype) if sharded else in_buckets(shapes, dtype, cap)
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
        made = {
            "lines": [{**asdict(one), "hidden": one.hidden} for one in found.lines],
            "recommended": found.choice.chosen.hook,
            "rival": None if found.rival is None else found.rival.hook,
            "pays_below": found.pays_below,
            "assumptions": notes,
        }
        print(json.dumps(made, indent=1))
    else:
        show(cluster, training, found, notes)
    return 0


def assumptions(cluster: Cluster, training: Training, about: str) -> list[str]:
    """Return what the prediction assumes, one sentence each."""
    parts = "units of about equal bytes" if training.sharded else "buckets"
    made = [
        f"Model: {about}, in {len(training.layouts)} {parts}. Gradients have the dtype of the parameters",
        f"Step: the forward takes {FORWARD:.0%} of it, the backward the rest; gradients appear evenly over the backward",
        f"Link: a node sends and receives {bandwidth(cluster.bits)} at the same time, and nothing else uses it. Each message "
        f"in a row between nodes costs half a round trip ({duration(cluster.round_trip / 2)})",
        "Messages: sums and gathers go round one ring of all ranks, and codes directly to every rank",
        "Codes: they take no time here, because their time on a GPU has not been measured. Time them on your GPU, and "
        "compare with 'codes'",
    ]
    if cluster.ranks > 1:
        made.insert(3, f"Inside a node: each rank sends {bandwidth(cluster.node_bits)}, without latency")
    if training.sharded:
        made.append("FSDP2: two weight gathers and one gradient scatter for each unit, and one gather runs ahead")
    return made


def show(cluster: Cluster, training: Training, found: Answer, notes: Sequence[str]) -> None:
    """Print the table, the answer, and the assumptions in 80 columns."""
    how, plain = ("FSDP2", "plain FSDP2") if training.sharded else ("DDP", "plain DDP")
    rank = " A rank sends 'rank MB'." if cluster.ranks > 1 else ""
    print(
        shown(
            f"{training.parameters / 1e6:.5g} M parameters, {how}, {cluster.nodes} node{'s' * (cluster.nodes > 1)} of "
            f"{cluster.ranks} rank{'s' * (cluster.ranks > 1)}, {bandwidth(cluster.bits)} and {duration(cluster.round_trip)} "
            f"between nodes. A step without communication takes {duration(training.step)}. Everything here is predicted.\n",
            _table(cluster, found, plain),
            f"\nIn a step 'node MB' leave a node.{rank} 'link' is the time of all messages, 'hidden' the part behind "
            "computation, and 'left' the part that makes the step longer. Codes may cost up to 'codes' before the hook loses to "
            f"{plain}. Times are in ms.\n",
            Text(_verdict(found, plain), style="bold"),
            *indented(_reasons(cluster, training, found)),
            "\nassumed:",
            *indented(notes),
            width=80,
        ),
        end="",
    )


def _table(cluster: Cluster, found: Answer, plain: str) -> Table:
    several = cluster.ranks > 1
    table = columns("hook", "node MB", *(("rank MB",) if several else ()), "link ms", "hidden", "left", "codes")
    first = found.lines[0]
    for one in found.lines:
        gain = first.left - one.left
        cells = [_mega(one.leaving), *([_mega(one.sent)] if several else [])]
        cells += map(milli, (one.link, one.hidden, one.left))
        cells.append("·" if one is first else milli(gain) if gain > 0 else "never")
        table.add_row(Text(plain if one is first else one.hook), *cells)
    return table


def _verdict(found: Answer, plain: str) -> str:
    first, chosen = found.lines[0], found.choice.chosen
    if chosen is first:
        return f"answer: none. Keep {plain}: a step takes {duration(first.seconds)}."
    return (
        f"answer: {chosen.hook}. A step takes {duration(chosen.seconds)} instead of {duration(first.seconds)}, if its codes take "
        f"no time. They may cost {duration(first.seconds - chosen.seconds)} in a step."
    )


def _reasons(cluster: Cluster, training: Training, found: Answer) -> list[str]:
    """Return sentences about the answer, without their full stops."""
    made = []
    chosen, rival, best = found.choice.chosen, found.rival, found.choice.best
    if rival is not None:
        if not chosen.lossy:
            saved = max(0.0, 1 - rival.seconds / found.choice.exact.seconds)
            made.append(f"The best lossy hook, {rival.hook}, would save {saved:.1%} of a step")
        if found.pays_below is not None:
            border = f"saves more than {WORTH:.0%} of a step if the link is slower than {bandwidth(found.pays_below)}"
            made.append(f"{rival.hook} {border}")
        elif chosen.lossy:
            made.append(f"{rival.hook} saves {WORTH:.0%} of a step on any link up to {bandwidth(FASTEST)}")
        else:
            made.append(f"No link down to {bandwidth(SLOWEST)} makes a lossy hook save {WORTH:.0%} of a step")
    if chosen.lossy:
        loss = recorded_loss(chosen.hook)
        made.append(f"It changes the gradients{f'. Recorded cost in loss: {loss}' if loss else ''}. Compare the loss")
    if cluster.round_trip >= FAR_APART and cluster.ranks == 1 and not training.sharded:
        made.append(
            f"On CPUs, commhooks.attach(link='{ch_core.Link(cluster.bits, cluster.round_trip)}') or run --link sends a step in "
            "fewer half round trips than this table has"
        )
    outer = None if training.sharded else rounds(training.step, best.link, best.hook, best.seconds)
    if outer is not None:
        made.append(outer.sentence())
    return made


def _mega(size: float) -> str:
    return f"{size / 1e6:.{0 if size >= 1e8 else 2}f}"
