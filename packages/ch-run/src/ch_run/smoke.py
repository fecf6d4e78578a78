"""Tries hooks on one gloo rank with a model of two buckets, in a child process: `python -m ch_run.smoke`.

The child reads canonical nodes from standard input as a JSON list, and writes one JSON line per hook. A hook that hangs or
ends the process fails alone: the parent starts a new child for the hooks after it.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from commhooks import Node, unparse

STEPS = 3
MODEL = "torch.nn.parallel.distributed.DistributedDataParallel"  # tries every hook
GRACE = 120.0  # seconds for the import of torch on a busy machine
MARK = "commhooks-smoke: "


def problems(nodes: Sequence[Node], timeout: float) -> Iterator[str]:
    """Yield for each node an empty string, or the reason why the hook does not work.

    Args:
        nodes: canonical nodes to attach.
        timeout: seconds allowed for one hook.
    """
    rest = list(nodes)
    while rest:
        tried = 0
        with tempfile.TemporaryFile("w+") as errors:  # a child that writes much would block on a pipe
            for answer in _one_child(rest, timeout, errors):
                tried += 1
                yield answer
        rest = rest[tried:]


def _one_child(nodes: Sequence[Node], timeout: float, errors: IO[str]) -> Iterator[str]:
    """Yield results until the child has tried all hooks, or hangs or dies in one."""
    lines: queue.Queue[str | None] = queue.Queue()
    child = subprocess.Popen(
        [sys.executable, "-m", "ch_run.smoke"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    threading.Thread(target=_pump, args=(child, lines), daemon=True).start()
    try:
        assert child.stdin is not None  # noqa: S101
        child.stdin.write(json.dumps(nodes))
        child.stdin.close()
        if lines.get(timeout=GRACE) is None:
            yield from [f"the gloo rank failed to start: {_tail(errors)}"] * len(nodes)
            return
        for _ in nodes:
            line = lines.get(timeout=timeout)
            if line is None:
                yield f"ended the process with status {child.wait()}: {_tail(errors)}"
                return
            yield str(json.loads(line)["error"])
    except queue.Empty:
        yield f"did not finish within {timeout:g} s"
    finally:
        child.kill()
        child.wait()


def _pump(child: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert child.stdout is not None  # noqa: S101
    for line in child.stdout:
        if line.startswith(MARK):  # other lines were printed by the hook
            lines.put(line.removeprefix(MARK))
    lines.put(None)


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return " / ".join(errors.read().strip().splitlines()[-3:])[-500:]


def _try(node: Node) -> str:
    """Attach, train a few steps and check the gradients. Return an error message, or an empty string."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from commhooks import attach

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)  # 16 KiB a layer: two buckets
    handle = attach(model, node, single_process=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64, dtype=torch.float32, device="cpu")).square().mean().backward()
        bad = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
        if bad:
            return f"{unparse(node)} gives no finite gradient for {', '.join(bad)}"
        optimizer.step()
    handle.check()
    handle.detach()
    return ""


def main() -> int:
    """Run as the child."""
    import torch
    import torch.distributed as dist

    nodes: list[Any] = json.load(sys.stdin)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        print(MARK + "ready", flush=True)
        for node in nodes:
            try:
                error = _try(node)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            print(MARK + json.dumps({"error": error}), flush=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
