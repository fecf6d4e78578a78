"""The part of an FSDP case that every rank runs. It compares full gradients with those of the bare model, and checks
residuals of shards.
"""

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import commhooks
from tests.campaign import models
from tests.campaign.checks import Bounds, Sums, TorchRefuses, Wrong, flat64, mean_owed, oracle, same_on_all_ranks
from tests.campaign.ddp import losses, own_gradients, weigh, weights
from tests.campaign.draw import Case
from tests.campaign.hooks import BF16, entry_of
from tests.campaign.notes import Notes
from tests.campaign.plants import make


class Sharded:
    """A model under ``fully_shard``, one replica or several."""

    def __init__(
        self, case: Case, hooked: bool, start: dict[str, torch.Tensor] | None = None, trained: set[str] | None = None
    ) -> None:
        self.case = case
        names = ("replicate", "shard")
        self.mesh = init_device_mesh("cpu", (case.world // case.shards, case.shards), mesh_dim_names=names)
        net = models.build(case.model, "float32" if case.dtype == "mixed" else case.dtype)
        if start is not None:
            net.load_state_dict(start)
        for name, p in net.named_parameters() if trained is not None else ():
            p.requires_grad_(name in trained)
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if case.dtype == "mixed" else {}
        how: dict[str, Any] = policy | {"reshard_after_forward": not case.keep}
        for part in net.layers:
            fully_shard(part, mesh=self.mesh["shard"], **how)
        self.net = fully_shard(net, mesh=self.mesh["shard"], **how)
        lr = 0.002 if case.optimizer == "adam" else 0.05
        make_optimizer = torch.optim.Adam if case.optimizer == "adam" else torch.optim.SGD
        self.optimizer = make_optimizer(net.parameters(), lr=lr)
        self.group = self.mesh["replicate"].get_group()
        self.handle: commhooks.CommHook | None = None
        self.weights: commhooks.CommHook | None = None
        if hooked and case.gather:
            self.weights = commhooks.attach(self.net, case.gather_expr, axis="gather", timeout=20.0)
        if hooked:
            told = {"optimizer": self.optimizer} if case.given else {}
            replicas = {"process_group": self.group} if case.shards < case.world else {}
            told["weighted"] = bool(case.weighted)
            self.handle = commhooks.attach(self.net, make(case.hook), timeout=20.0, **told, **replicas)

    def names(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def gradients(self, step: int) -> dict[str, torch.Tensor | None]:
        """Return the gradients of this rank's shards."""
        self.optimizer.zero_grad()
        for micro, loss_of in enumerate(losses(self.case, step)):
            quiet = self.case.accumulate == "no_sync" and micro == 0
            self.net.set_requires_gradient_sync(not quiet)
            if self.handle is not None and self.case.weighted:
                weigh(self.handle, self.case, step, micro)
            loss_of(self.net).backward()
        return {name: None if p.grad is None else p.grad for name, p in self.names().items()}

    def full(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters and buffers. This is a collective."""
        state = self.net.state_dict()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}

    def computed_with(self) -> dict[str, torch.Tensor]:
        """The whole weights and buffers that this rank computes with, decoded if a hook codes the gathers. A collective.

        Raises:
            Wrong: ranks compute with different weights, or a weight is further from the exact one than its code allows.
        """
        exact = self.full()
        if self.weights is None:
            return exact
        sharded = [module for module in self.net.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.unshard()
        found = {name: whole(p.detach()).clone() for name, p in self.net.named_parameters()}
        for module in sharded:
            module.reshard()
        same_on_all_ranks(found, "decoded weights")
        step = self.case.gather_error + (BF16 if self.case.dtype in {"mixed", "bfloat16"} else 0.0)
        for name, weight in found.items():
            off, peak = (flat64(weight) - flat64(exact[name])).abs(), flat64(exact[name]).abs().max()
            if not bool((off <= 1.01 * step * peak).all()):
                raise Wrong(
                    "decoded weights are near", f"{name}: {float(off.max()):.3g} off, the largest is {float(peak):.3g}"
                )
        return exact | found

    def key(self, name: str) -> str:
        """Return the key of a shard's state. An unsharded parameter keeps its name."""
        return f"{name}[{self.mesh['shard'].get_local_rank()}/{self.case.shards}]" if self.case.shards > 1 else name


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run2(rank: int, world: int, case: Case, notes: Notes) -> dict[str, float]:
    """Run one ``fully_shard`` case. Raise the first check that fails."""
    notes.phase("the same loop without a hook")
    try:
        _trial(case)
    except Exception as error:
        raise TorchRefuses(f"{type(error).__name__}: {error}") from error
    notes.phase("attach")
    loop, sums, entry = Sharded(case, hooked=True), Sums(), entry_of(case.hook)
    bare = models.build(case.model, "float32" if case.dtype == "mixed" else case.dtype)
    loose = 2.0**-6 if case.dtype == "mixed" else 0.0  # a shard is computed in bf16 from bf16 copies
    bounds = Bounds(entry, world, 2 if case.accumulate == "twice" else 1, loose)
    for step in range(case.steps):
        if step == case.resumed:
            notes.phase(f"resume before step {step}")
            loop = _resumed(loop)
        if step == case.thawed:
            for net in (loop.net, bare):
                net.requires_grad_(True)
        before = loop.full()
        bare.load_state_dict(loop.computed_with())
        truth = oracle(_own(bare, case, step), weight=sum(weights(case, step)), of=case.weighted)
        notes.phase(f"step {step}")
        grads = loop.gradients(step)
        if case.gather and any(not torch.equal(p, before[n]) for n, p in loop.full().items() if n in loop.names()):
            raise Wrong("sharded parameters stay exact", "a step before the optimizer changed them")
        full = {name: whole(grad) for name, grad in grads.items()}
        if truth.finite:
            same_on_all_ranks(full)
            sums.add(full, truth)
            for name, param in loop.names().items():
                bounds.near(name, full[name], truth, param.dtype)
        elif all(g is None or bool(g.isfinite().all()) for g in full.values()):
            raise Wrong("Inf reaches the optimizer", "one rank's gradient is infinite, the reduced ones are all finite")
        if case.clip:
            torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 0.1)
        if truth.finite:
            loop.optimizer.step()
    notes.phase("the end")
    if entry.promise == "residual" and sums.steps:
        _conserved(loop, bounds, sums)
    same_on_all_ranks({name: whole(p.detach()) for name, p in loop.net.named_parameters()}, "parameters")
    return _closed(loop)


def _own(bare: nn.Module, case: Case, step: int) -> list[dict[str, torch.Tensor]]:
    """Return this rank's own gradients. Under a mixed policy, forward and backward use bf16 parameters."""
    if case.dtype != "mixed":
        return own_gradients(bare, case, step, 1.0)
    narrow = copy.deepcopy(bare).bfloat16()

    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return narrow(x.bfloat16(), use)

    found = []
    for loss_of in losses(case, step):
        narrow.zero_grad()
        loss_of(Narrow()).backward()
        params = {name: p for name, p in narrow.named_parameters() if p.requires_grad}
        found.append({n: flat64(p.grad if p.grad is not None else torch.zeros_like(p)) for n, p in params.items()})
    return found


def _trial(case: Case) -> None:
    """Run torch's own FSDP over all ranks without a hook."""
    plain = Sharded(case, hooked=False)
    for step in range(2):
        if step == 1 and case.thawed >= 0:
            plain.net.requires_grad_(True)
        plain.gradients(step)
        plain.optimizer.step()
    plain.full()


def _resumed(old: Sharded) -> Sharded:
    """Save hook, model and optimizer to a file of this rank and load them."""
    file = io.BytesIO()
    if old.handle is None:
        raise AssertionError("the loop has no hook")
    optimizer = old.optimizer.state_dict()
    trained = {name for name, p in old.net.named_parameters() if p.requires_grad}
    keeps = old.handle.reduction is not None  # FSDP's own hook functions have no state to save
    weights = old.weights.state_dict() if old.weights is not None else {}
    torch.save({"hook": old.handle.state_dict() if keeps else {}, "weights": weights}, file)
    file.seek(0)
    new = Sharded(old.case, hooked=True, start=old.full(), trained=trained)
    new.optimizer.load_state_dict(optimizer)
    if new.handle is None:
        raise AssertionError("the loop has no hook")
    saved = torch.load(file, weights_only=True)
    if keeps:
        new.handle.load_state_dict(saved["hook"])
    if new.weights is not None:
        new.weights.load_state_dict(saved["weights"])
    return new


def _conserved(loop: Sharded, bounds: Bounds, sums: Sums) -> None:
    """Check applied + owed. Replicas keep residuals of this rank's shards. Ranks of a shard mesh keep those of whole
    parameters.
    """
    if loop.handle is None:
        raise AssertionError("the loop has no hook")
    saved = loop.handle.state_dict()
    unit = saved.get("reference", 1.0)
    entries = {n: row["residual"] * unit for n, row in saved["entries"].items() if "residual" in row}
    between_replicas = loop.case.shards < loop.case.world
    if between_replicas or loop.case.shards == 1:
        here, like, keys, group = _of_shards(loop, sums), {}, {n: loop.key(n) for n in loop.names()}, loop.group
        like = {name: param.to_local() for name, param in loop.names().items()}
    else:
        here, keys, group = sums, {name: name for name in loop.names()}, loop.mesh["shard"].get_group()
        like = {name: torch.empty(param.shape, dtype=param.dtype) for name, param in loop.names().items()}
    unknown = entries.keys() - set(keys.values())
    if unknown:
        raise Wrong("applied + owed = sum of averages", f"residuals of unknown shards: {sorted(unknown)}")
    owed = mean_owed({name: entries[key] for name, key in keys.items() if key in entries}, like, group)
    for name, param in loop.names().items():
        if name in here.wanted:
            bounds.conserved(name, here, owed[name], param.dtype)


def _of_shards(loop: Sharded, sums: Sums) -> Sums:
    """Return this rank's shards of the sums."""
    here = Sums()
    here.steps = sums.steps
    for name, param in loop.names().items():
        if name not in sums.wanted:
            continue
        for store, mine in ((sums.applied, here.applied), (sums.wanted, here.wanted)):
            value = store[name].view(param.shape)
            shard = distribute_tensor(value, loop.mesh["shard"], param.placements, src_data_rank=None)
            mine[name] = flat64(shard.to_local())
        here.size[name] = sums.size[name]
    return here


def _closed(loop: Sharded) -> dict[str, float]:
    if loop.handle is None:
        raise AssertionError("the loop has no hook")
    loop.handle.check()
    loop.handle.assert_active()
    stats = loop.handle.stats()
    loop.handle.detach()
    if loop.weights is not None:
        loop.weights.check()
        loop.weights.assert_active()
        loop.weights.detach()
        if any(
            not torch.equal(p.to(t.dtype), t)
            for p, t in zip(loop.full().values(), loop.computed_with().values(), strict=True)
        ):
            raise Wrong("torch's own gather after detach", "weights are still decoded")
    return {key: stats[key] for key in ("steps", "compressed_steps") if key in stats}
