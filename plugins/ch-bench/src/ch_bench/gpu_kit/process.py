"""A process that runs one part of the kit."""

import faulthandler
import gc
import os
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Dead, Findings
from ch_bench.gpu_kit.part_list import PARTS

AGAIN = 3
"""Exit status if a new process must do the remaining rows."""


@dataclass(frozen=True)
class Order:
    """Task of a process.

    Attributes:
        part: name of the part.
        rows, log: files for findings and for the output.
        run: see :class:`~ch_bench.gpu_kit.findings.Findings`.
        deadline: in seconds of :func:`time.monotonic`, which all processes of a machine share.
    """

    part: str
    rows: Path
    log: Path
    run: int
    device: str
    tiny: bool
    deadline: float


def carry_out(order: Order) -> None:
    """Run the part and end the process, with status 0 if all rows were tried."""
    os.setsid()  # the kit kills the whole session, children included
    with order.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print(f"\n== {order.part}, run {order.run}", flush=True)
    gc.freeze()  # collections between rows skip the imported modules
    faulthandler.dump_traceback_later(max(0.5, order.deadline - time.monotonic() - 2))  # shows where the part hangs
    warnings.filterwarnings("ignore", category=FutureWarning)
    [part] = [each for each in PARTS if each.name == order.part]
    code = 0
    try:
        module, _, function = part.target.partition(":")
        run = getattr(import_module(f"ch_bench.gpu_kit.{module}"), function)
        run(Findings(order.rows, part.name, order.run), KitDevice(order.device, order.tiny))
    except Dead as why:
        print(f"this process has lost its device: {why}", file=sys.stderr)
        code = AGAIN
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # unfinished groups and devices may hang at the interpreter's end


def tell_device(_: object) -> None:
    """End with status 0 if there is a GPU. This needs its own process, because the kit's must not hold the device."""
    os.setsid()
    os._exit(0 if torch.cuda.is_available() else 1)
