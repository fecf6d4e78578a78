"""The part of the contract about the averaged gradient, over simulated ranks."""

import pytest
import torch

from commhooks.testing.contract_case import Case, finite
from commhooks.testing.contract_reporting import Reporting
from commhooks.testing.gradients import all_ranks, average, distance, parameters, same_bits
from commhooks.testing.simulated_ranks import SimulatedRanks, Step

PACKED = 16  # bytes by which a message of packed bits may be filled up


def run(ranks: SimulatedRanks, like: dict[str, torch.Tensor], steps: int, first: int = 0) -> list[Step]:
    """Steps on gradients that differ by rank and step; every error is raised."""
    done = []
    for step in range(first, first + steps):
        done.append(ranks.step(all_ranks(like, ranks.world_size, step)))
        for error in done[-1].errors:
            if error is not None:
                raise error
    return done


class Numbers(Case):
    """Checks of results."""

    def test_all_ranks_get_the_same_bits(self) -> None:
        self.needs_average()
        like = parameters()
        for world in self.world_sizes:
            for step in run(self.ranks(world, like), like, 4):
                for rank in range(1, world):
                    other = same_bits(step.gradients[0], step.gradients[rank])
                    assert other == [], f"ranks 0 and {rank} of {world} have different bits in {other}"

    def test_equals_the_average_within_tolerance(self) -> None:
        self.needs_average()
        if not self.mean:
            pytest.skip("`mean = False`: it leaves something else than the mean, on purpose")
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

    def test_compresses(self) -> None:
        wanted = self.compresses if self.compresses is not None else self.lossy and self.averages
        if not wanted:
            pytest.skip("does not promise to send less")
        like = parameters()
        ranks = self.ranks(2, like)
        run(ranks, like, 3)
        assert ranks.engines[0].counters.compressed_steps > 0, (
            "no step sent less than plain averaging would have: set `first_step`, if it warms up first, or "
            "`compresses = False`, if it is lossy for another reason"
        )

    def test_reports_what_it_sent(self) -> None:
        """``ctx.sent`` is in the gradient's units in every dtype, and asking for it changes nothing."""
        if not self.reduction.reports_sent:
            pytest.skip("does not declare reports_sent: error_feedback refuses it")
        for dtype, world in self._dtypes_and_worlds():
            like = parameters(dtype)
            asked, unasked = self.ranks(world, like, wrap=Reporting), self.ranks(world, like)
            for step in range(2):
                (found,), (wanted,) = run(asked, like, 1, step), run(unasked, like, 1, step)
                other = same_bits(found.gradients[0], wanted.gradients[0])
                assert other == [], (
                    f"{dtype}, {world} ranks: {other} become other numbers when ctx.sent is filled. Does the report "
                    "share memory with what is sent? x.to(dtype) is x itself when x has that dtype"
                )
                if self.mean:
                    error, allowed = distance(average(_reports(asked)), found.gradients[0]), self.conserved(dtype)
                    assert error <= allowed, (
                        f"{dtype}, {world} ranks: the mean of what the ranks report in ctx.sent differs from the result "
                        f"by {error:.3g}, allowed {allowed:.3g}. A report is in the gradient's units, before the "
                        "division by W, after rounding. Correct it, or set `conservation` or `mean = False`"
                    )

    def test_input_is_sent_plus_residual(self) -> None:
        if "residual" not in self.local_fields:
            pytest.skip("keeps no residual")
        if not self.mean and self.conservation is None:
            pytest.skip("`mean = False`: what it sends is not what it applies; set `conservation` to have it checked")
        for dtype, world in self._dtypes_and_worlds():
            like = parameters(dtype)
            ranks = self.ranks(world, like)
            before: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
            for step in range(4 if dtype == torch.float32 else 2):
                every = all_ranks(like, world, step)
                result = ranks.step(every)
                after = [_residuals(one) for one in ranks.save()]
                self._conserved(every, before, result.gradients[0], after, dtype)
                before = after

    def _dtypes_and_worlds(self) -> list[tuple[torch.dtype, int]]:
        """fp32 on every number of ranks, the other dtypes on the last."""
        return [
            (t, w) for t in self.dtypes for w in (self.world_sizes if t == torch.float32 else self.world_sizes[-1:])
        ]

    def _conserved(
        self,
        every: list[dict[str, torch.Tensor]],
        before: list[dict[str, torch.Tensor]],
        out: dict[str, torch.Tensor],
        after: list[dict[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """``mean(gradient + old residual) = averaged gradient + mean(new residual)``, over all that has a residual."""
        assert after[0], (
            "no parameter has a residual: choose options in `expr` that compress something, or set `first_step` to be "
            "past a warm-up"
        )
        error, size = 0.0, 0.0
        for name in after[0]:
            given = _mean([one[name].double() for one in every])
            if all(name in one for one in before):
                given = given + _mean([_as_gradient(one[name], out[name]) for one in before])
            kept = out[name].double() + _mean([_as_gradient(one[name], out[name]) for one in after])
            error, size = error + float((given - kept).square().sum()), size + float(given.square().sum())
        relative, allowed = (error / size) ** 0.5, self.conserved(dtype)
        assert relative <= allowed, (
            f"{dtype}, {len(every)} ranks: input and sent + residual differ by {relative:.3g}, allowed {allowed:.3g}. "
            "A residual has the parameter's shape, or else the numbers in the order of memory. Set `conservation` if "
            "the method promises no better, `mean = False` if what it applies is no mean"
        )

    def test_bucket_size_changes_nothing(self) -> None:
        if self.reduction.granularity != "tensor":
            pytest.skip("treats a bucket as one vector, and says so")
        like = parameters()
        runs = [run(self.ranks(2, like, buckets), like, 3) for buckets in (1, 2, 5)]
        for other in runs[1:]:
            for a, b in zip(runs[0], other, strict=True):
                differing = same_bits(a.gradients[0], b.gradients[0])
                assert differing == [], (
                    f"{differing} have other bits in other buckets: declare granularity = 'bucket' if the bucket is "
                    "one vector to the method. (A BLAS may round a product by how its matrix is aligned in memory: "
                    "copy it into ctx.scratch() first.)"
                )

    def test_deterministic(self) -> None:
        like = parameters()
        first, second = (run(self.ranks(2, like), like, 3) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            differing = same_bits(a.gradients[1], b.gradients[1])
            assert differing == [], f"{differing} differ between two runs: draw random numbers from ctx.step and a seed"

    def test_dtypes(self) -> None:
        self.needs_average()
        for dtype in self.dtypes:
            if dtype == torch.float32:
                continue  # every other check
            like = parameters(dtype)
            if self.mean:
                allowed = max(self.allowed(dtype), self.allowed(), 8 * torch.finfo(dtype).eps)
                self.near(self._error(2, like), allowed, f"{dtype} (`dtypes` says which are tried)")
            result = run(self.ranks(2, like), like, 2)[-1].gradients[0]
            assert all(result[name].dtype == dtype for name in result)
            assert finite(result), f"{dtype}: not finite (`dtypes` says which are tried)"

    def test_unused_parameter_comes_late(self) -> None:
        """A gradient that is zero on one rank, then on all, then there: finite, and right again."""
        self.needs_average()
        like, world = parameters(), 2
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

    def test_single_rank(self) -> None:
        like = parameters()
        assert finite(run(self.ranks(1, like), like, 2)[-1].gradients[0])

    def test_bytes_as_declared(self) -> None:
        like = parameters()
        ranks = self.ranks(2, like)
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
        # Equal shards for all ranks pad each bucket, and packed bits are filled up to whole bytes in each gathered message;
        # anything else is the same however the parameters are cut.
        if self.reduction.granularity == "tensor" and not self.reduction.collectives & {"all_to_all", "reduce_scatter"}:
            filled = PACKED * ranks.world_size * ranks.buckets if "all_gather" in self.reduction.collectives else 0
            assert abs(3 * as_one_bucket - declared) <= 3 * filled, "the bytes depend on the buckets"


def _reports(ranks: SimulatedRanks) -> list[dict[str, torch.Tensor]]:
    """What each rank said that it sent."""
    return [handle.reduction.sent for handle in ranks.handles if isinstance(handle.reduction, Reporting)]


def _residuals(saved: dict[str, object]) -> dict[str, torch.Tensor]:
    entries = saved["entries"]
    assert isinstance(entries, dict)
    return {name: row["residual"].double() for name, row in entries.items() if "residual" in row}


def _as_gradient(residual: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A residual in the gradient's shape: it has that, or (a matrix, a vector) the numbers in the order of memory."""
    if residual.shape == gradient.shape:
        return residual.double()
    return residual.double().reshape(-1).as_strided(gradient.shape, gradient.stride())


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).mean(0)
