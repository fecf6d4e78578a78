"""``commhooks run --outer --state``: killed, and resumed from the end of a round, the script unchanged."""

import shutil
from pathlib import Path

import pytest
import torch

from .kit import SCRIPTS, run

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]
FEEDBACK = "quant4(block=16, error_feedback=True, exempt=False)"
STREAMING = f"streaming(every=4, fragments=2, overlap=1, steps=8, exchange={FEEDBACK})"


def weights(folder: Path) -> list[torch.Tensor]:
    return list(torch.load(folder / "weights.pt", weights_only=True).values())


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def killed_and_resumed(folder: Path, script: str, outer: str, save: int, **options: object) -> tuple[bool, str]:
    """Return True if the resumed run has the bits of an uninterrupted one, and its standard error."""
    whole, killed = folder / "whole", folder / "killed"
    for one in (whole, killed):
        one.mkdir()
    assert run(whole, script, "--save", save, outer=outer).report["models"][0]["steps"] == 8
    died = run(killed, script, "--save", save, "--kill", 7, outer=outer, state="state", check=False, **options)
    assert died.code != 0 and not (killed / "weights.pt").exists()
    done = run(killed, script, "--save", save, "--resume", outer=outer, state="state", **options)
    assert f"its state after step {save} is resumed from" in done.err or done.report["models"][0]["steps"] == 8
    return same(whole, killed), done.err


@pytest.mark.full
@pytest.mark.parametrize(
    ("outer", "save"),
    [
        (f"diloco(every=2, steps=8, exchange={FEEDBACK})", 4),
        ("diloco(every=3, steps=8)", 6),
        ("diloco(every=3, overlap=2, steps=8)", 5),  # the end of the first round
    ],
)
def test_killed_and_resumed_with_the_same_bits(tmp_path: Path, outer: str, save: int) -> None:
    assert killed_and_resumed(tmp_path, "ddp_loop", outer, save)[0]


@pytest.mark.full
@pytest.mark.parametrize("every", [1, 4])
def test_a_resume_from_inside_a_round_is_refused_and_names_the_last_step(tmp_path: Path, every: int) -> None:
    """Rank 0 saves alone while the other rank is already further in the round."""
    text = (
        (SCRIPTS / "ddp_loop.py")
        .read_text()
        .replace("            torch.save(saved", "            time.sleep(2); torch.save(saved")
    )
    text = text.replace("import os\n", "import os\nimport time\n").replace("        dist.barrier()\n", "")
    text = text.replace("        os.kill(", "        dist.barrier()  # both have written step 6\n        os.kill(")
    given = {"outer": f"diloco(every=3, exchange={FEEDBACK})", "state": "state", "state_every": every}
    died = run(tmp_path, text, "--save", 4, "--kill", 7, check=False, **given)
    assert "the script saves after step 4, inside a round" in died.err and "after step 6, and every 3 steps" in died.err
    done = run(tmp_path, text, "--resume", check=False, **given)
    assert done.code != 0 and "StateError" in done.err
    assert "(the last is 6)" in done.err and "save after a step that ends a round" in done.err


@pytest.mark.full
def test_schedules_without_a_common_model_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp_loop", outer=STREAMING, state="state", check=False)
    assert done.code != 0 and "the ranks hold different models until the last step" in done.err


NORM = "torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.nn.Linear(64, 96)", NORM),  # buffers of each rank
        ("AdamW(model.parameters(), lr=1e-2)", "SGD(model.parameters(), lr=0.1)"),  # an optimizer without state
        ('    optimizer.load_state_dict(saved["optimizer"])\n', ""),  # a script that resumes its model only
    ],
    ids=["buffers", "plain SGD", "model only"],
)
def test_scripts_of_other_kinds_resume_too(tmp_path: Path, old: str, new: str) -> None:
    text = (SCRIPTS / "ddp_loop.py").read_text()
    assert old in text
    assert killed_and_resumed(tmp_path, text.replace(old, new), "diloco(every=3, steps=8)", 6)[0]


@pytest.mark.full
def test_a_schedule_keeps_the_rate_that_the_script_has_loaded(tmp_path: Path) -> None:
    """The state is written in the optimizer's step, before the scheduler's."""
    text = (SCRIPTS / "ddp_loop.py").read_text()
    text = text.replace("begin = 0\n", "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)\nbegin = 0\n")
    text = text.replace("    optimizer.step()\n", "    optimizer.step()\n    schedule.step()\n")
    text = text.replace('"step": step + 1}', '"step": step + 1, "schedule": schedule.state_dict()}')
    text = text.replace(
        '    begin = saved["step"]', '    schedule.load_state_dict(saved["schedule"]); begin = saved["step"]'
    )
    assert killed_and_resumed(tmp_path, text, "diloco(every=2, steps=8)", 4)[0]


@pytest.mark.full
def test_three_ranks_go_on_from_the_start_of_two(tmp_path: Path) -> None:
    run(tmp_path, "ddp_loop", "--save", 3, "--kill", 5, outer="diloco(every=3)", state="state", check=False)
    done = run(tmp_path, "ddp_loop", "--resume", ranks=3, outer="diloco(every=3)", state="state")
    assert done.report["models"][0]["steps"] == 8 and done.stats["rounds_done"] == 2


@pytest.mark.full
def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    outer = "diloco(every=3)"
    run(tmp_path, "ddp_loop", "--save", 3, "--kill", 5, outer=outer, state="state", check=False)
    shutil.copytree(tmp_path / "state", tmp_path / "before")
    other = run(tmp_path, "ddp_loop", "--resume", outer="diloco(every=4)", state="state", check=False)
    assert other.code != 0 and "StateError" in other.err and "every=3" in other.err
    for one in (tmp_path / "state").glob("*/step-*/rank-1-of-2-*.pt"):
        one.write_bytes(one.read_bytes()[:100])
    damaged = run(tmp_path, "ddp_loop", "--resume", outer=outer, state="state", check=False)
    assert damaged.code != 0 and "the files of the ranks [1]" in damaged.err
