"""The page of a trace opens in a browser, without a network, with the time line of a thousand steps."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ch_trace
import commhooks
from ch_core import simulate
from ch_testing import spawn
from commhooks import Plain, Reducer
from commhooks.cli import main

STEPS = 1000
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def body(rank: int, world: int, folder: str, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.02
    )
    handle = commhooks.attach(model, "powersgd(rank=2)")
    with ch_trace.Trace(handle, Path(folder) / "trace.json"):
        for _ in range(steps):
            model(torch.randn(8, 64)).square().mean().backward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trace of a thousand steps on two ranks, and with its page."""
    made = tmp_path_factory.mktemp("traces")
    spawn(body, 2, str(made), STEPS + 1)
    assert main(["trace", str(made), "--html", str(made / "page.html")]) == 0
    return made


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_draws_a_thousand_steps(folder: Path, tmp_path: Path) -> None:
    for wide in (1400, 420):
        found = in_browser(folder / "page.html", tmp_path, wide)
        assert re.search(rf">step 700 of {STEPS}, [\d.]+ (ms|s) shown<", found)
        [drawn] = re.findall(r'data-drawn="(\d+)"', found)
        assert int(drawn) > 40  # bars of one step
        assert ch_trace.TraceFile.read(folder)[0].summary.advice in found


def in_browser(page: Path, profile: Path, wide: int) -> str:
    """Return the document after its script has run. An error in the script fails the test."""
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", f"--window-size={wide},1000",
         "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", f"{page.as_uri()}#step=700"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert not re.search(r"CONSOLE.*(Uncaught|Error)", done.stderr), done.stderr
    return done.stdout


@pytest.mark.gloo
@pytest.mark.full
def test_the_page_needs_no_other_file_and_holds_every_step(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    assert not re.search(r"https?://|src=|<link", text)
    [data] = re.findall(r'<script type="application/json" id="data-0">(.*?)</script>', text)
    found = json.loads(data)
    assert len(found["numbers"]) == len(found["kinds"]) == len(found["edges"]) - 1 == STEPS
    for kinds, begun, ended in zip(found["kinds"], found["edges"], found["edges"][1:], strict=False):
        assert sum(kinds) == pytest.approx(ended - begun, abs=1e-5)  # the critical path has no gaps
    assert len(text) < 8e6


def traced(path: Path, name: str) -> dict[str, Any]:
    """Return the written trace of an average of one tensor."""

    def alone(rank: Any) -> None:
        reducer = Reducer(Plain(), {name: torch.zeros(8)}, transport=rank.transport)
        with ch_trace.Trace(reducer.handle, path):
            for _ in range(3):
                reducer.average()

    simulate(1, alone)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    traced(tmp_path / "trace.json", "</script><b>")
    page = ch_trace.html_page(ch_trace.TraceFile.read(tmp_path))
    assert page.count("</script>") == 2 and "<b>" not in page


def test_no_text_of_a_file_becomes_markup_or_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace may come from another machine."""
    path, bad = tmp_path / "trace.json", "\"><b onclick='x'>$BODY $TITLE\x1b[31m"
    data = traced(path, "w")
    summary = data["otherData"]["summary"]
    summary |= {"hook": bad, "during": bad, "advice": bad}
    summary["buckets"][0] |= {"axis": bad, "parameters": bad}
    for event in data["traceEvents"]:
        event["name"] = bad if event["ph"] == "X" else event["name"]
        event["args"] = {key: bad if key == "name" else value for key, value in event["args"].items()}
    path.write_text(json.dumps(data))
    assert main(["trace", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text("utf-8")
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert "<b" not in re.sub(r"<(?:body|button)\b", "", page) and page.count("<section>") == 1
    assert outside.count("$BODY") > 5  # as text


def test_a_trace_of_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    data = traced(path, "w")
    del data["otherData"]["summary"]["wire"]
    path.write_text(json.dumps(data))
    assert main(["trace", str(path)]) == 1
    assert "is a trace of commhooks" in " ".join(capsys.readouterr().err.split())


def test_a_path_without_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text('{"hook": "quant4"}')
    assert main(["trace", str(tmp_path)]) == 1
    assert "has no trace: give a file that Trace wrote" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "broken.json").write_text("{")
    assert main(["trace", str(tmp_path / "broken.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err
