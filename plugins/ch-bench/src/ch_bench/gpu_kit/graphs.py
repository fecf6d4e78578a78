"""Whether a backward with a hook can be captured as a CUDA graph and replayed."""

import torch

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.rows import Rows, Skipped, Values
from ch_bench.gpu_kit.setting import Setting

WARM_UP = 11  # iterations that DDP wants before a capture


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        for hook in ("plain", "allreduce", "bf16_compress", "powersgd(rank=4)"):
            rows.row(hook, _captured, setting, device, hook)


def _captured(setting: Setting, device: torch.device, hook: str) -> Values:
    if not setting.cuda:
        raise Skipped("there are no CUDA graphs on a CPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = models.ddp(setting, device)
        handle = models.attach(model, hook) if hook != "plain" else None
        inputs = models.batch(setting, device, 0)
        for _ in range(WARM_UP):
            models.backward(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        model(inputs).square().mean().backward()
    graph.replay()
    torch.cuda.synchronize()
    replayed = models.gradients(model)
    if not bool(replayed.isfinite().all()) or not bool(replayed.any()):
        raise AssertionError("what was replayed is not finite, or nothing")
    return {"captured": True, "handle": "-" if handle is None else handle.expr}
