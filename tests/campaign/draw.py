"""A case holds all inputs of one run, drawn from a seed and a number alone."""

import random
from dataclasses import asdict, dataclass, replace

from tests.campaign.ambient import AMBIENTS
from tests.campaign.hooks import (
    AROUND,
    BETWEEN,
    BY_EXPR,
    FUNCTIONS,
    GATHER_INSIDE,
    GATHER_NODES,
    GATHERS,
    HOOKS,
    Entry,
    between_nodes,
    entry_of,
)

MODELS = [
    "mlp",
    "shared",
    "unused",
    "frozen",
    "zero_d",
    "empty",
    "transposed",
    "strided",
    "channels_last",
    "complex",
    "sparse",
    "batch_norm",
    "sync_norm",
    "rnn",
    "gpt",
    "reentrant",
    "non_reentrant",
    "moe",
    "double_use",
]
SHARDED = [
    "mlp",
    "frozen",
    "transposed",
    "batch_norm",
    "sync_norm",
    "rnn",
    "gpt",
    "reentrant",
    "non_reentrant",
    "moe",
    "double_use",
]
KINDS = {
    "ddp": 52,
    "simulated": 24,
    "fsdp2": 14,
    "outer": 8,
    "members": 6,
    "levels": 10,
    "levels_simulated": 8,
    "gather": 8,
}
TOPOLOGIES = {  # ranks, and ranks per node or the ranks of each node -> odds
    (4, "2"): 30,
    (4, "[[0, 2], [1, 3]]"): 15,
    (4, "4"): 5,
    (2, "1"): 5,
    (2, "2"): 5,
    (3, "1"): 5,
    (6, "2"): 10,
    (6, "3"): 10,
    (5, "[[0, 1], [2, 3, 4]]"): 4,
    (3, "2"): 3,
}
NEEDS_UNUSED = ("unused", "moe")


@dataclass(frozen=True)
class Case:
    """One run. Fields that a kind of model does not use keep their defaults.

    Attributes:
        kind: ``ddp``, ``fsdp2``, ``simulated``, ``outer`` (an outer optimizer), ``members`` (ch-ft), ``levels`` and
            ``levels_simulated`` (DDP and simulated ranks with ``two_level``) or ``gather`` (FSDP2 with a hook on its weights).
        door: ``attach``, or ``register`` (``register_comm_hook`` with the function of PyTorch's form).
        cap: ``bucket_cap_mb``; simulated: the number of buckets.
        accumulate: ``no``, ``no_sync``, or ``twice`` (two synchronised backwards for one optimizer step).
        given: arguments of ``attach``: ``""``, ``optimizer``, ``scaler`` or ``both``.
        poisoned: the step at which one rank's gradient is infinite, or -1.
        resumed: the step before which everything is saved, created again and loaded, or -1.
        shards: FSDP2: ranks that share one copy of the model.
        ambient: default dtype or device during the steps, or nothing.
        handed: simulated: the hook that takes over the state at ``resumed``, or nothing.
        thawed: FSDP2: the step before which frozen parameters start to train, or -1.
        every: outer: inner steps per round.
        added: outer: the step before which the model gets new parameters, or -1.
        grown: outer: the step before which a buffer changes its shape on one rank, or -1.
        nodes: ranks per node, or the ranks of each node, for ``two_level`` around the hook; or nothing.
        inside: ``two_level``'s numbers inside a node, or nothing for fp32.
        around: the wrapper around ``two_level``, or nothing.
        levels: simulated with ``handed``: which of the two hooks has two levels: ``both``, ``first`` or ``second``.
        gather: FSDP2: the hook of the weight gathers, or nothing.
        gather_nodes: ``nodes=`` of ``two_level`` around it, or nothing.
        gather_inside: ``two_level``'s numbers inside a node, or nothing.
        keep: FSDP2: True if weights stay gathered between forward and backward.
        weighted: ``mean`` or ``sum`` if ranks weigh their gradients so, or nothing.
        seed: seed of the data.
    """

    number: int
    seed: int
    kind: str
    model: str
    hook: str
    world: int
    door: str = "attach"
    cap: float = 0.002
    dtype: str = "float32"
    accumulate: str = "no"
    views: bool = False
    static: bool = False
    find_unused: bool = False
    to_none: bool = True
    join: bool = False
    clip: bool = False
    given: str = ""
    optimizer: str = "sgd"
    poisoned: int = -1
    resumed: int = -1
    shards: int = 1
    ambient: str = ""
    handed: str = ""
    thawed: int = -1
    every: int = 1
    added: int = -1
    grown: int = -1
    nodes: str = ""
    inside: str = ""
    around: str = ""
    levels: str = "both"
    gather: str = ""
    gather_nodes: str = ""
    gather_inside: str = ""
    keep: bool = False
    weighted: str = ""
    steps: int = 4

    @property
    def processes(self) -> int:
        """Ranks that are processes; simulated ranks and members are threads of one."""
        return 1 if self.kind in {"simulated", "levels_simulated", "members"} else self.world

    @property
    def expr(self) -> str:
        """What ``attach`` is given."""
        return self._on_levels(self.hook) if self.nodes and self.levels != "second" else self.hook

    @property
    def handed_expr(self) -> str:
        """The hook that takes over the state."""
        return self._on_levels(self.handed) if self.nodes and self.levels != "first" else self.handed

    @property
    def entry(self) -> Entry:
        """What the hook promises."""
        on = self.nodes and self.levels != "second"
        return between_nodes(entry_of(self.hook), self.inside, self.around) if on else entry_of(self.hook)

    @property
    def handed_entry(self) -> Entry:
        on = self.nodes and self.levels != "first"
        return between_nodes(entry_of(self.handed), self.inside, self.around) if on else entry_of(self.handed)

    @property
    def gather_expr(self) -> str:
        """The hook on the weight gathers, as ``attach(axis="gather")`` is given it."""
        made = self.gather
        if made and self.gather_nodes:
            inside = f", inside={self.gather_inside!r}" if self.gather_inside else ""
            made = f"two_level({made}, nodes={self.gather_nodes}{inside})"
        return made

    @property
    def gather_error(self) -> float:
        """Return the largest right error of a decoded weight, relative to the largest one of its parameter."""
        code, inside = GATHERS[self.gather], GATHER_INSIDE[self.gather_inside]
        return code + inside * (1 + 2 * code)  # inside a node, a decoded number is coded once more

    def _on_levels(self, hook: str) -> str:
        inside = f", inside={self.inside!r}" if self.inside else ""
        return AROUND[self.around].format(f"two_level({hook}, nodes={self.nodes}{inside})")

    @property
    def scaled(self) -> bool:
        return self.given in {"scaler", "both"}


def draw(seed: str, number: int, kinds: tuple[str, ...] = tuple(KINDS), hook: str = "") -> Case:
    """Return case ``number`` of a campaign. One program always draws the same case."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.choices(kinds, [KINDS[each] for each in kinds])[0]
    makers = {
        "ddp": _ddp,
        "fsdp2": _fsdp2,
        "simulated": _simulated,
        "outer": _outer,
        "members": _members,
        "levels": _levels,
        "levels_simulated": _levels_simulated,
        "gather": _gather,
    }
    case = Case(number=number, kind=kind, **{**makers[kind](rng), "seed": rng.randrange(1000)})
    if hook:
        plain = {
            "door": "attach",
            "world": max(2, case.world),
            "ambient": "",
            "handed": "",
            "nodes": "",
        }
        case = Case(**(asdict(case) | {"hook": hook} | plain))
    return replace(case, weighted=_weighted(random.Random(f"{seed}:{number}:weights"), case))


def _weighted(rng: random.Random, case: Case) -> str:
    """Return what the weights are of. Models and hooks that refuse weights get none."""
    kinds = {"ddp", "simulated", "levels", "levels_simulated", "fsdp2"}
    two_axes = case.kind == "fsdp2" and case.shards not in {1, case.world}
    # Ranks that normalise together have gradients of the losses of all ranks, which a mean of each cannot weigh.
    two_axes = two_axes or case.model == "sync_norm"
    own = case.entry.promise == "silent" or case.hook.startswith(("torch:", "post_local_sgd"))
    refused = case.kind not in kinds or two_axes or own or case.door != "attach"
    if refused or case.join or case.accumulate == "twice" or rng.random() > 0.35:
        return ""
    narrow = case.dtype in {"float16", "autocast"} or case.scaled or "fp16" in case.expr + case.handed
    return "mean" if narrow else rng.choice(["mean", "sum"])  # a sum of many could pass fp16's range


def weight(case: Case, step: int, rank: int, micro: int = 0) -> float:
    """Return the tokens of one micro-batch. In every step some rank has tokens, and in step 2 all have more than before."""
    rng = random.Random(f"{case.seed}:{step}:{rank}:{micro}")
    narrow = case.dtype == "float16" or "fp16" in case.expr + case.handed
    some = [1.0, 2.0, 3.5] if narrow else [1.0, 3.0, 64.0, 100.5]
    n = rng.choice(some if rank == step % case.world else [0.0, *some])
    return n * (100.0 if step == 2 and not narrow else 1.0)


def _hook(rng: random.Random, place: str) -> str:
    return rng.choice([entry.expr for entry in HOOKS if place in entry.places])


def _now_and_then(rng: random.Random, odds: float, steps: int) -> int:
    return rng.randrange(1, steps) if rng.random() < odds else -1


def _ddp(rng: random.Random) -> dict[str, object]:
    model, steps = rng.choice(MODELS), rng.choice([3, 4, 5])
    door = "register" if rng.random() < 0.15 else "attach"
    row: dict[str, object] = {
        "model": model,
        "door": door,
        "hook": rng.choice(FUNCTIONS) if door == "register" else _hook(rng, "ddp"),
        "world": rng.choices([1, 2, 3, 4, 5], [5, 40, 25, 20, 10])[0],
        "cap": rng.choice([0.0005, 0.002, 0.002, 0.005, 25.0]),
        "dtype": rng.choices(
            ["float32", "float64", "bfloat16", "float16", "mixed", "autocast"], [52, 6, 12, 10, 10, 10]
        )[0],
        "accumulate": rng.choices(["no", "no_sync", "twice"], [60, 25, 15])[0],
        "views": rng.random() < 0.4,
        "static": rng.random() < 0.15,
        "find_unused": rng.random() < (0.95 if model in NEEDS_UNUSED else 0.2),
        "to_none": rng.random() < 0.7,
        "clip": rng.random() < 0.25,
        "optimizer": rng.choice(["sgd", "adam"]),
        "steps": steps,
        "resumed": _now_and_then(rng, 0.25, steps),
    }
    if door == "attach":
        row["given"] = rng.choices(["", "optimizer", "scaler", "both"], [50, 20, 15, 15])[0]
    if row["static"] and rng.random() < 0.8:
        row["accumulate"] = "no"  # plain DDP refuses most others
    row["poisoned"] = _now_and_then(rng, 0.15, steps)
    if rng.random() < 0.12 and model != "sync_norm":
        row |= {"join": True, "accumulate": "no", "poisoned": -1, "resumed": -1, "optimizer": "sgd", "static": False}
        row["given"] = "optimizer" if row.get("given") else ""
    row["ambient"] = rng.choice(AMBIENTS) if rng.random() < 0.25 else ""
    return row


def _fsdp2(rng: random.Random) -> dict[str, object]:
    world = rng.choices([2, 3, 4], [40, 10, 30])[0]
    shards = rng.choice([each for each in (1, 2, 3, 4) if world % each == 0])
    steps = rng.choice([3, 4])
    return {
        "model": rng.choice(SHARDED),
        "world": world,
        "shards": shards,
        "hook": _hook(rng, "shard" if shards == world and rng.random() < 0.9 else "replicate"),
        "dtype": rng.choices(["float32", "bfloat16", "mixed"], [70, 15, 15])[0],
        "accumulate": rng.choices(["no", "no_sync", "twice"], [60, 25, 15])[0],
        "clip": rng.random() < 0.25,
        "given": rng.choice(["", "optimizer"]),
        "optimizer": rng.choice(["sgd", "adam"]),
        "steps": steps,
        "poisoned": _now_and_then(rng, 0.1, steps),
        "resumed": _now_and_then(rng, 0.2, steps),
        "thawed": _now_and_then(rng, 0.4, steps),
    }


def _simulated(rng: random.Random) -> dict[str, object]:
    steps = rng.choice([4, 6, 8])
    return {
        "model": "tensors",
        "hook": _hook(rng, "simulated"),
        "world": rng.choice([1, 2, 3, 4, 5]),
        "cap": float(rng.choice([1, 2, 3, 7])),
        "dtype": rng.choices(["float32", "float64", "bfloat16", "float16", "mixed"], [60, 10, 10, 10, 10])[0],
        "given": rng.choice(["", "optimizer", "scaler"]),
        "steps": steps,
        "poisoned": _now_and_then(rng, 0.3, steps),
        "resumed": (resumed := _now_and_then(rng, 0.5, steps)),
        "ambient": rng.choice(["float64", "bfloat16"]) if rng.random() < 0.2 else "",
        "handed": _residual_hook(rng) if resumed >= 0 and rng.random() < 0.6 else "",
    }


def _residual_hook(rng: random.Random) -> str:
    return rng.choice([e.expr for e in HOOKS if e.promise == "residual" and "simulated" in e.places])


def _outer(rng: random.Random) -> dict[str, object]:
    steps = rng.choice([5, 6, 8])
    two = rng.random() < 0.2
    return {
        "model": rng.choice(["mlp", "shared", "frozen", "batch_norm", "gpt", "channels_last"]),
        "world": 4 if two else rng.choice([2, 3]),
        "nodes": "2" if two else "",
        "hook": rng.choice(
            ["allreduce", "allreduce", "bf16_compress", "quant4(error_feedback=True)", "powersgd(rank=2)"]
        ),
        "every": rng.choice([1, 2, 3]),
        "steps": steps,
        "added": _now_and_then(rng, 0.4, steps),
        "grown": _now_and_then(rng, 0.25, steps),
    }


def _members(rng: random.Random) -> dict[str, object]:
    hooks = [e for e in BY_EXPR if "replicate" in BY_EXPR[e].places and BY_EXPR[e].promise != "silent"]
    return {
        "model": rng.choice(["mlp", "unused", "moe", "shared", "gpt"]),
        "world": rng.choice([2, 3]),
        "hook": rng.choice(["", *hooks]),
        "cap": rng.choice([0.002, 25.0]),
        "steps": rng.choice([3, 4]),
    }


def _topology(rng: random.Random, hooks: list[str], handed: str = "") -> dict[str, object]:
    """A hook between nodes, with the reductions inside and around it. The hook ``handed`` gets the same ones."""
    world, nodes = rng.choices(list(TOPOLOGIES), list(TOPOLOGIES.values()))[0]
    entry = BY_EXPR[rng.choice(hooks)]
    insides = [
        "",
        "",
        "",
        "bf16",
        "fp16" if entry.wire <= 2.0**-20 else "",
        "quant8" if entry.promise == "exact" else "",
    ]
    inside = rng.choice(insides)
    both = [entry.expr, handed or entry.expr]
    # bf16_wrapper refuses hooks with codes
    narrows = not inside and all(expr.startswith(("allreduce", "powersgd")) for expr in both)
    arounds = ["", "", "", *(each for each in AROUND if narrows or each != "bf16_wrapper")]
    around = "" if entry.expr.startswith(("policy", "bf16_wrapper", "fp16_wrapper")) else rng.choice(arounds)
    return {"hook": entry.expr, "world": world, "nodes": nodes, "inside": inside, "around": around}


def _levels(rng: random.Random) -> dict[str, object]:
    row = _ddp(rng) | {"door": "attach"}
    return row | _topology(rng, BETWEEN)


def _levels_simulated(rng: random.Random) -> dict[str, object]:
    row = _simulated(rng)
    feeding = [expr for expr in BETWEEN if BY_EXPR[expr].promise == "residual"]
    row |= _topology(rng, feeding if row["handed"] else BETWEEN, str(row["handed"]))
    return row | {"levels": rng.choice(["both", "first", "second"]) if row["handed"] else "both"}


def _gather(rng: random.Random) -> dict[str, object]:
    row = _fsdp2(rng)
    world = int(str(row["world"]))
    shards = rng.choice([each for each in (2, 3, 4) if world % each == 0])
    hook = _hook(rng, "shard" if shards == world else "replicate")
    nodes = rng.choice(GATHER_NODES[shards]) if rng.random() < 0.6 else ""
    return row | {
        "shards": shards,
        "hook": hook,
        "gather": rng.choice(list(GATHERS)),
        "gather_nodes": nodes,
        "gather_inside": rng.choice(list(GATHER_INSIDE)) if nodes else "",
        "keep": rng.random() < 0.3,
    }
