"""Outer optimizers of ch-outer, as data. This module imports no torch."""

from collections.abc import Iterable

from ch_outer.options import options_of
from commhooks import HookSpec, hookimpl

_AT_THE_END = "steps after the last whole round reach no other rank, unless steps= has the number of steps of the run"
_AS_MEASURED = "0.6 to 1.3 % above all-reduce at 100 times fewer bytes (small GPT, 9000 steps)"


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """Return the published methods as outer optimizers for ``commhooks run --outer``."""
    return (
        HookSpec(
            "diloco",
            "outer",
            "ch_outer:diloco",
            "averages the moves of every 500 steps, then steps Nesterov SGD",
            options=options_of("diloco"),
            caution=_AT_THE_END,
            example="diloco(every=30, exchange=quant4)",
            paper="https://arxiv.org/abs/2311.08105",
            recommended=True,
            when="an average in every step takes longer than the step; hundreds of rounds",
            loss=_AS_MEASURED,
        ),
        HookSpec(
            "streaming",
            "outer",
            "ch_outer:streaming_diloco",
            "DiLoCo in four fragments that take turns, exchanged while training goes on",
            options=options_of("streaming"),
            caution=_AT_THE_END,
            aliases=("streaming_diloco",),
            example="streaming(every=40, exchange=quant4)",
            paper="https://arxiv.org/abs/2501.18512",
            when="the exchanges of diloco take a large part of the time",
            loss="1.2 % above all-reduce with every=30 and mix='carry', 1.9 % with mix=0.5 (seed 0)",
        ),
        HookSpec(
            "sparse_loco",
            "outer",
            "ch_outer:sparseloco",
            "averages the largest entries of the moves in two bits each, with a decaying residual",
            options=options_of("sparse_loco"),
            caution=_AT_THE_END,
            aliases=("sparseloco",),
            paper="https://arxiv.org/abs/2508.15706",
            when="the link is so slow that even quant2 takes most of the time",
            loss="high in short runs: three times the steps in thirty rounds",
        ),
        HookSpec(
            "muloco",
            "outer",
            "ch_outer:muloco",
            "DiLoCo around Muon, whose moves survive coarse exchanges better than AdamW's",
            options=options_of("muloco"),
            caution=_AT_THE_END,
            example="muloco(exchange=quant4)",
            paper="https://arxiv.org/abs/2505.23725",
            when="the script trains with Muon",
            loss="not measured here",
        ),
        HookSpec(
            "local_sgd",
            "outer",
            "ch_outer:local_sgd",
            "averages the parameters every 8 steps, without outer momentum",
            options=options_of("local_sgd"),
            caution=_AT_THE_END,
            example="local_sgd(every=4, exchange=quant4)",
            paper="https://arxiv.org/abs/1805.09767",
            recommended=True,
            when="short runs, or a link that needs only a few times fewer bytes",
            loss="8 to 19 % more steps than all-reduce to the same loss with every=4 to 8 and quant4",
        ),
    )
