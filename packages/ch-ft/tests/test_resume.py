"""All replicas end and restart from disk. The run continues as if they had not ended."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from ch_testing.torchft import quorum
from ch_testing.torchft.member import Task

SAVED, END = 6, 14


def trained(folder: Path, tasks: list[Task]) -> quorum.Outcome:
    """Run until step ``END`` with a separate lighthouse."""
    (folder / "stop").write_text(str(END))
    with quorum.lighthouse(heartbeat=1.0, join_timeout=5.0) as address:
        outcome = quorum.run(folder, [replace(task, lighthouse=address, min_replicas=len(tasks)) for task in tasks])
    assert outcome.raised() == {}
    assert set(outcome.codes.values()) == {0}, outcome.last_words()
    return outcome


@pytest.mark.full
@pytest.mark.timeout(90)
def test_a_run_resumed_from_disk_is_the_run_that_was_not_ended(tmp_path: Path) -> None:
    """Parameters, Q and every replica's residual equal those of the other run to the bit, at each step after the
    restart.
    """
    names = quorum.NAMES[:3]
    tasks = [Task(name, str(tmp_path), "", "powersgd(rank=2)", save_at=SAVED) for name in names]
    whole = trained(tmp_path, tasks)
    for name in names:
        (tmp_path / f"{name}.jsonl").unlink()
    resumed = trained(tmp_path, [replace(t, save_at=-1, resume=True, seed=9 + i) for i, t in enumerate(tasks)])
    keys = ("params", "q", "residual", "participants")
    for name in names:
        before, after = whole.committed(name), resumed.committed(name)
        assert sorted(after) == list(range(SAVED + 1, END + 1))
        for step, record in after.items():
            assert [record[key] for key in keys] == [before[step][key] for key in keys], (name, step)
            assert record["participants"] == 3
        attempts = resumed.steps[name]  # on a busy machine the manager may reject a step, which then runs again
        assert attempts[-1]["compressed"] == len(attempts) >= END - SAVED
    residuals = {whole.committed(name)[END]["residual"] for name in names}
    assert len(residuals) == 3, "a residual is a replica's own"
