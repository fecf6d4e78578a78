"""Memory that a collective writes to in place, and that a dropped step takes back.

A step may be dropped while its messages are in flight. A transport cannot cancel them. When a late peer sends, the transport
writes the result to the memory that the message got. By then a later step may use the same memory.

So a message never gets a user's tensor itself. It gets a second tensor over the same memory, which costs 4 us. If the step is
dropped, the user's tensor gets other memory, and all its views with it: DDP's bucket, gradients, tensors that a user averages
by hand. The message keeps the old memory until it ends.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

# Private, and only used to drop a step. torch 2.10 and 2.11 lack it. There a message gets a copy, which costs time and memory.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class Loan:
    """Memory of a tensor that one message writes to.

    On an accelerator the message gets the tensor itself, because streams order what is written after a dropped message.

    Args:
        tensor: receives the result.

    Attributes:
        tensor: as given.
        message: what the collective gets instead.

    Example:
        >>> tensor = torch.zeros(2)
        >>> view, loan = tensor[1:], Loan(tensor)
        >>> take_back([loan])  # the step is dropped
        >>> _ = loan.message.fill_(7.0)  # and a late peer sends
        >>> view.item()
        0.0
    """

    __slots__ = ("message", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = self.message = tensor
        if tensor.is_cpu:
            self.message = from_dlpack(to_dlpack(tensor)) if _CAN_SWAP else tensor.clone()

    @property
    def _in_place(self) -> bool:
        return self.message.data_ptr() == self.tensor.data_ptr()

    def receive(self) -> None:
        """Write the result to the tensor if it is elsewhere.

        It is in a copy without the swap of storages, or if the transport has moved the message's memory, as torchft's process
        groups in another process do.
        """
        if not self._in_place:
            self.tensor.copy_(self.message)


def take_back(loans: Iterable[Loan]) -> None:
    """Give other memory to the tensors of dropped messages, and to all their views. Their contents are copied.

    Args:
        loans: of all dropped messages that may still write. Several may lie in one storage.
    """
    together: dict[int, list[Loan]] = defaultdict(list)
    for loan in loans:
        if loan.tensor.is_cpu and loan._in_place:
            together[loan.tensor.untyped_storage().data_ptr()].append(loan)
    for same in together.values():
        storage: Any = same[0].tensor.untyped_storage()
        old = storage.clone()
        storage._swap_data_ptr_(old)  # now `old` owns the memory of the messages
        # A storage of Python lives as long as torch uses it, and with it what its attributes refer to.
        owners: list[Any] = [loan.message.untyped_storage() for loan in same]
        if not old.resizable():  # NumPy has arrays over this memory, which do not follow their tensor
            owners.append(storage)
        for owner in owners:
            owner.memory = [*getattr(owner, "memory", ()), old]
