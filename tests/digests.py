"""Compute digests of every hook's numbers and messages, to compare two commits to the bit.

    python tests/digests.py --out before.json            # on one commit: ten minutes
    python tests/digests.py --out after.json             # on the other, on the same machine and torch
    python tests/digests.py --compare before.json after.json

Each case gives a digest of the gradients of each step and rank, one of the saved state, the collectives in the order in
which they were started (kind, elements, dtype), and `stats()` without its times. Cases are hooks, wrappers and compositions
on 1 to 4 simulated ranks, and on two gloo processes over DDP (attached and registered) and FSDP2's replicate and shard axis.
The program uses public names of commhooks only, so that it serves commits whose modules have other names.
"""

import argparse
import hashlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import commhooks
from commhooks.testing import SimulatedRanks, spawn

P = "powersgd(rank=2, min_compression_rate=1)"
SIMPLE = [
    "allreduce",
    "noop",
    "fp16_compress",
    "bf16_compress",
    "quant8",
    "quantize_per_tensor",
    "quantize_per_channel",
]
HOOKS: list[Any] = [
    *SIMPLE,
    "bf16_compress(accumulate='fp32')",
    "fp16_compress(accumulate='fp32')",
    P,
    "powersgd(rank=1, min_compression_rate=1, warm_start=False)",
    "powersgd(rank=2, min_compression_rate=1, error_feedback=False)",
    "powersgd(rank=2, min_compression_rate=1, start_iter=2)",
    "powersgd",
    "batched_powersgd(rank=2)",
    "bf16_wrapper(allreduce)",
    "fp16_wrapper(allreduce)",
    f"bf16_wrapper({P})",
    f"fp16_wrapper({P})",
    f"bf16_wrapper({P}, accumulate='fp32')",
    "error_feedback(bf16_wrapper(allreduce))",
    "quant8(error_feedback=True)",
    "error_feedback(bf16_compress)",
    f"warmup({P}, steps=2)",
    f"warmup(bf16_compress, {P}, steps=2)",
    f"warmup(bf16_wrapper({P}), steps=1)",
    "quant2",
    "quant4",
    "quant(bits=3, rotation='hadamard', rounding='stochastic')",
    "sign",
    "topk",
    "randomk",
    "two_level(quant4)",
    {"*.bias": "allreduce", "2.*": "bf16_compress", "*": P},
    {"*.bias": "allreduce", "*": f"bf16_wrapper({P})"},
    {"*.bias": "fp16_compress", "*": "quant8(error_feedback=True)"},
]
NO_SIMULATION = {"post_local_sgd"}  # a foreign hook, which starts its own collectives
STEPS, POISONED = 6, 3  # the fourth step is not finite on rank 0, and must leave no trace


def digest(tensors: dict[str, torch.Tensor]) -> str:
    made = hashlib.blake2b(digest_size=12)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().reshape(-1)
        made.update(f"{name} {tuple(tensors[name].shape)} {tensor.dtype}".encode())
        made.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return made.hexdigest()


def state_of(handle: Any) -> str:
    if not isinstance(handle.state, commhooks.HookState):
        return ""
    saved = handle.state_dict()
    entries = {f"{name}/{field}": t for name, row in saved["entries"].items() for field, t in row.items()}
    return f"{saved['step']} {digest(entries)}"


def figures(handle: Any) -> dict[str, float]:
    return {name: value for name, value in handle.stats().items() if not name.endswith("seconds")}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 33),
        nn.Tanh(),
        nn.Linear(33, 24),
        nn.Tanh(),
        nn.Linear(24, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 8),
    )


def guarded(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a case, or the error that ends it. Both must stay the same."""
    try:
        return body()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}


# -- simulated ranks


def simulated(what: Any, world: int, dtype: torch.dtype) -> dict[str, Any]:
    like = {name: p.detach().to(dtype) for name, p in net().named_parameters()}
    ranks = SimulatedRanks(lambda: commhooks.create(what), world, like, buckets=3)
    asked: list[list[str]] = [[] for _ in range(world)]
    for rank, transport in enumerate(ranks.transports):
        listen(transport, asked[rank])
    steps = []
    for step in range(STEPS):
        every = [gradients(like, rank, step) for rank in range(world)]
        if step == POISONED:
            every[0]["0.weight"][0, 0] = float("inf")
        done = ranks.step(every)
        errors = [type(error).__name__ for error in done.errors if error is not None]
        steps.append([*(digest(found) for found in done.gradients), *errors])
    ranks.resolve_step()
    messages = [hashlib.blake2b("\n".join(one).encode(), digest_size=12).hexdigest() for one in asked]
    return {
        "steps": steps,
        "messages": asked[0],
        "every rank's messages": messages,
        "state": [state_of(handle) for handle in ranks.handles],
        "stats": figures(ranks.handles[0]),
    }


def gradients(like: dict[str, torch.Tensor], rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in like.items()}


def listen(transport: Any, asked: list[str]) -> None:
    """Record every collective at its start."""
    for kind in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        setattr(transport, kind, written_down(kind, getattr(transport, kind), asked))


def written_down(kind: str, start: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def started(*arguments: Any) -> Any:
        shown = " ".join(f"{t.numel()}:{t.dtype}" if isinstance(t, torch.Tensor) else str(t) for t in arguments)
        asked.append(f"{kind} {shown}")
        return start(*arguments)

    return started


# -- processes


class Messages(TorchDispatchMode):
    """Records every collective that torch.distributed gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [f"{t.numel()}:{t.dtype}" for t in flattened(args) if isinstance(t, torch.Tensor)]
            self.seen.append(f"{func._schema.name.removeprefix('c10d::')} {' '.join(sizes)}")
        return func(*args, **(kwargs or {}))


def flattened(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in flattened(each)] if isinstance(value, list | tuple) else [value]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(model: nn.Module, handle: Any = None) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, messages = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(4, 24, generator=generator)).square().mean()
        with Messages() as seen:
            (loss * (float("inf") if step == POISONED and dist.get_rank() == 0 else 1.0)).backward()
        messages.append(seen.seen)
        found = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        steps.append(digest(found))
        if step != POISONED:
            optimizer.step()
    made: dict[str, Any] = {"steps": steps, "messages": messages}
    if handle is not None:
        made |= {"state": state_of(handle), "stats": figures(handle)}
    return made


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=0.002)


def on_ddp(what: Any) -> dict[str, Any]:
    model = ddp()
    return trained(model, commhooks.attach(model, what))


def registered(name: str) -> dict[str, Any]:
    model = ddp()
    model.register_comm_hook(None, commhooks.get(name))
    return trained(model)


def on_replicate_axis(what: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, commhooks.attach(model, what))


def on_shard_axis(what: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, commhooks.attach(model, what, axis="shard"))


def on_reducer(what: Any) -> dict[str, Any]:
    """Run without a model, one stage at a time."""
    like = {name: p.detach() for name, p in net().named_parameters()}
    reducer = commhooks.Reducer(what, like)
    steps, messages = [], []
    for step in range(STEPS):
        with Messages() as seen:
            exchange = reducer.start(gradients(like, dist.get_rank(), step))
            exchange.advance()
            steps.append(digest(exchange.wait()))
        messages.append(seen.seen)
    return {"steps": steps, "messages": messages, "state": state_of(reducer.handle), "stats": figures(reducer)}


def process(rank: int, world: int, only: str) -> dict[str, Any]:
    """Run all cases of one rank."""
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for what in [*HOOKS, "post_local_sgd"]:
        cases[f"ddp {what}"] = lambda what=what: on_ddp(what)
        if what not in ("noop", "post_local_sgd"):
            cases[f"replicate axis {what}"] = lambda what=what: on_replicate_axis(what)
            cases[f"reducer {what}"] = lambda what=what: on_reducer(what)
    for name in SIMPLE:
        cases[f"registered {name}"] = lambda name=name: registered(name)
    for what in ("allreduce", "bf16_compress", "fp16_compress", "bf16_compress(accumulate='fp32')"):
        cases[f"shard axis {what}"] = lambda what=what: on_shard_axis(what)
    return {name: guarded(body) for name, body in cases.items() if only in name}


def covered() -> None:
    """Check that some case has every installed reduction and wrapper of this project."""
    text = json.dumps([*HOOKS, *NO_SIMULATION])
    for spec in commhooks.list_hooks():
        ours = spec.provider.startswith("ch-") and spec.provider != "ch-template" and spec.kind not in ("fsdp", "outer")
        named = any(name in text for name in spec.names) or spec.name == "policy"
        if ours and not named:
            raise SystemExit(f"no case has {spec.id}: add one to HOOKS")


def measure(only: str) -> dict[str, Any]:
    covered()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__}
    for world in (1, 2, 3, 4):
        for what in HOOKS:
            for dtype in (torch.float32, torch.bfloat16) if world == 2 else (torch.float32,):
                name = f"simulated {world} {str(dtype).removeprefix('torch.')} {what}"
                if only in name:
                    found[name] = guarded(lambda w=what, n=world, d=dtype: simulated(w, n, d))
    for rank, one in enumerate(spawn(process, 2, only, timeout=1500.0, group_timeout=60.0)):
        found |= {f"{name}, rank {rank}": value for name, value in one.items()}
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    lines = [f"only in the first: {name}" for name in sorted(a.keys() - b.keys())]
    lines += [f"only in the second: {name}" for name in sorted(b.keys() - a.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name]:
            one, two = a[name], b[name]
            keys = sorted(k for k in {*one, *two} if one.get(k) != two.get(k)) if isinstance(one, dict) else [""]
            lines.append(f"differs: {name}: {', '.join(keys)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the digests")
    parser.add_argument("--only", default="", help="run cases whose name contains this text")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two files to compare")
    words = parser.parse_args()
    if words.compare:
        a, b = (json.loads(path.read_text()) for path in words.compare)
        lines = differences(a, b)
        print("\n".join(lines) or f"{len(a) - 1} cases, the same to the bit")
        return 1 if lines else 0
    found = measure(words.only)
    words.out.write_text(json.dumps(found, indent=1) + "\n")
    errors = {name: value["error"] for name, value in found.items() if isinstance(value, dict) and "error" in value}
    print(f"{len(found) - 1} cases, {len(errors)} that end with an error:")
    print("\n".join(f"  {name}: {error}" for name, error in errors.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(2)
