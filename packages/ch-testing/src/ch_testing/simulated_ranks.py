"""W ranks of one hook in this process, with handles, engines and named gradients.

Tests of hooks use real handles and engines on simulated ranks, without processes and models.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ch_core import Engine, Nodes, SimulatedGroup, SimulatedTransport, Work, together
from commhooks import Binding, Bucket, BucketLayout, CommHook, CommHooksError, merge

Gradients = Mapping[str, torch.Tensor]
Given = Mapping[str, torch.Tensor | None]
"""The gradients of a rank; ``None`` for a parameter that the rank did not use."""


class CountingTransport(SimulatedTransport):
    """A simulated rank that counts the bytes that it sends, in all scopes."""

    _own = 0

    @property
    def payload(self) -> int:
        """Bytes of the full-size tensors of all collectives."""
        return self._own + sum(
            t._own for t in self._scoped.values() if isinstance(t, CountingTransport) and t is not self
        )

    def _post(self, kind: str, op: str, *tensors: torch.Tensor) -> Work:
        whole = max(tensors, key=torch.Tensor.numel)
        self._own += whole.numel() * whole.element_size()
        return super()._post(kind, op, *tensors)


class SimulatedBinding(Binding):
    """The binding of a handle on a simulated rank."""

    calls = 0
    weighs = True

    def __init__(self, engine: Engine, layout: BucketLayout) -> None:
        self.engine, self.layout = engine, layout

    def check(self) -> None:
        """Do nothing; :meth:`SimulatedRanks.step` returns every error."""

    def detach(self) -> None:
        """Do nothing; there is no model."""


@dataclass
class Step:
    """Result of one step, each rank's averaged gradients and its error."""

    gradients: list[dict[str, torch.Tensor]]
    errors: list[BaseException | None] = field(default_factory=list)


class SimulatedRanks:
    """Simulated ranks that share nothing but their collectives.

    Args:
        make: returns one rank's unattached handle, such as ``lambda: commhooks.create("powersgd")``.
        world_size: number of ranks.
        like: tensors with the names, shapes, strides and dtypes of the parameters, in model order.
        buckets: number of buckets; as in DDP the last parameters come first.
        timeout: seconds after which a rank that waits for another raises.
        nodes: ranks per node, or the ranks of each node; ``None`` for one rank per node.
        transport: makes the transport of a rank, given the group and the rank.
        weighted: True to average by the weights that :meth:`step` gets.

    Example:
        >>> import torch
        >>> from commhooks import CommHook, Plain
        >>> make = lambda: CommHook(node={"hook": "allreduce", "config": {}}, built=Plain())
        >>> ranks = SimulatedRanks(make, 2, {"w": torch.zeros(2)})
        >>> ranks.step([{"w": torch.zeros(2)}, {"w": torch.ones(2)}]).gradients[0]["w"]
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        make: Callable[[], CommHook],
        world_size: int,
        like: Gradients,
        *,
        buckets: int = 2,
        timeout: float = 30.0,
        nodes: Nodes | None = None,
        transport: Callable[[SimulatedGroup, int], CountingTransport] = CountingTransport,
        weighted: bool = False,
    ) -> None:
        self.world_size, self.buckets, self.like = world_size, buckets, like
        self.group = SimulatedGroup(world_size, nodes)
        self.transports = [transport(self.group, rank) for rank in range(world_size)]
        self.handles = [make() for _ in range(world_size)]
        self.engines: list[Engine] = []
        self._dropped: frozenset[str] = frozenset()  # no rank used them in the last step
        layout = BucketLayout.of_tensors(like)
        for handle, carries in zip(self.handles, self.transports, strict=True):
            assert handle.reduction is not None, f"{handle.expr} is not a reduction, so it cannot be simulated"
            engine = Engine(handle.reduction, carries, handle.state, timeout=timeout)  # type: ignore[arg-type]
            engine.open_levels()
            engine.set_dropped(lambda: self._dropped)
            binding = SimulatedBinding(engine, layout)
            handle.bind(binding)
            if weighted:
                binding.weigh_ranks()
            self.engines.append(engine)

    def step(
        self,
        gradients: Sequence[Given],
        joined: Collection[int] = (),
        weights: Sequence[float | torch.Tensor | None] = (),
        of: Literal["mean", "sum"] = "mean",
    ) -> Step:
        """Run one backward on every rank. The given gradients do not change.

        Args:
            gradients: one mapping for each rank, with ``None`` where the rank did not use a parameter.
            joined: ranks that have run out of data (``DDP.join``): they send zeros in place of their gradients.
            weights: each rank's, for :meth:`.CommHook.weigh`; ``None`` for a rank that does not call it.
            of: see :meth:`.CommHook.weigh`.
        """

        def one(rank: int) -> tuple[dict[str, torch.Tensor], BaseException | None]:
            left = rank in joined
            given = {n: None if left else gradients[rank].get(n) for n in (self.like if left else gradients[rank])}
            made = split(given, self.buckets, self.like)
            if left:  # a joined rank uses no parameter, but DDP does not say so
                for bucket in made:
                    bucket.unused = frozenset()
            self.engines[rank].set_participating(not left)
            weight = weights[rank] if weights else None
            if weight is not None and not left:
                self.handles[rank].weigh(weight, of)
            try:
                for bucket in made:
                    self.engines[rank].submit(bucket)
                error = self.engines[rank].finish()
            except CommHooksError as lost:  # every rank learns of a lost transport through its own wait
                error = lost
            found = {p.name: view.clone() for bucket in made for p, view in bucket.views()}
            return {name: found[name] for name in given}, error

        results = together(self.group, one)
        sending = [given for rank, given in enumerate(gradients) if rank not in joined]
        self._dropped = frozenset(n for n in self.like if all(given.get(n) is None for given in sending))
        return Step([found for found, _ in results], [error for _, error in results])

    def resolve_step(self) -> None:
        """Commit or roll back the last step, on every rank."""
        for engine in self.engines:
            engine.resolve_step()

    def rollback(self) -> None:
        """Roll back the last step, as if the optimizers had skipped it."""
        for handle in self.handles:
            handle.rollback()

    def save(self) -> list[dict[str, Any]]:
        """Return every rank's ``state_dict()``."""
        return [handle.state_dict() for handle in self.handles]

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load :meth:`save`; from another number of ranks, the mean residual."""
        if len(saved) == self.world_size:
            for handle, one in zip(self.handles, saved, strict=True):
                handle.load_state_dict(one)
            return
        merged = merge(saved)
        for handle in self.handles:
            handle.load_state_dict(merged, world_change="mean")


def split(gradients: Given, count: int, like: Gradients | None = None) -> list[Bucket]:
    """Return buckets of one dtype each, the last parameters first as in DDP: ``count`` buckets of every dtype.

    Args:
        gradients: by parameter name, in model order.
        count: buckets of each dtype.
        like: tensors with the shapes of the parameters whose gradient is ``None``.
    """
    shown = {name: t if t is not None else (like or {})[name] for name, t in gradients.items()}
    groups: list[list[str]] = []
    for dtype in dict.fromkeys(t.dtype for t in shown.values()):
        names = [name for name, t in shown.items() if t.dtype == dtype][::-1]
        size = max(1, -(-len(names) // count))
        groups += [names[i : i + size] for i in range(0, len(names), size)]
    made = []
    for index, names in enumerate(groups):
        layout = BucketLayout.of_tensors({name: shown[name] for name in names})
        storage = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        unused = frozenset(name for name in names if gradients[name] is None)
        bucket = Bucket(layout, storage, index, index == len(groups) - 1, unused)
        for name in names:
            gradient = gradients[name]
            if gradient is not None:
                bucket.view(name).copy_(gradient)
        made.append(bucket)
    return made
