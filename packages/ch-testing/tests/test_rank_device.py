"""The switch ``pytest --device``: ranks on a GPU, on one that they share, and on an imagined one."""

import os

import pytest
import torch
import torch.distributed as dist

from ch_testing import WorkerError, device_modes, rank_device, spawn

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(120)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")

SUITE = """
import pytest
from ch_testing import spawn

def body(rank, world):
    return rank

def helper():
    return spawn(body, 2)

@pytest.fixture
def results():
    return helper()

def test_by_a_fixture(results):
    assert results == [0, 1]

def test_by_a_helper():
    assert helper() == [0, 1]

@pytest.mark.cpu("tests gloo")
def test_gloo():
    assert spawn(body, 2) == [0, 1]

def test_without_ranks():
    assert body(0, 1) == 0
"""


def run(pytester: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=100)


def test_ranks_have_their_own_gpus_or_share_the_first() -> None:
    assert [rank_device.place(rank, 2, 2) for rank in range(2)] == [(0, {}), (1, {})]
    (first, one), (second, other) = (rank_device.place(rank, 2, 1) for rank in range(2))
    assert first == second == 0
    differ = {name for name in one if one[name] != other[name]}
    assert one.keys() == other.keys() and differ == {"NCCL_HOSTID"}
    assert "TORCH_NCCL_BLOCKING_WAIT" not in one  # a rank would wait for its peer inside a launch


def order_of_events(rank: int, world: int) -> list[object]:
    """Enter as on a machine with one GPU, and note what the rank does before its group."""
    from unittest import mock

    events: list[object] = []
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.accelerator, "set_device_index", lambda index: events.append(("device", index))),
        mock.patch.object(torch, "set_default_device", lambda device: events.append(("default", str(device)))),
        mock.patch.object(device_modes.DrawnOnCPU, "__enter__") as mode,
    ):
        rank_device.enter("cuda", rank, world)
    return [os.environ["NCCL_HOSTID"], *events, mode.call_count]


def test_a_rank_takes_its_gpu_and_variables_before_its_group() -> None:
    found = spawn(order_of_events, 2, device="cpu", group=False)
    assert found == [[f"rank{rank}", ("device", 0), ("default", "cuda:0"), 1] for rank in range(2)]
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.full
@NO_GPU
def test_without_a_gpu_tests_of_ranks_are_skipped_with_one_reason(pytester: pytest.Pytester) -> None:
    result = run(pytester, SUITE, "--device", "cuda", "-rs")
    result.assert_outcomes(skipped=2, deselected=2)
    result.stdout.fnmatch_lines(
        ["*ranks: --device cuda needs an NVIDIA GPU*skipped", "SKIPPED ?2? *--device cuda needs an NVIDIA GPU*"]
    )


@pytest.mark.full
def test_only_tests_that_start_ranks_follow_the_switch(pytester: pytest.Pytester) -> None:
    run(pytester, SUITE, "--device", "imagined").assert_outcomes(passed=2, deselected=2)


def test_the_mark_needs_a_reason(pytester: pytest.Pytester) -> None:
    result = run(pytester, SUITE.replace('"tests gloo"', ""))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pytest.mark.cpu needs a reason*"])


def drawn(rank: int, world: int) -> list[float]:
    generator = torch.Generator().manual_seed(7)
    made = torch.randn(3, generator=generator)
    assert made.device == torch.get_default_device()
    return [*made.tolist(), *torch.zeros(3).normal_(generator=generator).tolist()]


def test_a_cpu_generator_gives_the_same_numbers_on_every_device() -> None:
    assert spawn(drawn, 1, device="imagined") == spawn(drawn, 1, device="cpu")


def follows(rank: int, world: int) -> float:
    x = torch.ones(3, requires_grad=True)
    (x * torch.ones(3, device=x.device)).sum().backward()
    seen = torch.cat([x.grad, torch.tensor(x.detach().cpu().numpy()[:1])])
    dist.all_reduce(seen)
    host = seen.cpu()
    assert host.device == torch.device("cpu") != seen.device
    return float(host.to(seen.device)[0] + seen[1])


def by_name(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3, device="cpu") * 2)


def moved(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(3).cpu())


def mixed(rank: int, world: int) -> None:
    torch.nn.Linear(3, 3)(torch.ones(3, device="cpu"))


def in_a_backward(rank: int, world: int) -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: dist.all_reduce(torch.zeros(3)))  # no default device applies there
    x.sum().backward()


def as_numpy(rank: int, world: int) -> None:
    torch.ones(3).numpy()


def test_tensors_of_the_default_device_pass() -> None:
    assert spawn(follows, 2, device="imagined") == [4.0, 4.0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (by_name, "allreduce.. got a CPU tensor of shape .3,"),
        (moved, "allreduce.. got a CPU tensor of shape .3,"),
        (in_a_backward, "allreduce.. got a CPU tensor of shape .3,"),
        (mixed, "linear.. got a CPU tensor"),
        (as_numpy, "call cpu.. first"),
    ],
)
def test_a_cpu_tensor_made_by_name_is_found(body: object, reason: str) -> None:
    assert spawn(body, 2, device="cpu") == [None, None]  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match=reason):
        spawn(body, 2, device="imagined")  # type: ignore[arg-type]
