"""The convergence study on the text task and few steps: resume, equal bytes, discovery, the page."""

import json
from typing import Any

import pytest
import torch
from programs.convergence import __main__ as study
from programs.convergence import report, runs, tasks

import commhooks

pytestmark = [pytest.mark.full, pytest.mark.timeout(100)]
TINY = ["--tasks", "gpt", "--steps", "3", "--seeds", "1", "--jobs", "1", "--hooks", "allreduce", "powersgd(rank=1)"]


def test_every_hook_is_compared_or_left_out_with_a_reason():
    compared = {node["hook"] for e in runs.expressions() for node in _nodes(commhooks.create(e).config)}
    listed = {spec.name for kind in ("reduction", "ddp", "wrapper") for spec in commhooks.list_hooks(kind=kind)}
    assert listed - compared == set(runs.LEFT_OUT)
    assert not compared & set(runs.LEFT_OUT)
    assert set(runs.VARIANTS) <= listed


def _nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    from commhooks.registry.expression import nodes

    return nodes(node)


def test_a_run_continues_and_gives_the_page(tmp_path, monkeypatch):
    words = [*TINY, "--out", str(tmp_path)]
    assert study.main([*words, "--minutes", "1e-9"]) == 3, "no time: nothing was run, and it says so"
    assert study.main(words) == 0
    path = tmp_path / "results.json"
    first = json.loads(path.read_text())
    assert set(first) == {f"gpt/iid/0/{e}" for e in ("bf16_compress", "allreduce", "powersgd(rank=1)")}
    lossy = first["gpt/iid/0/powersgd(rank=1)"]["record"]
    assert lossy["compressed_steps"] == 3
    assert lossy["step"] == [0, 1, 2, 3]
    assert lossy["train"][-1] < lossy["train"][0]
    # One run is lost, as after a kill, and one has another setting. Only these two run again.
    del first["gpt/iid/0/powersgd(rank=1)"]
    first["gpt/iid/0/allreduce"]["setting"]["lr"] = 1.0
    first["gpt/iid/0/bf16_compress"]["record"]["train"][-1] = 1.25
    path.write_text(json.dumps(first))
    assert study.main(words) == 0
    again = json.loads(path.read_text())
    assert again["gpt/iid/0/bf16_compress"]["record"]["train"][-1] == 1.25
    assert again["gpt/iid/0/powersgd(rank=1)"]["record"]["train"] == lossy["train"], "to the bit the same run"
    assert again["gpt/iid/0/allreduce"]["setting"]["lr"] != 1.0
    page = (tmp_path / "convergence.md").read_text()
    assert "`powersgd(rank=1)`" in page
    assert "text GPT, i.i.d. shards, `powersgd(rank=1)`, at equal steps: train loss" in page, "a losing cell is printed"
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_any_expression_can_be_asked_for(capsys):
    words = ["--tasks", "gpt", "--seeds", "1", "--hooks"]
    asked = study.parse([*words, "powersgd( min_compression_rate=1,rank=3 )"]).hooks
    assert asked == ["bf16_compress", "powersgd(min_compression_rate=1, rank=3)"]
    assert [one.expr for one in runs.runs(["gpt"], asked, 1, 3)] == asked
    with pytest.raises(SystemExit):
        study.parse([*words, "no_such_hook"])
    assert "no_such_hook" in capsys.readouterr().err


def run(wire: list[float], train: list[float]) -> dict[str, Any]:
    return {"wire": wire, "train": train, "test": [-x for x in train]}


def test_equal_bytes():
    base = run([0, 10, 20, 40], [4.0, 3.0, 2.0, 1.0])
    assert [report.at_bytes(base, b, "train") for b in (0, 5, 10, 30, 40, 99)] == [4.0, 3.5, 3.0, 1.5, 1.0, 1.0]
    thrifty = report.compare([run([0, 1, 2, 4], [4.0, 3.5, 3.0, 2.0])], [base], "x", False)
    assert (thrifty.ratio, thrifty.budget) == (10.0, 4e-6)
    assert (thrifty.steps["train"].verdict, thrifty.steps["train"].difference) == ("worse", 1.0)
    assert thrifty.bytes["train"].ours == [2.0]
    assert thrifty.bytes["train"].base == [pytest.approx(3.6)]
    assert thrifty.bytes["train"].verdict == "better"
    # A hook that sends more per step is cut off at the baseline's total bytes.
    wasteful = report.compare([run([0, 20, 40, 80], [4.0, 3.0, 2.0, 1.0])], [base], "x", False)
    assert (wasteful.bytes["train"].ours, wasteful.bytes["train"].base) == ([2.0], [1.0])
    assert wasteful.steps["train"].verdict == "mixed"


def test_a_verdict_needs_every_seed():
    assert report.verdict([0.1, 0.2, 0.3]) == "worse"
    assert report.verdict([0.1, 0.2, 0.3], higher=True) == "better"
    assert report.verdict([0.1, -0.2, 0.3]) == "mixed"
    assert report.verdict([0.0, 0.0]) == "mixed"
    assert report.verdict([0.1, 0.0]) == "mixed"


def test_shards():
    labels = torch.arange(10).repeat(12)
    for kind in ("iid", "sorted"):
        parts = tasks.shards(labels, 4, kind, seed=1)
        assert sorted(torch.cat(parts).tolist()) == list(range(120))
        assert {len(part) for part in parts} == {30}
        seen = [len(set(labels[part].tolist())) for part in parts]
        assert max(seen) <= 3 if kind == "sorted" else min(seen) > 5
