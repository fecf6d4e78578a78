"""Bytes that members of a torchft quorum send, as the loopback interface counts them.

    sudo python -m ch_bench.links.manager_bytes [--members 4] [--record]

Members with real torchft Managers train in a new network namespace, where no other program uses the interface. An exchange
that was emulated by sums padded with zeros would send W times the bytes of its gradient.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import torch

import ch_ft
from ch_bench import record
from ch_ft.testing import quorum

HOOKS = ["allreduce", "bf16_compress", "bf16_compress(accumulate='fp32')", "quant8", "quant4(error_feedback=True)"]
WIDTH, DEPTH, STEPS = 512, 4, 4  # four matrices of 1 MiB
INSIDE = "CH_BENCH_INSIDE"


def carried() -> int:
    """Return the bytes that the loopback interface of this namespace has sent."""
    line = next(one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:"))
    return int(line.split()[9])


def measure(hook: str, members: int) -> tuple[float, float]:
    """Return the bytes per member and step that the engine counts, and those that the interface carries."""
    barrier = Barrier(members)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    with quorum.lighthouse(min_replicas=members, heartbeat=60.0, join_timeout=5.0) as address:

        def one(number: int) -> tuple[float, float]:
            module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
            module.load_state_dict(net.state_dict())
            with ch_ft.local(
                lighthouse=address, replica=f"member_{number}", min_replicas=members, init_sync=False,
                state_dict=dict, load_state_dict=lambda state: None, quorum_timeout=120, group_timeout=60, timeout=90,
            ) as member:  # fmt: skip
                group = member.process_group
                model = ch_ft.DistributedDataParallel(
                    member.manager, module, hook=hook, process_group=group, bucket_cap_mb=1.0
                )
                optimizer = ch_ft.OptimizerWrapper(member.manager, torch.optim.SGD(module.parameters(), lr=1e-3))
                counted = before = 0.0
                for step in range(2 + STEPS):
                    if step == 2:  # every member has joined
                        barrier.wait()
                        before, counted = carried(), model.handle.stats()["wire_bytes"] if model.handle else 0.0
                        barrier.wait()
                    optimizer.zero_grad()
                    model(torch.randn(4, WIDTH, dtype=torch.float32, device="cpu")).square().mean().backward()
                    if not optimizer.step():
                        raise RuntimeError(f"{hook}: step {step} was not committed: {member.manager.errored()}")
                barrier.wait()
                sent = carried() - before
                counted = (model.handle.stats()["wire_bytes"] - counted) if model.handle else 0.0
                barrier.wait()
                return counted / STEPS, sent / members / STEPS

        with ThreadPoolExecutor(members) as pool:
            running = [pool.submit(one, number) for number in range(members)]
            results = [future.result(timeout=300) for future in running]
        return results[0]


def table(found: dict[str, tuple[float, float]]) -> str:
    """Return the bytes of each hook as Markdown."""
    plain = found[HOOKS[0]][1]
    rows = [
        [f"`{h}`", f"{counted:,.0f}", f"{sent:,.0f}", f"{sent / plain:.3f}"] for h, (counted, sent) in found.items()
    ]
    return record.markdown_table(["hook", "engine", "interface", "against allreduce"], rows)


def main() -> int:
    """Run the members in a network namespace and print the bytes of each hook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/wire-bytes.md")
    args = parser.parse_args()
    if INSIDE in os.environ:
        sys.stdout.write("\n" + json.dumps({hook: measure(hook, args.members) for hook in HOOKS}))
        sys.stdout.flush()
        os._exit(0)  # torchft 0.2.0 cannot stop its checkpoint servers
    again = f"ip link set lo up && exec {sys.executable} -m ch_bench.links.manager_bytes --members {args.members}"
    environment = {**os.environ, INSIDE: "1", "RUST_LOG": "off", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(["unshare", "--net", "sh", "-c", again], env=environment, capture_output=True, text=True)
    if ran.returncode:
        sys.stderr.write(ran.stderr[-2000:])
        return ran.returncode
    found = f"Bytes per member and step, {args.members} members\n\n{table(json.loads(ran.stdout.splitlines()[-1]))}"
    print(found)
    if args.record:
        record.write("wire-bytes", "torchft's Manager", record.command("ch_bench.links.manager_bytes"), found)
    return 0


if __name__ == "__main__":
    record.run_main(main)
