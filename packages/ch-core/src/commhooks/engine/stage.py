"""The requests of one stage, under way: what a mean is, what is sent and which requests are merged is decided here, once,
for every transport alike; in which way it is sent, by :mod:`commhooks.engine.schedule`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from commhooks.casting import encode
from commhooks.engine.arrival import Decode, Message, on_arrival
from commhooks.engine.schedule import TUNED, CpuTuning
from commhooks.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from commhooks.scratch import Scratch
from commhooks.transport.base import Transport, Work


@dataclass(slots=True)
class Stage:
    """The requests of one stage, under way.

    Starting one encodes (scale by 1/W, cast, merge) and starts the collectives; :meth:`wait` waits and decodes.
    All-reduces of equal dtype, op and wire are merged into one message.

    Attributes:
        any_order: whether sums of unrounded numbers may be added up in another order than DDP's.
        newest: whether no message of a later bucket will want gloo's threads before this one is done.
        error: first exception of an ``on_sent`` of a request.
        wire_bytes: what this rank sends, as modelled: round a ring ``2 (W - 1) / W`` of an all-reduce and ``(W - 1) / W``
            of any other collective, and all of it to ``W - 1`` ranks in a direct exchange.
    """

    transport: Transport
    scratch: Scratch
    owner: object
    any_order: bool = False
    tuning: CpuTuning = TUNED
    newest: bool = True
    _works: list[Message] = field(default_factory=list)
    reduced: list[torch.Tensor] = field(default_factory=list)
    wire_bytes: float = 0.0
    error: BaseException | None = None

    def start(self, requests: tuple[Request, ...]) -> "Stage":
        groups: dict[object, list[AllReduce]] = {}
        for number, request in enumerate(requests):
            if isinstance(request, AllReduce):
                if request.tensor.is_sparse:
                    self._sparse(request)
                elif request.tensor.numel():
                    key = (request.tensor.dtype, request.op, request.wire)
                    groups.setdefault(key, []).append(request)
            else:
                self._other(number, request)
        for number, group in enumerate(groups.values()):
            self._all_reduce(number, group)
        return self

    def wait(self, timeout: float | None) -> None:
        """Finish every collective and put the results where the requests want them."""
        for work, output, decode in self._works:
            self.tuning.wait(work, output, timeout)
            if decode is not None:
                decode()
        self._works.clear()

    def then(self, action: Callable[[], None]) -> None:
        """See :func:`~commhooks.engine.arrival.on_arrival`. :meth:`wait` returns when the results are there, as ever."""
        self._works = on_arrival(self._works, action)

    # -- all-reduce

    def _all_reduce(self, number: int, group: list[AllReduce]) -> None:
        first = group[0]
        tensor, wire = first.tensor, first.wire
        scale = self._scale(first.op)
        if len(group) == 1 and wire is None:
            self.reduced.append(tensor)
            if first.sent is not None:
                first.sent.copy_(tensor)
            self._tell_sent(first)  # before the tensor itself is scaled, and travels
            if scale != 1.0:
                tensor.mul_(scale)
            self._reduce(number, tensor.view(-1), first, None)
            return
        total = sum(r.tensor.numel() for r in group)
        dtype = wire.dtype if wire is not None else tensor.dtype
        merged = self.scratch.get(self.owner, f"stage all-reduce {number}", (total,), dtype, tensor.device)
        tensors = [r.tensor.view(-1) for r in group]
        parts = list(torch.split_with_sizes(merged, [t.numel() for t in tensors]))
        if wire is None:
            torch._foreach_copy_(parts, tensors)
            if scale != 1.0:
                merged.mul_(scale)
        else:
            for source, part in zip(tensors, parts, strict=True):
                encode(source, part, scale, wire)
        for request, part in zip(group, parts, strict=True):
            if request.sent is not None:
                request.sent.copy_(part.view(request.sent.shape)).mul_(1.0 / scale)
        self.reduced.append(merged)  # one sum tells of all whether something is not finite
        self._reduce(number, merged, first, lambda: torch._foreach_copy_(tensors, parts))
        for request in group:
            self._tell_sent(
                request
            )  # while the message travels; nothing received is put in place before `start` returns

    def _tell_sent(self, request: AllReduce) -> None:
        if request.on_sent is not None:
            try:
                request.on_sent()
            except BaseException as error:  # raised here, it would keep peers waiting for this rank's message
                self.error = self.error or error

    def _reduce(self, number: int, flat: torch.Tensor, like: AllReduce, decode: Callable[[], None] | None) -> None:
        """Start the message in the way that costs least, where the transport leaves that open. With more than two
        ranks the order in which they are added up depends on the way; what no cast has rounded is then sent as DDP
        sends it, and its average is DDP's to the bit, unless nobody counts on that.
        """
        size, op = flat.nbytes, _sum(like.op)
        free = self.transport.free and flat.device.type == "cpu"
        if free and (self.any_order or self.transport.world_size == 2 or like.wire is not None):
            if op == "sum" and flat.is_floating_point() and self.tuning.direct(size, self.transport.world_size):
                self._exchange_directly(number, flat, decode)
                return
            if self.newest and size >= self.tuning.halved_from:
                ahead, flat = flat.chunk(2)
                self._add(self.transport.all_reduce(ahead, op), ahead, None)
        self._sends(2 * size)
        self._add(self.transport.all_reduce(flat, op), flat, decode)

    def _exchange_directly(self, number: int, flat: torch.Tensor, decode: Callable[[], None] | None) -> None:
        """An all-reduce of few numbers: each rank sends all of them to every other, and adds up what has come in the
        order of the ranks. That is one message to wait for; a ring has ``2 (W - 1)``, one after another.
        """
        shape = (self.transport.world_size, flat.numel())
        sent, received = (
            self.scratch.get(self.owner, f"stage {what} {number}", shape, flat.dtype, flat.device)
            for what in ("sent", "received")
        )
        sent.copy_(flat)

        def add_up() -> None:
            first, second, *others = received.unbind(0)
            torch.add(first, second, out=flat)
            for row in others:
                flat.add_(row)
            if decode is not None:
                decode()

        self._sends(sent.nbytes)
        self._add(self.transport.all_to_all(received.view(-1), sent.view(-1)), received, add_up)

    def _sparse(self, request: AllReduce) -> None:
        if self._scale(request.op) != 1.0:
            request.tensor.div_(self.transport.world_size)  # as DDP does here, where it multiplies dense ones by 1/W
        # gloo and NCCL gather indices and values
        self._sends(self.transport.world_size * (request.tensor._indices().nbytes + request.tensor._values().nbytes))
        self._add(self.transport.all_reduce(request.tensor, _sum(request.op)), request.tensor, None)

    # -- the others

    def _other(self, number: int, request: Request) -> None:
        if isinstance(request, AllGather):
            self._move(number, request, self.transport.all_gather)
        elif isinstance(request, AllToAll):
            self._move(number, request, self.transport.all_to_all)
        elif isinstance(request, ReduceScatter):
            self._reduce_scatter(number, request)

    def _move(
        self,
        number: int,
        request: AllGather | AllToAll,
        collective: Callable[[torch.Tensor, torch.Tensor], Work],
    ) -> None:
        """What arrives as it was sent, on its way perhaps in fewer bits."""
        sent, received, wire = request.input, request.output, request.wire
        decode: Decode = None
        if wire is not None:
            name, device = f"stage {request.kind} {number}", sent.device
            sent = self.scratch.get(self.owner, name + " input", sent.shape, wire.dtype, device)
            received = self.scratch.get(self.owner, name + " output", received.shape, wire.dtype, device)
            encode(request.input, sent, 1.0, wire)
            decode = partial(_copy, request.output, received)
        if request.sent is not None:
            request.sent.copy_(sent)
        self._sends((sent if request.kind == "all_to_all" else received).nbytes)
        self._add(collective(received, sent), received, decode)

    def _reduce_scatter(self, number: int, request: ReduceScatter) -> None:
        scale, wire = self._scale(request.op), request.wire
        self.reduced.append(request.output)
        if wire is None:
            if scale != 1.0:
                request.input.mul_(scale)
            self._sends(request.input.nbytes)
            work = self.transport.reduce_scatter(request.output, request.input, _sum(request.op))
            self._add(work, request.output, None)
            return
        device, owner = request.input.device, self.owner
        name = f"stage reduce-scatter {number}"
        sent = self.scratch.get(owner, name + " input", request.input.shape, wire.dtype, device)
        received = self.scratch.get(owner, name + " output", request.output.shape, wire.dtype, device)
        encode(request.input, sent, scale, wire)
        self._sends(sent.nbytes)
        work = self.transport.reduce_scatter(received, sent, _sum(request.op))
        self._add(work, received, partial(_copy, request.output, received))

    def _scale(self, op: str) -> float:
        return 1.0 / self.transport.world_size if op == "mean" else 1.0

    def _sends(self, nbytes: int) -> None:
        """Count a message of so many bytes for all ranks together, of which a rank keeps its own part."""
        self.wire_bytes += nbytes * (self.transport.world_size - 1) / self.transport.world_size

    def _add(self, work: Work, output: torch.Tensor, decode: Decode) -> None:
        self._works.append((work, output, decode))


def _sum(op: str) -> str:
    """What the transport is asked for: a mean has been divided before, so that no sum of 16-bit numbers overflows."""
    return "sum" if op == "mean" else op


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
