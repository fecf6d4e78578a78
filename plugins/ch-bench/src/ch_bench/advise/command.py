r"""Predict step times with each hook on your network, and recommend one.

    torchrun --nproc-per-node 2 -m commhooks advise --model my_module:make
    python -m commhooks advise --nproc 2

Start it on your machines as you start your training. Within a minute it times a step without communication, the
messages that hooks send over your network, and the arithmetic of each hook on your model. Then it runs each hook on the
real model with emulated messages and predicts the time of a step. It recommends a hook and changes nothing.

`my_module:make` returns `(module, batch)`, where `module(*batch)` is the loss or a tensor whose mean replaces it. For a
module that returns predictions it returns `(module, (inputs, target), loss)`. A last part may be `optimizer(parameters)`.
With `python -m` the module may lie in the current folder. If the function has sharded the module with `fully_shard`, the
steps are those of FSDP2, and 'quant8 / quant4' stands for a hook on weight gathers and one on gradients. Without a launcher,
ranks are started on this machine. `--link` then connects them by a shaped network (needs root and iproute2). With a launcher
it says what the link should be, and `advise` warns if more arrives. If a round trip between two ranks takes 5 ms or more,
every hook is attached with `link=`, as for ranks that are far apart.

On several nodes of several ranks, `advise` also predicts the hooks inside `two_level`, and measures the link inside a node and
the one between nodes. torchrun tells the nodes. `--nodes 2x4` starts two nodes of four ranks here; with `--link`
each node has one uplink.

`--cluster` answers for machines that are not here. It measures nothing and starts no rank:

    python -m commhooks advise --cluster 4x8 --link 25gbit,0.1ms \
        --parameters 1.3e9 --dtype bf16 --step 250ms
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from ch_bench import launch
from ch_bench.advise import cluster_command
from ch_bench.advise.network import Network
from ch_bench.advise.predict import HOOKS, SHARDED_HOOKS, Advice, advise, leveled_hooks
from ch_bench.advise.workload import MODELS, check, load
from ch_bench.help_text import HelpFormatter
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.tables import columns, indented, milli, shown
from ch_testing import WorkerError
from commhooks import Progress, duration

PARTS = (
    "A step is the sum of waiting for messages, arithmetic of the hook, and the rest. The rest is the model's own work, which "
    "slows down if messages use the same cores."
)
WHERE = {"all": "", "node": " inside a node", "peers": " between nodes"}


def set_up(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command."""
    parser.description, parser.formatter_class = __doc__, HelpFormatter
    parser.add_argument("--model", help=f"module:callable, or one of {', '.join(MODELS)} (default gpt)")
    parser.add_argument(
        "--hooks",
        nargs="+",
        metavar="EXPR",
        help=f"hooks to compare (default {', '.join(HOOKS)}; for fully_shard, {', '.join(SHARDED_HOOKS)})",
    )
    parser.add_argument("--seconds", metavar="S", type=float, default=60.0, help="time limit of the probe (default 60)")
    parser.add_argument("--bucket-cap-mb", metavar="MB", type=float, help="bucket size of DDP (default DDP's)")
    parser.add_argument("--nproc", metavar="N", type=int, default=2, help="ranks without a launcher (default 2)")
    parser.add_argument("--nodes", metavar="NxL", help="N nodes of L ranks without a launcher, as in 2x4")
    parser.add_argument(
        "--link", metavar="LINK", help="shape the network between these ranks or nodes, as in 200mbit,80ms"
    )
    cluster_command.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def start(args: argparse.Namespace) -> int:
        if args.cluster is not None:
            if args.nodes is not None:
                parser.error("--nodes starts ranks here, and --cluster starts none: give one of them")
            return cluster_command.run(args, parser.error)
        return run(_checked(args, parser))

    return start


def _checked(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    if alone := cluster_command.set_options(args):
        parser.error(f"{alone[0]} describes a cluster that is not here: add --cluster NxL, as in 4x8")
    args.model = args.model or "gpt"
    try:
        args.shape = Link.parse(args.link) if args.link else None
    except ValueError as error:
        parser.error(str(error))
    args.each = None
    if args.nodes is not None:
        nodes, args.each = cluster_command.nodes_of("--nodes", args.nodes, parser.error)
        args.nproc = nodes * args.each
    if args.seconds <= 0 or args.nproc < 2:
        parser.error("--seconds must be > 0, and --nproc at least 2, because one rank sends nothing")
    return args


def run(args: argparse.Namespace) -> int:
    """Probe, predict and print on rank 0.

    Raises:
        CommHooksError: unknown model or hook.
    """
    check(args.model, args.hooks or HOOKS)
    if launch.under_torchrun():
        launch.run_here(worker, vars(args), None)
        return 0
    if args.shape and (reason := netns.why_not(args.shape)):
        print(f"--link {args.link}: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        path = Path(folder, "advice.json")
        shaped = netns.Network(args.nproc, args.shape, ranks_per_node=args.each or 1) if args.shape else nullcontext()
        with shaped as net:
            try:
                launch.launch(worker, args.nproc, vars(args), path, enter=net.enter if net else None)
            except WorkerError as error:
                print(error, file=sys.stderr)
                return 1
        show(json.loads(path.read_text()), args.json)
    return 0


def worker(rank: int, world: int, device: torch.device, args: dict[str, Any], path: Path | None) -> None:
    """Run one rank. Rank 0 prints the result, or writes it to ``path``."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as in training
    if args["each"] is not None:  # as torchrun tells nodes
        os.environ.update(GROUP_RANK=str(rank // args["each"]), LOCAL_WORLD_SIZE=str(args["each"]))
    work = load(args["model"], device, args["bucket_cap_mb"])
    with Progress("advise") if rank == 0 else nullcontext() as progress:
        tell = progress if progress is not None else (lambda what: None)
        hooks = args["hooks"] or (list(SHARDED_HOOKS) if work.sharded else leveled_hooks(work, list(HOOKS)))
        local, told = _local(world, args["link"]), args["shape"]
        advice = advise(work, hooks, seconds=args["seconds"], tell=tell, local=local, told=told)
    if rank == 0:
        found = {"model": args["model"], "device": str(device), **as_dict(advice)}
        if path is None:
            show(found, args["json"])
        else:
            path.write_text(json.dumps(found))


def _local(world: int, link: str | None) -> bool:
    """Return True if all ranks share this machine and no link is shaped between them."""
    if launch.under_torchrun():
        return os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    return link is None


def as_dict(advice: Advice) -> dict[str, Any]:
    """Return plain values, for JSON."""
    plain = ("alone", "recommended", "reasons", "parameters", "world_size", "ranks_per_node")
    return {
        **{key: getattr(advice, key) for key in plain},
        "predictions": [asdict(one) for one in advice.predictions],
        "network": network_dict(advice.network),
    }


def network_dict(network: Network) -> dict[str, Any]:
    """Return the result of the probe, with latency and bandwidth of each collective."""
    rows = []
    for scope, level in {"all": network, **network.levels}.items():
        for (kind, dtype), curve in level.curves.items():
            sent = curve.sizes[-1] - curve.sizes[0]
            busy = curve.work(curve.sizes[-1])
            rate = 8 * sent / busy if busy > 0 else None
            row = {"collective": kind, "dtype": dtype, "scope": scope, "latency": curve.latency, "bits": rate}
            rows.append({**row, **asdict(curve)})
    plain = ("together", "burst", "spare", "load")
    pair = None if network.pair is None else {"bits": network.pair.rate, "round_trip": network.pair.round_trip}
    return {**{key: getattr(network, key) for key in plain}, "pair": pair, "collectives": rows}


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print the tables in 80 columns or the width of the terminal."""
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(
        shown(
            f"{found['model']}: {found['parameters']:,} parameters on {_ranks(found)} ({found['device']}); "
            f"a step without communication takes {duration(found['alone'])}. {pair_text(found['network'])}\n",
            _network_table(found["network"]),
            "",
            _hook_table(found),
            f"\n{_columns(found)}",
            Text(f"\nuse {found['recommended']}", style="bold"),
            *indented(found["reasons"]),
            width=None if sys.stdout.isatty() else 80,
        ),
        end="",
    )


def _ranks(found: dict[str, Any]) -> str:
    world, each = found["world_size"], found["ranks_per_node"]
    return f"{world} ranks" if each is None else f"{world // each} node{'s' * (world > each)} of {each} ranks"


def pair_text(network: dict[str, Any]) -> str:
    pair, load = network["pair"], f"Before the probe, other programs used {network['load']:.0%} of the cores."
    if pair is None:
        return load
    trip = f"Between two ranks a round trip takes {pair['round_trip'] * 1e3:.2f} ms"
    return f"{trip}, and {pair['bits'] / 1e6:.0f} Mbit/s arrive. {load}"


def _network_table(network: dict[str, Any]) -> Table:
    table = columns("collective", "latency", "payload a second", "largest size")
    for row in network["collectives"]:
        name = row["collective"] + (f" of {row['dtype']}" if row["dtype"] else "") + WHERE[row["scope"]]
        rate = "too short" if row["bits"] is None else f"{row['bits'] / 8e6:.0f} MB"  # to tell a byte's time
        table.add_row(name, f"{row['latency'] * 1e3:.2f} ms", rate, f"{row['sizes'][-1] / 1e6:.2f} MB")
    return table


def _hook_table(found: dict[str, Any]) -> Table:
    plain = next(one for one in found["predictions"] if one["hook"] == "allreduce")
    nodes = plain["leaving"] is not None
    table = columns("hook", "step ms", "waiting", "arithmetic", "rest", "node MB" if nodes else "sent MB", "speed")
    for one in found["predictions"]:
        faster = plain["seconds"] / one["seconds"]
        taken = "bold green" if one["hook"] == found["recommended"] else ""
        rest = max(0.0, one["seconds"] - one["waiting"] - one["arithmetic"])
        cells: list[str | Text] = [
            *map(milli, (one["seconds"], one["waiting"], one["arithmetic"], rest)),
            f"{one['leaving' if nodes else 'sent'] / 1e6:.2f}",
            Text("·" if one is plain else f"{faster:.2f}×", style="" if taken or faster >= 1 else "bright_red"),
        ]
        table.add_row(Text(one["hook"]), *cells, style=taken)
    return table


def _columns(found: dict[str, Any]) -> str:
    """Return the meaning of the columns of the hooks' table."""
    sent = "sent MB: bytes that a rank sends in a step"
    if found["predictions"][0]["leaving"] is not None:
        sent = "node MB: bytes that a node sends to other nodes in a step"
    return f"{PARTS} {sent}; speed: relative to allreduce."
