"""The embedded default: a lighthouse, a store and a manager in this process, for one machine.

What it does not survive: the process that holds the lighthouse. When that dies, no quorum can form any more and every
replica's next step ends in a quorum time-out. Neither torchft's lighthouse nor its checkpoint server asks who is
calling, and both unpickle what they receive: trusted networks only.
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
    """A member of a quorum and, if it is the first, the lighthouse. A context manager.

    Attributes:
        manager: torchft's Manager.
        process_group: the group given to it; give it to :class:`~ch_ft.DistributedDataParallel` too, which then
            fails fast.
        address: what ``local(lighthouse=...)`` of another process joins.
        not_survived: what the death of this process means for the others.
    """

    manager: "Manager"
    process_group: Abortable
    address: str
    not_survived: str
    _lighthouse: Any
    _store: TCPStore

    def close(self) -> None:
        """Leave the quorum; with the lighthouse, end the job."""
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
    """Start what one replica on one machine needs.

    Args:
        state_dict: what a healing replica is sent: model, optimizer, scheduler. Can also be given later, with
            ``manager.register_state_dict_fn``.
        load_state_dict: how it takes that over.
        lighthouse: address of a lighthouse to join; without it, one is started in this process.
        replica: name of this replica.
        min_replicas: fewest replicas that may train.
        heartbeat: seconds of silence after which the lighthouse takes a replica for dead. Bounds recovery from below.
        group_timeout: seconds that one collective may take.
        timeout: seconds for torchft's other operations; more than ``group_timeout``.
        quorum_timeout: seconds to wait for the others; more than a step and ``group_timeout`` together.
        process_group: the manager's group; by default a new ``torchft.ProcessGroupGloo``. Nightly builds of torchft on
            torch 2.14 or later also take one of torch's own, made with ``enable_reconfigure=True``; shut it down
            yourself.
        **manager: further arguments of torchft's Manager, e.g. ``use_async_quorum=False``, ``init_sync=False``.

    Raises:
        HookNotSupportedError: torchft is not installed, or is one that ch-ft cannot use.
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
    survived = "replicas other than this one go on without it" if server is None else NOT_SURVIVED
    return Local(made, group, lighthouse, survived, server, store)


def start_lighthouse(*, min_replicas: int = 1, heartbeat: float = 1.0, join_timeout: float = 0.1) -> Any:
    """A lighthouse of this process, on loopback, on any free port; ``.address()`` and ``.shutdown()``.

    Args:
        min_replicas: fewest replicas in a quorum.
        heartbeat: seconds of silence after which a replica is taken for dead.
        join_timeout: seconds that a quorum waits for known replicas that are alive but late.
    """
    return require_torchft().coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        heartbeat_timeout_ms=int(heartbeat * 1000),
        join_timeout_ms=int(join_timeout * 1000),
    )


def loopback(address: str) -> str:
    """A server bound to loopback advertises the machine's name, which need not lead there.

    Example:
        >>> loopback("http://somewhere:4321")
        'http://127.0.0.1:4321'
    """
    return f"http://127.0.0.1:{address.rsplit(':', 1)[1].strip('/')}"
