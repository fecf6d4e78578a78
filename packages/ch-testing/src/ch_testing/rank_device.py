"""Device of the ranks' tensors: ``pytest --device cpu``, ``cuda`` or ``imagined``.

The switch has three parts, all in this file. :mod:`ch_testing.pytest_plugin` calls :func:`choose` with the option.
:class:`ch_testing.Ranks` gives the choice to every rank, and each rank calls :func:`enter` before it makes its group. A
tensor made without ``device=`` then lies on the rank's device, as after ``torch.set_default_device``.

- ``cpu``: nothing changes, and ranks meet over gloo.
- ``cuda``: ranks meet over NCCL. Each has its own GPU, or all share GPU 0 (:func:`shared_gpu`).
- ``imagined``: CPU tensors over gloo, and an error for each tensor that a GPU rank would have on the wrong device
  (:mod:`ch_testing.device_modes`).

Off the CPU, ``torch.randn(4, generator=g)`` with a CPU generator draws on the CPU and moves the numbers.
"""

import os

CHOICES = ("cpu", "cuda", "imagined")
_chosen = "cpu"


def choose(device: str) -> None:
    """Choose the device of all ranks that this process starts."""
    global _chosen
    _chosen = device


def chosen() -> str:
    """Return the chosen device, one of :data:`CHOICES`."""
    return _chosen


def missing(device: str) -> str:
    """Return the reason why ranks cannot run on this device, or an empty string."""
    if device != "cuda":
        return ""
    import torch

    if not torch.cuda.is_available():
        return f"--device cuda needs an NVIDIA GPU, and torch {torch.__version__} finds none"
    return "" if torch.distributed.is_nccl_available() else f"torch {torch.__version__} was built without NCCL"


def headline(device: str) -> str:
    """Return the line for pytest's header."""
    if reason := missing(device):
        return f"ranks: {reason}; tests of ranks are skipped"
    if device != "cuda":
        return f"ranks: {device} tensors over gloo"
    import torch

    count = torch.cuda.device_count()
    return (
        f"ranks: NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} on {count} x {torch.cuda.get_device_name(0)}. "
        f"More than {count} ranks share GPU 0 over sockets (NCCL_HOSTID), and their times mean nothing"
    )


def backend() -> str:
    """Return the back end of groups. NCCL alone refuses CPU tensors, which is part of the test."""
    return "nccl" if _chosen == "cuda" else "gloo"


def shared_gpu(rank: int) -> dict[str, str]:
    """Return the variables with which several ranks of NCCL share one GPU.

    NCCL refuses two ranks on one device if their hosts are equal ("Duplicate GPU detected"), and it knows a host by the
    hash of ``NCCL_HOSTID``. With different ones the ranks talk over sockets. About 10 ms per collective.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_CTAS": "2",  # kernels of all ranks must fit on the GPU together, or they wait for each other forever
    }


def place(rank: int, world_size: int, gpus: int) -> tuple[int, dict[str, str]]:
    """Return the GPU of a rank, and the variables that it must set before it makes a group."""
    return (rank, {}) if world_size <= gpus else (0, shared_gpu(rank))


def enter(device: str, rank: int, world_size: int) -> None:
    """Make this process a rank on the device. It has no group yet."""
    choose(device)
    if device == "cpu":
        return
    import torch

    from ch_testing import device_modes  # it needs torch, and pytest loads this module without torch

    if device == "imagined":
        torch.set_default_device(device_modes.IMAGINED)
        device_modes.imagine()
        return
    index, variables = place(rank, world_size, torch.cuda.device_count())
    os.environ.update(variables)
    torch.accelerator.set_device_index(index)
    torch.set_default_device(torch.device("cuda", index))
    device_modes.DrawnOnCPU().__enter__()  # type: ignore[no-untyped-call]
