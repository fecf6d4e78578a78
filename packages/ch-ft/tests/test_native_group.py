"""A Manager over one of torch's own process groups (torch 2.14, torchft's nightly). Each quorum
reconfigures the group.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ch_ft

torchft = pytest.importorskip("torchft")
quorum = pytest.importorskip("ch_testing.torchft.quorum")  # quiets torchft before any part of it starts

pytestmark = [
    pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="torch < 2.14: groups cannot reconfigure"),
    pytest.mark.skipif(
        not hasattr(torchft.process_group, "ReconfigureOptions"), reason="torchft 0.2.0 takes its own groups only"
    ),
]

NET = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))


def native(store: dist.Store, rank: int, world: int) -> dist.ProcessGroup:
    """Return one of torch's own gloo groups. It has no connection before its first quorum."""
    group = dist.ProcessGroup(store, rank, world)
    backend = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=10), enable_reconfigure=True)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def train(address: str, store: dist.Store, number: int, stop: int, hook: str) -> dict[int, tuple[int, float]]:
    """Train one replica, which leaves at step ``stop``. Return participants and the sum of the parameters by committed
    step.
    """
    group = native(store, number, 3)
    net = copy.deepcopy(NET)
    seen = {}
    with ch_ft.local(
        lighthouse=address, replica=f"replica_{number}", process_group=group, state_dict=net.state_dict,
        load_state_dict=net.load_state_dict, quorum_timeout=20, min_replicas=2,
    ) as member:  # fmt: skip
        manager = member.manager
        model = ch_ft.DistributedDataParallel(manager, net, hook=hook, process_group=group, bucket_cap_mb=0.0005)
        optimizer = ch_ft.OptimizerWrapper(manager, torch.optim.SGD(net.parameters(), lr=0.05))
        while manager.current_step() < stop:
            optimizer.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number + 10 * manager.current_step()))
            model(x).pow(2).mean().backward()
            if optimizer.step():
                total = float(sum(p.detach().double().sum() for p in net.parameters()))
                seen[manager.current_step()] = manager.num_participants(), total
        assert model.handle is not None
        assert model.handle.stats()["compressed_steps"] > 0
    group.shutdown()
    return seen


@pytest.mark.timeout(100)
@pytest.mark.parametrize("hook", ["powersgd(rank=2)", "quant4(block=16, error_feedback=True)"])
def test_replicas_continue_without_one_that_left(hook: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Each replica needs a separate connection, because all of them wait on the store at once.
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(3)]
    with quorum.lighthouse(min_replicas=2, heartbeat=1.0, join_timeout=3.0) as address, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(train, address, stores[n], n, stop, hook) for n, stop in enumerate((12, 12, 6))]
        logs = [future.result(timeout=80) for future in running]
    for step in set(logs[0]) | set(logs[1]):
        assert len({log[step] for log in logs if step in log}) == 1, step
    assert {3, 2} == {participants for participants, _ in logs[0].values()}
    assert logs[0][12][0] == 2
