"""One sentence at the start of a training: the hook, the model, the bytes of a step, and the state."""

import torch

from ch_core import LATER
from commhooks.handle import CommHook
from commhooks.report.report import planned_bytes, planned_node_bytes
from commhooks.report.text import size


def start_line(handle: CommHook, model: torch.nn.Module, resumed: str = "") -> str:
    """Return the sentence for an attached handle. `attach` logs it, and `commhooks run` prints it.

    Args:
        handle: attached to ``model``.
        model: as the user knows it.
        resumed: where the state comes from; by default the sentence says if the handle has one.

    Example:
        >>> import commhooks, torch, torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> start_line(commhooks.attach(model, "allreduce"), model)
        'allreduce on DistributedDataParallel (Linear): one process, which sends nothing'
        >>> dist.destroy_process_group()
    """
    inner = getattr(model, "module", None)
    inside = f" ({type(inner).__name__})" if isinstance(inner, torch.nn.Module) else ""
    return f"{handle.expr} on {type(model).__name__}{inside}: {_sent(handle)}{_state(handle, resumed)}"


def _sent(handle: CommHook) -> str:
    binding = handle.binding
    if binding is None or not binding.engines:
        return "a foreign hook, whose bytes are unknown"
    worlds = [engine.transport.world_size for engine in binding.engines.values()]
    if handle.alone or max(worlds) < 2:
        return "one process, which sends nothing"
    engine = binding.engine
    if engine is None:
        return "its bytes are known after the first step"
    nodes = planned_node_bytes(engine, binding.layouts, LATER)
    sent, plain = nodes or planned_bytes(engine, binding.layouts, LATER)
    sender, to = ("node", " to other nodes") if nodes else ("rank", "")
    return f"each {sender} sends {size(sent)}{to} per step instead of the {size(plain)} of plain averaging"


def _state(handle: CommHook, resumed: str) -> str:
    if resumed:
        return f"; {resumed}"
    reduction, state = handle.reduction, handle.hook_state
    if handle.alone or reduction is None or state is None or not reduction.fields:
        return ""
    if state.step:
        return f"; its state is the one after step {state.step}"
    return "; it has a state, and none was given, so residuals start at zero"
