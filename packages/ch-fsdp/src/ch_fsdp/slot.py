"""The slots of FSDP2 for collectives of its user, one of each kind in every parameter group."""

from typing import Any, ClassVar

from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import SlotTakenError


class SlotObject:
    """An object of this package in one of FSDP2's slots. It remembers torch's own.

    Attributes:
        attribute: attribute of :class:`.ParamGroup` that reads and writes the slot.
        axis: value of ``attach(axis=)`` that uses the slot.
        default: name of the class that torch puts there.
        taken: error if another object is there, after "GROUP has".
        replaced: the object that was there.
    """

    attribute: ClassVar[str]
    axis: ClassVar[str]
    default: ClassVar[str]
    taken: ClassVar[str]

    def __init__(self, group: ParamGroup, expr: str) -> None:
        self.group, self.expr = group, expr
        self.replaced: Any = getattr(group, self.attribute)
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
