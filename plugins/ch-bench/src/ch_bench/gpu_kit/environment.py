"""The machine: versions, devices and installed packages."""

import os
import platform
import subprocess
from importlib.metadata import distributions
from importlib.util import find_spec

import torch
import torch.distributed as dist

import commhooks
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Skipped, Values

_PACKAGES = ("torch", "numpy", "pluggy", "rich", "torchft", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def run(rows: Findings, kit: KitDevice) -> None:
    rows.row("versions", _versions)
    rows.row("device", _device, kit)
    rows.row("driver", _driver)
    rows.row("hooks", _hooks)
    rows.row("copy of 256 MB", _bandwidth, kit)


def _versions() -> Values:
    installed = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    versions = {name: installed.get(name, "-") for name in _PACKAGES}
    ours = {name: version for name, version in installed.items() if name.startswith("ch-")}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        **versions,
        "ours": ours,
    }


def _device(kit: KitDevice) -> Values:
    if not kit.cuda:
        raise Skipped("on CPU tensors")
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "GiB": found.total_memory / 2**30,
        "capability": f"{found.major}.{found.minor}",
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "-",
        "TF32 for products": torch.get_float32_matmul_precision(),
    }


def _driver() -> Values:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,utilization.gpu", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=15, check=False,
        )  # fmt: skip
    except OSError:
        raise Skipped("nvidia-smi is not installed") from None
    return {"nvidia-smi": done.stdout.strip() or done.stderr.strip()}


def _hooks() -> Values:
    missing = [str(failure) for failure in commhooks.failures()]
    if missing:
        raise RuntimeError(f"plugins failed to load: {missing}")
    return {"hooks": [spec.name for spec in commhooks.list_hooks()], "torchft": find_spec("torchft") is not None}


def _bandwidth(kit: KitDevice) -> Values:
    """Measure one pass over memory, the unit of every hook's cost."""
    device = torch.device(kit.device)
    source = torch.ones((1 if kit.tiny else 256) * 2**18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    took = sorted(kit.milliseconds(lambda: target.copy_(source))[0] for _ in range(5))[2]
    return {"ms": took, "GB/s read and written": 2 * source.nbytes / took / 1e6}
