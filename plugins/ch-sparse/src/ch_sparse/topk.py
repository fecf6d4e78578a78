"""The largest entries of every chunk, with error feedback that may decay (Deep Gradient Compression, arXiv:1712.01887;
chunks, decay and 2 bits as in SparseLoCo, arXiv:2508.15706).

Rank i adds its residual, ``p = g + decay * e``, and chooses the ``max(1, round(density * chunk))`` largest of every ``chunk``
consecutive elements of a parameter. Their number follows from the layout, so the sizes of all messages are known in advance. An
entry travels as its place in the chunk, in the fewest bits for that, and its value in ``bits`` bits. Every rank gathers every
rank's entries and adds them in rank order, so all ranks have the same bits::

    all-gather    message of a rank (values, packed places)
    locally       mean = sum of the entries / W, zero elsewhere;  e = p - sent

A message holds ``bits`` and ``ceil(log2(chunk))`` bits per entry, and with ``bits=2`` 4 bytes per chunk. Each kind is filled up
to whole bytes, and the message to an even number of bytes. Values in 32 bits are a separate message. A rank receives ``W - 1``
messages, so the volume grows with the number of ranks. :meth:`~commhooks.Reduction.cautions` says when it passes bf16's.

NaN and Inf count as larger than all other entries, so a chunk that holds one sends at least one.
"""

from ch_sparse.chunks import Chunks, largest
from ch_sparse.message import VALUES, BitPacking, SparseExchange
from ch_sparse.options import TopKOptions
from ch_sparse.sparse import Sparse, fill
from commhooks import Bucket, BucketLayout, Stages, StepContext, per_layout


class TopK(TopKOptions, Sparse):
    """The mean of each rank's largest entries.

    Options: see :class:`~ch_sparse.options.TopKOptions`. A 16-bit wrapper may round values of 32 bits.

    Raises:
        HookConfigError: an option out of its limits, or ``decay`` without ``feedback``.

    State: ``residual``, local, fp32, one per sparsified parameter, with ``feedback`` only.

    Example:
        >>> layout = BucketLayout.of_shapes({"w": (64, 64)})
        >>> stages = TopK(density=0.01).plan(layout, StepContext(world_size=2))
        >>> stages[0][0].payload_bytes  # of two ranks: 41 values in bf16, 42 places of 12 bits in 63 bytes, 1 to be even
        292
    """

    name = "topk"
    collectives = frozenset({"all_gather"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reports_sent = not self.feedback
        self.castable = frozenset({"all_gather"}) if self.bits == 32 else frozenset()
        self._values, self._places = VALUES[self.bits], BitPacking((self.chunk - 1).bit_length())

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        chunks = self._chunks_of(bucket.layout)
        grid = ctx.scratch("grid", (chunks.rows, self.chunk), device=bucket.device)
        places = list(zip(bucket.params, chunks.places(grid), strict=True))
        self.load(bucket, places, ctx)

        columns = largest(grid, chunks.k)  # (rows, k)
        exchange = SparseExchange(chunks, self._values, self._places, ctx, bucket.device)
        yield exchange.requests(grid.gather(1, columns), columns)

        at, sent = chunks.positions(chunks.entries(columns)), exchange.own()
        if self.feedback:
            grid.view(-1).index_add_(0, at, sent, alpha=-1.0)  # e = p - sent
            self.keep(places, ctx, bucket.device)
        if ctx.sent is not None:
            grid.zero_().view(-1).index_copy_(0, at, sent)
            fill(ctx.sent, places)

        total = grid.zero_().view(-1)
        for at, values in exchange:  # a message holds a place once, so the device cannot change the order of the sum
            total.index_add_(0, at, values, alpha=1.0 / ctx.world_size)
        fill(bucket, places)

    @per_layout
    def _chunks_of(self, layout: BucketLayout) -> Chunks:
        return Chunks(layout, self.chunk, self.density)
