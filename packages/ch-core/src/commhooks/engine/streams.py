"""The engine's side stream on CUDA; on CPU nothing.

Five rules (they cannot be seen to be broken on a CPU): the side stream waits for the hook's stream before any
encoding and at each resume; collectives are waited for inside ``with side:`` only; the buffer, which crosses
streams, is recorded; futures are made for the device and completed under the side stream; no host code looks at
numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs a block on a stream of its own, after everything that the present stream has been given."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, tensor: torch.Tensor) -> Iterator[None]:
        """Enter the side stream of the tensor's device and record the tensor there."""
        if not tensor.is_cuda:
            yield
            return
        device = tensor.device
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            tensor.record_stream(side)
            yield

    def join(self, tensor: torch.Tensor) -> None:
        """Have the present stream wait for what the side stream of the tensor's device has been given so far."""
        side = self._streams.get(tensor.device)
        if side is not None:
            torch.cuda.current_stream(tensor.device).wait_stream(side)
