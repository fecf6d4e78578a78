"""Training over a bad line: loss, jitter and cuts delay it and change no bit, or every rank raises a typed error in time."""

import atexit
import hashlib
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ch_core
import commhooks
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_testing import spawn

REASON = netns.why_not(Link.parse("0ms"))
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(REASON), reason=REASON or "runs")]
LINK = "50mbit,80ms"
STEPS, CUT = 6, 3
Outcome = tuple[str, float]
"""Digest of the parameters, or the type and the beginning of an error's message; and the seconds of the longest step."""


def train(rank: int, world: int, folder: str, hook: str, deadline: float | None, group: float) -> Outcome:
    """Train a few steps. Files tell when step ``CUT`` begins, and when this rank has raised."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), bucket_cap_mb=0.25)
    if hook != "torch":
        commhooks.attach(model, hook, timeout=deadline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    longest = 0.0
    for step in range(STEPS):
        if step == CUT and rank == 0:
            Path(folder, "cut").touch()
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(100 * rank + step))
        begun = time.perf_counter()
        try:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        except Exception as error:
            Path(folder, f"raised{rank}").touch()
            return f"{type(error).__name__}: {error}"[:200], time.perf_counter() - begun
        longest = max(longest, time.perf_counter() - begun)
    dist.barrier()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, longest


def outcomes(
    folder: Path, words: str | None, hook: str, *, cut: float = 0.0, deadline: float | None = None, group: float = 200.0
) -> list[Outcome]:
    """Train two ranks on a link, which is cut in the middle of a step: for some seconds, or until both have raised."""
    done = threading.Event()
    begins, *raised = (folder / name for name in ("cut", "raised0", "raised1"))
    with netns.Network(2, words) as net:

        def cutter() -> None:
            while not begins.exists() and not done.wait(0.002):
                pass
            net.cut()
            end = time.monotonic() + cut
            while time.monotonic() < end and not all(path.exists() for path in raised) and not done.wait(0.05):
                pass
            net.restore()

        thread = threading.Thread(target=cutter if cut else lambda: None)
        thread.start()
        try:
            return spawn(train, 2, str(folder), hook, deadline, group, timeout=group + 60, group=False, enter=net.enter)
        finally:
            done.set()
            thread.join()


def same_bits_as_on_a_good_link(folder: Path, found: list[Outcome], hook: str) -> None:
    (folder / "good").mkdir()
    good = outcomes(folder / "good", None, hook)
    assert found[0][0] == found[1][0] == good[0][0], found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("words", [f"{LINK},1% loss", f"{LINK},20ms jitter"])
def test_loss_and_jitter_change_no_bit(tmp_path: Path, words: str) -> None:
    hook = "quant4(error_feedback=True)"
    same_bits_as_on_a_good_link(tmp_path, outcomes(tmp_path, words, hook), hook)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_a_cut_below_the_deadline_changes_no_bit(tmp_path: Path, seconds: float) -> None:
    hook = "powersgd(rank=4)"
    found = outcomes(tmp_path, LINK, hook, cut=seconds)
    assert max(longest for _, longest in found) > seconds  # the cut was in the middle of a step
    same_bits_as_on_a_good_link(tmp_path, found, hook)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("hook", ["quant4", "powersgd(rank=4)", "topk(density=0.01)", "bf16_compress"])
def test_a_cut_above_the_deadline_is_a_typed_error_on_every_rank(tmp_path: Path, hook: str) -> None:
    for what, seconds in outcomes(tmp_path, LINK, hook, cut=60.0, deadline=4.0):
        assert what.startswith("HookTimeoutError: "), what
        assert seconds < 12.0  # the deadline, and again as long for what the ranks tell each other


def ends_first(rank: int, world: int, folder: str) -> list[float]:
    """Gather short messages and a long one. Rank 0 ends as soon as it can, and rank 1 reads message by message."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    transport = ch_core.FarTransport(None, ch_core.Link.parse(LINK))

    def gather(numel: int) -> tuple[torch.Tensor, ch_core.Work]:
        output = torch.empty(world * numel)
        return output, transport.all_gather(output, torch.full((numel,), float(rank)))

    for _ in range(3):  # TCP's window grows
        gather(500_000)[1].wait(30.0)
    if rank == 0:
        time.sleep(3.0)  # the messages of rank 1 have arrived
    started = [*(gather(8) for _ in range(20)), gather(500_000)]
    for _, work in started:
        work.wait(30.0)
        time.sleep(0.1 if rank else 0.0)  # rank 1 posts its next receives while the long message travels, for 1.6 s
    atexit._run_exitfuncs()  # as a process does that ends by itself
    return started[-1][0][::500_000].tolist()


@pytest.mark.timeout(100)
def test_a_rank_that_ends_first_cuts_no_message_on_the_way(tmp_path: Path) -> None:
    with netns.Network(2, "10mbit,80ms") as net:
        assert spawn(ends_first, 2, str(tmp_path), timeout=80, group=False, enter=net.enter) == [[0.0, 1.0]] * 2
