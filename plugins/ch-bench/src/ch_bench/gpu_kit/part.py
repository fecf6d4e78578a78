"""One part of the kit, in the process that the kit starts for it."""

import faulthandler
import gc
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ch_bench.gpu_kit.parts import PARTS
from ch_bench.gpu_kit.rows import Dead, Rows
from ch_bench.gpu_kit.setting import Setting

AGAIN = 3
"""Exit status: rows are left, for a fresh process."""


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Attributes:
        part: its name.
        rows, log: the files that findings and whatever is printed go to.
        run: see :class:`~ch_bench.gpu_kit.rows.Rows`.
        deadline: by :func:`time.monotonic`, which all processes of a machine share.
    """

    part: str
    rows: Path
    log: Path
    run: int
    device: str
    tiny: bool
    deadline: float


def carry_out(order: Order) -> None:
    """Run the part and end the process, 0 if all rows were tried."""
    os.setsid()  # so that its children can be ended with it
    with order.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print(f"\n== {order.part}, run {order.run}", flush=True)
    gc.freeze()  # what was imported lives on: collections between rows need not look at it
    faulthandler.dump_traceback_later(max(0.5, order.deadline - time.monotonic() - 2))  # where it hangs
    warnings.filterwarnings("ignore", category=FutureWarning)
    [part] = [each for each in PARTS if each.name == order.part]
    code = 0
    try:
        part.load()(Rows(order.rows, part.name, order.run), Setting(order.device, order.tiny))
    except Dead as why:
        print(f"this process has lost its device: {why}", file=sys.stderr)
        code = AGAIN
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # groups and devices that were left half way may wait for ever at the interpreter's end


def tell_device(_: object) -> None:
    """Exit status 0 if there is a GPU: asked in a process of its own, the kit's shall not hold the device."""
    os.setsid()
    os._exit(0 if torch.cuda.is_available() else 1)
