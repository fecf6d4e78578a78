"""A transport whose messages are not sent but noted: the engine and the hook run as they are."""

from collections.abc import Callable

import torch

from ch_bench.advise.replay import Recorder, Sent
from commhooks.adapters import Work


class _Waits:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: float | None) -> None:
        self._wait()


class EmulatedTransport:
    """One rank's end of a group that is not there: every rank contributes what this one does.

    Args:
        rank, world_size: in the group that it stands for.
        recorder: what notes the messages, and the waiting for them; ``None``: nothing.

    Attributes:
        sent: every message since it was last cleared.
    """

    free = True  # sends as a process group's does: direct exchanges, halves
    elastic = False

    def __init__(self, rank: int, world_size: int, recorder: Recorder | None = None) -> None:
        self.rank, self.world_size, self.recorder = rank, world_size, recorder
        self.sent: list[Sent] = []

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._post("all_reduce", tensor, lambda: None)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._post("all_gather", output, lambda: output.view(self.world_size, -1).copy_(input.view(-1)))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._post("all_to_all", input, lambda: output.copy_(input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        mine = input.view(self.world_size, -1)[self.rank]
        return self._post("reduce_scatter", input, lambda: output.copy_(mine))

    def abort(self) -> None:
        """There is nothing to end."""

    def _post(self, kind: str, tensor: torch.Tensor, deliver: Callable[[], object]) -> Work:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # the clock is the host's: it has to see what the GPU has done
        adds = kind in ("all_reduce", "reduce_scatter")
        one = Sent(kind, str(tensor.dtype).removeprefix("torch.") if adds else "", tensor.numel() * tensor.itemsize)
        self.sent.append(one)
        recorder = self.recorder
        if recorder is None:
            deliver()
            return _Waits(lambda: None)
        number = recorder.post(one)
        with recorder.stopped():
            deliver()  # the network's threads would do it
        return _Waits(lambda: recorder.wait(number))
