"""A case over simulated ranks, with tensors instead of a model. Every step is drawn, and all ranks
run in this process.
"""

import io
import random
from dataclasses import replace
from typing import Any

import torch

import commhooks
from ch_testing import SimulatedRanks, mean_residuals
from commhooks import CommHook
from tests.campaign.ambient import ambient
from tests.campaign.checks import Bounds, Exact, Oracle, Sums, Wrong, digest, flat64
from tests.campaign.draw import Case, weight
from tests.campaign.notes import Notes
from tests.campaign.plants import make

Tensors = dict[str, torch.Tensor]


def tensors(rng: random.Random, dtype: str) -> Tensors:
    """Return parameters in every layout, as many as a model has."""
    kind = torch.float32 if dtype == "mixed" else getattr(torch, dtype)
    like: Tensors = {}
    for number in range(rng.randrange(2, 7)):
        rows, columns = rng.choice([1, 3, 16, 33, 48]), rng.choice([1, 8, 24, 65])
        shape = rng.choice(["plain", "plain", "plain", "turned", "vector", "scalar", "empty", "cube", "images"])
        like[f"part{number}.{'bias' if shape == 'vector' else 'weight'}"] = {
            "plain": lambda r=rows, c=columns: torch.zeros(r, c),
            "turned": lambda r=rows, c=columns: torch.zeros(c, r).t(),
            "vector": lambda r=rows: torch.zeros(r),
            "scalar": lambda: torch.zeros(()),
            "empty": lambda: torch.zeros(0, 3),
            "cube": lambda r=rows, c=columns: torch.zeros(r, c, 2),
            "images": lambda r=rows: torch.zeros(r, 4, 3, 3).to(memory_format=torch.channels_last),
        }[shape]().to(kind)
    if dtype == "mixed":
        last = list(like)[-1]
        like[last] = like[last].to(torch.bfloat16)
    return like


def gradients(like: Tensors, case: Case, step: int, world: int) -> list[Tensors]:
    made = []
    for rank in range(world):
        generator = torch.Generator().manual_seed((case.seed * 31 + step) * 8 + rank)
        draw = {n: torch.randn(t.shape, generator=generator, dtype=torch.double) for n, t in like.items()}
        made.append({n: torch.empty_like(t).copy_(draw[n] / 4) for n, t in like.items()})
    if step == case.poisoned:
        victim = max(like, key=lambda name: like[name].numel())
        made[case.seed % world][victim].mul_(torch.inf)
    return made


def truth_of(every: list[Tensors], weights: list[float]) -> Oracle:
    exact, total = {}, sum(weights)
    for name in every[0]:
        parts = [
            flat64(one[name]) * n if n else torch.zeros_like(flat64(one[name]))
            for n, one in zip(weights, every, strict=True)
        ]
        flat = torch.stack(parts)
        exact[name] = Exact(flat.sum(0) / total, flat.abs().sum(0) / total)
    peak = max((float(flat64(t).abs().max()) for one in every for t in one.values() if t.numel()), default=0.0)
    return Oracle(exact, {}, peak, total / len(every))


def run(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """Run one case. Raise the first check that fails."""
    rng = random.Random(case.seed)
    like = tensors(rng, case.dtype)
    entry, sums, count = case.entry, Sums(), case.world
    handed = case.handed_entry if case.handed else entry
    ranks = _ranks(case, count, like)
    for step in range(case.steps):
        if step == case.resumed:
            other = entry.promise == "residual" and not case.handed and rng.random() < 0.5
            count = rng.choice(_counts(case)) if other else count
            notes.phase(f"resume before step {step} on {count} ranks")
            ranks = _handed_over(case, ranks, like) if case.handed else _resumed(case, ranks, count, like)
            count = ranks.world_size
        notes.phase(f"step {step}")
        _one_step(case, ranks, like, step, sums, skipped=bool(case.given) and rng.random() < 0.2)
    notes.phase("the end")
    taken = case.handed and entry.promise == "residual" and case.resumed >= 0
    last = handed if case.handed and case.resumed >= 0 else entry
    bounds = Bounds(replace(last, wire=max(last.wire, entry.wire)), max(count, case.world))
    saved = ranks.save()
    for name, tensor in like.items():
        if name in sums.wanted and (taken or not case.handed):
            bounds.conserved(name, sums, _owed(saved, name, tensor), tensor.dtype)
    return {"steps": ranks.engines[0].counters.as_dict()["steps"]}


def _ranks(case: Case, count: int, like: Tensors) -> SimulatedRanks:
    def one() -> CommHook:
        made: Any = make(case.expr)
        return made if isinstance(made, CommHook) else CommHook(node=made.node(), built=made)

    return SimulatedRanks(one, count, like, buckets=int(case.cap), timeout=15.0, weighted=bool(case.weighted))


def _counts(case: Case) -> list[int]:
    """Return the numbers of ranks on which a state may be loaded; nodes by number of ranks need a multiple of it."""
    if not case.nodes:
        return [1, 2, 3, 4]
    return [each * int(case.nodes) for each in (1, 2, 3)] if case.nodes.isdigit() else [case.world]


def _resumed(case: Case, old: SimulatedRanks, count: int, like: Tensors) -> SimulatedRanks:
    file = io.BytesIO()
    torch.save(old.save(), file)
    file.seek(0)
    new = _ranks(case, count, like)
    new.load(torch.load(file, weights_only=True))
    return new


def _handed_over(case: Case, old: SimulatedRanks, like: Tensors) -> SimulatedRanks:
    """Give the states of all ranks to another hook, as ``attach(state=)`` does."""
    states = []
    for handle in old.handles:
        handle.detach()
        states.append(handle.state)
    given = iter(states)

    def one() -> CommHook:
        made = commhooks.create(case.handed_expr)
        made.state = next(given)
        return made

    return SimulatedRanks(one, len(states), like, buckets=int(case.cap), timeout=15.0, weighted=bool(case.weighted))


def _one_step(case: Case, ranks: SimulatedRanks, like: Tensors, step: int, sums: Sums, skipped: bool) -> None:
    """Run a backward on every rank. ``skipped`` is True if the optimizers do not use the step."""
    over = bool(case.handed) and 0 <= case.resumed <= step
    entry, world = case.handed_entry if over else case.entry, ranks.world_size
    every = gradients(like, case, step, world)
    weights = [weight(case, step, rank) for rank in range(world)] if case.weighted else []
    if weights and not any(weights):
        weights[0] = 1.0  # a state may have been loaded on other ranks
    given = every
    if case.weighted == "sum":
        given = [{name: t * n for name, t in one.items()} for n, one in zip(weights, every, strict=True)]
    with ambient(case.ambient):
        result = ranks.step(given, weights=weights, of="sum" if case.weighted == "sum" else "mean")
    for error in result.errors:
        if error is not None:
            raise error
    truth = truth_of(every, weights or [1.0] * world)
    if not truth.finite:
        if entry.promise != "silent" and any(
            all(bool(flat64(t).isfinite().all()) for t in one.values()) for one in result.gradients
        ):
            raise Wrong("Inf reaches the optimizer", "one rank's gradient is infinite, the reduced ones are all finite")
        return
    if entry.promise != "silent" and len({digest(one) for one in result.gradients}) > 1:
        raise Wrong("same bits on all ranks", "the simulated ranks' gradients differ")
    bounds = Bounds(entry, world)
    for rank, found in enumerate(result.gradients):
        own = {name: flat64(t) for name, t in every[rank].items()}
        for name, tensor in like.items():
            bounds.near(name, found[name], replace(truth, own=own), tensor.dtype)
    if skipped:
        ranks.rollback()
    else:
        sums.add(dict(result.gradients[0]), truth)


def _owed(saved: list[dict[str, Any]], name: str, like: torch.Tensor) -> list[torch.Tensor]:
    rows = [one["entries"].get(name, {}).get("residual") for one in saved]
    unit = saved[0].get("reference", 1.0)
    return list(mean_residuals([{} if row is None else {name: row * unit} for row in rows], {name: like})[name])
