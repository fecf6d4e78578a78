"""Contract, part 2: the averaged gradient, on simulated ranks."""

import torch

from ch_testing.contract_case import Case, finite, only_if
from ch_testing.gradients import all_ranks, average, distance, parameters, same_bits
from ch_testing.simulated_ranks import SimulatedRanks, Step
from ch_wrappers import Policy
from commhooks import Plain

PADDING = 16  # bytes by which a message of packed bits may be filled up


def run(ranks: SimulatedRanks, like: dict[str, torch.Tensor], steps: int, first: int = 0) -> list[Step]:
    """Run steps on gradients that differ by rank and step, and raise every error."""
    done = []
    for step in range(first, first + steps):
        done.append(ranks.step(all_ranks(like, ranks.world_size, step)))
        for error in done[-1].errors:
            if error is not None:
                raise error
    return done


class Averaging(Case):
    """Checks of the averaged gradient."""

    @only_if("simulates", "averages")
    def test_all_ranks_get_the_same_bits(self) -> None:
        like = parameters()
        for world in self.world_sizes:
            for step in run(self.ranks(world, like), like, 4):
                for rank in range(1, world):
                    other = same_bits(step.gradients[0], step.gradients[rank])
                    assert other == [], f"ranks 0 and {rank} of {world} have different bits in {other}"

    @only_if("sends", "averages")
    def test_writes_to_a_part_of_the_bucket(self) -> None:
        """Under a policy, the hook gets every other parameter of a bucket, so that ``bucket.buffer`` is a gathered copy."""
        like = parameters()
        others = [name for name, tensor in like.items() if tensor.numel()][1::2]
        ranks = self.ranks(self.few, like, 1, lambda hook: Policy([*((name, Plain()) for name in others), ("*", hook)]))
        for step in run(ranks, like, 2):
            other = same_bits(step.gradients[0], step.gradients[1])
            assert other == [], (
                f"the ranks kept different gradients of {other} under a policy. If a policy gives a hook only some "
                "parameters of a bucket, `bucket.buffer` is a gathered copy, and writes to the copy are lost. Assign the "
                "result: `bucket.buffer = small.to(bucket.dtype)` in place of `bucket.buffer.copy_(small)`"
            )

    @only_if("simulates", "averages", "mean")
    def test_equals_the_average_within_tolerance(self) -> None:
        like = parameters()
        for world in self.world_sizes:
            self.near(self._error(world, like), self.allowed(), f"{world} ranks")

    def _error(self, world: int, like: dict[str, torch.Tensor]) -> float:
        """Of one step; with residuals, of the sum of many steps with constant gradients."""
        ranks, every = self.ranks(world, like), all_ranks(like, world, 0)
        wanted, steps = average(every), self.steps if self.local_fields else 1
        total = {name: torch.zeros(t.shape, dtype=torch.float64, device="cpu") for name, t in like.items()}
        for _ in range(steps):
            for name, found in ranks.step(every).gradients[0].items():
                total[name] += found.double() / steps
        return distance(total, wanted)

    @only_if("simulates", "sends_less")
    def test_compresses(self) -> None:
        like = parameters()
        ranks = self.ranks(self.few, like)
        run(ranks, like, 3)
        assert ranks.engines[0].counters.compressed_steps > 0, (
            "no step sent less than plain averaging would have: set `first_step`, if it warms up first, or "
            "`compresses = False`, if it is lossy for another reason"
        )

    @only_if("simulates", "any_bucket")
    def test_bucket_size_changes_nothing(self) -> None:
        like = parameters()
        runs = [run(self.ranks(self.few, like, buckets), like, 3) for buckets in (1, 2, 5)]
        for other in runs[1:]:
            for a, b in zip(runs[0], other, strict=True):
                differing = same_bits(a.gradients[0], b.gradients[0])
                assert differing == [], (
                    f"{differing} have other bits in other buckets: declare granularity = 'bucket' if the bucket is "
                    "one vector to the method. (A BLAS may round a product by how its matrix is aligned in memory: "
                    "copy it into ctx.scratch() first.)"
                )

    @only_if("simulates")
    def test_deterministic(self) -> None:
        like = parameters()
        first, second = (run(self.ranks(self.few, like), like, 3) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            differing = same_bits(a.gradients[1], b.gradients[1])
            assert differing == [], f"{differing} differ between two runs: draw random numbers from ctx.step and a seed"

    @only_if("simulates", "averages")
    def test_dtypes(self) -> None:
        for dtype in self.dtypes:
            if dtype == torch.float32:
                continue  # every other check
            like = parameters(dtype)
            if self.mean:
                allowed = max(self.allowed(dtype), self.allowed(), 8 * torch.finfo(dtype).eps)
                self.near(self._error(self.few, like), allowed, f"{dtype} (`dtypes` says which are tried)")
            result = run(self.ranks(self.few, like), like, 2)[-1].gradients[0]
            assert all(result[name].dtype == dtype for name in result)
            assert finite(result), f"{dtype}: not finite (`dtypes` says which are tried)"

    @only_if("simulates", "averages")
    def test_unused_parameter_comes_late(self) -> None:
        """A gradient that is zero on one rank, then on all, then there: finite, and right again."""
        like, world = parameters(), self.few
        ranks = self.ranks(world, like)
        for step in range(6):
            every = all_ranks(like, world, step)
            for rank in range(world if step < 3 else 1 if step < 4 else 0):
                every[rank]["head.weight"].zero_()
                every[rank]["embed.weight"].zero_()
            result = ranks.step(every)
            assert finite(result.gradients[0]), f"step {step}"
            if step < 3 and self.reduction.granularity == "tensor" and self.mean:
                assert float(result.gradients[0]["head.weight"].abs().sum()) == 0.0, "zeros average to zeros"
        assert float(result.gradients[0]["head.weight"].norm()) > 0

    @only_if("simulates", "fits_one_rank")
    def test_single_rank(self) -> None:
        like = parameters()
        assert finite(run(self.ranks(1, like), like, 2)[-1].gradients[0])

    @only_if("simulates")
    def test_bytes_as_declared(self) -> None:
        like = parameters()
        ranks = self.ranks(self.few, like)
        as_one_bucket = ranks.handles[0].payload_per_step()
        for number in range(3):
            run(ranks, like, 1, number)
            engine, transport = ranks.engines[0], ranks.transports[0]
            status = (ranks.world_size + 1) * 4 * (number + 1) if engine.counters.traffic.rounds else 0
            declared = engine.counters.traffic.payload_bytes
            assert transport.payload - status == declared, "what was sent is not what the plan says"
        if len({self.reduction.phase(self.first_step + number) for number in range(4)}) > 1:
            return
        assert 3 * ranks.handles[0].payload_per_step() == declared
        # Equal shards for all ranks pad each bucket, and each gathered message pads packed bits to whole bytes. All
        # other bytes are the same for all bucket sizes.
        if self.reduction.granularity == "tensor" and not self.reduction.collectives & {"all_to_all", "reduce_scatter"}:
            filled = PADDING * ranks.world_size * ranks.buckets if "all_gather" in self.reduction.collectives else 0
            assert abs(3 * as_one_bucket - declared) <= 3 * filled, "the bytes depend on the buckets"
