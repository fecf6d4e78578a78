"""The adapter of FSDP1. It refuses, so that `commhooks run` still accepts FSDP1 models that never train."""

from typing import NoReturn

import torch

from ch_core import HookNotSupportedError
from commhooks.adapters.options import AttachOptions
from commhooks.handle import CommHook


def refuse(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> NoReturn:
    """Refuse an FSDP1 model, and name FSDP2."""
    raise HookNotSupportedError(
        f"attach() cannot put {handle.expr} on FullyShardedDataParallel (FSDP1), which PyTorch has deprecated. Shard the "
        "model with fully_shard (FSDP2) and attach to that. Or keep FSDP1 and register a hook function in PyTorch's form: "
        "model.register_comm_hook(LowPrecisionState(group), bf16_compress_hook)"
    )
