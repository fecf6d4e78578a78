"""A network of N Linux network namespaces on one bridge, with uplinks of a given rate.

    with Network(world=2, rate="200mbit") as net:
        print(net.verify())  # bits per second of a real transfer
        launch(worker, 2, enter=net.enter)  # rank r runs inside namespace r

Each namespace has an interface ``IFACE``, which Gloo uses. A token bucket filter limits its rate, as a network card does, and
TCP uses Linux's default congestion control (cubic). With ``ranks_per_node`` a namespace is a node of several ranks, which
share the interface and reach each other over loopback. `sent_here` reads the interface's counters. This needs root and
iproute2; `why_not` returns the reason if it is unavailable.
"""

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from commhooks import CommHooksError

IFACE = "ch0"
CLONE_NEWNET = 0x40000000  # linux/sched.h
HEADERS = 14 + 20 + 32  # bytes per packet: Ethernet, IPv4, TCP with time stamps (Linux's default)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
T = TypeVar("T")


class LinkError(CommHooksError, RuntimeError):
    """Network namespaces are unavailable, or a link does not have the requested rate."""


def parse_rate(rate: str) -> float:
    """Return bits per second for a text such as ``"200mbit"``. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    if match is None:
        raise ValueError(f"{rate!r} is not a rate; legal is a number and kbit, mbit or gbit, as in 200mbit")
    return float(match[1]) * UNITS[match[2]]


def why_not() -> str:
    """Return the reason why network namespaces are unavailable, or an empty string."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    probe = f"chprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"this kernel or container refuses network namespaces: {made.stderr.strip()}" if made.returncode else ""


class Network:
    """Context manager of namespaces joined by a bridge.

    Args:
        world: number of ranks.
        rate: limit of each namespace's uplink; ``None`` for no limit.
        ranks_per_node: ranks of each namespace, a divisor of ``world``.
        burst: bytes that an uplink sends at once after it was idle, as tc writes them.
        connections: that gloo opens between two ranks. It takes them in turns, with two threads for each.
    """

    def __init__(
        self,
        world: int,
        rate: str | None = None,
        *,
        ranks_per_node: int = 1,
        burst: str = "128kb",
        connections: int = 1,
    ) -> None:
        self.bits = parse_rate(rate) if rate else None
        self.connections = connections
        self.rate, self.ranks_per_node, self.burst = rate, ranks_per_node, burst
        self.names = [f"ch{os.getpid()}r{node}" for node in range(world // ranks_per_node)]
        self.hub = f"ch{os.getpid()}hub"

    def __enter__(self) -> "Network":
        reason = why_not()
        if reason:
            raise LinkError(reason)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def enter(self) -> "Enter":
        """Function for a new rank to call first; it can be pickled."""
        return Enter(self.names, self.ranks_per_node, self.connections)

    def address(self, node: int) -> str:
        """Return the IPv4 address of a namespace."""
        return f"10.77.0.{node + 1}"

    def verify(self, seconds: float = 1.0) -> float:
        """Send for about ``seconds`` from the first namespace to the second and return the bits per second that arrive.

        Headers take a twentieth. A busy machine can only make a link slower, so the best of three counts.

        Raises:
            LinkError: a shaped link is not within 15 % of its rate.
        """
        size = int((self.bits or 2e9) / 8 * seconds)
        got = 0.0
        for _ in range(3):
            got = max(got, self.transfer(size))
            if self.bits is None or 0.85 * self.bits <= got <= 1.05 * self.bits:
                return got
        raise LinkError(
            f"the link has {got / 1e6:.0f} Mbit/s instead of {self.rate}: end other programs, or choose a lower rate"
        )

    def transfer(self, size: int) -> float:
        """Send ``size`` bytes from the first namespace to the second over TCP and return the bits per second that arrive."""
        server = within(self.names[1], lambda: socket.create_server((self.address(1), 0)))
        client = within(self.names[0], lambda: socket.create_connection(server.getsockname(), timeout=10))
        connection, _ = server.accept()
        sender = threading.Thread(target=_send, args=(client, size))
        with server, client, connection:
            sender.start()
            arrived, buffer, start = 0, bytearray(1 << 20), time.perf_counter()
            while arrived < size:
                arrived += connection.recv_into(buffer)
            elapsed = time.perf_counter() - start
            sender.join()
        return arrived * 8 / elapsed

    def _build(self) -> None:
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            _ip("netns", "add", name)
            peer = ["peer", "name", f"p{node}", "netns", self.hub]
            _ip("-n", name, "link", "add", IFACE, "type", "veth", *peer)
            _ip("-n", self.hub, "link", "set", f"p{node}", "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", IFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", IFACE, "up")
            within(name, _use_cubic)
            if self.rate:
                _command("tc", "-n", name, "qdisc", "add", "dev", IFACE, "root", *_shape(self.rate, self.burst))

    def _remove(self) -> None:
        for name in [*self.names, self.hub]:  # deletes the interfaces, too
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Sent(NamedTuple):
    """Counters of an interface: sent bytes including headers, and packets."""

    bytes: int
    packets: int

    @property
    def stream(self) -> int:
        """Bytes without the headers of the packets."""
        return self.bytes - HEADERS * self.packets


def sent_here() -> Sent:
    """Return the counters of ``IFACE`` in this thread's namespace."""
    with open("/proc/thread-self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == IFACE:
                fields = counters.split()
                return Sent(int(fields[8]), int(fields[9]))
    raise RuntimeError(f"no interface {IFACE}: this thread has not entered a Network")


def limit_here(rate: str | None) -> None:
    """Limit the uplink of this thread's namespace, or remove the limit. One rank of each node calls it."""
    if rate is None:
        subprocess.run(["tc", "qdisc", "del", "dev", IFACE, "root"], capture_output=True)  # fails if there is no limit
    else:
        _command("tc", "qdisc", "replace", "dev", IFACE, "root", *_shape(rate))


class Enter:
    """``Enter(names)(rank)`` moves the calling thread and its future threads to the rank's namespace.

    Args:
        names: of the namespaces.
        ranks_per_node: ranks of each. From two on, torchrun's variables name the node.
        connections: see :class:`Network`.
    """

    def __init__(self, names: list[str], ranks_per_node: int = 1, connections: int = 1) -> None:
        self.names, self.ranks_per_node, self.connections = names, ranks_per_node, connections

    def __call__(self, rank: int) -> None:
        node = rank // self.ranks_per_node
        _setns(self.names[node])
        os.environ["GLOO_SOCKET_IFNAME"] = ",".join([IFACE] * self.connections)
        if self.ranks_per_node > 1:
            os.environ.update(GROUP_RANK=str(node), LOCAL_WORLD_SIZE=str(self.ranks_per_node))


def within(name: str, make: Callable[[], T]) -> T:
    """Call ``make`` in a new thread inside a namespace. A socket made there stays there."""
    made: list[Any] = []

    def body() -> None:
        try:
            _setns(name)
            made.append(make())
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    result: T = made[0]
    return result


def _shape(rate: str, burst: str = "128kb") -> list[str]:
    return ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]


def _use_cubic() -> None:
    """Use cubic: BBR takes a link with bursts of collectives for a slower one, so results would depend on the machine."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as control:
        control.write("cubic")


def _setns(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 only
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _send(client: socket.socket, size: int) -> None:
    block = memoryview(bytes(1 << 20))
    while size > 0:
        size -= client.send(block[: min(size, len(block))])


def _ip(*words: str) -> str:
    return _command("ip", *words)


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)!r} failed: {done.stderr.strip()}")
    return done.stdout
