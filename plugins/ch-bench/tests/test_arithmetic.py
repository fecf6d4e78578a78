"""CPU time of the ranks of a node, without messages."""

import time

from programs.links import arithmetic

from commhooks import AllReduce, Bucket, BucketLayout, Plain, Stages, StepContext, Topology

SIZES = {"up": (96, 64), "bias": (64,), "down": (64, 96), "norm": (96,)}
SPIN, SLEEP = 0.02, 0.2  # seconds


def test_each_element_has_one_owner_and_each_rank_its_figures() -> None:
    flat, *places = arithmetic.measure("powersgd(rank=2)", SIZES, Topology.even(4, 2), 3)
    assert [place.label for place in places] == ["place 0", "place 1"]
    assert flat.residual == 2 * 96 * 64 * 4  # the matrices, in fp32
    assert sum(place.residual for place in places) == flat.residual
    for part in (flat, *places):
        assert len(part.arithmetic) == len(part.thread) == 3
        assert all(0 < inside < whole for inside, whole in zip(part.arithmetic, part.thread, strict=True))
    rows = arithmetic.table([flat, *places]).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [
        "`powersgd(rank=2)`",
        "place 0",
        "place 1",
        "mean of the places",
    ]


def test_the_clock_counts_work_on_both_sides_of_a_message_and_no_waiting() -> None:
    class Busy(Plain):
        def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
            spin()
            time.sleep(SLEEP)
            yield AllReduce(bucket.buffer)
            spin()

    def spin() -> None:
        until = time.thread_time() + SPIN
        while time.thread_time() < until:
            pass

    clocked = arithmetic.Clocked(Busy())
    rank = arithmetic.Rank(clocked, clocked, 0, Topology.even(2, 1), [BucketLayout.of_shapes(SIZES)])
    hook, thread = rank.step()
    assert 2 * SPIN <= hook < thread
    assert thread < 2 * SPIN + SLEEP / 2
