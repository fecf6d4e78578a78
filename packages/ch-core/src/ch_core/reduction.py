"""Reductions: compression methods as generators over a bucket.

A reduction yields collective requests, and resumes when their tensors hold the results. When it ends, the bucket holds the
averaged gradient. It sees no process group, future, stream or callback. The same generator therefore runs over DDP, FSDP2's
replicate axis, a fault-tolerance manager and simulated ranks.

Control flow may depend on the layout and on ``ctx.step`` alone, never on numbers. :meth:`Reduction.plan` can then list all
collectives of a step before it begins, by running the generator on meta tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, cast

import torch

from ch_core.bucket import Bucket, BucketLayout, ParamLayout, contiguous_stride
from ch_core.encoding import OWN_ORDER, Encoding, Entry, Key, Packed
from ch_core.entries import RESIDUAL, Draft
from ch_core.errors import HookConfigError, HookNotSupportedError, HookResultError
from ch_core.link import Link
from ch_core.requests import (
    BF16_BYTES,
    LATER,
    AllReduce,
    Request,
    Requests,
    Scope,
    StagePlan,
    as_tuple,
    passes_bf16,
    refusal,
    trip_bytes,
)
from ch_core.scratch import Scratch
from ch_core.shards import Shards, Weights, plain_gather, plain_scatter
from ch_core.topology import Nodes, Topology

Stages = Generator[Requests, None, None]
"""Result of :meth:`Reduction.run`: a generator that yields requests, and resumes when their tensors hold the results."""


class StepContext:
    """The step that a reduction runs in: its number, this rank, state and scratch memory.

    Attributes:
        rank: this rank in the group. It must not decide which collectives are requested.
        world_size: ranks in the group.
        step: number of committed steps before this one. Steps that were rolled back do not count. A reduction with state
            does not count steps whose reduced numbers were not finite. A stateless one has nothing to undo, and counts
            them.
        participating: False on a rank that only joins the collectives (out of data, healing, spare). Its tensors of
            the draft are dropped, except fields that are the same on all ranks.
        sent: bucket to fill with this rank's contribution, or ``None`` (see :attr:`Reduction.reports_sent`).
        topology: the nodes of the group's ranks; ``None`` if the reduction does not ask for them.
        encodings: encodings of the entries that the reduction writes (:meth:`Reduction.encodings`).
        link: slowest link between two ranks, if the user has named it.
    """

    __slots__ = (
        "_absent",
        "_draft",
        "_owes",
        "_owner",
        "_pieces",
        "_scratch",
        "_shared",
        "_whole",
        "encodings",
        "link",
        "participating",
        "rank",
        "sent",
        "step",
        "topology",
        "world_size",
    )

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        step: int = 0,
        *,
        draft: Draft | None = None,
        scratch: Scratch | None = None,
        owner: Hashable = 0,
        participating: bool = True,
        shared: frozenset[str] = frozenset(),
        sent: Bucket | None = None,
        absent: frozenset[str] = frozenset(),
        topology: Topology | None = None,
        owes: bool = True,
        encodings: Mapping[Key, Encoding] = MappingProxyType({}),
        link: Link | None = None,
    ) -> None:
        self.rank, self.world_size, self.step, self.participating = rank, world_size, step, participating
        self.sent, self.topology, self.link = sent, topology, link
        self._draft = draft if draft is not None else Draft()
        self._scratch = scratch if scratch is not None else Scratch()
        self._owner = owner
        self._shared = shared
        self._absent = absent  # parameters without a gradient on this rank
        self._owes = owes  # False if this rank's errors do not count: a manager averages over the participants alone
        self.encodings = encodings
        self._whole = participating and not absent
        self._pieces: Pieces | None = None  # this rank owns parts of parameters only

    def size(self, scope: Scope) -> int:
        """Return the number of ranks that take part in a request of a scope."""
        if self.topology is None:
            return 1 if scope == "node" else self.world_size
        return self.world_size if scope == "all" else self.topology.size(scope)

    def sends_whole(self, nbytes: int) -> bool:
        """True if each rank should send all of its ``nbytes`` to every other rank, instead of a part and then its average.

        With two ranks both send the same bytes, and whole messages are rounded once and travel once. More ranks send
        (W - 2) times as many bytes more, which must not take longer than the second message on the link.

        >>> StepContext(world_size=2).sends_whole(10**9), StepContext(world_size=3).sends_whole(1)
        (True, False)
        """
        further = (self.world_size - 2) * nbytes
        return further <= 0 or (self.link is not None and further <= self.link.bytes_on_the_way)

    def read(self, name: str, field: str, shape: Sequence[int] | None = None) -> torch.Tensor | None:
        """Return the committed state tensor of a parameter, or ``None``. It must not be written to.

        With ``shape``, a tensor of another shape (from other options) also reads as ``None``.

        A joined rank sends zeros and commits nothing. Its local fields read as ``None`` and stay unchanged. The same holds
        for a parameter that this rank has not used, because DDP drops the average if no rank used it. :meth:`as_owner`
        reads and writes these fields.
        """
        entry = self._entry(name, field)
        if entry is None:
            return None
        found = entry.tensor if self._pieces is None else self._pieces.shaped(name, field, entry.tensor)
        return found if shape is None or found.shape == tuple(shape) else None

    def read_packed(self, name: str, field: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return a parameter's committed codes and scales (see :class:`~ch_core.Packed`), or ``None``.

        Without scales the first tensor holds numbers: from a checkpoint, or from another hook.
        """
        entry = self._entry(name, field)
        return None if entry is None else (entry.tensor, entry.scales)

    def _entry(self, name: str, field: str) -> Entry | None:
        if not (self._whole or self._takes_part(name, field)):
            return None
        found = self._draft.found.get((name, field))
        if self._pieces is None or found is None or self._pieces.fits(name, field, found.encoding):
            return found
        return None  # of another part of the parameter

    def write(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return a tensor to fill. It becomes the parameter's state when the step commits.

        If :meth:`read` gives no residual because this rank has no gradient of the parameter, the commit adds the written
        residual to the old one.
        """
        return self._written(name, field, shape, dtype, device, OWN_ORDER).tensor

    def write_packed(
        self, name: str, field: str, shape: Sequence[int], packed: Packed, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales to fill, as :meth:`write` returns a tensor."""
        entry = self._written(name, field, shape, torch.int8, device, Encoding(packed=packed))
        if entry.scales is None:
            raise HookConfigError(
                f"codes are written to the field {field!r} of {name!r}, which is not packed: return its format in packed_fields "
                "or packing()"
            )
        return entry.tensor, entry.scales

    def _written(
        self,
        name: str,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        encoding: Encoding,
    ) -> Entry:
        """Return an entry of the draft, or scratch memory if this rank must not change the entry.

        Neither the pieces nor the engine name its encoding if a test calls the reduction itself. It is then ``encoding``.
        """
        if self._pieces is not None:
            encoding = self._pieces.encoding(name, field, shape)
        else:
            encoding = self.encodings.get((name, field), encoding)
        draft = self._draft
        if self._whole or self._takes_part(name, field):
            return draft.write((name, field), shape, dtype, device, encoding)
        if self._owes and field == RESIDUAL:
            # Without a gradient of the parameter it does not send the residual. It may still round other numbers.
            return draft.write((name, field), shape, dtype, device, encoding, is_error=True)
        owner, device = (self._owner, name), torch.device(device)
        made = Entry(self._scratch.get(owner, "written " + field, shape, dtype, device), encoding)
        blocks = encoding.scales(made.tensor)
        if blocks is not None:
            made.scales = self._scratch.get(owner, "scales of " + field, (blocks,), torch.float32, device)
        return made

    def scratch(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        brief: bool = False,
    ) -> torch.Tensor:
        """Return an uninitialised tensor that belongs to this bucket until the generator ends.

        With ``brief`` all buckets share it, and it is valid until the generator yields.
        """
        return self._scratch.get(None if brief else self._owner, name, shape, dtype, torch.device(device))

    def child(self, part: str, *, sent: Bucket | None = None) -> "StepContext":
        """Return the same step for a part of a composition, with separate scratch memory and its report in ``sent``."""
        made = StepContext(
            self.rank,
            self.world_size,
            self.step,
            draft=self._draft,
            scratch=self._scratch,
            owner=(self._owner, part),
            participating=self.participating,
            shared=self._shared,
            sent=sent,
            absent=self._absent,
            topology=self.topology,
            owes=self._owes,
            encodings=self.encodings,
            link=self.link,
        )
        made._pieces = self._pieces
        return made

    def among(
        self,
        part: str,
        scope: Scope,
        pieces: "Pieces",
        absent: frozenset[str] = frozenset(),
        shared: Collection[str] = (),
        *,
        participating: bool = True,
    ) -> "StepContext":
        """Return the same step among the ranks of a scope, for a reduction of the pieces that this rank owns there.

        Args:
            part: separates scratch memory, as in :meth:`child`.
            scope: its ranks are counted from 0, and requests must get this scope.
            pieces: the owned parts of parameters. State is read and written for these parts.
            absent: parameters for which the scope's ranks have no gradient through this rank.
            shared: fields that are the same on all ranks of the scope.
            participating: False if this rank only joins the collectives.
        """
        topology = self.topology
        rank, size = self.rank, self.world_size
        if topology is not None and scope != "all":
            rank, size = topology.members(self.rank, scope).index(self.rank), topology.size(scope)
        made = StepContext(
            rank,
            size,
            self.step,
            draft=self._draft,
            scratch=self._scratch,
            owner=(self._owner, part),
            participating=participating,
            shared=frozenset(shared),
            absent=absent,
            owes=self._owes,
            link=self.link if scope != "node" else None,
        )
        made._pieces = pieces
        return made

    def places(self) -> list["StepContext"]:
        """Return a copy of this step, without state, for each place of a node. Their plans cover the plans of all ranks."""
        if self.topology is None:
            return [self]
        made = [copy(self) for _ in self.topology.places]
        for one, rank in zip(made, self.topology.places, strict=True):
            one.rank = rank
        return made if self.topology.place(self.rank) else [self, *made[1:]]

    def is_foreign(self, name: str, field: str, pieces: "Pieces") -> bool:
        """True if the state has an entry of other elements than this rank's piece.

        Such entries come from a loaded state, or from an earlier partition.
        """
        found = self._draft.found.get((name, field))
        return found is not None and not pieces.fits(name, field, found.encoding)

    def adopt(self, name: str, field: str, pieces: "Pieces") -> bool:
        """Cut a foreign entry to this rank's piece if all other elements are zeros, as after a load on the same nodes.

        Returns:
            True if it is this rank's piece now.
        """
        entry = self._draft.found[name, field]
        piece = pieces.cut(name, field, entry.decoded())
        if piece is not None:
            entry.tensor, entry.encoding, entry.scales = piece.tensor, piece.encoding, None
        return piece is not None

    def take_foreign(self, name: str, field: str) -> torch.Tensor:
        """Remove a foreign entry, and return its numbers in the parameter's own order. It goes when the step commits."""
        draft = self._draft
        numbers = draft.found[name, field].decoded()
        draft.drop((name, field))
        return numbers

    def keep_foreign(self, name: str, field: str) -> None:
        """Add the entry that this step has written for this rank's piece to the foreign entry, and write the sum."""
        draft = self._draft
        piece = draft.written.pop((name, field), None)
        if piece is not None:
            whole = draft.found[name, field].decoded()
            whole = whole.to(torch.float32, copy=True) if not whole.is_floating_point() else whole.clone()
            whole += piece.decoded().view(whole.shape)
            draft.write((name, field), whole.shape, whole.dtype, whole.device).tensor.copy_(whole)

    def sends(self, name: str) -> bool:
        """Return True if this rank has a gradient of the parameter to send."""
        return self.participating and name not in self._absent

    def as_owner(self) -> "StepContext":
        """Return the same step with access to every entry of the state, also of parameters that this rank does not send.

        A rank that owns a part of the average rounds that part for all ranks. It must keep the rounding error even if
        it did not use the parameter or has joined, because no other rank knows the error.
        """
        made = copy(self)
        made._whole = True
        return made

    def _takes_part(self, name: str, field: str) -> bool:
        return field in self._shared or self.sends(name)


class Pieces:
    """The parts of parameters that one rank owns, by parameter name.

    Args:
        whole: layouts of the whole parameters.
        owned: the parts, as parameters of their own.
        parts: name -> first and last element (excluded) in the order of the parameter's memory.
        inner: reduction of the parts in ``step``. It knows the formats of its fields.
        step: this step.
        local: fields with a number for each element. Entries of these fields belong to a part.
    """

    def __init__(
        self,
        whole: Mapping[str, ParamLayout],
        owned: Mapping[str, ParamLayout],
        parts: Mapping[str, tuple[int, int]],
        inner: "Reduction",
        step: int,
        local: Collection[str],
    ) -> None:
        self._whole, self._owned, self._parts, self._local = whole, owned, parts, frozenset(local)
        self._inner, self._step = inner, step
        self._made: dict[tuple[str, str], Encoding] = {}

    def fits(self, name: str, field: str, encoding: Encoding) -> bool:
        """True if an entry of this encoding covers exactly the owned part of a parameter, or its field has no parts."""
        return field not in self._local or (name in self._parts and encoding == self._encoding(name, field))

    def shaped(self, name: str, field: str, entry: torch.Tensor) -> torch.Tensor:
        """Return an entry of the owned part in the shape that the reduction of this step gives the field.

        Another reduction may have written it in the shape of the parameter, or in the shape of its matrix. The numbers have
        the same order in both.
        """
        if field not in self._local or name not in self._owned or self._encoding(name, field).packed is not None:
            return entry
        piece = self._owned[name]
        shape = piece.matrix_shape if self._ordered(name, field) else piece.shape
        return entry if entry.numel() != piece.numel else entry.view(shape)

    def encoding(self, name: str, field: str, shape: Sequence[int]) -> Encoding:
        """Return the encoding of an entry that a reduction of the pieces writes."""
        start, stop = self._parts.get(name, (0, 0))
        if field not in self._local or math.prod(shape) != stop - start:
            return OWN_ORDER
        return self._encoding(name, field)

    def cut(self, name: str, field: str, numbers: torch.Tensor) -> Entry | None:
        """Return the owned part of a whole parameter as a separate entry; ``None`` if other elements are not zeros."""
        if name not in self._parts or numbers.numel() != self._whole[name].numel:
            return None
        encoding, piece = self._encoding(name, field), self._owned[name]
        mine = encoding.encode(numbers)
        others = numbers.numel() > piece.numel and torch.count_nonzero(numbers) > torch.count_nonzero(mine)
        if others:
            return None
        return Entry(mine.reshape(piece.matrix_shape if self._ordered(name, field) else piece.shape).clone(), encoding)

    def _ordered(self, name: str, field: str) -> bool:
        return field in self._inner.memory_order(self._whole[name], self._step)

    def _encoding(self, name: str, field: str) -> Encoding:
        key = (name, field)
        if key not in self._made:
            whole = self._whole[name]
            packed, piece = self._inner.packing(whole, self._step).get(field), self._owned[name]
            if piece.stride == contiguous_stride(piece.shape) or self._ordered(name, field):
                made = Encoding.of(whole, in_memory=True, packed=packed)
                self._made[key] = replace(made, part=self._parts[name])
            else:  # a whole parameter that is not contiguous
                self._made[key] = Encoding(packed=packed)
        return self._made[key]


class Reduction(ABC):
    """Base of all reductions.

    Subclasses implement :meth:`run`; most need nothing else.

    Attributes:
        name: shown in profiler ranges, errors and tables.
        granularity: ``"tensor"`` if each parameter is treated alone, so that results do not depend on ``bucket_cap_mb``.
            ``"bucket"`` if the bucket is treated as one vector.
        collectives: kinds of requests that it yields.
        castable: kinds of requests that a 16-bit wrapper may round. An all-gather or all-to-all must also be marked
            (``AllGather(..., castable=True)``), because others of the same kind may carry packed bytes.
        lossy: True if the result differs from the average by more than rounding of the bucket's dtype.
        trips: number of times that an uncompressed gradient crosses the network: 2 for an all-reduce, 1 for a
            reduce-scatter. Reports compare the sent bytes with it.
        fields: state fields, each ``"local"`` to a rank, ``"shared"`` (the same on all ranks), or ``"owned"`` (the same on one
            rank of each node, and absent from the others).
        scaled_fields: power of the loss scale in each field that follows it: 1 for gradients, 2 for their squares. The
            engine multiplies these fields when a ``GradScaler`` changes its scale. ``state_dict()`` holds them unscaled.
        memory_order_fields: fields that hold a parameter in the order of its memory, as :meth:`.Bucket.matrix` shows it.
            Other fields have the parameter's own shape. If another reduction takes over the state, the engine converts
            their common fields. Checkpoints hold the parameter's own order.
        packed_fields: fields that are held in 8 bits, and their format, see :class:`~ch_core.Packed`.
        reports_sent: True if :meth:`run` fills ``ctx.sent``, a bucket of the same layout, with this rank's contribution:
            in the gradient's units, before the division by W, after all rounding. The ``sent`` of an
            :class:`~ch_core.requests.AllReduce` of the gradient itself is such a contribution. ``error_feedback`` needs
            it. A reduction with its own residual leaves it False.
        delivers: True if it only averages the bucket in place by all-reduces. None of its code runs after them.
            A class that defines :meth:`run` or :meth:`start` does not inherit it.
        splits: ``"elements"`` if a parameter may be cut anywhere, because each element (or block of elements) is treated alone.
            ``"rows"`` if it stays whole where possible, and may be cut between rows of its matrix. ``two_level`` divides
            the work of a node accordingly.
        levels: True if a part of it reduces over the ranks of a node. The engine then asks the transport for the topology.
        nodes: topology that the user gives; ``None`` to ask the ranks.
        piece_bytes: on a CPU, the engine cuts a larger bucket between parameters into pieces of about this many bytes of
            gradient. Each piece is a bucket, so that arithmetic overlaps with messages. ``None``: never cut.

    Example:
        >>> import torch
        >>> class SignSum(Reduction):
        ...     name, lossy = "sign_sum", True
        ...     def run(self, bucket, ctx):
        ...         signs = bucket.buffer.sign()
        ...         yield AllReduce(signs)
        ...         bucket.buffer = signs
        >>> from ch_core import AllReduce
        >>> SignSum().plan(BucketLayout.of_shapes({"w": (4, 4)}), StepContext(world_size=2))[0][0].payload_bytes
        64
    """

    name: str = "reduction"
    granularity: Literal["tensor", "bucket"] = "tensor"
    collectives: frozenset[str] = frozenset({"all_reduce"})
    castable: frozenset[str] = frozenset({"all_reduce", "reduce_scatter"})
    lossy: bool = False
    trips: int = 2
    fields: Mapping[str, Literal["local", "shared", "owned"]] = MappingProxyType({})
    scaled_fields: Mapping[str, int] = MappingProxyType({"residual": 1})
    memory_order_fields: frozenset[str] = frozenset()
    packed_fields: Mapping[str, Packed] = MappingProxyType({})
    reports_sent: bool = False
    delivers: bool = False
    piece_bytes: int | None = None
    splits: Literal["elements", "rows"] = "rows"
    levels: bool = False
    nodes: Nodes | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__dict__.keys().isdisjoint(("run", "start")):  # its own code may run after the last collective
            cls.delivers = cls.__dict__.get("delivers", False)

    @abstractmethod
    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """Yield requests; leave the averaged gradient in ``bucket``."""

    @property
    def shared_fields(self) -> frozenset[str]:
        """State fields that are the same on all ranks. A new rank receives them."""
        return frozenset(name for name, kind in self.fields.items() if kind == "shared")

    def memory_order(self, param: ParamLayout, step: int) -> frozenset[str]:
        """Return the :attr:`memory_order_fields` of a parameter in a step."""
        return self.memory_order_fields

    def packing(self, param: ParamLayout, step: int) -> Mapping[str, Packed]:
        """Return the :attr:`packed_fields` of a parameter in a step."""
        return self.packed_fields

    def encodings(self, layout: BucketLayout, step: int) -> Mapping[tuple[str, str], Encoding]:
        """Return the encoding of every entry that a bucket of this layout may have, by parameter name and field.

        The result is the same object for steps of the same :meth:`phase`.
        """
        cache: dict[Hashable, dict[tuple[str, str], Encoding]] = self.__dict__.setdefault("_encodings", {})
        key = (layout, self.phase(step))
        if key not in cache:
            made = cache[key] = {}
            for param in self.state_params(layout):
                if self.encodes_itself(param, step):
                    continue
                in_memory, packed = self.memory_order(param, step), self.packing(param, step)
                for field in self.fields:
                    made[param.name, field] = Encoding.of(param, in_memory=field in in_memory, packed=packed.get(field))
        return cache[key]

    def encodes_itself(self, param: ParamLayout, step: int) -> bool:
        """True if it reads a parameter's state in any encoding, so that the engine need not convert it."""
        return False

    def state_params(self, layout: BucketLayout) -> Sequence[ParamLayout]:
        """Return the parameters whose state a bucket of this layout reads and writes."""
        return layout.params

    def keeps_equal(self, name: str) -> bool:
        """True if all ranks get the same gradient of a parameter, so that its copies stay equal.

        A comparison of ranks covers these parameters only.
        """
        return True

    def low_rank(self, param: ParamLayout, step: int) -> bool:
        """True if the average of this matrix has less than half of its directions. Such a hook does not suit every optimizer."""
        return False

    def phase(self, step: int) -> Hashable:
        """Return a value that changes with the step if the requests do (a warm-up, an alternation)."""
        return ()

    def route(self, param: ParamLayout, step: int) -> str | None:
        """Return the reason to average this parameter exactly instead of by :meth:`run`; ``None`` if there is none."""
        return None

    def routes(self, layout: BucketLayout, step: int) -> dict[str, str]:
        """Return parameter name -> reason for the parameters that are averaged exactly."""
        cache: dict[Hashable, dict[str, str]] = self.__dict__.setdefault("_routes", {})
        key = (layout, self.phase(step))
        if key not in cache:
            reasons = ((p.name, p.plain_only or self.route(p, step)) for p in layout.params)
            cache[key] = {name: reason for name, reason in reasons if reason}
        return cache[key]

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """Return the generator to drive: :meth:`run` for the parameters that fit, exact averaging for the others."""
        return self.run_with_plain(
            bucket, ctx, self.routes(bucket.layout, ctx.step) if self.lossy or self.fields else ()
        )

    def run_with_plain(self, bucket: Bucket, ctx: StepContext, plainly: Collection[str]) -> Stages:
        """Run :meth:`run`, and in the same rounds average the parameters of ``plainly`` exactly."""
        if not plainly:
            return self._stages(bucket, ctx)
        if len(plainly) == len(bucket.params):
            return plain(bucket, ctx.sent)
        fit = [p.name for p in bucket.params if p.name not in plainly]
        if ctx.sent is None:
            return parallel(self._stages(bucket.select(fit), ctx), plain(bucket.select(plainly)))
        inner = ctx.child("fit", sent=ctx.sent.select(fit))
        return parallel(
            self._stages(bucket.select(fit), inner), plain(bucket.select(plainly), ctx.sent.select(plainly))
        )

    def _stages(self, bucket: Bucket, ctx: StepContext) -> Stages:
        """Call :meth:`run`, and refuse a result that is not a generator. A ``run`` without ``yield`` returns none."""
        stages: object = self.run(bucket, ctx)
        if not hasattr(stages, "__next__"):
            raise HookResultError(
                f"{self.name}: run() returned {type(stages).__name__}. It must be a generator that yields its requests, such as "
                "AllReduce(bucket.buffer), and resumes when they hold the result. If it has no requests, end it with "
                "`yield from ()`"
            )
        return cast(Stages, stages)

    # -- on gradients that the ranks share out

    @property
    def scatters(self) -> bool:
        """True if it has a :meth:`run_scatter`. Sharded models refuse a reduction without one by name."""
        return type(self).run_scatter is not Reduction.run_scatter

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """Yield requests; leave this rank's part of the average in ``shards.output``.

        Optional. Residuals are local, under the parameter's name and of its whole shape (:meth:`.Shards.cut`). The same
        state then fits another number of ranks.
        """
        raise HookNotSupportedError(
            f"{self.name} cannot leave each rank a part of the average, because it has no run_scatter(). Use a hook that "
            "scatters, such as allreduce, bf16_compress or quant4"
        )

    def start_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """Return the generator to drive: :meth:`run_scatter` for the parameters that fit, exact averaging for the others."""
        plainly = self.routes(shards.layout.part, ctx.step) if self.lossy or self.fields else {}
        if not plainly:
            return self.run_scatter(shards, ctx)
        # Both run at once, and may use scratch memory of one name and size.
        exact = plain_scatter(shards.select(plainly), ctx.child("exact").scratch)
        if len(plainly) == len(shards.params):
            return exact
        return parallel(self.run_scatter(shards.select({p.name for p in shards.params} - plainly.keys()), ctx), exact)

    # -- on parameters that the ranks gather

    @property
    def gathers_weights(self) -> bool:
        """True if it has a :meth:`gather_weights`, and no state. A gather of weights refuses others by name."""
        return type(self).gather_weights is not Reduction.gather_weights and not self.fields

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        """Yield requests; leave in ``weights.storage`` the weights that every rank computes with.

        Optional. All ranks must decode the same bits, also of their own shard. Two gathers of the same shards must give the
        same weights, because a step gathers in forward and again in backward. ``two_level(inside=...)`` gathers the averages
        of a node with it.
        """
        raise HookNotSupportedError(
            f"{self.name} cannot gather weights, because it has no gather_weights(). Use a hook that gathers, such as "
            "bf16_compress, quant8 or quant4"
        )

    def start_gather_weights(self, weights: Weights, ctx: StepContext, exact: Collection[str] = ()) -> Stages:
        """Return the generator to drive: :meth:`gather_weights` for the parameters that fit, an exact gather for the others.

        Args:
            weights: the shards.
            ctx: the step.
            exact: names of further parameters to gather exactly.
        """
        routed = self.routes(weights.layout.part, ctx.step) if self.lossy else {}
        return self.gather_with_plain(weights, ctx, {*exact, *routed})

    def gather_with_plain(self, weights: Weights, ctx: StepContext, plainly: Collection[str]) -> Stages:
        """Run :meth:`gather_weights`, and in the same round gather the parameters of ``plainly`` exactly."""
        names = {p.name for p in weights.params}
        exact = names.intersection(plainly)
        if not exact:
            return self.gather_weights(weights, ctx)
        # A cast gathers by the same function. With one context both would write to one piece of scratch memory if their sizes
        # are equal, and one parameter would get the numbers of another.
        plain = self.gather_exactly(weights.select(exact), ctx.child("exact"))
        return plain if exact == names else parallel(self.gather_weights(weights.select(names - exact), ctx), plain)

    def gather_exactly(self, weights: Weights, ctx: StepContext) -> Stages:
        """Gather weights as they are. A composition that gathers over several levels does so, too."""
        return plain_gather(weights, ctx.scratch)

    def label(self, param: ParamLayout, step: int) -> str:
        """Return the name of the method that treats a parameter, for tables of a plan."""
        return self.name

    def check(self, layout: BucketLayout) -> None:  # noqa: B027 - most reductions take any model
        """Refuse a model that does not fit. ``attach`` passes all parameters as one virtual bucket.

        Raises:
            HookConfigError: naming the parameters.
        """

    def cautions(self, layout: BucketLayout, world_size: int) -> list[str]:
        """Return warnings about this reduction on a model over ``world_size`` ranks, in sentences.

        An adapter logs them. By default a reduction that gathers warns if its
        volume, which grows with the number of ranks, exceeds the volume of ``bf16_compress``. An override adds to
        ``super().cautions(...)``.

        Args:
            layout: all parameters, as one virtual bucket.
            world_size: any number of ranks.
        """
        if "all_gather" not in self.collectives:
            return []

        def volume(ranks: int) -> int:
            return trip_bytes(self.plan(layout, StepContext(world_size=ranks, step=LATER)))

        first = passes_bf16(volume, layout.size, world_size)
        if first is None:
            return []
        times = volume(world_size) / (BF16_BYTES * layout.size)
        return [
            f"{self.name} gathers every rank's message, so its volume grows with the number of ranks: over {world_size} it "
            f"is {times:.2g} times that of bf16_compress, which it passes from {first} ranks on. Send less, or use a hook "
            "whose volume does not grow, such as powersgd"
        ]

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        """Return the requests of every stage, from the layout alone, by running the generator on meta tensors.

        A layout without parameters, of a model that is frozen now, has none.

        Raises:
            HookConfigError: the generator cannot run without numbers.
            HookResultError: no transport can carry one of its requests.
        """
        if not layout.params:
            return ()
        meta = BucketLayout(layout.params, layout.numel, layout.dtype, "meta")
        bucket = Bucket(meta, torch.empty(layout.numel, dtype=layout.dtype, device="meta"))
        dry = StepContext(
            ctx.rank, ctx.world_size, ctx.step, participating=ctx.participating, topology=ctx.topology, link=ctx.link
        )
        stages: list[StagePlan] = []
        try:
            for requests in self.start(bucket, dry):
                asked = as_tuple(requests)
                for request in asked:
                    why = refusal(request, ctx.size(request.scope))
                    if why is not None:
                        raise HookResultError(f"{self.name}, stage {len(stages)}: {why}")
                stages.append(tuple(r.plan() for r in asked))
        except HookResultError:
            raise
        except Exception as error:
            raise HookConfigError(
                f"{self.name}: its collectives could not be planned, because the generator failed on meta tensors "
                f"({type(error).__name__}: {error}). A reduction's requests must follow from the layout and the step; "
                "allocate with ctx.scratch(..., device=bucket.device) and do not read numbers, or override plan()"
            ) from error
        return tuple(stages)

    def config(self) -> dict[str, Any]:
        """Return the options that rebuild this reduction, as plain values."""
        return {}

    def node(self) -> dict[str, Any]:
        """Return the canonical expression node of this reduction and of the reductions inside it."""
        return {"hook": self.name, "config": self.config()}

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in self.config().items())
        return f"{self.name}({inside})" if inside else self.name


class Plain(Reduction):
    """The exact average, in the bucket's own dtype: one in-place all-reduce."""

    name = "allreduce"
    granularity = "tensor"
    reports_sent = True
    delivers = True
    splits = "elements"

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return plain(bucket, ctx.sent)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        return plain_scatter(shards, ctx.scratch)

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        return plain_gather(weights, ctx.scratch)


def plain(bucket: Bucket, sent: Bucket | None = None) -> Stages:
    """Average the bucket exactly with one in-place all-reduce per contiguous piece. The engine merges these.

    ``sent``, a bucket of the same layout, is filled with this rank's contribution.
    """
    runs = bucket.segments()
    reports = sent.segments() if sent is not None else [None] * len(runs)
    if runs:
        yield tuple(AllReduce(run, sent=report) for run, report in zip(runs, reports, strict=True))


def parallel(*generators: Stages) -> Stages:
    """Advance several generators together. Their requests of one stage travel as one tuple.

    Exact averaging together with a two-stage method therefore adds no round.
    """
    live = list(generators)
    try:
        while live:
            stage: list[Request] = []
            for generator in tuple(live):
                try:
                    stage.extend(as_tuple(next(generator)))
                except StopIteration:
                    live.remove(generator)
            if live:  # an empty stage counts, because other ranks of the node may ask for something in it
                yield tuple(stage)
    finally:
        for generator in live:
            generator.close()
