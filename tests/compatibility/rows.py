"""Rows of the comparison: every public name of the modules in `MODULES`, and its counterpart here."""

from dataclasses import dataclass, field
from typing import Any

DDP = "torch.distributed.algorithms.ddp_comm_hooks"
FSDP = "torch.distributed.algorithms._comm_hooks.default_hooks"
AVERAGING = "torch.distributed.algorithms.model_averaging"
QUANT = "torch.distributed.algorithms._quantization.quantization"
LIGHTNING = "lightning.fabric.utilities.distributed"
OVERRIDES = "lightning.pytorch.overrides.distributed"
CALLBACK = "ch_ddp.frameworks.lightning:CommHookCallback"

MODULES = (
    DDP,
    f"{DDP}.default_hooks",
    f"{DDP}.debugging_hooks",
    f"{DDP}.powerSGD_hook",
    f"{DDP}.post_localSGD_hook",
    f"{DDP}.quantization_hooks",
    f"{DDP}.ddp_zero_hook",
    f"{AVERAGING}.averagers",
    f"{AVERAGING}.hierarchical_model_averager",
    f"{AVERAGING}.utils",
    "torch.distributed.optim.post_localSGD_optimizer",
    FSDP,
    QUANT,
    OVERRIDES,
    LIGHTNING,
    "torchft.ddp",
)


@dataclass(frozen=True)
class PublicName:
    """One public name.

    Attributes:
        module, name: of their name.
        ours: ``module:name`` of the counterpart; empty if there is none.
        case: function of `cases` that runs for both; empty if nothing can run.
        options: of the case.
        part: tried part or form of the name.
        reason: why there is no counterpart, or its replacement.
        limit: time limit in seconds.
    """

    module: str
    name: str
    ours: str = ""
    case: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    part: str = ""
    reason: str = ""
    limit: float = 20.0


def plain(module: str, name: str, ours: str, case: str, part: str = "", **options: Any) -> PublicName:
    return PublicName(module, name, ours, case, options, part)


def members() -> list[PublicName]:
    """Return rows for the ten hooks of the enum."""
    near = {"FP16_COMPRESS": 1e-2, "BF16_COMPRESS": 2e-2, "QUANTIZE_PER_TENSOR": 0.1, "QUANTIZE_PER_CHANNEL": 0.1}
    names = "ALLREDUCE FP16_COMPRESS BF16_COMPRESS QUANTIZE_PER_TENSOR QUANTIZE_PER_CHANNEL POWER_SGD"
    names += " POWER_SGD_RANK2 BATCHED_POWER_SGD BATCHED_POWER_SGD_RANK2 NOOP"
    rows = []
    for name in names.split():
        part = f"{name}, before step 1000" if "POWER" in name else name
        options = {"member": name, "tolerance": near.get(name, 1e-6)}
        rows.append(plain(DDP, "DDPCommHookType", "ch_ddp:DDPCommHookType", "by_type", part, **options))
    return rows


SAMPLERS = "a data sampler: no gradient communication"
ZERO = (
    "overlaps ZeRO's optimizer with DDP; PyTorch refuses gloo and applies no update in the first steps. Shard "
    "with FSDP2 (ch-fsdp), or overlap the optimizer with `ch_ddp.OverlappedOptimizer`"
)
AUTO = "wraps blocking `all_gather` and `all_to_all` calls, and is no hook; 8-bit gradients are `quant8`"

ROWS: list[PublicName] = [
    plain(f"{DDP}.default_hooks", "allreduce_hook", "ch_ddp:allreduce_hook", "hook"),
    plain(f"{DDP}.default_hooks", "fp16_compress_hook", "ch_ddp:fp16_compress_hook", "hook", tolerance=1e-2),
    plain(f"{DDP}.default_hooks", "bf16_compress_hook", "ch_ddp:bf16_compress_hook", "hook", tolerance=2e-2),
    plain(f"{DDP}.default_hooks", "fp16_compress_wrapper", "ch_ddp:fp16_compress_wrapper", "wrapper"),
    plain(f"{DDP}.default_hooks", "bf16_compress_wrapper", "ch_ddp:bf16_compress_wrapper", "wrapper"),
    plain(f"{DDP}.debugging_hooks", "noop_hook", "ch_ddp:noop_hook", "noop"),
    plain(f"{DDP}.powerSGD_hook", "PowerSGDState", "ch_powersgd:PowerSGDState", "powersgd_state"),
    plain(f"{DDP}.powerSGD_hook", "powerSGD_hook", "ch_powersgd:powerSGD_hook", "powersgd"),
    plain(f"{DDP}.powerSGD_hook", "batched_powerSGD_hook", "ch_powersgd:batched_powerSGD_hook", "powersgd"),
    plain(
        f"{DDP}.quantization_hooks",
        "quantization_pertensor_hook",
        "ch_quant:quantization_pertensor_hook",
        "hook",
        tolerance=0.1,
    ),
    plain(
        f"{DDP}.quantization_hooks",
        "quantization_perchannel_hook",
        "ch_quant:quantization_perchannel_hook",
        "hook",
        tolerance=0.1,
    ),
    plain(
        f"{DDP}.post_localSGD_hook",
        "PostLocalSGDState",
        "ch_ddp:PostLocalSGDState",
        "local_sgd",
        "subgroup=None",
        subgroup=False,
    ),
    plain(
        f"{DDP}.post_localSGD_hook",
        "post_localSGD_hook",
        "ch_ddp:post_localSGD_hook",
        "local_sgd",
        "a given subgroup",
        subgroup=True,
    ),
    plain(
        DDP, "register_ddp_comm_hook", "ch_ddp:register_ddp_comm_hook", "by_type", "with ALLREDUCE", member="ALLREDUCE"
    ),
    *members(),
    plain(
        f"{DDP}.optimizer_overlap_hooks",
        "DDP._register_fused_optim",
        "ch_ddp:OverlappedOptimizer",
        "overlapped",
        "private there",
    ),
    PublicName(f"{DDP}.ddp_zero_hook", "hook_with_zero_step", case="zero_overlap", reason=ZERO),
    PublicName(f"{DDP}.ddp_zero_hook", "hook_with_zero_step_interleaved", case="zero_overlap", reason=ZERO),
    PublicName(f"{AVERAGING}.averagers", "ModelAverager", "ch_ddp:ModelAverager", reason="abstract: nothing to run"),
    plain(f"{AVERAGING}.averagers", "PeriodicModelAverager", "ch_ddp:PeriodicModelAverager", "averager"),
    plain(
        f"{AVERAGING}.hierarchical_model_averager",
        "HierarchicalModelAverager",
        "ch_ddp:HierarchicalModelAverager",
        "averager",
        levels=True,
    ),
    plain(f"{AVERAGING}.utils", "average_parameters", "ch_ddp:average_parameters", "averaging"),
    plain(
        f"{AVERAGING}.utils",
        "average_parameters_or_parameter_groups",
        "ch_ddp:average_parameters",
        "averaging",
        grouped=True,
    ),
    PublicName(
        f"{AVERAGING}.utils",
        "get_params_to_average",
        case="chosen",
        reason="`average_parameters` chooses itself: all trainable ones, so that ranks with different unused "
        "parameters still exchange messages of one size",
    ),
    plain(
        "torch.distributed.optim.post_localSGD_optimizer",
        "PostLocalSGDOptimizer",
        "ch_ddp:PostLocalSGDOptimizer",
        "local_optimizer",
    ),
    plain(
        "torch.distributed.optim.post_localSGD_optimizer",
        "PostLocalSGDOptimizer",
        "ch_ddp:PostLocalSGDOptimizer",
        "local_optimizer",
        "step(closure)",
        closure=True,
    ),
    plain(FSDP, "DefaultState", "ch_fsdp:DefaultState", "fsdp", "with reduce_scatter_hook", hook="reduce_scatter_hook"),
    plain(
        FSDP,
        "LowPrecisionState",
        "ch_fsdp:LowPrecisionState",
        "fsdp",
        "with fp16_compress_hook",
        hook="fp16_compress_hook",
        tolerance=2e-2,
    ),
    plain(FSDP, "allreduce_hook", "ch_fsdp:allreduce_hook", "fsdp", "NO_SHARD", hook="allreduce_hook"),
    plain(FSDP, "reduce_scatter_hook", "ch_fsdp:reduce_scatter_hook", "fsdp", "FULL_SHARD", hook="reduce_scatter_hook"),
    *[
        plain(FSDP, name, f"ch_fsdp:{name}", "fsdp", "FULL_SHARD", hook=name, tolerance=2e-2)
        for name in ("fp16_compress_hook", "bf16_compress_hook")
    ],
    PublicName(QUANT, "auto_quantize", case="quantized_gather", reason=AUTO),
    PublicName(QUANT, "DQuantType", reason=f"the argument of `auto_quantize`, which {AUTO}"),
    plain(
        OVERRIDES, "_register_ddp_comm_hook", "ch_ddp:register_ddp_comm_hook", "lightning_register", "private since 2.0"
    ),
    plain("lightning.pytorch.strategies", "DDPStrategy", CALLBACK, "lightning_strategy", "ddp_comm_hook="),
    plain(LIGHTNING, "AllGatherGrad", "ch_ddp:AllGatherGrad", "gather_grad", "Lightning 1.x"),
    PublicName(
        OVERRIDES, "prepare_for_backward", reason="tells DDP's reducer which parameters are used: torch does it itself"
    ),
    PublicName(OVERRIDES, "UnrepeatedDistributedSampler", reason=SAMPLERS),
    PublicName(OVERRIDES, "UnrepeatedDistributedSamplerWrapper", reason=SAMPLERS),
    PublicName(LIGHTNING, "DistributedSamplerWrapper", reason=SAMPLERS),
    PublicName(LIGHTNING, "is_shared_filesystem", reason="looks at disks: no gradient communication"),
    PublicName("torchft.ddp", "DistributedDataParallel", "ch_ft:DistributedDataParallel", "managed", limit=60.0),
    PublicName(
        "torchft.ddp",
        "PureDistributedDataParallel",
        "ch_ft:PureDistributedDataParallel",
        "managed",
        {"pure": True},
        limit=60.0,
    ),
]
