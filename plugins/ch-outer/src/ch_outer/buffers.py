"""Floating-point buffers (BatchNorm's statistics): averaged at the end of a round, so that all ranks come to one model."""

from collections.abc import Mapping
from typing import Any

import torch

from ch_outer.joining import joined
from ch_outer.parts import buffers_of
from commhooks import HookConfigError, Plain, Reducer, StateError


class Buffers:
    """The buffers of a model, and what the ranks share of them: the last average.

    Args:
        model: whose; each rank's own run on between two averages.
        kind: ``"average"``, or ``"local"``: then there are none here.
        **where: of the reducer.

    Attributes:
        shared: by name, as of the last average: with the starts, the one model that all ranks share.
        reducers: the one that averages them, if there are any.

    Raises:
        HookConfigError: another kind.
    """

    def __init__(self, model: torch.nn.Module, kind: str, **where: Any) -> None:
        if kind not in ("average", "local"):
            raise HookConfigError(f"buffers={kind!r}: legal are 'average' and 'local'")
        self._model = model
        self.shared = {name: b.clone() for name, b in buffers_of(model).items()} if kind == "average" else {}
        self.reducers = [Reducer(Plain(), self.shared, **where)] if self.shared else []

    def live(self) -> dict[str, torch.Tensor]:
        """Those in the model, looked up anew: a module may put another tensor in the place of one."""
        return buffers_of(self._model) if self.shared else {}

    def places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each with what is shared of it, but for those that have changed their shape (a cache that grows)."""
        pairs = [(live, self.shared.get(name)) for name, live in self.live().items()]
        return [(live, shared) for live, shared in pairs if shared is not None and shared.shape == live.shape]

    def average(self) -> dict[str, torch.Tensor]:
        """Over the ranks; nothing is written yet."""
        return self.reducers[0].average(self.live()) if self.reducers else {}

    def put(self, averaged: Mapping[str, torch.Tensor], *, live: bool = True) -> None:
        """What all ranks share from now on, if it is anything; this rank's own, too, if they are ``live``."""
        for name, average in averaged.items():
            self.shared[name].copy_(average)
        for own, shared in self.places() if averaged and live else ():
            own.copy_(shared)

    def state_dict(self) -> dict[str, Any]:
        """What is shared. The model's own are in its own state."""
        return {
            "shared": {name: b.clone() for name, b in self.shared.items()},
            "reducers": [reducer.state_dict() for reducer in self.reducers],
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse the buffers of another model.

        Raises:
            StateError: naming one of them.
        """
        here, there = ({name: tuple(b.shape) for name, b in one.items()} for one in (self.shared, saved["shared"]))
        for name, shape in here.items() ^ there.items():
            raise StateError(
                f"the saved outer state and this model differ in the buffer {name!r} of shape {shape}: give the same model and "
                "buffers="
            )

    def join(self, given: Mapping[str, Any], *, behind: bool) -> None:
        """Go on from another member's :meth:`state_dict`; who is ``behind`` has its buffers, too."""
        self.check(given)
        self.put(given["shared"], live=behind)
        for reducer, theirs in zip(self.reducers, given["reducers"], strict=True):
            reducer.load_state_dict(joined(reducer.state_dict(), theirs, behind=behind))
