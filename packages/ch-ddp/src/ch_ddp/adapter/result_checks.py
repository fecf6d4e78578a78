"""What DDP may be given. torch reads a hook's result through raw storage: too long, strided or of another dtype it is
taken silently, ``None`` ends the process.
"""

import builtins
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, get_origin

import torch

import commhooks.errors
from commhooks import GradBucket, HookConfigError, HookResultError, RankMismatchError

log = logging.getLogger("commhooks")

_CALLBACK = re.compile(r"error when running the callback: ([A-Za-z_.]+): (.*?)\s*\n?\s*At:", re.DOTALL)


def refuse_annotations(hook: Callable[..., Any], name: str) -> None:
    """Refuse a function whose annotations say that it is no DDP hook, as torch does where it is registered.

    Raises:
        HookConfigError: it returns something else than a future, or takes something else than a bucket.
    """
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError):  # none to be had: its results are checked
        return
    declared: list[tuple[str, Any, type]] = [("returns", signature.return_annotation, torch.futures.Future)]
    declared += [("takes", p.annotation, GradBucket) for p in list(signature.parameters.values())[1:2]]
    for what, given, wanted in declared:
        kind = type(None) if given is None else get_origin(given) or given
        if kind in (inspect.Signature.empty, Any) or not isinstance(kind, type):
            continue
        if not issubclass(wanted, kind) and not issubclass(kind, wanted):  # a future of C++, object: either way
            raise HookConfigError(
                f"{name} is annotated as a function that {what} {getattr(given, '__name__', given)}; a DDP hook is "
                "(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]. Correct the "
                "annotation, or give the hook that was meant"
            )


def checked(value: object, buffer: torch.Tensor, name: str, index: int, warned: set[str] | None = None) -> torch.Tensor:
    """``value`` as a tensor that DDP may read as bucket ``index``.

    Args:
        value: what the hook's future holds: a tensor, or a list of one (as a raw collective's future has).
        buffer: the bucket's buffer.
        name: of the hook, for errors.
        index: of the bucket, for errors.
        warned: names that have been warned about a changed dtype; extended here.

    Raises:
        HookResultError: it is no tensor, or has another size, device, layout or kind of number.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise HookResultError(
            f"{name}: the future of bucket {index} holds {type(value).__name__}; it has to hold the reduced buffer, a "
            f"tensor of {buffer.numel()} elements"
        )
    wrong = []
    if value.numel() != buffer.numel():
        wrong.append(f"{value.numel()} elements instead of {buffer.numel()}")
    if value.device != buffer.device:
        wrong.append(f"device {value.device} instead of {buffer.device}")
    if value.is_sparse != buffer.is_sparse:
        wrong.append(f"layout {value.layout} instead of {buffer.layout}")
    if value.is_floating_point() != buffer.is_floating_point() or value.is_complex() != buffer.is_complex():
        wrong.append(f"dtype {value.dtype} instead of {buffer.dtype}")
    if wrong:
        raise HookResultError(f"{name}: the result of bucket {index} has {', '.join(wrong)}")
    if value.dtype != buffer.dtype and warned is not None and name not in warned:
        warned.add(name)
        log.warning("%s returns %s for a %s bucket; it is cast back", name, value.dtype, buffer.dtype)
    return value.to(buffer.dtype) if value.is_sparse else value.to(buffer.dtype).contiguous()


def annotate(error: BaseException, name: str, index: int, advice: str = "") -> BaseException:
    """The same error, saying which hook and bucket it came from; its type where torch has hidden that.

    An exception inside a ``.then`` callback comes out of torch as ``RuntimeError`` with the text of the original.
    """
    found = _CALLBACK.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is not None:
        original = _exception(found[1].rsplit(".", 1)[-1], found[2])
        if original is not None:
            original.__cause__ = error
            error = original
    note = f"(raised by {name}, bucket {index}) {advice}".strip()
    if hasattr(error, "add_note"):
        error.add_note(note)
    log.error("%s: %s %s", type(error).__name__, error, note)
    return error


def _exception(name: str, text: str) -> BaseException | None:
    """An exception of a builtin type or one of ours, by its name."""
    kind = getattr(commhooks.errors, name, getattr(builtins, name, None))
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    try:
        return kind(text)
    except TypeError:  # a type that is made of more than a text
        return None


def digest(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """Two int64 numbers that differ, as good as surely, where one bit of the buffers differs.

    The first is the sum of the bit patterns, the second the sum weighted by position modulo a prime, so that swapped
    values show. One pass each over the gradient.
    """
    total = torch.zeros(2, dtype=torch.int64, device="cpu")
    for number, buffer in enumerate(buffers):
        flat = (buffer.coalesce().values() if buffer.is_sparse else buffer).detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.contiguous().view(_BITS[flat.dtype.itemsize]).to(torch.int64)
        weights = torch.arange(bits.numel(), dtype=torch.int64, device=bits.device).remainder_(8191).add_(number + 1)
        total += torch.stack([bits.sum(), (bits * weights).sum()]).cpu()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(name: str, digests: torch.Tensor) -> BaseException | None:
    """The error where the rows of ``digests``, one per rank, are not all the same; ``None`` where they are."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(digests.tolist()):
        groups.setdefault(tuple(row), []).append(rank)
    if len(groups) == 1:
        return None
    shown = " / ".join(", ".join(map(str, ranks)) for ranks in sorted(groups.values(), key=len, reverse=True))
    return RankMismatchError(
        f"{name}: after the hook the gradients are not the same on all ranks; these ranks agree with one another: "
        f"{shown}. The hook's result depends on the rank, or ranks have run different collectives"
    )
