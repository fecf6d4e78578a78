"""What the parts have in common: the device, the sizes, a group of one rank, and clocks."""

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

CYCLES = 20_000_000  # of a delaying kernel: about 10 ms at 2 GHz, longer than anything that the parts start after it


@dataclass(frozen=True)
class Setting:
    """Where the parts run.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: shapes and repetitions for a test of the kit itself.
    """

    device: str
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """Of a group with one GPU per rank."""
        return "nccl" if self.cuda else "gloo"

    @contextmanager
    def group(self) -> Iterator[torch.device]:
        """A process group of one rank, this process; gives its device."""
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
        """Wait until the device has nothing left to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def delay(self) -> None:
        """Keep the current stream busy for a while; on a CPU, where everything happens in order, nothing."""
        if self.cuda:
            torch.cuda._sleep(CYCLES)

    def milliseconds(self, step: Callable[[], object]) -> tuple[float, float]:
        """``(device, host)`` milliseconds of one call: until the device has done it, and until it returned."""
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
