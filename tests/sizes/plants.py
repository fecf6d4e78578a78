"""Small mistakes that the suite must see. Each is put into every rank before its first case."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def short_message() -> None:
    """Long messages leave their last number as it was."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return original(tensor[:-1] if tensor.numel() > 1 << 16 else tensor, *args, **options)

    dist.all_reduce = all_reduce


def lost_chunk() -> None:
    """A quantized average leaves out a chunk of whole blocks."""
    from ch_quant import exchange

    original = exchange.whole

    def whole(vectors: Any, chunk: Any, block: int) -> torch.Tensor | None:
        found = original(vectors, chunk, block)
        return found.clone() if found is not None and chunk.first else found

    exchange.whole = whole


def forgotten_residual() -> None:
    """A residual of the step before the last one is taken for the last one."""
    from ch_core.entries import Versions

    original = Versions.commit
    commits = [0]

    def commit(self: Versions, **options: Any) -> None:
        commits[0] += 1
        if commits[0] == 2:
            for key in [key for key in self.draft.written if key[1] == "residual"][:1]:
                self.draft.written[key].tensor.copy_(self.committed[key].tensor)
        original(self, **options)

    Versions.commit = commit  # type: ignore[method-assign]


def one_rank() -> None:
    """One rank rounds one number of its average the other way."""
    if dist.get_rank() == 1:
        from commhooks import Plain

        original = Plain.run

        def run(self: Plain, bucket: Any, ctx: Any) -> Any:
            yield from original(self, bucket, ctx)
            if not bucket.storage.is_meta:
                at = bucket.storage[-1:]
                at.copy_(torch.nextafter(at, at + 1))

        Plain.run = run  # type: ignore[method-assign]


def other_columns() -> None:
    """PowerSGD decodes with this rank's factor in place of the mean."""
    from ch_powersgd.powersgd import _BucketStep

    original = _BucketStep.decode

    def decode(self: _BucketStep) -> None:
        self.q.flat[: self.q.flat.numel() // 2].copy_(self.own_q.flat[: self.q.flat.numel() // 2])
        original(self)

    _BucketStep.decode = decode  # type: ignore[method-assign]


PLANTS: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "short message": (short_message, "allreduce", "attach", "average"),
    "lost chunk": (lost_chunk, "quant4", "reducer", "average"),
    "forgotten residual": (forgotten_residual, "error_feedback(bf16_compress)", "attach", "residual"),
    "one rank": (one_rank, "allreduce", "register", "ranks differ"),
    "other columns": (other_columns, "powersgd(rank=4)", "reducer", "average"),
}
"""Name -> the mistake, a hook and a way that show it, and the check that must see it."""
