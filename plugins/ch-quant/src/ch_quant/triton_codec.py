"""The arithmetic of :class:`ch_quant.codec.Workspace` in one Triton kernel per chunk.

Torch's operations read and write a chunk a dozen times, and on a GPU these passes are their cost. The kernel reads a chunk
once, writes its codes once, and writes the decoded numbers for error feedback on the way. The bytes are the same, so ranks
with and without Triton average together.

There are kernels for nearest rounding in 8 and 4 bits. At 2 and 1 bits a scale is a mean. torch does not specify the
order of its sum, so the kernel could not guarantee the same bytes. Stochastic rounding would have to draw torch's
random numbers.
"""

from threading import Lock

import torch

from ch_quant.codec import LARGEST, Codec, Workspace
from ch_quant.sizes import SIZES
from ch_quant.triton_kernels import INTERPRETED, decode, encode
from commhooks import HookConfigError, StepContext

# The interpreter keeps its position in globals, so threads (simulated ranks) would run each other's programs.
_LAUNCH = Lock()


def check_codec(codec: Codec) -> None:
    """Refuse a format without a kernel.

    Raises:
        HookConfigError: the format is not 8 or 4 bits, not rounded to nearest, or its blocks are too large.
    """
    instead = "leave kernel out: torch's operations send the same bytes"
    if codec.bits not in (8, 4) or codec.rounding != "nearest":
        given = f"bits={codec.bits}, rounding={codec.rounding!r}"
        raise HookConfigError(f"kernel='triton' with {given}: there are kernels for bits=8 and 4, 'nearest'; {instead}")
    if codec.block > SIZES.triton_block:
        raise HookConfigError(f"kernel='triton' with block={codec.block}: {SIZES.triton_block} at most; or {instead}")


def check_device(device: torch.device) -> None:
    """Refuse tensors that the kernels cannot access.

    Raises:
        HookConfigError: the tensors are not on a GPU, and Triton's interpreter is off.
    """
    if device.type != "cuda" and not INTERPRETED:
        raise HookConfigError(
            f"kernel='triton' on tensors of {device.type!r}: Triton's kernels run on CUDA. Leave kernel out, or set "
            "TRITON_INTERPRET=1 in the environment before a test starts"
        )


class TritonWorkspace(Workspace):
    """Arguments and attributes as those of :class:`~ch_quant.codec.Workspace`.

    Attributes:
        shape: compile-time constants of the kernels.
    """

    def _make(self, ctx: StepContext, device: torch.device, rows: int) -> None:
        lanes = 8 // self.codec.bits
        piece = self.codec.block // lanes
        width = 1 << (piece - 1).bit_length()  # Triton counts in powers of two
        self._pieces = max(1, SIZES.triton_lane // width)
        self.shape = {"PIECE": piece, "LANES": lanes, "PIECES": self._pieces, "WIDTH": width}

    def encode(
        self,
        x: torch.Tensor,
        scales: torch.Tensor,
        packed: torch.Tensor,
        noise: torch.Generator | None,
        keep: bool = False,
    ) -> None:
        rows = x.shape[0]
        with _LAUNCH, torch.cuda.device_of(x):  # Triton launches on the current device
            encode[self._grid(rows)](
                x,
                scales.view(torch.int16),
                packed,
                self.y,
                rows,
                *(self.codec.shares if self.codec.lopsided else (1.0 / self._reach(), 0.0)),
                LARGEST,
                LOPSIDED=self.codec.lopsided,
                KEEP=keep,
                enable_fp_fusion=False,
                **self.shape,
            )

    def decoded(self, rows: int, scales: torch.Tensor) -> torch.Tensor:
        return self.y[:rows]

    def subtract(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return x.sub_(self.y[: len(x)])

    def decode(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        add: bool = False,
    ) -> torch.Tensor:
        rows = scales.shape[0]
        y = out if out is not None else self.y[:rows]
        with _LAUNCH, torch.cuda.device_of(y):
            decode[self._grid(rows)](
                scales.view(torch.int16), packed, y, rows, factor, ADD=add, enable_fp_fusion=False, **self.shape
            )
        return y

    def _grid(self, rows: int) -> tuple[int]:
        return (-(-rows // self._pieces),)
