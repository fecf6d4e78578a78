"""The loops, and what their results must be. Bounds are committed before the first run that they judge."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
SEEDS = (0, 1, 2)
"""Seeds of the plain runs. The other ways run with the first one."""

EXACT = "allreduce"
FEEDBACK = "powersgd(rank=4)"
EVERY = 8
"""Inner steps of a round of `--outer`."""

WIDER = 0.15
"""Part of the largest plain loss that counts as a spread if three seeds are closer together than that.

The data of all seeds are equal, so three seeds of some loops differ by one percent. PowerSGD sends a direction some steps later
than plain averaging does. That costs a run of 64 steps more than one percent, and a flipped residual costs more than a hundred.
"""

REFUSALS = {"exact": 3, "feedback": 6, "attach": 6, "outer": 12, "resumed": 3}
"""The largest number of loops that may be refused, by way."""

WAYS = tuple(REFUSALS)


@dataclass(frozen=True)
class Loop:
    """A script, and how it runs.

    Attributes:
        name: of its file.
        steps: optimizer steps of a model in the whole run, for `--outer`.
        needs: packages of other projects that it imports.
        worlds: ranks of its launches, one after another.
        forks: True if the script starts its ranks itself.
        scaler: True if `attach` gets the GradScaler of the script, too.
        saves: True if the script saves checkpoints. It is then also killed, started again, and has to end with equal bits.
        outer: the largest loss with an outer optimizer, as a multiple of the largest plain loss; None for the common bound.
    """

    name: str
    steps: int = 64
    needs: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (2,)
    forks: bool = False
    scaler: bool = False
    saves: bool = False
    outer: float | None = None

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.name}.py"

    def expression(self, way: str) -> str:
        """Return the expression of the hook or outer optimizer."""
        outer = f"diloco(every={EVERY}, exchange=quant4, rate=1.0, momentum=0.0, steps={self.steps})"
        return {"exact": EXACT, "outer": outer}.get(way, FEEDBACK)

    def limit(self, way: str, plain: list[float]) -> float:
        """Return the largest legal loss.

        It is the largest plain loss of three seeds plus their spread, and twice their spread with an outer optimizer.
        A spread is at least :data:`WIDER` of the largest loss.
        """
        largest = max(plain)
        spread = max(largest - min(plain), WIDER * largest)
        if way == "outer":
            return largest * self.outer if self.outer is not None else largest + 2 * spread
        return largest + spread


LOOPS = (
    Loop("plain", saves=True),
    Loop("accumulate_no_sync", saves=True),
    Loop("accumulate_flag"),
    Loop("grad_scaler", scaler=True, saves=True),
    Loop("clip_norm", steps=96, saves=True),
    Loop("gan_frozen_d", saves=True),
    Loop("gan_one_module", saves=True),
    Loop("actor_critic", steps=300, saves=True),
    Loop("distillation", saves=True),
    Loop("ema_deepcopy", saves=True),
    Loop("ema_averaged_model", steps=96, saves=True),
    Loop("ema_copy_restore", saves=True),
    Loop("swa", saves=True),
    Loop("sam", saves=True),
    Loop("grad_cache"),
    Loop("gradient_penalty"),
    Loop("lora_checkpointing", steps=96, saves=True),
    Loop("freeze_thaw", steps=96, saves=True),
    Loop("freeze_unused", steps=96, saves=True),
    Loop("two_optimizers", saves=True),
    Loop("optimizer_in_backward"),
    Loop("muon"),
    Loop("muon_torch"),
    Loop("zero_redundancy", saves=True),
    Loop("schedule_free", needs=("schedulefree",), saves=True),
    Loop("master_weights"),
    Loop("masked_weights", saves=True),
    Loop("eval_saves", saves=True),
    Loop("best_model", saves=True),
    Loop("forked_ranks", forks=True),
    Loop("two_models"),
    Loop("compiled", saves=True),
    Loop("fsdp2"),
    Loop("fsdp2_replicas", worlds=(4,), saves=True),
    Loop("replicate", saves=True),
    Loop("elastic", steps=96, worlds=(2, 1, 2), saves=True),
    Loop("lightning_trainer", needs=("lightning",), saves=True),
    Loop("hf_trainer", needs=("transformers", "accelerate"), saves=True),
    Loop("accelerate_loop", needs=("accelerate",), saves=True),
    Loop("peft_lora", steps=96, needs=("peft",), saves=True),
    Loop("torchao_qat", needs=("torchao",)),
)
