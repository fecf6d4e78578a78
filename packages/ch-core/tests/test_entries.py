"""Versions of a state's entries: the draft of a step, its buffers, and the messages that may still write to them."""

from typing import ClassVar, Literal

import pytest
import torch

from ch_core import (
    AllReduce,
    Bucket,
    HookState,
    Packed,
    Reduction,
    SimulatedGroup,
    SimulatedTransport,
    Stages,
    StepContext,
)
from ch_core.encoding import Encoding, Entry
from ch_core.engine.engine import Engine
from ch_core.entries import Versions

KEY = ("w", "residual")


def write(versions: Versions, value: float) -> Entry:
    entry = versions.draft.write(KEY, (2,))
    entry.tensor.fill_(value)
    return entry


def value(versions: Versions) -> float:
    return float(versions.committed[KEY].tensor[0])


def test_two_buffers_take_turns() -> None:
    versions = Versions()
    seen = []
    for number in range(6):
        seen.append(write(versions, number).tensor.data_ptr())
        if number == 3:
            versions.rollback()
        else:
            versions.commit()
    a, b = seen[:2]
    assert seen == [a, b, a, b, b, a]
    assert (value(versions), versions.step) == (5.0, 5)


def test_a_second_reduction_finds_what_the_first_wrote_and_a_dropped_step_leaves_neither() -> None:
    versions = Versions()
    write(versions, 1.0)
    versions.commit()
    draft = versions.draft
    for number in (2.0, 3.0):
        draft.reopen({"w"}, {"residual"})
        assert float(draft.found[KEY].tensor[0]) == number - 1.0
        write(versions, number)
        assert float(draft.found[KEY].tensor[0]) == number - 1.0
    assert value(versions) == 1.0
    versions.rollback()
    assert float(draft.found[KEY].tensor[0]) == 1.0


def test_an_error_in_8_bits_is_added_to_numbers_of_another_encoding() -> None:
    packed = Packed(block=4)
    versions = Versions({KEY: Entry(torch.tensor([1.0, 2.0, -4.0, 0.5]))})
    entry = versions.draft.write(KEY, (4,), torch.int8, encoding=Encoding(packed=packed), is_error=True)
    assert entry.scales is not None
    packed.pack(torch.tensor([0.25, 0.0, 0.0, 0.25]), entry.tensor, entry.scales)
    versions.commit()
    assert versions.committed[KEY].numbers().tolist() == pytest.approx([1.25, 2.0, -4.0, 0.75], abs=4 / 254)


def test_buffers_of_a_step_that_has_not_ended_are_not_used_again() -> None:
    versions = Versions()
    late = write(versions, 1.0).tensor
    versions.abandon()
    assert write(versions, 2.0).tensor is not late


class Mirror(Reduction):
    """Averages an entry of its state in place, so that a message writes to the draft."""

    name = "mirror"
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"mirror": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        mirror = ctx.write("w", "mirror", (4,), device=bucket.device).copy_(bucket.buffer)
        yield AllReduce(mirror)
        bucket.buffer.copy_(mirror)


def test_a_late_message_of_an_earlier_engine_cannot_write_to_the_state() -> None:
    """The first engine's step never ends: its peer is late, and another engine takes over the state."""
    state, group = HookState(), SimulatedGroup(2)
    earlier = Engine(Mirror(), SimulatedTransport(group, 0), state)
    earlier.submit(Bucket.from_tensors({"w": torch.ones(4)}))
    engine = Engine(Mirror(), SimulatedTransport(SimulatedGroup(1), 0), state)
    engine.submit(Bucket.from_tensors({"w": torch.full((4,), 5.0)}))
    assert engine.finish() is None
    assert engine.resolve_step()
    SimulatedTransport(group, 1).all_reduce(torch.full((4,), 9.0), "sum")  # the late peer
    found = state.read("w", "mirror")
    assert found is not None
    assert found.tolist() == [5.0] * 4
