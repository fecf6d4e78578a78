"""Counted bytes against two outside witnesses: a paper's table, and the network interface."""

import json
import os
import subprocess
import sys

import pytest

from ch_bench.counted import paper_bytes
from ch_bench.links import netns

REASON = netns.why_not()


def test_the_paper_data_column_from_shapes_alone() -> None:
    plain = paper_bytes.payload_per_epoch("allreduce")
    assert round(plain) == 1023
    for rank, megabytes, ratio in ((1, 4.2, 243), (2, 7.5, 136), (4, 14.2, 72), (7, 24.2, 42)):
        planned = paper_bytes.payload_per_epoch(f"powersgd(rank={rank}, min_compression_rate=1)")  # the paper has none
        assert round(planned, 1) == megabytes
        assert round(plain / planned) == ratio


@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_counted_bytes_agree_with_the_interface(world: int) -> None:
    hooks = ["allreduce", "bf16_compress", "quant4", "powersgd(rank=32)"]
    words = [sys.executable, "-m", "ch_bench.links.wire_bytes", "--json", "--nproc", str(world), "--hooks", *hooks]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    answer = done.stdout[done.stdout.index("{") :]  # torch 2.10 says what gloo connects
    for hook, (engine, stream, interface, packets) in json.loads(answer).items():
        # Gloo's 48 bytes, before each message and alone, are all that TCP carries besides; PowerSGD's messages are small.
        assert engine < stream < engine * (1.03 if "powersgd" in hook else 1.01), hook
        assert interface == pytest.approx(stream + netns.HEADERS * packets), hook


@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
@pytest.mark.timeout(60)
def test_a_shaped_link_is_no_faster_than_asked_and_leaves_nothing_behind() -> None:
    with netns.Network(2, "100mbit") as net:
        assert net.transfer(6_000_000) < 105e6  # how much slower depends on what else the machine does
        names = {*net.names, net.hub}
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not names & {line.split()[0] for line in left.splitlines() if line}


@pytest.mark.parametrize("rate", ["", "fast", "10", "1 gbit/s", "-1mbit"])
def test_a_bad_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="legal is a number and kbit, mbit or gbit"):
        netns.parse_rate(rate)
