"""Memory that a state and its engine hold over many steps."""

import gc

import pytest
import torch

import commhooks
from ch_testing import SimulatedRanks
from ch_testing.gradients import all_ranks, parameters

EF = "error_feedback(bf16_compress)"


def ranks(expr: str, like: dict[str, torch.Tensor]) -> SimulatedRanks:
    return SimulatedRanks(lambda: commhooks.create(expr), 2, like)


def test_sent_is_no_copy_if_the_bucket_itself_is_sent() -> None:
    for expr, copies in ((EF, 0), ("error_feedback(topk(feedback=False))", 1)):
        made = ranks(expr, parameters())
        made.step(all_ranks(parameters(), 2, 0))
        names = [name for _, name in made.engines[0].messenger.scratch._tensors]
        assert names.count("sent") == (2 if copies else 0)  # one for each bucket


@pytest.mark.full
@pytest.mark.parametrize("expr", [EF, "powersgd(rank=2, min_compression_rate=1)", "quant4(error_feedback=True)"])
def test_nothing_grows_with_the_steps(expr: str) -> None:
    like = {"w": torch.zeros(32, 16), "v": torch.zeros(16, 32)}
    made, every = ranks(expr, like), all_ranks(like, 2, 0)

    def alive() -> tuple[int, int]:
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len(found), sum(t.nbytes for t in found)

    for _ in range(5):
        made.step(every)
    before = alive()
    for _ in range(40):
        made.step(every)
    assert alive() <= before
