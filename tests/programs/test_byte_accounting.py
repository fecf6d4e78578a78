"""Counted bytes agree with two independent sources, a paper's table and the network interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ch_bench.links import netns
from ch_bench.pytorch_hooks import reduction_of
from commhooks import BucketLayout, StepContext

BENCH = Path(__file__).resolve().parents[2] / "plugins" / "ch-bench"  # its programs are not installed
REASON = netns.why_not()
WORKERS, BATCH, IMAGES = 16, 128, 50_000
STEPS = IMAGES // (WORKERS * BATCH)  # per epoch
MIB = 2**20
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first block


def resnet18(classes: int = 10) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of ResNet-18 for 32 x 32 images (3 x 3 stem, two blocks in each of four stages)."""
    shapes = {"conv1": (64, 3, 3, 3)} | _norm("bn1", 64)
    before = 64
    for i, (width, stride) in enumerate(STAGES, 1):
        for j in range(2):
            name = f"layer{i}.{j}"
            shapes |= {f"{name}.conv1": (width, before, 3, 3)} | _norm(f"{name}.bn1", width)
            shapes |= {f"{name}.conv2": (width, width, 3, 3)} | _norm(f"{name}.bn2", width)
            if j == 0 and (stride != 1 or before != width):
                shapes |= {f"{name}.shortcut": (width, before, 1, 1)} | _norm(f"{name}.shortcut_bn", width)
            before = width
    return shapes | {"linear.weight": (classes, before), "linear.bias": (classes,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def payload_per_epoch(expr: str) -> float:
    """Return the MiB that one worker gives to collectives in an epoch.

    Vogels et al. 2019 (https://arxiv.org/abs/1905.13727) train ResNet-18 on CIFAR-10 with 16 workers of batch 128, so an epoch
    has 24 full steps. A convolution ``(out, in, k, k)`` is a matrix of ``out`` by ``in * k * k``; vectors are averaged.
    """
    plan = reduction_of(expr).plan(BucketLayout.of_shapes(resnet18()), StepContext(world_size=WORKERS))
    return STEPS * sum(request.payload_bytes for stage in plan for request in stage) / MIB


def test_the_paper_data_column_from_shapes_alone() -> None:
    plain = payload_per_epoch("allreduce")
    assert round(plain) == 1023
    for rank, megabytes, ratio in ((1, 4.2, 243), (2, 7.5, 136), (4, 14.2, 72), (7, 24.2, 42)):
        planned = payload_per_epoch(f"powersgd(rank={rank}, min_compression_rate=1)")  # the paper gives none
        assert round(planned, 1) == megabytes
        assert round(plain / planned) == ratio


@pytest.mark.full
@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_counted_bytes_agree_with_the_interface(world: int) -> None:
    hooks = ["allreduce", "bf16_compress", "quant4", "powersgd(rank=32)"]
    words = [sys.executable, "-m", "programs.links.wire_bytes", "--json", "--nproc", str(world), "--hooks", *hooks]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env, cwd=BENCH)
    assert done.returncode == 0, done.stderr
    answer = done.stdout[done.stdout.index("{") :]  # torch 2.10 prints gloo's connections
    for hook, (engine, stream, interface, packets) in json.loads(answer).items():
        # TCP also carries gloo's 48 bytes before each message and alone. PowerSGD's messages are small.
        assert engine < stream < engine * (1.03 if "powersgd" in hook else 1.01), hook
        assert interface == pytest.approx(stream + netns.HEADERS * packets), hook


@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
@pytest.mark.timeout(60)
def test_a_shaped_link_is_no_faster_than_asked_and_leaves_nothing_behind() -> None:
    with netns.Network(2, "100mbit") as net:
        assert net.transfer(6_000_000) < 105e6  # the slowdown depends on other work of the machine
        names = {*net.names, net.hub}
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not names & {line.split()[0] for line in left.splitlines() if line}
