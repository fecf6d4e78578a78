"""`commhooks.attach_axes`: puts hooks on several axes of an FSDP2 model with one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ch_core import HookConfigError, Reduction, StateError
from commhooks.api.attach import attach
from commhooks.handle import CommHook
from commhooks.report.report import Report

Hook = str | Mapping[str, Any] | Callable[..., Any] | Reduction | CommHook


@dataclass(frozen=True, slots=True)
class AxesReport:
    """Reports of several axes. Print it, show it in a notebook, or call :meth:`to_dict`.

    Attributes:
        reports: the report of each axis.
        bytes_per_step: by axis, bytes that a rank sends in a step on average since attaching, as `wire_bytes` counts them.
    """

    reports: Mapping[str, Report]
    bytes_per_step: Mapping[str, float]

    def __str__(self) -> str:
        whole = sum(self.bytes_per_step.values())
        shares = ", ".join(f"{axis} {sent:,.0f}" for axis, sent in self.bytes_per_step.items())
        parts = [f"axis {axis!r}: {report}" for axis, report in self.reports.items()]
        return "\n\n".join([*parts, f"bytes sent per step: {shares}; together {whole:,.0f}"])

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{axis}</h4>{report._repr_html_()}" for axis, report in self.reports.items())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        axes = {axis: report.to_dict() for axis, report in self.reports.items()}
        return {"axes": axes, "bytes_per_step": dict(self.bytes_per_step)}


class AxesHandle:
    """The hooks on several axes of one model, as :func:`commhooks.attach_axes` returns them.

    Attributes:
        handles: a :class:`~commhooks.CommHook` for each axis, in the order `"gather"`, `"shard"`, `"replicate"`.
    """

    def __init__(self, handles: Mapping[str, CommHook]) -> None:
        self.handles = dict(handles)

    def __getitem__(self, axis: str) -> CommHook:
        return self.handles[axis]

    def __repr__(self) -> str:
        return f"<AxesHandle {', '.join(f'{axis}: {handle.expr}' for axis, handle in self.handles.items())}>"

    @property
    def attached(self) -> bool:
        return any(handle.attached for handle in self.handles.values())

    def stats(self) -> dict[str, float]:
        """Return the sums of all axes' figures, and `AXIS_payload_bytes`, `AXIS_wire_bytes` and `AXIS_rounds` of each axis.

        Steps are the most that an axis has counted. See :meth:`commhooks.CommHook.stats`.
        """
        total: dict[str, float] = {}
        for handle in self.handles.values():
            for key, value in handle.stats().items():
                total[key] = max(total.get(key, 0.0), value) if key.endswith("steps") else total.get(key, 0.0) + value
        return total

    def report(self) -> AxesReport:
        """Return a report with a table for each axis, and the bytes of each axis."""
        reports = {axis: handle.report() for axis, handle in self.handles.items()}
        stats = {axis: report.stats for axis, report in reports.items()}
        sent = {axis: found["wire_bytes"] / max(found["steps"], 1.0) for axis, found in stats.items()}
        return AxesReport(reports, sent)

    def assert_active(self) -> None:
        """Raise AttachError if the model has not called the hook of an axis. See :meth:`commhooks.CommHook.assert_active`."""
        for handle in self.handles.values():
            handle.assert_active()

    def check(self) -> None:
        """Raise the exception of the last failure on any axis, unless it was raised already."""
        for handle in self.handles.values():
            handle.check()

    def detach(self) -> None:
        """Give torch its own collectives back on every axis.

        Raises:
            AttachError: gradients are kept back by `set_requires_all_reduce(False)`. Every axis is still attached.
        """
        for handle in reversed(self.handles.values()):  # only the replicate axis may refuse
            handle.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each axis, which resumes this rank. See :meth:`commhooks.CommHook.state_dict`."""
        return {axis: handle.state_dict() for axis, handle in self.handles.items()}

    def load_state_dict(self, state: Mapping[str, Any], *, world_change: str = "error") -> None:
        """Load the result of :meth:`state_dict`, one axis after the other.

        Args:
            state: by axis.
            world_change: see :meth:`commhooks.CommHook.load_state_dict`.

        Raises:
            StateError: the state has other axes, or an axis refuses its part.
        """
        if set(state) != set(self.handles):
            raise StateError(
                f"the state is of the axes {', '.join(map(str, state))}, and hooks are attached to {', '.join(self.handles)}. "
                "Attach to the axes of the state, or load single axes: handle['gather'].load_state_dict(state['gather'])"
            )
        for axis, handle in self.handles.items():
            handle.load_state_dict(state[axis], world_change=world_change)


def attach_axes(
    model: torch.nn.Module,
    *,
    gather: Hook | None = None,
    shard: Hook | None = None,
    replicate: Hook | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: object | None = None,
    verify_ranks: bool = True,
    timeout: float | None = None,
    manager: object | None = None,
) -> AxesHandle:
    """Put hooks on up to three axes of an FSDP2 model: its weight gathers, reduce-scatters and averages of replicas.

    An axis without a hook keeps torch's own collective.

    Args:
        model: sharded with `fully_shard`.
        gather: hook of the weight gathers, such as `"quant8"`.
        shard: hook of the gradients' reduce-scatter.
        replicate: hook of the gradients between replicas.
        process_group: group of the replicate axis.
        optimizer: rolls back the state of the axes of gradients after each step that it skips.
        scaler: the `GradScaler`, for the axes of gradients.
        verify_ranks: True to compare the ranks, on all axes.
        timeout: seconds for one collective, on all axes.
        manager: torchft's Manager, for the replicate axis. All arguments are those of :func:`commhooks.attach`.

    Returns:
        One handle. `stats()` and `report()` have the bytes of each axis, `detach()` gives all collectives back.

    Raises:
        HookConfigError: no axis has a hook, or an argument belongs to an axis without one.
        AttachError, HookNotSupportedError, RankMismatchError: see :func:`commhooks.attach`. No hook stays in the model.

    Example:
        >>> import commhooks
        >>> commhooks.attach_axes(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        ...
        ch_core.errors.HookConfigError: attach_axes() got no hook. Give one of gather=, shard= and replicate=
    """
    hooks = {"gather": gather, "shard": shard, "replicate": replicate}
    chosen = {axis: hook for axis, hook in hooks.items() if hook is not None}
    if not chosen:
        raise HookConfigError("attach_axes() got no hook. Give one of gather=, shard= and replicate=")
    if replicate is None and (process_group is not None or manager is not None):
        raise HookConfigError("process_group= and manager= belong to the replicate axis. Give replicate= a hook, too")
    if shard is None and replicate is None and (optimizer is not None or scaler is not None):
        raise HookConfigError(
            "optimizer= and scaler= belong to the axes of gradients. Give shard= or replicate= a hook, too"
        )
    handles: dict[str, CommHook] = {}
    try:
        for axis, hook in chosen.items():
            of_gradients = {"optimizer": optimizer, "scaler": scaler} if axis != "gather" else {}
            between = {"process_group": process_group, "manager": manager} if axis == "replicate" else {}
            options: dict[str, Any] = {**of_gradients, **between, "verify_ranks": verify_ranks, "timeout": timeout}
            handles[axis] = attach(model, hook, axis=axis, **options)
    except BaseException:
        AxesHandle(handles).detach()
        raise
    return AxesHandle(handles)
