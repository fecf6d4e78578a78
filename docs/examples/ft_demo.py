"""Three replicas train the demo's GPT with compressed gradients. One is killed in the middle of backward.

Each replica is a process with torchft's real Manager. The replicas meet at a lighthouse in this process, on loopback. The demo
kills replica 1 with SIGKILL between two collectives of a backward pass, and starts it again with other weights. The log names the
lost member, the lost attempts, their durations and the healed member. The picture shows the loss and the number of participants
over time.

Run it with ``nox -s ft-demo``, or by hand: ``python docs/examples/ft_demo.py --steps 120 --png ft_demo.png``.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # torchft logs a line per quorum and process

import torch

import ch_ft
from ch_bench.gpt import GPT
from ch_ft.local_manager import NOT_SURVIVED, loopback

Record = dict[str, Any]
VOCAB, CONTEXT, BATCH = 64, 64, 8


@dataclass(frozen=True)
class Replica:
    """Arguments of one process."""

    number: int
    folder: str
    lighthouse: str
    hook: str
    steps: int
    replicas: int
    kill_at: int | None
    seed: int

    @property
    def name(self) -> str:
        return f"replica_{self.number}"


def main() -> int:
    options = arguments()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="ft_demo_"))
    server = ch_ft.start_lighthouse(min_replicas=1, heartbeat=1.0, join_timeout=1.0)
    address = loopback(server.address())
    print(f"lighthouse: {address}  (others on this machine can join it)")
    print(f"not survived: {NOT_SURVIVED}")
    replicas = [
        Replica(n, str(folder), address, options.hook, options.steps, options.replicas, options.kill_at, n)
        for n in range(options.replicas)
    ]
    try:
        codes = supervise(replicas, options.limit)
    finally:
        server.shutdown()
    logs = {r.name: read(folder / f"{r.name}.jsonl") for r in replicas}
    story(logs)
    if options.png:
        picture(logs, Path(options.png), options.hook)
        print(f"picture: {options.png}")
    failed = {name: code for name, code in codes.items() if code != 0}
    if failed:
        print(f"exit codes: {failed}")
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="committed steps at which training ends")
    parser.add_argument("--kill-at", type=int, default=15, help="step in whose backward replica 1 is killed")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--hook", default="powersgd(rank=4)")
    parser.add_argument("--png", default="ft_demo.png", help="file for the picture; empty for none")
    parser.add_argument("--folder", default="", help="folder for the logs (default: a temporary folder)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which all processes are ended")
    return parser.parse_args()


def supervise(replicas: list[Replica], limit: float) -> dict[str, int | None]:
    """Start the replicas, start the killed one again, and wait for all. No process is left when this returns."""
    spawn = multiprocessing.get_context("spawn")

    def start(replica: Replica) -> Any:
        process = spawn.Process(target=train, args=(replica,), daemon=True)
        process.start()
        return process

    processes = {r.name: (r, start(r)) for r in replicas}
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline and any(p.is_alive() for _, p in processes.values()):
            time.sleep(0.05)
            for name, (replica, process) in list(processes.items()):
                if process.exitcode == -signal.SIGKILL and replica.number == 1 and replica.kill_at is not None:
                    print(f"{name} was killed (signal {signal.SIGKILL.value}); starting it again")
                    again = replace(replica, kill_at=None, seed=replica.seed + 100)
                    processes[name] = (again, start(again))
        return {name: p.exitcode for name, (_, p) in processes.items()}
    finally:
        for _, process in processes.values():
            process.kill()
            process.join()


# -- one replica


def train(replica: Replica) -> None:
    """Run a replica's process."""
    torch.set_num_threads(1)
    torch.manual_seed(replica.seed)
    logging.getLogger("torchft").setLevel(logging.CRITICAL)  # the same events, with tracebacks
    warnings.simplefilter("ignore")
    log = (Path(replica.folder) / f"{replica.name}.jsonl").open("a", buffering=1)

    def note(event: str, **fields: object) -> None:
        log.write(json.dumps({"t": time.monotonic(), "event": event, **fields}) + "\n")

    note("started")
    module = GPT(VOCAB, CONTEXT, width=128, layers=2, heads=4)
    local = ch_ft.local(lighthouse=replica.lighthouse, replica=replica.name, group_timeout=30.0, timeout=40.0)
    manager = local.manager
    model = ch_ft.DistributedDataParallel(
        manager, module, hook=replica.hook, process_group=local.process_group, bucket_cap_mb=0.5
    )
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min(1.0, (step + 1) / 10))
    optimizer = ch_ft.OptimizerWrapper(manager, inner, schedulers=[schedule])
    for key, part in (("model", module), ("optim", inner), ("schedule", schedule)):
        manager.register_state_dict_fn(key, part.load_state_dict, part.state_dict)
    suicide(manager, replica, note)
    participants = 0
    while manager.current_step() < replica.steps or participants < replica.replicas:  # equal on all replicas
        optimizer.zero_grad()
        loss = model(*batch(replica.number, manager.current_step()))
        loss.backward()
        contributed, participants = manager.is_participating(), manager.num_participants()
        committed = optimizer.step()
        note(
            "step",
            step=manager.current_step(),
            loss=float(loss.detach()),
            committed=committed,
            contributed=contributed,
            participants=participants,
        )
    assert model.handle is not None
    stats = model.handle.stats()
    gradient = 4 * sum(p.numel() for p in module.parameters())
    note("finished", compressed=stats["compressed_steps"], sent=stats["payload_bytes"] / stats["steps"], plain=gradient)
    time.sleep(0.5)  # the others may still be in their last vote
    os._exit(0)  # torchft 0.2.0 cannot stop its checkpoint server


def suicide(manager: Any, replica: Replica, note: Any) -> None:
    """SIGKILL this process between the P's and the Q's of a backward pass, if it is replica 1."""
    allreduce, seen = manager.allreduce, [-1, 0]

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = manager.current_step()
        seen[:] = [now, seen[1] + 1 if seen[0] == now else 0]
        due = replica.number == 1 and replica.kill_at is not None and now >= replica.kill_at
        if due and seen[1] == 3 and manager.num_participants() == replica.replicas:
            note("killed", step=now)
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce(tensor, *args, **kwargs)

    manager.allreduce = counting


def batch(number: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a text that counts with a stride. It is easy to learn, so the loss falls within a minute."""
    rng = torch.Generator().manual_seed(1000 * step + number)
    start = torch.randint(VOCAB, (BATCH, 1), generator=rng)
    stride = torch.randint(1, 5, (BATCH, 1), generator=rng)
    line = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB
    return line[:, :-1], line[:, 1:]


# -- afterwards


def read(path: Path) -> list[Record]:
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the kill cut it off
            continue
    return records


def story(logs: dict[str, list[Record]]) -> None:
    """Tell the run: the lost member, lost attempts, durations, and the healed member."""
    begin = min(lines[0]["t"] for lines in logs.values() if lines)
    kills = [(name, r) for name, lines in logs.items() for r in lines if r["event"] == "killed"]
    for victim, kill in kills:
        print(f"{kill['t'] - begin:7.2f} s  {victim} left in the backward pass of step {kill['step']}, between P and Q")
        for name, lines in logs.items():
            after = [r for r in lines if r["event"] == "step" and r["t"] > kill["t"]]
            if name == victim or not after:
                continue
            lost = sum(not r["committed"] for r in after)
            next_one = next((r for r in after if r["committed"]), None)
            if next_one is not None:
                print(
                    f"{next_one['t'] - begin:7.2f} s  {name} lost {lost} attempt(s), committed step {next_one['step']} "
                    f"with {next_one['participants']} participants, {next_one['t'] - kill['t']:.2f} s after the kill"
                )
        reborn = [r for r in logs[victim] if r["t"] > kill["t"]]
        first = next((r for r in reborn if r["event"] == "step" and r["committed"]), None)
        if first is not None:
            print(
                f"{first['t'] - begin:7.2f} s  {victim} healed and committed step {first['step']}, "
                f"{first['t'] - reborn[0]['t']:.2f} s after its new process began to run"
            )
    for name, lines in logs.items():
        end = next((r for r in lines if r["event"] == "finished"), None)
        steps = [r for r in lines if r["event"] == "step"]
        if end is not None and steps:
            print(
                f"{name}: loss {steps[-1]['loss']:.3f} at step {steps[-1]['step']}; {end['compressed']:.0f} compressed "
                f"steps, {end['sent'] / 1e3:.0f} kB a step instead of {end['plain'] / 1e3:.0f} kB"
            )
    assert all(r["compressed"] > 0 for lines in logs.values() for r in lines if r["event"] == "finished")


def picture(logs: dict[str, list[Record]], path: Path, hook: str) -> None:
    """Plot the loss of every replica and the number of participants over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min(r["t"] for lines in logs.values() for r in lines if r["event"] == "step")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1])
    for name, lines in logs.items():
        steps = [r for r in lines if r["event"] == "step" and r["committed"] and r["contributed"]]
        steps += [{"t": r["t"], "loss": float("nan")} for r in lines if r["event"] == "killed"]  # a gap in the line
        steps.sort(key=lambda r: r["t"])
        above.plot([r["t"] - begin for r in steps], [r["loss"] for r in steps], ".-", markersize=3, label=name)
    committed = [r for lines in logs.values() for r in lines if r["event"] == "step" and r["committed"]]
    everyone = sorted((r["t"] - begin, r["participants"]) for r in committed)
    below.step([t for t, _ in everyone], [n for _, n in everyone], where="post", color="black")
    for lines in logs.values():
        for r in lines:
            if r["event"] == "killed":
                for axis in (above, below):
                    axis.axvline(r["t"] - begin, color="red", linestyle="--", linewidth=1)
                above.text(
                    r["t"] - begin, 0.97, " SIGKILL", color="red", va="top", transform=above.get_xaxis_transform()
                )
    above.set(ylabel="loss (nats per symbol)", title=f"one of {len(logs)} replicas killed and restarted; {hook}")
    above.legend()
    below.set(xlabel="seconds since the first step", ylabel="participants", ylim=(0, len(logs) + 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
