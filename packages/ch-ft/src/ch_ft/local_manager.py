"""Start a lighthouse, a store and a manager in this process, for one machine.

The job does not survive the process of the lighthouse. Without it no quorum can form, and every replica's next step
ends in a quorum time-out. Use it in trusted networks only: torchft's lighthouse and checkpoint server authenticate no
client, and healing unpickles its input.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from ch_ft.manager import Abortable
from ch_ft.torchft_support import require_torchft

if TYPE_CHECKING:
    from torchft import Manager

log = logging.getLogger("commhooks")

NOT_SURVIVED = (
    "the lighthouse lives in this process: if this process ends, no replica can form a quorum again and the job is over"
)


@dataclass(slots=True)
class Local:
    """Member of a quorum, with the lighthouse if it is the first. A context manager.

    Attributes:
        manager: torchft's Manager.
        process_group: its process group. Give it to :class:`~ch_ft.DistributedDataParallel` too: peers then notice
            a failure at once.
        address: lighthouse to pass to ``local(lighthouse=...)`` in another process.
        not_survived: says if other replicas survive the death of this process.
    """

    manager: "Manager"
    process_group: Abortable
    address: str
    not_survived: str
    _lighthouse: Any
    _store: TCPStore

    def close(self) -> None:
        """Leave the quorum. This ends the job if the lighthouse is here."""
        self.process_group.abort()
        self.manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def local(
    *,
    state_dict: Callable[[], Any] | None = None,
    load_state_dict: Callable[[Any], None] | None = None,
    lighthouse: str | None = None,
    replica: str = "replica_0",
    min_replicas: int = 1,
    heartbeat: float = 1.0,
    group_timeout: float = 10.0,
    timeout: float = 20.0,
    quorum_timeout: float = 60.0,
    process_group: Abortable | None = None,
    **manager: Any,
) -> Local:
    """Start a manager for one replica, and a lighthouse if none is given.

    Args:
        state_dict: returns the state of model, optimizer and scheduler for a healing replica. Or call
            ``manager.register_state_dict_fn`` later.
        load_state_dict: loads it.
        lighthouse: address of a lighthouse to join; without it, one is started in this process.
        replica: name of this replica.
        min_replicas: fewest replicas that may train.
        heartbeat: seconds without a sign of life after which a replica is dead. Recovery takes at least as long.
        group_timeout: seconds that one collective may take.
        timeout: seconds for torchft's other operations; more than ``group_timeout``.
        quorum_timeout: seconds to wait for the others; more than a step and ``group_timeout`` together.
        process_group: the manager's group; by default a new ``torchft.ProcessGroupGloo``. Nightly builds of torchft on
            torch 2.14 or later also take one of torch's own, made with ``enable_reconfigure=True``; shut it down
            yourself.
        **manager: further arguments of torchft's Manager, e.g. ``use_async_quorum=False``, ``init_sync=False``.

    Raises:
        HookNotSupportedError: torchft is not installed, or lacks a name that ch-ft uses.
    """
    torchft = require_torchft()
    server = None
    if lighthouse is None:
        server = start_lighthouse(min_replicas=min_replicas, heartbeat=heartbeat)
        lighthouse = loopback(server.address())
        log.info("lighthouse for others to join: %s; %s", lighthouse, NOT_SURVIVED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = process_group or torchft.ProcessGroupGloo(timeout=timedelta(seconds=group_timeout))
    made = torchft.Manager(
        pg=group,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=min_replicas,
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(seconds=quorum_timeout),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        **{"hostname": "127.0.0.1", **manager},
    )
    survived = "the other replicas continue without it" if server is None else NOT_SURVIVED
    return Local(made, group, lighthouse, survived, server, store)


def start_lighthouse(*, min_replicas: int = 1, heartbeat: float = 1.0, join_timeout: float = 0.1) -> Any:
    """Start a lighthouse in this process, on a free port of loopback. It has ``.address()`` and ``.shutdown()``.

    Args:
        min_replicas: fewest replicas in a quorum.
        heartbeat: seconds without a sign of life after which a replica is dead.
        join_timeout: seconds that a quorum waits for known replicas that are alive but late.
    """
    return require_torchft().coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        heartbeat_timeout_ms=int(heartbeat * 1000),
        join_timeout_ms=int(join_timeout * 1000),
    )


def loopback(address: str) -> str:
    """Return a server's address on loopback. The server advertises the machine's name, which may not resolve to loopback.

    Example:
        >>> loopback("http://somewhere:4321")
        'http://127.0.0.1:4321'
    """
    return f"http://127.0.0.1:{address.rsplit(':', 1)[1].strip('/')}"
