"""Checks of results: the exact mean of the ranks' gradients, and the distance from it that a hook may have."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ch_testing import mean_residuals, unaccounted
from tests.campaign.hooks import FP16, ROUNDING, Entry

Grads = Mapping[str, torch.Tensor | None]
SUBNORMAL = 2.0**-24  # fp16's smallest step


class Wrong(AssertionError):
    """A check failed; ``check`` is its name."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


class TorchRefuses(Exception):
    """Plain DDP or FSDP, without any hook, does not run this case either."""


def flat64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in logical order as real, dense fp64."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.double().reshape(-1)


@dataclass
class Exact:
    """One parameter in one step, over all ranks.

    Attributes:
        mean: mean of the ranks' gradients.
        size: mean of their magnitudes, element by element. Rounding errors are relative to it.
    """

    mean: torch.Tensor
    size: torch.Tensor


@dataclass
class Oracle:
    """A step without any hook, with every parameter, this rank's own gradients, and the largest magnitude anywhere.

    Attributes:
        weight: mean weight of the ranks, 1 without weights. Residuals are conserved in its unit.
    """

    exact: dict[str, Exact]
    own: dict[str, torch.Tensor]
    peak: float
    weight: float = 1.0

    @property
    def finite(self) -> bool:
        return all(bool(each.mean.isfinite().all()) for each in self.exact.values())


def oracle(
    micros: list[dict[str, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    weight: float = 1.0,
    of: str = "",
) -> Oracle:
    """Compute from this rank's gradients of every micro-batch, each flat and in fp64. This is a collective.

    Args:
        micros: the gradients.
        group: the ranks.
        weight: this rank's, if the ranks are weighed.
        of: what its gradient is of, ``mean`` or ``sum``; empty for the plain mean over the ranks.
    """
    world = dist.get_world_size(group)
    times = weight if of == "mean" else 1.0
    # A weight of 0 leaves nothing of a gradient, also of one that is not finite.
    counted = [{n: times * t if weight else torch.zeros_like(t) for n, t in one.items()} for one in micros]
    own = {name: sum_of([one[name] for one in counted]) for name in micros[0]}
    size = {name: sum_of([one[name].abs() for one in counted]) for name in micros[0]}
    total = torch.tensor([weight if of else 1.0], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    both = torch.cat([*own.values(), *size.values()])
    dist.all_reduce(both, group=group)
    parts = iter((both / float(total)).split([t.numel() for t in (*own.values(), *size.values())]))
    means = dict(zip(own, parts, strict=False))
    exact = {name: Exact(means[name], next(parts)) for name in own}
    peak = sum_of([torch.cat([*one.values(), torch.zeros(1)]).abs().max() for one in micros]).reshape(1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    return Oracle(exact, own, float(peak), float(total) / world)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def digest(grads: Grads) -> str:
    """Return a digest of every bit and of the set of parameters with a gradient."""
    found = hashlib.sha256()
    for name, grad in grads.items():
        found.update(f"{name}:{grad is not None}".encode())
        if grad is not None:
            dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            found.update(real.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def same_on_all_ranks(grads: Grads, what: str = "gradients") -> None:
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, digest(grads))
    if len(set(every)) > 1:
        groups = [[r for r, other in enumerate(every) if other == one] for one in dict.fromkeys(every)]
        raise Wrong("same bits on all ranks", f"{what} differ between ranks {' | '.join(map(str, groups))}")


def same_bits(grads: Grads, plain: Grads) -> None:
    """Check for the same bits as plain DDP."""
    for name, grad in grads.items():
        other = plain[name]
        ok = (
            grad is None and other is None
            if grad is None or other is None
            else torch.equal(flat64(grad), flat64(other))
        )
        if not ok:
            far = float((flat64(grad) - flat64(other)).abs().max()) if grad is not None and other is not None else None
            raise Wrong("the bits of plain DDP", f"{name}: largest difference {far}")


@dataclass(frozen=True)
class Bounds:
    """Largest right distance from the mean, for one hook in one case."""

    entry: Entry
    world: int
    backwards: int = 1
    loose: float = 0.0  # relative, for a compiled model, whose own gradients round differently

    def rounding(self, dtype: torch.dtype) -> float:
        return ROUNDING[str(dtype).removeprefix("torch.")] + self.loose

    def tiny(self, dtype: torch.dtype) -> float:
        """Return the absolute error that fp16 makes with small numbers."""
        narrow = dtype == torch.float16 or self.entry.wire == FP16
        return 2 * (self.world + 2) * SUBNORMAL if narrow else 1e-30

    def near(self, name: str, got: torch.Tensor | None, step: Oracle, dtype: torch.dtype) -> None:
        """Check one parameter's gradient in one step. A missing gradient counts as zeros."""
        exact, promise, entry = step.exact[name], self.entry.promise, self.entry
        found = flat64(got) if got is not None else torch.zeros_like(exact.mean)
        wanted = step.own[name] if promise == "silent" else exact.mean
        size = step.own[name].abs() if promise == "silent" else exact.size
        if promise == "residual" or not wanted.numel():
            return
        error = (found - wanted).abs()
        allowed = 2 * (self.world + 8) * self.rounding(dtype) * size + self.tiny(dtype)
        if got is not None and got.is_sparse:  # a frequent row is a sum of larger numbers in any order
            allowed = allowed + 16 * self.rounding(dtype) * step.peak
        if promise == "projected":
            length, off = float(wanted.norm()), float(error.norm())
            limit = (1 + 1e-3) * length * (1 if self.backwards == 1 else 3) + float(allowed.norm())
            limit += 4 * (self.world + 2) * entry.wire * float(size.norm())
            if off <= limit:
                return
            raise Wrong("near the average", f"{name}: {off:.3g} from the average, which is {length:.3g} long")
        if promise == "wire":
            allowed = allowed + 2 * (self.world + 2) * self.backwards * entry.wire * size
        elif promise == "integer":
            allowed = allowed + 2 * self.backwards * step.peak / 127
        if not bool((error <= allowed).all()):
            worst = int((error - allowed).nan_to_num(torch.inf).argmax())
            raise Wrong(
                "near the average",
                f"{name}[{worst}] is {float(found[worst]):.7g}, the average is {float(wanted[worst]):.7g}, allowed "
                f"{float(allowed[worst]):.3g} more or less (the ranks' mean magnitude is {float(size[worst]):.3g})",
            )

    def conserved(self, name: str, sums: "Sums", owed: list[torch.Tensor], dtype: torch.dtype) -> None:
        """Check ``applied + mean residual = sum of the averages``. ``owed`` is in logical and in memory order."""
        if self.entry.promise != "residual" or not sums.wanted[name].numel():
            return
        rounding = self.rounding(dtype)
        narrow = max(rounding, self.entry.wire) > 1e-5
        factor = (4 if narrow else 64) * (self.world + 2) * self.backwards
        limit = factor * (rounding + self.entry.wire) * float(sums.size[name])
        limit += sums.steps * self.tiny(dtype) * sums.wanted[name].numel() ** 0.5
        gap = sums.applied[name] - sums.wanted[name]
        kept = {name: (owed[0], owed[1])} if owed else {}
        off = unaccounted({name: sums.wanted[name]}, {name: sums.applied[name]}, kept)[name]
        if not off <= limit:
            length = float(sums.wanted[name].norm())
            raise Wrong(
                "applied + owed = sum of averages",
                f"{name}: {off:.3g} is missing, allowed {limit:.3g}; the sum of {sums.steps} averages is "
                f"{length:.3g} long, {float(gap.norm()):.3g} of it was not applied and "
                f"{[round(float(each.norm()), 6) for each in owed]} is owed",
            )


class Sums:
    """Unscaled sums over the committed steps: applied gradients, averages, and their sizes."""

    def __init__(self) -> None:
        self.applied: dict[str, torch.Tensor] = {}
        self.wanted: dict[str, torch.Tensor] = {}
        self.size: dict[str, float] = {}
        self.steps = 0

    def add(self, grads: Grads, step: Oracle, scale: float = 1.0) -> None:
        self.steps += 1
        for name, exact in step.exact.items():
            got = grads.get(name)
            found = flat64(got) if got is not None else torch.zeros_like(exact.mean)
            for store, value in ((self.applied, found), (self.wanted, exact.mean)):
                store[name] = store.get(name, torch.zeros_like(value)) + value * step.weight / scale
            self.size[name] = self.size.get(name, 0.0) + float(exact.size.norm()) * step.weight / scale


def mean_owed(
    residuals: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the ranks' mean residual of every parameter, in both orders. A collective."""
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, dict(residuals), group=group)
    return mean_residuals(ranks, params)
