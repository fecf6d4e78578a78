"""Checks of hook results and of reduced gradients.

torch reads a hook's result through raw storage. It accepts a tensor of wrong size, stride or dtype silently, and None
ends the process. So the adapter checks each result before DDP sees it.
"""

import builtins
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, get_origin

import torch

import commhooks
from ch_core import checksum
from commhooks import GradBucket, HookConfigError, HookResultError, RankMismatchError

log = logging.getLogger("commhooks")

_CALLBACK = re.compile(r"error when running the callback: ([A-Za-z_.]+): (.*?)\s*\n?\s*At:", re.DOTALL)


def refuse_annotations(hook: Callable[..., Any], name: str) -> None:
    """Refuse a function that is not annotated as a DDP hook, as torch does in ``register_comm_hook``.

    Raises:
        HookConfigError: the function is annotated with another parameter than a bucket, or another result than a future.
    """
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError):  # no signature; results are checked later
        return
    declared: list[tuple[str, Any, type]] = [("returns", signature.return_annotation, torch.futures.Future)]
    declared += [("takes", p.annotation, GradBucket) for p in list(signature.parameters.values())[1:2]]
    for what, given, wanted in declared:
        kind = type(None) if given is None else get_origin(given) or given
        if kind in (inspect.Signature.empty, Any) or not isinstance(kind, type):
            continue
        if not issubclass(wanted, kind) and not issubclass(kind, wanted):  # accept base classes and subclasses
            raise HookConfigError(
                f"{name} is annotated as a function that {what} {getattr(given, '__name__', given)}. A DDP hook is "
                "(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]. Correct the "
                "annotation, or pass another hook"
            )


def checked(value: object, buffer: torch.Tensor, name: str, index: int, warned: set[str] | None = None) -> torch.Tensor:
    """Return ``value`` as a tensor that DDP may read as bucket ``index``.

    Args:
        value: result of the hook's future: a tensor, or a list of one tensor (as raw collectives give).
        buffer: the bucket's buffer, ``(numel,)``.
        name: hook's name, for errors.
        index: bucket's index, for errors.
        warned: hooks that already got a warning about a changed dtype. This function adds to it.

    Raises:
        HookResultError: the value is not a tensor, or differs in size, device, layout or kind of dtype.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise HookResultError(
            f"{name}: the future of bucket {index} holds {type(value).__name__}. Complete it with the reduced buffer, a "
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
        log.warning("%s returns %s for a %s bucket. The result is cast to %s", name, value.dtype, *[buffer.dtype] * 2)
    return value.to(buffer.dtype) if value.is_sparse else value.to(buffer.dtype).contiguous()


def annotate(error: BaseException, name: str, index: int, advice: str = "") -> BaseException:
    """Return the error with a note that names hook and bucket, in its original type.

    torch turns an exception inside a ``.then`` callback into a ``RuntimeError`` with the original text.
    """
    found = _CALLBACK.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is not None:
        original = _exception(found[1].rsplit(".", 1)[-1], found[2])
        if original is not None:
            original.__cause__ = error
            error = original
    note = f"(raised by {name}, bucket {index}) {advice}".strip()
    error.add_note(note)
    log.error("%s: %s %s", type(error).__name__, error, note)
    return error


def _exception(name: str, text: str) -> BaseException | None:
    """Return an exception of a builtin or commhooks type by its name, or None."""
    kind = getattr(commhooks, name, getattr(builtins, name, None))
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    try:
        return kind(text)
    except TypeError:  # its constructor needs more than a text
        return None


def gradient_checksum(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the :func:`~ch_core.checksum` of gradients as a number, and their number, ``(2,)`` int64."""
    given = list(buffers)
    return torch.tensor([int(checksum(*given), 16) - 2**63, len(given)], dtype=torch.int64, device="cpu")


def mismatch(name: str, checksums: torch.Tensor) -> BaseException | None:
    """Return an error if ``checksums`` ``(world, 2)`` differ between ranks, else None."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(checksums.tolist()):
        groups.setdefault(tuple(row), []).append(rank)
    if len(groups) == 1:
        return None
    shown = " / ".join(", ".join(map(str, ranks)) for ranks in sorted(groups.values(), key=len, reverse=True))
    return RankMismatchError(
        f"{name}: the reduced gradients differ between ranks. Groups of equal ranks: {shown}. The hook's result depends "
        "on the rank, or ranks ran different collectives"
    )
