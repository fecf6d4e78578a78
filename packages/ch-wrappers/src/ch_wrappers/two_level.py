"""Two levels: sum inside each node, compress between the nodes, gather inside.

Flat exchanges lose their saving on nodes with several ranks, because every rank of a node sends its own message over the node's
link. Here the node sends one. W = N L ranks on N nodes, and place r of every node owns part r of the bucket
(:mod:`ch_wrappers.node_partition`)::

    1. all-to-all in the node       rank r receives part r of its L ranks, and adds them in fp32
    2. the inner reduction          averages part r over the N ranks of place r
    3. all-gather in the node       every rank receives all parts

So each rank compresses 1/L of the gradient, and keeps 1/L of the residual and of Q. Hierarchical exchanges are as old as MPI;
ZeRO++'s qgZ (arXiv:2306.10209) has this order for quantized gradients.

The ranks of a sharded model gather weights in the other order, with the inner reduction between the nodes and then inside each
node. A shard enters each node once.

A reduction with state gets the sum over the node, not the mean. Its residual then has the unit of a rank's own residual:
``applied + mean of residuals over all ranks = sum of the averages``, as without two levels. A residual of elements that this
rank does not own, from another partition, another topology or the flat hook, goes into this rank's gradient at the next step.
The node's sum carries it to the owner, so nothing is lost.
"""

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch

from ch_core import Nodes, Pieces, Scope, as_tuple
from ch_wrappers.node_partition import Partition, partition
from ch_wrappers.wire_cast import WireCast
from commhooks import (
    AllGather,
    AllToAll,
    Bucket,
    BucketLayout,
    Composite,
    HookConfigError,
    ParamLayout,
    Plain,
    Reduction,
    ShardLayout,
    Shards,
    Stages,
    StepContext,
    Topology,
    Weights,
    Wire,
    build,
    composed,
)


class TwoLevel(Composite):
    """Runs ``inner`` between nodes, on sums that the ranks of a node have made.

    Args:
        inner: the reduction between nodes.
        inside: the reduction inside a node. The exact average, and ``None``, send gradients as they are; 16-bit averages send
            16 bits. Both add in fp32. Otherwise a reduction without state that scatters and gathers, such as quant8.
        nodes: ranks per node, or the ranks of each node. ``None`` asks torchrun's variables, or the host names.

    Raises:
        HookConfigError: a level inside a level, or an ``inside`` that has state or cannot scatter and gather.
    """

    name = "two_level"
    levels = True
    collectives = frozenset({"all_to_all", "all_gather"})

    def __init__(self, inner: Reduction, inside: Reduction | None = None, nodes: Nodes | None = None) -> None:
        super().__init__(inner)
        if inner.levels:
            raise HookConfigError(
                f"two_level({inner.name}): the hook inside has two levels already. Give the inner hook alone"
            )
        self._given = None if isinstance(inside, Plain) else inside
        if self._given is not None:
            _check_inside(self._given)
        cast = self._given if isinstance(self._given, WireCast) and isinstance(self._given.inner, Plain) else None
        self.wire = None if cast is None else cast.wire
        self.inside = self._given if cast is None else None
        self.nodes = nodes if nodes is None or isinstance(nodes, int) else tuple(tuple(node) for node in nodes)
        self.reports_sent = False  # a rank's contribution vanishes in the sum of its node
        self.lossy = self.lossy or (self._given is not None and self._given.lossy)
        self.granularity = "bucket" if self.lossy or inner.fields else "tensor"  # the partition follows from the bucket
        self.fields = {field: "local" if kind == "local" else "owned" for field, kind in inner.fields.items()}
        self.splits = inner.splits
        self.piece_bytes = inner.piece_bytes
        powers = inner.scaled_fields
        self._owed = frozenset(f for f, kind in inner.fields.items() if kind == "local" and powers.get(f) == 1)
        self._divided = frozenset(f for f, kind in inner.fields.items() if kind == "local")
        self._partitions: dict[tuple[BucketLayout, int, str], Partition] = {}
        self._pieces: dict[Hashable, Pieces] = {}
        self._depths: dict[Hashable, int] = {}

    def encodes_itself(self, param: ParamLayout, step: int) -> bool:
        return True

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run_with_plain(bucket, ctx, {p.name for p in bucket.params if p.kind != "dense"})  # sparse, complex

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        topology = ctx.topology
        ranks, place = (topology.ranks_per_node, topology.place(ctx.rank)) if topology is not None else (1, 0)
        splits = self.inner.splits
        parts = self._partition(bucket.layout, ranks, splits)
        pieces = self._owned(bucket.layout, parts, ranks, place, ctx.step)
        waiting = self._take_foreign(bucket, ctx, pieces)
        if ranks == 1:
            yield from self._between(bucket, ctx, pieces, bucket.unused, "all")
        else:
            yield from self._levels(bucket, ctx, topology, parts, place, pieces)
        for name, field in waiting:
            ctx.keep_foreign(name, field)

    def _levels(
        self, bucket: Bucket, ctx: StepContext, topology: Topology | None, parts: Partition, place: int, pieces: Pieces
    ) -> Stages:
        assert topology is not None  # noqa: S101 - several ranks in a node
        ranks, several = topology.ranks_per_node, topology.size("peers") > 1
        n, device, layout = parts.numel, bucket.device, parts.layouts[place]
        packed = parts.pack(bucket, ctx.scratch("parts", (ranks * n,), bucket.dtype, device))
        mine = ctx.scratch("mine", (n,), layout.dtype, device)
        sums = several and bool(self.inner.fields)
        yield from self._reduce_inside(packed, mine, ctx, 1.0 if sums else 1.0 / ranks)
        # A hook inside may decode padding to numbers, which differ between nodes. In the gather they would share blocks with
        # averages, and change what other ranks decode.
        mine[layout.size :].zero_()
        if several:
            depth = self._depth(bucket.layout, parts, topology, ctx.step)
            if layout.params:
                # The same object in every step, so that the reduction between nodes finds its cached views.
                owned = bucket.cached(
                    (self, "owned", layout, bucket.index, bucket.is_last),
                    lambda: Bucket(
                        BucketLayout(layout.params, n, layout.dtype, device), mine, bucket.index, bucket.is_last
                    ),
                    mine,
                )
                between = self._between(owned, ctx, pieces, self._silent(owned, bucket, ctx), "peers")
                yield from _padded(between, depth)
            else:
                for _ in range(depth):
                    yield ()
        if sums:
            mine.mul_(1.0 / ranks)
        yield from self._gather_inside(mine, packed, ctx)
        parts.unpack(packed, bucket)

    # -- on gradients that the ranks share out

    @property
    def scatters(self) -> bool:
        """True for a reduction between nodes that scatters and keeps no state. A residual would lie with other ranks."""
        return super().scatters and not self.inner.fields

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        topology = ctx.topology
        if topology is None or topology.ranks_per_node == 1:
            yield from self.inner.start_scatter(shards, ctx.child("between"))
            return
        ranks, nodes, n = topology.ranks_per_node, topology.size("peers"), shards.layout.part.numel
        dtype = torch.float64 if shards.storage.dtype == torch.float64 else torch.float32
        packed = ctx.scratch("parts", (ranks, nodes, n), shards.storage.dtype, shards.device)
        parts = shards.storage.view(-1, n)
        for place, first in enumerate(topology.places):  # the ranks with one place get their parts next to each other
            for number, peer in enumerate(topology.peers(first)):
                packed[place, number].copy_(parts[peer])
        mine = ctx.scratch("mine", (nodes * n,), dtype, shards.device)
        yield from self._reduce_inside(packed.view(-1), mine, ctx, 1.0 / ranks)
        if nodes == 1:
            shards.output.copy_(mine)
            return
        output = ctx.scratch("output", (n,), dtype, shards.device)
        peers = Shards(_among_peers(shards.layout, nodes, mine), mine, output, shards.index)
        between = ctx.among("between", "peers", Pieces({}, {}, {}, self.inner, ctx.step, ()))
        yield from _scoped(self.inner.start_scatter(peers, between), "peers")
        shards.output.copy_(output)

    # -- on parameters that the ranks gather

    def start_gather_weights(self, weights: Weights, ctx: StepContext, exact: Collection[str] = ()) -> Stages:
        # A parameter that does not fit the inner reduction travels exactly inside the node, too.
        return Reduction.start_gather_weights(self, weights, ctx, exact)

    def gather_exactly(self, weights: Weights, ctx: StepContext) -> Stages:
        return TwoLevel(Plain()).gather_weights(weights, ctx)

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        """Gather between the ranks with one place, then inside the node."""
        topology = ctx.topology
        if topology is None or topology.ranks_per_node == 1:
            return self.inner.start_gather_weights(weights, ctx.child("between"))
        return self._gather_levels(weights, ctx, topology)

    def _gather_levels(self, weights: Weights, ctx: StepContext, topology: Topology) -> Stages:
        """Gather this rank's shards and those of its peers, ``(nodes, n)``, then the node's, ``(ranks, nodes, n)``.

        So each shard enters a node once. Every rank decodes the bytes of its peers, and the node's ranks send each other the
        decoded numbers.
        """
        ranks, nodes = topology.ranks_per_node, topology.size("peers")
        kept, dtype, device = weights.layout.part, weights.storage.dtype, weights.device
        part = BucketLayout.of_shapes({p.name: p.shape for p in kept.params}, dtype, device)  # without gaps
        n, parts = part.numel, weights.storage.view(-1, kept.numel)
        places = [
            (slice(p.offset, p.offset + p.numel), slice(q.offset, q.offset + q.numel))
            for p, q in zip(kept.params, part.params, strict=True)
        ]
        between = ctx.among("between", "peers", Pieces({}, {}, {}, self.inner, ctx.step, ()))
        mine = ctx.scratch("mine", (nodes, n), dtype, device)
        packed = ctx.scratch("parts", (ranks, nodes, n), dtype, device)
        for source, target in places:
            mine[between.rank, target].copy_(weights.part[source])
        if nodes > 1:
            layout = _among_peers(ShardLayout(part, weights.layout.whole, weights.layout.dims), nodes, mine)
            peers = Weights(layout, mine.view(-1), between.rank, weights.index)
            yield from _scoped(self.inner.start_gather_weights(peers, between), "peers")
        yield from self._gather_inside(mine.view(-1), packed.view(-1), ctx)
        for place, first in enumerate(topology.places):
            for number, peer in enumerate(topology.peers(first)):
                for source, target in places:
                    parts[peer, source].copy_(packed[place, number, target])

    # -- between nodes

    def _between(self, owned: Bucket, ctx: StepContext, pieces: Pieces, absent: frozenset[str], scope: Scope) -> Stages:
        participating = ctx.participating or scope == "peers"  # a rank that has run out of data still owns a part
        inner = ctx.among("between", scope, pieces, absent, self.inner.shared_fields, participating=participating)
        yield from _scoped(self.inner.start(owned, inner), scope)

    def _silent(self, owned: Bucket, bucket: Bucket, ctx: StepContext) -> frozenset[str]:
        """Return the owned parameters that no rank of the node has a gradient for.

        DDP drops the average of a parameter that no rank has used, so its residual must stay here.
        """
        if owned.storage.is_meta or not self.inner.fields:  # without a residual it makes no difference
            return frozenset()
        doubtful = [p for p in owned.params if not ctx.sends(p.name)]
        if not doubtful:
            return frozenset()
        # The host waits for the device once, and only in a bucket with parameters that this rank has not used.
        used = torch.stack([owned.matrix(p).any() for p in doubtful]).tolist()
        return frozenset(p.name for p, some in zip(doubtful, used, strict=True) if not some)

    def _depth(self, layout: BucketLayout, parts: Partition, topology: Topology, step: int) -> int:
        """Return the largest number of stages of the inner reduction on any part.

        All ranks of a node gather at the same stage, so that their collectives have one order.
        """
        nodes = topology.size("peers")
        key = (layout, topology.ranks_per_node, nodes, self.inner.phase(step))
        if key not in self._depths:
            ctx = StepContext(0, nodes, step)
            self._depths[key] = max(len(self.inner.plan(part, ctx)) if part.params else 0 for part in parts.layouts)
        return self._depths[key]

    # -- inside a node

    def _reduce_inside(self, packed: torch.Tensor, mine: torch.Tensor, ctx: StepContext, factor: float) -> Stages:
        """Leave ``factor`` times the sum of this rank's part over the node in ``mine``."""
        ranks = packed.numel() // mine.numel()
        if self.inside is not None:
            output = self._in_dtype(mine, packed.dtype, ctx)
            shards = Shards(_parts(packed, ranks), packed, output)
            yield from _scoped(self.inside.start_scatter(shards, self._node(ctx)), "node")
            mine.copy_(output).mul_(factor * ranks)
            return
        received = ctx.scratch("received inside", packed.shape, packed.dtype, packed.device)
        yield AllToAll(packed, received, wire=self._wire(packed.dtype), scope="node")
        torch.sum(received.view(ranks, -1), 0, dtype=mine.dtype, out=mine)
        if factor != 1.0:
            mine.mul_(factor)

    def _gather_inside(self, mine: torch.Tensor, packed: torch.Tensor, ctx: StepContext) -> Stages:
        """Leave every part of the node in ``packed``."""
        if self.inside is not None:
            node = self._node(ctx)
            weights = Weights(_parts(packed, node.world_size), packed, node.rank)
            weights.part.copy_(mine)
            yield from _scoped(self.inside.gather_weights(weights, node), "node")
            return
        output = self._in_dtype(mine, packed.dtype, ctx)
        if output is not mine:
            output.copy_(mine)
        yield AllGather(output, packed, wire=self._wire(packed.dtype), scope="node")

    def _wire(self, dtype: torch.dtype) -> Wire | None:
        return self.wire if self.wire is not None and self.wire.narrows(dtype) else None

    def _in_dtype(self, mine: torch.Tensor, dtype: torch.dtype, ctx: StepContext) -> torch.Tensor:
        return mine if mine.dtype == dtype else ctx.scratch("mine, rounded", mine.shape, dtype, mine.device)

    def _node(self, ctx: StepContext) -> StepContext:
        return ctx.among("inside", "node", Pieces({}, {}, {}, self.inside or self.inner, ctx.step, ()))

    # -- ownership

    def _partition(self, layout: BucketLayout, ranks: int, splits: str) -> Partition:
        key = (layout, ranks, splits)
        if key not in self._partitions:
            self._partitions[key] = partition(layout, ranks, splits)
        return self._partitions[key]

    def _owned(self, layout: BucketLayout, parts: Partition, ranks: int, place: int, step: int) -> Pieces:
        key = (layout, ranks, place, self.inner.phase(step))
        if key not in self._pieces:
            whole = {p.name: p for p in layout.params}
            owned = {piece.param.name: (piece.start, piece.stop) for piece in parts.owned[place]}
            # With one rank in a node the inner reduction gets the bucket itself.
            params = {p.name: p for p in (parts.layouts[place] if ranks > 1 else layout).params}
            self._pieces[key] = Pieces(whole, params, owned, self.inner, step, self._divided)
        return self._pieces[key]

    def _take_foreign(self, bucket: Bucket, ctx: StepContext, pieces: Pieces) -> list[tuple[str, str]]:
        """Add residuals of elements that this rank does not own to its gradient.

        Returns:
            Residuals of parameters that this rank has no gradient for. They wait for a step that has one.
        """
        waiting = []
        for p in bucket.params:
            for field in self._owed:
                if not ctx.is_foreign(p.name, field, pieces) or ctx.adopt(p.name, field, pieces):
                    continue
                if not ctx.sends(p.name):
                    waiting.append((p.name, field))
                    continue
                found = ctx.take_foreign(p.name, field)
                if found.numel() == p.numel:
                    bucket.view(p).add_(found.view(p.shape))
        return waiting

    # -- description

    def config(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self._given is not None:
            made["inside"] = repr(self._given)
        if self.nodes is not None:
            made["nodes"] = self.nodes if isinstance(self.nodes, int) else [list(node) for node in self.nodes]
        return made


def _check_inside(inside: Reduction) -> None:
    if inside.levels:
        raise HookConfigError(f"inside={inside!r} has two levels, and a node is one of them. Give the hook in it alone")
    if inside.fields:
        raise HookConfigError(
            f"inside={inside!r} keeps state ({', '.join(sorted(inside.fields))}), and the residual belongs to the hook between "
            "the nodes. Give a hook without feedback, such as allreduce, bf16_compress or quant8"
        )
    if not (inside.scatters and inside.gathers_weights):
        raise HookConfigError(
            f"inside={inside!r} cannot leave each rank a part and gather the parts, because it has no "
            f"{'run_scatter' if not inside.scatters else 'gather_weights'}(). Give allreduce, bf16_compress or quant8"
        )


def _parts(packed: torch.Tensor, ranks: int) -> ShardLayout:
    """Return the parts of a node as shards of one matrix with a row for each rank."""
    n = packed.numel() // ranks
    part = BucketLayout.of_shapes({"part": (1, n)}, packed.dtype, packed.device)
    return ShardLayout(part, {"part": (ranks, n)})


def _among_peers(layout: ShardLayout, nodes: int, mine: torch.Tensor) -> ShardLayout:
    """Return the layout of the parts that the ranks with one place share out. They are some parts of a parameter."""
    part, whole = layout.part, {}
    for p in part.params:
        shape, dim = list(p.shape), layout.dims.get(p.name, 0)
        shape[dim] *= nodes
        whole[p.name] = tuple(shape)
    return ShardLayout(BucketLayout(part.params, part.numel, mine.dtype, mine.device), whole, layout.dims)


def _scoped(stages: Stages, scope: Scope) -> Stages:
    """Give all requests of some stages a scope."""
    try:
        for requests in stages:
            asked = as_tuple(requests)
            for request in asked:
                request.scope = scope
            yield asked
    finally:
        stages.close()


def _padded(stages: Stages, depth: int) -> Stages:
    """Yield empty stages after the last one until there are ``depth``."""
    count = 0
    try:
        for requests in stages:
            yield requests
            count += 1
    finally:
        stages.close()
    for _ in range(count, depth):
        yield ()


def two_level(hook: Any, *, inside: Any = "allreduce", nodes: Nodes | None = None) -> Any:
    """Run a hook between nodes, on sums that the ranks of each node have made.

    Args:
        hook: the hook between nodes: a reduction, or a hook that carries one.
        inside: hook inside a node: a reduction, or the expression of one. ``allreduce`` sends gradients as they are,
            ``bf16_compress`` and ``fp16_compress`` 16 bits; these three add in fp32. Others must scatter, gather and keep no
            state, as ``quant8`` does.
        nodes: number of ranks per node, or the ranks of each node. By default torchrun's variables tell it, or else the host
            names of the ranks.

    Returns:
        A reduction, or a hook if one was given.

    Raises:
        HookConfigError: a foreign hook, a hook with two levels, or an ``inside`` that has state.

    Example:
        >>> from commhooks import BucketLayout, Topology
        >>> made = two_level(WireCast(Plain(), "bf16"))
        >>> ctx = StepContext(0, 8, topology=Topology.even(8, 4))
        >>> [(r.scope, r.kind, r.payload_bytes) for [r] in made.plan(BucketLayout.of_shapes({"w": (64, 64)}), ctx)]
        [('node', 'all_to_all', 16384), ('peers', 'all_reduce', 2048), ('node', 'all_gather', 16384)]
    """
    if inside == "allreduce":
        inside = None  # needs no plugin that has this name
    elif isinstance(inside, Mapping | str):
        inside = build(inside).value
    inside = getattr(inside, "reduction", inside)
    if inside is not None and not isinstance(inside, Reduction):
        raise HookConfigError(
            f"inside={inside!r:.80}: expected a reduction or the expression of one, such as bf16_compress or quant8"
        )
    return composed("two_level", [hook], lambda parts: TwoLevel(parts[0], inside, nodes))
