"""The base of FSDP2's axes, which are the collectives that a hook can replace, and of the objects in torch's slots."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from ch_core import Engine
from ch_fsdp.group_order import GroupOrder
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import (
    AttachError,
    AttachOptions,
    BucketLayout,
    CommHook,
    HookNotSupportedError,
    HookState,
    ManagedAxis,
    Reduction,
    SlotTakenError,
)


class SlotObject:
    """An object of this package in one of FSDP2's slots. It remembers torch's own.

    Attributes:
        attribute: attribute of :class:`.ParamGroup` that reads and writes the slot.
        axis: value of ``attach(axis=)`` that uses the slot.
        default: name of the class that torch puts there.
        taken: error if another object is there, after "GROUP has".
        expr: the attached hook; ``None`` after ``detach()``.
        replaced: the object that was there.
        called: True if torch has called it, or has no reason to.
    """

    attribute: ClassVar[str]
    axis: ClassVar[str]
    default: ClassVar[str]
    taken: ClassVar[str]

    def __init__(self, group: ParamGroup, expr: str) -> None:
        self.group = group
        self.expr: str | None = expr
        self.replaced: Any = getattr(group, self.attribute)
        self.called = False
        setattr(group, self.attribute, self)

    @property
    def in_place(self) -> bool:
        return getattr(self.group, self.attribute) is self

    def remove(self) -> None:
        """Put torch's own object back."""
        if self.in_place:
            setattr(self.group, self.attribute, self.replaced)

    @classmethod
    def check_free(cls, group: ParamGroup) -> None:
        """Raise :class:`~commhooks.SlotTakenError` unless torch's own object is in the slot."""
        comm = getattr(group, cls.attribute)
        if isinstance(comm, cls):
            raise SlotTakenError(
                f"{group.name} has {comm.expr} attached on its {cls.axis} axis: detach() that handle first"
            )
        kind = type(comm).__name__
        if kind != cls.default:
            raise SlotTakenError(f"{group.name} has {cls.taken.format(kind=kind)}")


class Axis(ABC):
    """One collective of FSDP2 in every parameter group, and the engines that replace it.

    Args:
        groups: the parameter groups.
        handle: the handle.
        options: arguments of ``attach``.

    Attributes:
        of_gradients: False for weights.
        lost_from: text before the names of the groups in the error for slots that the user has filled.
        setters: torch's functions that fill these slots.
        engine: counts the steps and holds the state of the handle.
        engines: all engines by name, in the order in which they end a step.
        slots: the objects in torch's slots, one for each parameter group, once they are in place.
        group: the ranks of ``engine``; ``None`` if a manager compares them in every step.
        other_groups: other process groups whose ranks load a state together with ``group``.
        relay: process group along which the ranks of the mesh hear of an error that ``group`` does not reach.
        replicas: ranks with the same parameters, which ``check_ranks_every`` may compare.
        treatment: see :class:`.Binding`.
        order: decides when each group is reduced; ``None`` for at once.
        managed: the reduction between the groups of a manager, which has ``engine``.
        sums: see :class:`.Binding`.
    """

    of_gradients: ClassVar[bool] = True
    lost_from: ClassVar[str] = ""
    setters: ClassVar[str] = "set_custom_reduce_scatter or set_all_reduce_hook"
    engine: Engine
    engines: dict[str, Engine]
    slots: Sequence[SlotObject] = ()
    group: dist.ProcessGroup | None = None
    other_groups: Sequence[dist.ProcessGroup] = ()
    relay: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    treatment: Reduction | None = None
    order: GroupOrder | None = None
    managed: ManagedAxis | None = None

    def __init__(self, groups: list[ParamGroup], handle: CommHook, options: AttachOptions) -> None:
        self.groups, self.reduction, self._timeout = groups, reduction_of(handle), options.timeout

    @property
    def sums(self) -> bool:
        return False

    @abstractmethod
    def place(self, steps: Steps, end: BackwardEnd, expr: str) -> None:
        """Fill the slot of each parameter group. torch's setters refuse modules with several groups."""

    def after_agreement(self) -> None:  # noqa: B027 - only replicas need it
        """Start collectives of the axis itself."""

    def remove(self) -> bool:
        """Empty the slots. Return False if plain averaging stays in them."""
        for slot in self.slots:
            slot.remove()
        return True

    @abstractmethod
    def layout(self, kept: Collection[str]) -> BucketLayout:
        """Return all that :attr:`engine` reduces as one virtual bucket, with the frozen parameters in ``kept``."""


def reduction_of(handle: CommHook) -> Reduction:
    """Return the reduction of a handle, or the one that an FSDP1 function of this package carries.

    Raises:
        HookNotSupportedError: the hook is a foreign function.
    """
    reduction = handle.reduction or getattr(handle.built, "reduction", None)
    if not isinstance(reduction, Reduction):
        raise HookNotSupportedError(
            f"{handle.expr} is a hook function, which FSDP2 cannot call. Give a reduction: a name such as "
            "'bf16_compress', or a generator function (bucket, ctx)"
        )
    return reduction


def state_of(handle: CommHook) -> HookState:
    """Return the state of a handle; a new one for an FSDP1 function.

    Raises:
        AttachError: the state is of another kind.
    """
    state = handle.state if handle.reduction is not None else HookState()
    if not isinstance(state, HookState):
        raise AttachError(
            f"the state of {handle.expr} is a {type(state).__name__}; FSDP2 needs a HookState: give attach(state=) the "
            "state of another handle, or leave state out"
        )
    return state


def weighted_sums(group: ParamGroup) -> HookNotSupportedError | None:
    """Return the error if the gradients of a weighted average are sums."""
    if group.divide_factor is None:
        return None
    return HookNotSupportedError(
        f"weighted=True does not work here: set_gradient_divide_factor() has made the gradients of {group.name} sums, which have "
        "no mean weight. Reset it to None, or omit weighted="
    )
