"""The device that the parts of the kit run on, with its process group and clocks."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

CYCLES = 20_000_000  # of a delaying kernel: about 10 ms at 2 GHz, longer than the work that the parts start after it


@dataclass(frozen=True)
class KitDevice:
    """Device and sizes of a run of the kit.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: True for the shapes and repetitions of the kit's own test.
    """

    device: str
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """Backend of a group with one GPU for each rank."""
        return "nccl" if self.cuda else "gloo"

    @contextmanager
    def group(self) -> Iterator[torch.device]:
        """Make a process group of this process alone; yields its device."""
        device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
            store = FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(self.backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
            try:
                yield device
            finally:
                gc.collect()
                dist.destroy_process_group()

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def delay(self) -> None:
        """Occupy the current stream for a while. A CPU has no streams, so nothing happens there."""
        if self.cuda:
            torch.cuda._sleep(CYCLES)

    def milliseconds(self, step: Callable[[], object]) -> tuple[float, float]:
        """Return the milliseconds of one call until the device has finished, and until the call returns."""
        self.settle()
        if not self.cuda:
            begun = time.perf_counter()
            step()
            took = 1e3 * (time.perf_counter() - begun)
            return took, took
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = time.perf_counter()
        first.record()
        step()
        last.record()
        host = 1e3 * (time.perf_counter() - begun)
        last.synchronize()
        return first.elapsed_time(last), host
