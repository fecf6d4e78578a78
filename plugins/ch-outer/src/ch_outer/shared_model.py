"""The model that all ranks share: a start for each parameter, the last average of each buffer, and the outer optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_outer.buffers import Buffers
from ch_outer.fragment import Fragment, divide, start_of
from ch_outer.outer_sgd import OuterFactory, default_outer
from ch_outer.parameters import check_parameters, facts_of, options_of, parameters_of, trained
from ch_outer.schedule import Schedule
from commhooks import CommHooksError, Reducer, StateError

_KEYS = ("inner", "outer", "count", "landed", "fragments", "buffers", "schedule")  # of a state


class Ranks(Protocol):
    """The ranks that exchange, :class:`.FixedRanks` or :class:`.Members`, as a shared model sees them."""

    @property
    def fixed(self) -> bool:
        """True if the ranks stay to the end of the run."""

    @property
    def verify_ranks(self) -> bool:
        """True to compare options and values of all ranks."""

    def reducer_options(self) -> dict[str, Any]:
        """Return the options of each :class:`commhooks.Reducer` that name the ranks."""

    def turns(self, fragment: int, fragments: int) -> Callable[[int], int] | None:
        """Return a function from committed rounds to rounds of a fragment, or ``None`` if each fragment counts its own."""


class SharedModel:
    """Starts, averaged buffers and outer optimizer, equal on all ranks between two rounds.

    Args:
        model: the model of this rank.
        inner: the inner optimizer.
        schedule: times of the exchanges.
        exchange: averages the pseudo-gradients.
        outer: makes the outer optimizer of the starts.
        buffers: ``"average"`` or ``"local"``.
        ranks: the ranks that exchange.
        weighted: True if rounds average by weights.

    Attributes:
        params: the parameters that are exchanged, by name.
        fragments: the fragments of the parameters, in the order of their turns, then one for each time that parameters thawed.
        thawed: starts of parameters that were unfrozen since the last round, by name.
        buffers: the averaged buffers.
        outer: the outer optimizer.
        facts: lines that must be equal on all ranks.

    Raises:
        HookConfigError: an option is out of range, or the inner optimizer steps a tensor that is not a parameter of the model.
        RankMismatchError: ranks differ in options or parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: Optimizer,
        schedule: Schedule,
        exchange: Any,
        outer: OuterFactory | None,
        buffers: str,
        ranks: Ranks,
        weighted: bool = False,
    ) -> None:
        self.model, self._inner, self.weighted = model, inner, weighted
        self.params = trained(model, inner)
        parts = divide(self.params, schedule.fragments)
        self.schedule = schedule
        starts = {name: start_of(param) for name, param in self.params.items()}
        self.outer = (outer or default_outer())(list(starts.values()))
        # A manager sends its members equal values, so only fixed ranks compare values.
        values = ranks.fixed and ranks.verify_ranks
        self.facts = facts_of(model, starts, parameters_of(model)[1], buffers, values=values)
        self.facts["outer step"] = [f"{self.schedule}, buffers={buffers}", *options_of(self.outer)]
        # Only ranks that compare their starts learn if all of them have unfrozen the same parameters.
        self._frozen = parameters_of(model)[1] if values else {}
        self.thawed: dict[str, torch.Tensor] = {}
        self._where = where = ranks.reducer_options()
        # Used in place of `self`, because a reference cycle would keep a dropped inner optimizer alive.
        every, facts = self.params, self.facts

        def fragment(mine: dict[str, torch.Tensor], thawed: Mapping[str, torch.Tensor], **options: Any) -> Fragment:
            # Each fragment has its own reducer, so that a round of a fragment is one committed step of its state.
            reducer = Reducer(exchange, mine, facts=facts, weighted=weighted, **options, **where)
            return Fragment(
                {name: every[name] for name in mine}, mine, reducer, schedule.mix, thawed if values else None
            )

        self._fragment = fragment
        self.fragments: list[Fragment] = []
        for index, names in enumerate(parts):
            thawed = self.thawed if index == len(parts) - 1 else {}
            turns = ranks.turns(index, len(parts))
            self.fragments.append(fragment({name: starts[name] for name in names}, thawed, rounds=turns))
        self.buffers = Buffers(model, buffers, **where)

    def note_thawed(self) -> None:
        """Copy the starts of parameters that the script has unfrozen. Call it before an optimizer steps.

        A frozen parameter has not moved since the last round, so its value is its start on all ranks.
        """
        for name, param in self._frozen.items():
            if param.requires_grad and name not in self.thawed:
                self.thawed[name] = start_of(param)

    def admit(self, names: Iterable[str]) -> int:
        """Make a fragment of thawed parameters, on all ranks, whose starts are equal. Return its index."""
        starts = {name: self.thawed.pop(name) for name in names}
        self.params.update({name: self._frozen.pop(name) for name in starts})
        self.outer.param_groups[0]["params"] += starts.values()
        self.fragments.append(self._fragment(starts, {}))
        for weight in self.fragments[-2].weights():  # the thawed parameters have moved since the round before
            self.fragments[-1].weigh(weight)
        return len(self.fragments) - 1

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Average over another group of ranks from now on, also parameters that thaw later.

        Raises:
            RankMismatchError: ranks have other schedules, or another number of reducers, which they would exchange in turn.
        """
        facts = {"outer step": self.facts["outer step"][:1], "exchanges": [str(len(self.reducers))]}
        for reducer in self.reducers:
            reducer.move(process_group, facts=facts)
        self._where |= {"process_group": process_group, "transport": None}

    @property
    def reducers(self) -> list[Reducer]:
        """The reducers of fragments and buffers."""
        return [*(fragment.reducer for fragment in self.fragments), *self.buffers.reducers]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a parameter or buffer of this rank and its shared value."""
        pairs = [(f.params[name], start) for f in self.fragments for name, start in f.starts.items()]
        return [*pairs, *((self._frozen[name], start) for name, start in self.thawed.items()), *self.buffers.places()]

    def check_model(self) -> None:
        """Check that all trainable parameters and floating-point buffers of the model are exchanged.

        Raises:
            HookConfigError: one was added, replaced, unfrozen or removed since construction.
        """
        check_parameters(self.model, self._inner, {**self.params, **{name: self._frozen[name] for name in self.thawed}})
        self.buffers.check_names()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the shared model, the parts of this rank (residuals, roundings), and the schedule."""
        return {
            "outer": self.outer.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "buffers": self.buffers.state_dict(),
            "schedule": asdict(self.schedule),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of something else, or of another schedule, model, sharding or optimizer.

        Raises:
            StateError: names the missing or differing part.
        """
        missing = [key for key in _KEYS if key not in saved]
        if missing:
            raise StateError(
                f"this is not the state of an OuterOptimizer: {', '.join(missing)} missing. Load the state of an inner optimizer "
                "into the inner optimizer"
            )
        self.check_schedule("the state was saved with", saved["schedule"])
        if len(self.fragments) != len(saved["fragments"]):
            raise StateError(
                f"the state has {len(saved['fragments'])} fragments, this model {len(self.fragments)}: one more for each time "
                "that parameters were unfrozen later. Unfreeze them in the same rounds before you load the state"
            )
        for fragment, state in zip(self.fragments, saved["fragments"], strict=True):
            fragment.check(state)
        self.buffers.check(saved["buffers"])
        for name, optimizer in (("inner", self._inner), ("outer", self.outer)):
            there, here = (_sizes(groups) for groups in (saved[name]["param_groups"], optimizer.param_groups))
            if there != here:
                raise StateError(f"the saved {name} optimizer steps groups of {there} parameters, this one of {here}")

    def check_schedule(self, where: str, given: Mapping[str, Any]) -> None:
        """Refuse another schedule. ``where`` begins the error."""
        own = asdict(self.schedule)
        if given != own:
            there, here = (", ".join(f"{name}={value!r}" for name, value in one.items()) for one in (given, own))
            raise StateError(f"{where} {there}, this optimizer has {here}. Give the same schedule")

    def load_state_dict(self, saved: Mapping[str, Any], world_change: str) -> None:
        """Load a state that :meth:`check_state` has accepted into all fragments and buffers, or into none."""
        states = []
        for fragment, state in zip(self.fragments, saved["fragments"], strict=True):
            fragment.receive()  # the state of a reduction is open while its exchange is under way
            states.append((fragment.reducer, state["reducer"]))
        states += zip(self.buffers.reducers, saved["buffers"]["reducers"], strict=True)
        _load_reducers(states, world_change)
        for fragment, state in zip(self.fragments, saved["fragments"], strict=True):
            fragment.load_state_dict(state)
        self.buffers.put(saved["buffers"]["shared"], live=False)
        self.outer.load_state_dict(saved["outer"])


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _load_reducers(states: Sequence[tuple[Reducer, Mapping[str, Any]]], world_change: str) -> None:
    """Load all states. If a reducer refuses its state, restore the others."""
    before = [(reducer, reducer.state_dict()) for reducer, _ in states]
    for index, (reducer, state) in enumerate(states):
        try:
            reducer.load_state_dict(state, world_change=world_change)
        except CommHooksError:
            for loaded, own in before[:index]:
                loaded.load_state_dict(own)
            raise
