"""Memory that a dropped step takes back: views stay live, and the old memory lives as long as its message."""

import gc
import weakref

import pytest
import torch

from ch_core.transport import loan
from ch_core.transport.loan import Loan, take_back

pytestmark = pytest.mark.skipif(not loan._CAN_SWAP, reason="torch 2.10 and 2.11 cannot swap storages")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8]
)
def test_a_message_is_in_the_memory_of_its_tensor_until_the_tensor_takes_it_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(8).to(dtype)
    one = Loan(tensor[2:6])
    one.message.fill_(1)
    one.receive()
    assert tensor.tolist() == [0, 1, 1, 1, 1, 1, 6, 7]
    take_back([one])
    one.message.fill_(9)
    assert tensor.tolist() == [0, 1, 1, 1, 1, 1, 6, 7], "contents are copied"


def test_several_messages_in_one_storage_keep_the_same_old_memory() -> None:
    tensor = torch.zeros(8)
    gradient, loans = tensor[:4].view(2, 2), [Loan(part) for part in tensor.chunk(2)]
    whole = Loan(tensor)
    take_back([*loans, whole])
    for number, one in enumerate(loans):
        one.message.fill_(float(number + 1))
    assert whole.message.tolist() == [1.0] * 4 + [2.0] * 4
    assert not tensor.any()
    gradient.fill_(3.0)
    assert tensor.tolist() == [3.0] * 4 + [0.0] * 4


def test_a_storage_can_be_taken_back_in_every_step() -> None:
    tensor, dropped = torch.zeros(4), list[Loan]()
    for number in range(3):
        dropped.append(Loan(tensor))
        take_back(dropped[-1:])
        tensor.fill_(float(number))
    for one in dropped:
        one.message.fill_(-1.0)
    assert tensor.eq(2.0).all()
    assert len({one.message.data_ptr() for one in dropped}) == 3


@pytest.mark.parametrize("views", [False, True])
def test_the_old_memory_lives_as_long_as_the_message(views: bool) -> None:
    """Also if the message is a view of it, as half a message is, and if its user is gone."""
    tensor = torch.zeros(8)
    one = Loan(tensor)
    take_back([one])
    (old,) = one.message.untyped_storage().memory  # type: ignore[attr-defined]
    alive = weakref.ref(old)
    message = one.message.chunk(2)[1] if views else one.message
    del one, old, tensor
    gc.collect()
    assert alive() is not None
    message.fill_(1.0)
    del message
    gc.collect()
    assert alive() is None


def test_numpy_arrays_over_the_old_memory_stay_valid() -> None:
    pytest.importorskip("numpy")
    tensor = torch.ones(4)
    array, one = tensor.numpy(), Loan(tensor)
    take_back([one])
    alive = weakref.ref(tensor.untyped_storage().memory[0])  # type: ignore[attr-defined]
    del one
    gc.collect()
    assert alive() is not None and array.tolist() == [1.0] * 4


def test_a_transport_may_move_the_memory_of_a_message() -> None:
    """So do the process groups of torchft that live in another process."""
    tensor = torch.zeros(4)
    one = Loan(tensor)
    one.message.share_memory_().fill_(2.0)
    one.receive()
    assert tensor.eq(2.0).all()
    take_back([one])
    one.message.fill_(3.0)
    assert tensor.eq(2.0).all()
