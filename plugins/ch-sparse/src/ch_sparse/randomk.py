"""A random choice of entries, the same on all ranks. Only values travel, and one all-reduce averages them.

A parameter is cut into strata of ``round(1 / density)`` consecutive elements (the last may be shorter), and one element of each
stratum is chosen, with equal chances. The choice follows from ``seed``, the step and the position of the stratum in the
parameter, by a hash in integer arithmetic. No rank sends an index. Results do not depend on the buckets, the kind of
device or the GPU's generator. The volume does not grow with the number of ranks.

With ``feedback``, ``p = g + decay * e``. The hook applies the mean of the chosen entries of ``p`` and keeps the other entries as
``e`` (Stich et al. 2018, arXiv:1809.07599). Without it the chosen entries are multiplied by the elements of a stratum, so that
the expectation of the result is the mean, at the price of a high variance.

A stratum that holds NaN or Inf sends NaN, even if that entry is not chosen.
"""

import zlib

import torch

from ch_sparse.options import RandomKOptions
from ch_sparse.sparse import Sparse, fill
from commhooks import AllReduce, Bucket, BucketLayout, ParamLayout, Stages, StepContext, per_layout

DRAWN = "drawn"
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's, as signed numbers

_SMALL = 2.0**-100


class RandomK(RandomKOptions, Sparse):
    """The mean of one entry of each stratum.

    Options: see :class:`~ch_sparse.options.RandomKOptions`.

    Raises:
        HookConfigError: an option out of its limits, or ``decay`` without ``feedback``.

    State: ``residual``, local, fp32, one per sparsified parameter, with ``feedback``. Without it ``drawn``, shared, int64, one
    number per sparsified parameter, counts the steps that chose. The choice follows from ``ctx.step``, which counts only used
    steps for a hook with state.

    Example:
        >>> layout = BucketLayout.of_shapes({"w": (64, 64)})
        >>> stages = RandomK(density=0.01).plan(layout, StepContext(world_size=64))
        >>> [(r.kind, r.payload_bytes) for stage in stages for r in stage]  # 41 values in fp32, whatever the ranks
        [('all_reduce', 164)]
    """

    name = "randomk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = max(1, round(1.0 / self.density))  # elements of a stratum
        if not self.feedback:
            self.fields = {DRAWN: "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        keys = self._keys_of(bucket.layout)  # (rows,)
        grid = ctx.scratch("grid", (keys.numel(), self.size), device=bucket.device)
        rows = grid.split([self._strata(p) for p in bucket.params])
        places = [(p, mine.view(-1)) for p, mine in zip(bucket.params, rows, strict=True)]
        self.load(bucket, places, ctx)
        chosen = hashed(keys, ctx.step).remainder_(self.size).unsqueeze(1)  # (rows, 1): columns of the grid
        values = ctx.scratch("values", (keys.numel(),), device=bucket.device)
        # Zero, or NaN if an entry is not finite. The small factor keeps sums of large numbers finite.
        small = torch.full((self.size,), _SMALL, dtype=torch.float32, device=bucket.device)
        trace = grid.mv(small).mul_(0.0)  # (rows,)
        torch.add(grid.gather(1, chosen).view(-1), trace, out=values)
        if not self.feedback:
            values.mul_(self.size)
            for p in bucket.params:
                ctx.write(p.name, DRAWN, (1,), torch.int64, bucket.device).fill_(ctx.step + 1)
        sent = ctx.scratch("sent", (keys.numel(),), device=bucket.device) if self.feedback else None
        yield AllReduce(values, sent=sent)

        if sent is not None:
            grid.scatter_add_(1, chosen, sent.neg_().unsqueeze(1))  # e = p - sent, as the wire rounded it
            self.keep(places, ctx, bucket.device)
        grid.zero_().scatter_(1, chosen, values.unsqueeze(1))
        fill(bucket, places)

    def _strata(self, param: ParamLayout) -> int:
        return -(-param.numel // self.size)

    @per_layout
    def _keys_of(self, layout: BucketLayout) -> torch.Tensor:
        """Return a number for each stratum of a bucket, int64, from seed, parameter name and the stratum's position."""
        names = (zlib.crc32(p.name.encode()) for p in layout.params)
        starts = [
            hashed(torch.arange(self._strata(p), dtype=torch.int64, device="cpu"), n)
            for p, n in zip(layout.params, names, strict=True)
        ]
        return hashed(torch.cat(starts), self.seed).to(layout.device)


def hashed(keys: torch.Tensor, number: int) -> torch.Tensor:
    """Hash ``keys`` int64 with a number by splitmix64's finalizer, to the same bits on any device."""
    golden, first, second = _MULTIPLIERS
    offset = (number * golden + 2**63) % 2**64 - 2**63  # as int64 would overflow
    mixed = keys * golden + offset
    for shift, factor in ((30, first), (27, second)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right and fill with zeros; int64's own shift copies the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
