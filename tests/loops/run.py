"""Runs loops in every way, judges their results, and prints a table."""

import argparse
import importlib.util
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ch_testing import RankResult, Ranks
from tests.loops.bounds import EVERY, LOOPS, REFUSALS, SEEDS, WAYS, Loop
from tests.loops.worker import PRELOAD, Ended, Job, work

LIMIT, GRACE = 240.0, 40.0
"""Seconds for one launch, and for the other ranks after one rank has failed."""

LIBRARIES = {
    "lightning": "lightning",
    "transformers": "transformers.trainer",
    "accelerate": "accelerate",
    "peft": "peft",
    "torchao": "torchao.quantization.qat",
    "schedulefree": "schedulefree",
}
"""Module to preload, by package."""


@dataclass(frozen=True)
class Result:
    """Everything that one way of one loop has left.

    Attributes:
        ends: of the ranks of the last launch; None for a rank that died or had to be killed.
        values: loss and checksum of each rank.
        report: of `commhooks run`, or None.
        attached: number of models to which the runner has attached a hook.
        output: what each rank has printed.
        seconds: of all launches.
        survived: True if the rank that was to die has not died.
    """

    ends: list[Ended | None]
    values: list[dict[str, Any]]
    report: dict[str, Any] | None
    attached: int
    output: list[str]
    seconds: float
    survived: bool = False


@dataclass(frozen=True)
class Verdict:
    """The judgement of a result: "right", "refused" or "RED"."""

    state: str
    text: str = ""
    loss: float | None = None

    def __str__(self) -> str:
        return f"{self.loss:.4f}" if self.state == "right" and self.loss is not None else self.state


@dataclass
class Row:
    """A loop of the table."""

    loop: Loop
    plain: list[float] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0


def missing(loop: Loop) -> list[str]:
    """Return the packages that a loop needs and that are not installed."""
    return [name for name in loop.needs if importlib.util.find_spec(name) is None]


def launch(
    loop: Loop,
    way: str,
    seed: int = 0,
    *,
    flipped: bool = False,
    preload: Sequence[str] = (),
    kill: tuple[int, int, str] | None = None,
    state: bool = True,
) -> Result:
    """Run all launches of a loop in one way. A launch that fails is the last one.

    Args:
        loop: the loop.
        way: a way of the table, or "plain".
        seed: of the script.
        flipped: True to plant residuals with the wrong sign.
        preload: modules for the server of the ranks.
        kill: see :class:`.worker.Job`. The launch in which a rank dies comes first, and is started again.
        state: False to keep no state where the launches of the way would.
    """
    import torch.distributed as dist

    begun = time.monotonic()
    folder, survived = Path(tempfile.mkdtemp(prefix="loops-")), kill is not None
    try:
        launches = [(world, None) for world in loop.worlds]
        for world, dies in [*([(loop.worlds[0], kill)] if kill else []), *launches]:
            for old in [*folder.glob("result-*"), *folder.glob("report*")]:
                old.unlink()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
            expression = "" if way == "plain" else loop.expression(way)
            several = way == "resumed" or (len(loop.worlds) > 1 and way not in ("plain", "attach"))
            options = {"forks": loop.forks, "scaler": loop.scaler, "state": state and several, "flipped": flipped}
            job = Job(str(loop.path), way, expression, seed, str(folder), store.port, kill=dies, **options)
            ends, died = _ranks(job, 1 if loop.forks else world, preload)
            if dies and dies[0] in died:
                survived = False
                continue
            if survived or any(end is None or end.error for end in ends):
                break
        values = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
        report = folder / "report.json"
        return Result(
            ends,
            values,
            json.loads(report.read_text()) if report.exists() else None,
            len(list(folder.glob("attached-*"))),
            [path.read_text() for path in sorted(folder.glob("output-*"))],
            time.monotonic() - begun,
            survived,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ranks(job: Job, processes: int, preload: Sequence[str]) -> tuple[list[Ended | None], list[int]]:
    """Return the ends of the ranks, and the ranks that killed themselves."""

    def failed(result: RankResult) -> bool:
        if job.kill is not None:  # peers of the rank that dies may fail, and end, before its end is known
            return result.rank == job.kill[0]
        return result.exit_code != 0 or bool(result.value.error)

    with Ranks(work, processes, job, group=False, preload=[*PRELOAD, *preload]) as ranks:
        results = ranks.wait(LIMIT, failed)
        died = [result.rank for result in results if result.exit_code == -signal.SIGKILL]
        if ranks.alive() and not died:
            results = ranks.wait(GRACE if any(map(_over, results)) else 0.0)
        return [result.value if _over(result) and result.exit_code == 0 else None for result in results], died


def _over(result: RankResult) -> bool:
    return result.exit_code is not None


def judge(loop: Loop, way: str, got: Result, plain: Sequence[Result]) -> Verdict:
    """Return the judgement of a result, from the results of plain runs with three seeds."""
    if got.survived:
        return Verdict("RED", "the rank that was to die has not died")
    ended = [end for end in got.ends if end is not None]
    errors = [end for end in ended if end.error]
    if errors:
        return _refusal(way, got, errors)
    if len(ended) < len(got.ends):
        return Verdict("RED", f"rank {got.ends.index(None)} died or hung. {_tail(got)}")
    if len(got.values) != len(plain[0].values):
        return Verdict("RED", "a rank has left no result")
    first, loss = plain[0].values, got.values[0]["loss"]
    if way != "plain" and (not_used := _not_used(way, got)):
        kept = got.report is not None and bool(got.report["not_used"]) and got.values == first
        return Verdict("refused" if kept else "RED", not_used, loss)
    if way in ("exact", "resumed"):
        bits = "plain DDP's bits" if way == "exact" else "the bits of the run that was not killed"
        return Verdict("right" if got.values == first else "RED", f"not {bits}: {got.values} != {first}", loss)
    if len({value["parameters"] for value in got.values}) > 1:
        return Verdict("RED", f"the ranks end with different parameters; {_notes(got)}", loss)
    if way == "outer" and any(end.sent for end in ended):
        return Verdict(
            "RED", f"the optimizer sent {ended[0].sent} messages of its own in its steps; {_notes(got)}", loss
        )
    limit = loop.limit(way, [one.values[0]["loss"] for one in plain])
    if not (math.isfinite(loss) and loss <= limit):
        return Verdict("RED", f"loss {loss:.4f} is above {limit:.4f}; {_notes(got)}", loss)
    return Verdict("right", loss=loss)


def _refusal(way: str, got: Result, errors: list[Ended]) -> Verdict:
    """Judge errors: a refusal is typed, comes on all ranks after equal steps, and before a wrong average was used."""
    said = next((end for end in errors if end.typed and end.error != "RemoteHookError"), errors[0])
    text = f"{said.error} after {said.steps} steps: {said.text}"
    if not said.typed:
        return Verdict("RED", f"{text} {_tail(got)}")
    if len(errors) < len(got.ends) or not all(end.typed for end in errors):
        others = [f"{end.error}: {end.text[:200]}" if end is not None else "died or hung" for end in got.ends]
        return Verdict("RED", f"not refused on all ranks: {others}")
    if len({end.steps for end in errors}) > 1:
        return Verdict("RED", f"refused after different steps of the ranks: {[end.steps for end in errors]}. {text}")
    if way == "outer" and said.steps >= EVERY:  # the first round is over
        return Verdict("RED", f"refused after a round: {text}")
    if way != "outer" and len({end.stepped for end in errors}) > 1:
        return Verdict("RED", f"refused after the ranks' parameters differed: {text}")
    return Verdict("refused", text)


def _not_used(way: str, got: Result) -> str:
    """Return the reason why no model has trained with the hook, or an empty string."""
    if way == "attach":
        return "" if got.attached else "no model got the hook"
    if got.report is None:
        return f"no report. {_tail(got)}"
    models = got.report["models"]
    if not models:
        return f"no model got the hook: {_notes(got)}"
    if way == "outer":
        return "" if any(model.get("stats", {}).get("rounds_done") for model in models) else "no round was made"
    if way in ("feedback", "resumed") and not any(model.get("stats", {}).get("compressed_steps") for model in models):
        return "no step was compressed"
    return ""


def _notes(got: Result) -> str:
    """Return what the report says, or that there is none."""
    report = got.report or {"notes": [], "not_used": "", "models": []}
    said = [report["not_used"], *report["notes"]]
    said += [model["error"] for model in report["models"] if "error" in model]
    return "the report says: " + ("; ".join(dict.fromkeys(filter(None, said))) or "nothing")


def _tail(got: Result) -> str:
    """Return the last lines that each rank has printed."""
    return " | ".join(
        f"rank {rank} prints: " + " ".join(text.split("\n")[-5:])[-500:] for rank, text in enumerate(got.output)
    )


def resumed(loop: Loop, whole: Result, seed: int, *, preload: Sequence[str] = (), state: bool = True) -> Verdict:
    """Kill a run of a loop in a step that a seed draws, start it again, and compare it with a run to the end.

    Args:
        loop: a loop that saves checkpoints.
        whole: the result of the run with the same hook that was not killed.
        seed: of the step, the rank and the moment.
        preload: as in :func:`launch`.
        state: False to plant a defect: the second run then finds no state.
    """
    draw = random.Random(f"{seed} {loop.name}")
    steps = whole.ends[0].steps if whole.ends[0] is not None else 1
    kill = (draw.randrange(loop.worlds[0]), draw.randint(1, max(1, steps)), draw.choice(("before", "after")))
    found = judge(loop, "resumed", launch(loop, "resumed", preload=preload, kill=kill, state=state), [whole])
    where = f"rank {kill[0]} died {kill[2]} step {kill[1]} of {steps}"
    return Verdict(found.state, f"{where}; {found.text}", found.loss)


def run(loop: Loop, ways: Iterable[str], *, seed: int = 0, flipped: bool = False, preload: Sequence[str] = ()) -> Row:
    """Run a loop plain with three seeds, then in some ways. Another seed draws the step in which a rank dies."""
    row, begun = Row(loop), time.monotonic()
    if names := missing(loop):
        row.note = f"skipped, because {', '.join(names)} is not installed"
        return row
    plain = [launch(loop, "plain", seed, preload=preload) for seed in SEEDS]
    for seed, result in zip(SEEDS, plain, strict=True):
        verdict = judge(loop, "plain", result, [result])
        if verdict.text and not math.isfinite(result.values[0]["loss"] if result.values else math.nan):
            row.note = f"the plain run with seed {seed} failed: {verdict.text}"
            return row
    row.plain = [result.values[0]["loss"] for result in plain]
    whole = None
    for way in ways:
        if way != "resumed":
            got = launch(loop, way, flipped=flipped, preload=preload)
            whole = got if way == "feedback" else whole
            row.verdicts[way] = judge(loop, way, got, plain)
        elif loop.saves:
            whole = whole or launch(loop, "feedback", preload=preload)
            row.verdicts[way] = resumed(loop, whole, seed, preload=preload)
    row.seconds = time.monotonic() - begun
    return row


def table(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """Return the table, the texts of refusals, and the reasons of red cells."""
    lines = [f"| loop | plain, {len(SEEDS)} seeds | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    for row in rows:
        plain = f"{min(row.plain):.4f} … {max(row.plain):.4f}" if row.plain else row.note
        cells = [str(row.verdicts[way]) if way in row.verdicts else "" for way in ways]
        lines.append(f"| {row.loop.name} | {plain} | {' | '.join(cells)} |")
    for state in ("refused", "RED"):
        lines.append("")
        for way in ways:
            found = [(row.loop.name, row.verdicts[way]) for row in rows if way in row.verdicts]
            chosen = [(name, verdict.text) for name, verdict in found if verdict.state == state]
            legal = f" (at most {REFUSALS[way]})" if state == "refused" else ""
            lines.append(f"{state}, {way}: {len(chosen)} of {len(found)}{legal}")
            lines += [f"- {name}: {text}" for name, text in chosen]
    return "\n".join(lines)


def wrong(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for everything that must not be."""
    found = [f"{row.loop.name}, {way}" for row in rows for way, one in row.verdicts.items() if one.state == "RED"]
    found += [f"{row.loop.name}: {row.note}" for row in rows if row.note and "failed" in row.note]
    for way, most in REFUSALS.items():
        refused = sum(row.verdicts[way].state == "refused" for row in rows if way in row.verdicts)
        found += [f"{way}: {refused} loops are refused, at most {most} may be"] if refused > most else []
    return found


def drawn(seed: int, count: int) -> list[Loop]:
    """Return some loops by a seed, in the order of the table."""
    chosen = random.Random(seed).sample(LOOPS, min(count, len(LOOPS)))
    return [loop for loop in LOOPS if loop in chosen]


def run_all(
    loops: Sequence[Loop], ways: Sequence[str], *, seed: int = 0, flipped: bool = False, jobs: int = 1
) -> list[Row]:
    """Run loops, some at a time, and print each row when it is complete."""
    preload = [LIBRARIES[name] for name in LIBRARIES for loop in loops if name in loop.needs and not missing(loop)]

    def one(loop: Loop) -> Row:
        row = run(loop, ways, seed=seed, flipped=flipped, preload=[*dict.fromkeys(preload)])
        cells = ", ".join(f"{way} {verdict}" for way, verdict in row.verdicts.items())
        print(f"{loop.name}: {row.note or cells} ({row.seconds:.0f} s)", flush=True)
        for way, verdict in row.verdicts.items():
            if verdict.state == "RED":
                print(f"  RED {way}: {verdict.text}", flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, loops))


def main() -> int:
    """Return exit code 1 if any result is wrong; with `--flipped`, if any row with error feedback is not red."""
    parser = argparse.ArgumentParser(prog="loops", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw and of the steps in which ranks die (0)")
    parser.add_argument("--draw", type=int, help="run that many loops, drawn by the seed")
    parser.add_argument("--only", action="append", help="run this loop alone (may be repeated)")
    parser.add_argument("--way", action="append", choices=WAYS, help="run in this way alone (may be repeated)")
    parser.add_argument("--flipped", action="store_true", help="plant residuals with the wrong sign: rows must be red")
    parser.add_argument("--jobs", type=int, default=2, help="loops that run at a time (2)")
    parser.add_argument("--record", type=Path, help="write the table to this file")
    options = parser.parse_args()
    ways = options.way or (["feedback", "attach"] if options.flipped else [*WAYS])
    loops = drawn(options.seed, options.draw) if options.draw else list(LOOPS)
    loops = [loop for loop in loops if not options.only or loop.name in options.only]
    begun = time.monotonic()
    rows = run_all(loops, ways, seed=options.seed, flipped=options.flipped, jobs=options.jobs)
    found = unseen(rows) if options.flipped else wrong(rows)
    head = f"{len(rows)} loops, plain with seeds {', '.join(map(str, SEEDS))}, the others with {SEEDS[0]}"
    head += f"; ranks die by --seed {options.seed}" + ", which has drawn the loops" * bool(options.draw)
    text = f"{head}. {time.monotonic() - begun:.0f} s.\n\n{table(rows, ways)}\n\nWrong: {len(found)}\n"
    text += "".join(f"- {sentence}\n" for sentence in found)
    print(text)
    if options.record:
        options.record.write_text(text)
    return int(bool(found))


def unseen(rows: Sequence[Row]) -> list[str]:
    """Return the rows that a planted defect leaves green."""
    return [
        f"{row.loop.name}, {way}: the flipped residual is not seen"
        for row in rows
        for way, one in row.verdicts.items()
        if one.state == "right"
    ]


if __name__ == "__main__":
    sys.exit(main())
