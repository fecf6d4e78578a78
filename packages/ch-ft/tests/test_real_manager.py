"""Means and overflow over torchft's real Manager. Two replicas are threads around one lighthouse."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ch_ft
import commhooks
from commhooks import HookNotSupportedError, RankMismatchError

torchft = pytest.importorskip("torchft")
quorum = pytest.importorskip("ch_testing.torchft.quorum")  # quiets torchft before any part of it starts


@pytest.fixture
def address() -> Iterator[str]:
    with quorum.lighthouse(min_replicas=2, heartbeat=2.0, join_timeout=1.0) as found:
        yield found


def together(address: str, body: Callable[[ch_ft.Local, int], Any], replicas: int = 2, **options: Any) -> list[Any]:
    """Run ``body`` on two replicas at once, or on more."""

    def one(number: int) -> Any:
        with ch_ft.local(
            lighthouse=address,
            replica=f"replica_{number}",
            min_replicas=2,
            state_dict=dict,
            load_state_dict=lambda state: None,
            quorum_timeout=15,
            **options,
        ) as member:
            return body(member, number)

    with ThreadPoolExecutor(replicas) as pool:
        return [future.result(timeout=40) for future in [pool.submit(one, n) for n in range(replicas)]]


def module(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a module whose gradients equal its input."""
    return torch.nn.Linear(4, 4, bias=False, dtype=dtype)


KINDS = [
    "plain",
    "pure",
    "allreduce",
    "bf16_compress",
    "bf16_compress(accumulate='fp32')",
    "powersgd(rank=1, min_compression_rate=0.5)",
    "quant8(block=16)",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_mean_over_participants(address: str, kind: str) -> None:
    def body(member: ch_ft.Local, number: int) -> tuple[torch.Tensor, bool]:
        model = build(kind, member, module())
        optimizer = ch_ft.OptimizerWrapper(member.manager, torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.zero_grad()
        model(torch.full((1, 4), float(1 + number))).sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        if kind.startswith("powersgd"):
            assert model.handle is not None
            assert model.handle.stats()["payload_bytes"] > 0
        if kind.startswith("quant8"):
            assert model.handle.stats()["compressed_steps"] == 1
        return weight.grad.clone(), optimizer.step()

    for gradient, committed in together(address, body, init_sync=False):
        rounded = {"rtol": 5e-3, "atol": 0.0} if kind.startswith("quant8") else {}
        torch.testing.assert_close(gradient, torch.full((4, 4), 1.5), **rounded)
        assert committed


def build(kind: str, member: ch_ft.Local, inner: torch.nn.Module) -> Any:
    if kind == "pure":
        return ch_ft.PureDistributedDataParallel(member.manager, inner)
    hook = None if kind == "plain" else kind
    return ch_ft.DistributedDataParallel(member.manager, inner, hook=hook, process_group=member.process_group)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "hook", [pytest.param("bf16_compress", marks=pytest.mark.full), "quant8(block=16, error_feedback=True)"]
)
def test_weighted_means_follow_members_that_heal_and_leave(address: str, hook: str) -> None:
    """At step 0 one member contributes and the others heal. Weights grow a thousandfold at step 2, and then member 2 leaves."""
    weights = [3.0, 1000.0, 40.0]

    def weight(number: int, step: int) -> float:
        return weights[number] * (1000.0 if step >= 2 else 1.0)

    def body(member: ch_ft.Local, number: int) -> dict[int, tuple[bool, torch.Tensor, float | None]]:
        manager, found = member.manager, {}
        model = build("plain", member, module())
        handle = commhooks.attach(model, hook, weighted=True)
        optimizer = ch_ft.OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=0.0))
        while (step := manager.current_step()) < 6 and not (number == 2 and step == 3):
            optimizer.zero_grad()
            manager.num_participants()  # waits for the quorum, after which the step is that of the others
            step = manager.current_step()
            loss = model(torch.full((1, 4), float(1 + number))).sum()
            handle.weigh(weight(number, step))
            loss.backward()
            contributed = manager.is_participating()
            if optimizer.step():
                (parameter,) = model.parameters()
                assert parameter.grad is not None and handle.hook_state is not None
                reference = handle.hook_state.versions.next_reference
                found[step] = contributed, parameter.grad.clone(), reference
        return found

    members = together(address, body, replicas=3)
    counts = []
    for step in range(6):
        here = {number: one[step] for number, one in enumerate(members) if step in one}
        who = [number for number, (contributed, _, _) in here.items() if contributed]
        counts.append(len(who))
        mean = sum((1 + n) * weight(n, step) for n in who) / sum(weight(n, step) for n in who)
        first = here[who[0]]
        for _, found, reference in here.values():
            assert torch.equal(found, first[1]) and reference == first[2]
            torch.testing.assert_close(found, torch.full((4, 4), mean), rtol=1e-2, atol=0.0)
    assert counts[0] == 1 and counts[2] == 3 and counts[5] == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "dtype"), [("plain", "float16"), ("pure", "float16"), ("fp16_compress", "float32")])
def test_fp16_with_values_of_40_000_does_not_overflow(address: str, kind: str, dtype: str) -> None:
    number_type: torch.dtype = getattr(torch, dtype)

    def body(member: ch_ft.Local, number: int) -> list[float]:
        model = build(kind, member, module(number_type))
        member.manager.start_quorum()
        (model(torch.ones(1, 4, dtype=number_type)).sum() * 40_000).backward()
        assert member.manager.should_commit()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return [float(x) for x in weight.grad.unique()]

    assert together(address, body, init_sync=False) == [[40_000.0], [40_000.0]]


@pytest.mark.timeout(60)
def test_at_step_0_the_only_contributor_is_divided_by_one(address: str) -> None:
    """Torchft synchronises new members at step 0. One of two counted members contributes, and a hook divides by one."""

    def body(member: ch_ft.Local, number: int) -> list[float]:
        model = build("allreduce", member, module())
        member.manager.start_quorum()
        model(torch.full((1, 4), 2.0)).sum().backward()
        assert member.manager.should_commit()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return [float(x) for x in weight.grad.unique()]

    assert together(address, body) == [[2.0], [2.0]]


@pytest.mark.timeout(60)
def test_replicas_with_different_hooks_get_an_error(address: str) -> None:
    def body(member: ch_ft.Local, number: int) -> str:
        model = build("allreduce" if number else "bf16_compress", member, module())
        member.manager.start_quorum()
        with pytest.raises(RankMismatchError) as caught:
            model(torch.ones(1, 4)).sum().backward()
        assert not member.manager.should_commit()
        return str(caught.value)

    first, second = together(address, body, init_sync=False)
    assert "hook: here bf16_compress" in first
    assert "hook: here allreduce" in second
    assert "parameters" not in first


class OneProcess(torchft.process_group.ProcessGroupWrapper):
    """Wraps another group, like torchft's own wrappers."""


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (torchft.process_group.ProcessGroupDummy(0, 1), "a ProcessGroupDummy, discards"),
        (OneProcess(pg=torchft.process_group.ProcessGroupDummy(0, 1)), "a ProcessGroupDummy, discards"),
        (torchft.process_group.ProcessGroupBabyGloo(), "a ProcessGroupBabyGloo, lives in another process"),
    ],
)
def test_groups_without_the_other_collectives_are_refused_by_name(group: Any, reason: str) -> None:
    with ch_ft.local(process_group=group, state_dict=dict, load_state_dict=lambda state: None) as member:
        assert build("powersgd(rank=1)", member, module()).handle is not None, "sums are all that it needs"
        with pytest.raises(
            HookNotSupportedError, match=f"quant8.*needs all_gather, all_to_all, and its process group, {reason}"
        ):
            build("quant8", member, module())


@pytest.mark.timeout(60)
def test_the_embedded_default_trains_alone_and_lets_others_join() -> None:
    with ch_ft.local(init_sync=False, state_dict=dict, load_state_dict=lambda state: None) as first:
        assert first.address.startswith("http://127.0.0.1:")
        assert "lighthouse lives in this process" in first.not_survived
        model = build("powersgd(rank=1, min_compression_rate=0.5)", first, module())
        optimizer = ch_ft.OptimizerWrapper(first.manager, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            assert optimizer.step()
        assert first.manager.current_step() == 3
        assert model.handle.stats()["steps"] == 3


@pytest.mark.timeout(60)
def test_two_levels_are_refused_by_name() -> None:
    """Members join and leave, and two levels need ranks that stay on their nodes."""
    with (
        ch_ft.local(state_dict=dict, load_state_dict=lambda state: None) as member,
        pytest.raises(HookNotSupportedError, match=r"two_level\(quant4\) needs ranks that stay on their nodes"),
    ):
        build("two_level(quant4)", member, module())
