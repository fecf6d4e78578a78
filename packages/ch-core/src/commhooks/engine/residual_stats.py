"""Per-layer figures of error feedback, computed when asked for: how much of the gradient is held back, and where."""

import torch

from commhooks.engine.engine import Engine


def residual_figures(engine: Engine) -> dict[str, float]:
    """``residual_norm/NAME`` and ``relative_error/NAME`` of every parameter that has a residual.

    The relative error is ‖residual‖ / ‖gradient + residual‖, both of the last finished step and of this rank. It is
    left out where the gradient is gone, and with FSDP2, whose gradients would otherwise live on, in the first call:
    from then on the engine keeps them.
    """
    engine.last.keep = True
    state, figures = engine.state, {}
    shown = {p.name: (bucket, p) for bucket in engine.last.buckets for p in bucket.params}
    for name in sorted({name for name, field in state.held() if field == "residual"}):
        residual = state.newest(name, "residual")
        norm = torch.linalg.vector_norm(residual.double()).item()
        figures[f"residual_norm/{name}"] = norm / state.scale
        if name in shown:
            bucket, param = shown[name]
            gradient = bucket.storage.narrow(0, param.offset, param.numel).double()
            if norm > 0 and not gradient.any():
                continue  # zeroed in place since, or nothing was sent: neither tells what was held back
            whole = torch.linalg.vector_norm(gradient + residual.reshape(-1).double()).item()
            figures[f"relative_error/{name}"] = norm / whole if whole > 0 else 0.0
    return figures
