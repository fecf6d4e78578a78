"""A network of N Linux network namespaces, with links of a given rate, round trip, jitter and loss.

    with Network(world=2, link="200mbit,80ms") as net:
        print(net.verify())  # bits per second of a real transfer
        launch(worker, 2, enter=net.enter)  # rank r runs inside namespace r

Each namespace has an interface ``IFACE``, which Gloo uses. A token bucket filter limits its rate, as a network card does, and
TCP uses cubic, Linux's default, and keeps its window while a connection is idle. With ``ranks_per_node`` a namespace is a
node of several ranks, which share the interface and reach each other over loopback. `sent_here` reads the interface's
counters. This needs root and iproute2; `why_not` returns the reason if it is unavailable.

A bridge joins the interfaces if the link has a rate only. Otherwise the interfaces are TUN devices with packets of 1,500
bytes, and a process of its own delays and drops packets (:mod:`ch_bench.links.line`). It limits what a node receives, too.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from ch_bench.links.line import Carried
from ch_bench.links.link import Link
from commhooks import CommHooksError

IFACE = "ch0"
CLONE_NEWNET = 0x40000000  # linux/sched.h
HEADERS = 14 + 20 + 32  # bytes per packet: Ethernet, IPv4, TCP with time stamps (Linux's default)
MTU = 1500
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
T = TypeVar("T")


class LinkError(CommHooksError, RuntimeError):
    """Network namespaces are unavailable, or a link does not have the requested rate."""


def why_not(*links: Link) -> str:
    """Return the reason why network namespaces with such links are unavailable, or an empty string."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if any(link.delayed for link in links) and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a link with a round trip needs /dev/net/tun, which is missing or closed here"
    probe = f"chprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"this kernel or container refuses network namespaces: {made.stderr.strip()}" if made.returncode else ""


class Network:
    """Context manager of namespaces joined by links.

    Args:
        world: number of ranks.
        link: between every two namespaces, as :meth:`.Link.parse` reads it; ``None`` for a link without limits.
        ranks_per_node: ranks of each namespace, a divisor of ``world``.
        connections: that gloo opens between two ranks. It takes them in turns, with two threads for each.
        seed: of jitter and loss.

    Attributes:
        carried: what the line did, after the exit. ``None`` for a link without a line.
    """

    def __init__(
        self,
        world: int,
        link: str | Link | None = None,
        *,
        ranks_per_node: int = 1,
        connections: int = 1,
        seed: int = 0,
    ) -> None:
        self.link = Link.parse(link) if isinstance(link, str) else link or Link("")
        self.connections, self.ranks_per_node, self.seed = connections, ranks_per_node, seed
        self.names = [f"ch{os.getpid()}r{node}" for node in range(world // ranks_per_node)]
        self.hub = f"ch{os.getpid()}hub"
        self.line: subprocess.Popen[bytes] | None = None
        self.carried: Carried | None = None

    def __enter__(self) -> "Network":
        reason = why_not(self.link)
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
        """Measure the round trip and the rate, and return the bits per second that arrive from the first namespace in the second.

        Headers take a twentieth. A busy machine can only make a link slower, so the best of three counts. Loss makes TCP
        slower than the link, and jitter changes the round trip, so neither is judged on such a link.

        Raises:
            LinkError: a shaped link is not within 15 % of its rate, or not within 1 ms and 5 % of its round trip.
        """
        link, trip = self.link, self.round_trip()
        if link.round_trip is not None and not link.jitter and not link.loss and trip > 1.05 * link.round_trip + 1e-3:
            raise LinkError(
                f"a round trip takes {trip * 1e3:.1f} ms instead of {link.round_trip * 1e3:g}: end other programs"
            )
        size = int((link.rate or 2e9) / 8 * seconds)
        if link.loss:
            return self.transfer(size // 20)
        got = 0.0
        for _ in range(3):
            got = max(got, self.transfer(size))
            if link.rate is None or 0.85 * link.rate <= got <= 1.05 * link.rate:
                return got
        raise LinkError(
            f"the link has {got / 1e6:.0f} Mbit/s instead of {link.text}: end other programs, or choose a lower rate"
        )

    def transfer(self, size: int) -> float:
        """Send ``size`` bytes over TCP and return the bits per second at which the second half arrives.

        In the first half TCP looks for the rate, which takes several round trips.
        """
        with self.connection() as (client, server):
            sender = threading.Thread(target=_send, args=(client, size))
            sender.start()
            arrived, half, begun, buffer = 0, 0, 0.0, bytearray(1 << 20)
            while arrived < size:
                arrived += server.recv_into(buffer)
                if not half and arrived >= size // 2:
                    half, begun = arrived, time.perf_counter()
            elapsed = time.perf_counter() - begun
            sender.join()
        return (arrived - half) * 8 / elapsed

    def round_trip(self, times: int = 10) -> float:
        """Return the least seconds that one byte takes to the second namespace and back."""
        return min(self.round_trips(times))

    def round_trips(self, times: int) -> list[float]:
        """Return the seconds of several round trips of one byte, one after another."""
        taken = []
        with self.connection() as (client, server):
            for _ in range(times):
                begun = time.perf_counter()
                for near, far in ((client, server), (server, client)):
                    near.send(b"x")
                    far.recv(1)
                taken.append(time.perf_counter() - begun)
        return taken

    def cut(self) -> None:
        """Drop every packet that enters the line, until :meth:`restore`. Nobody is told, as when a distant cable breaks."""
        self._tell(b"cut\n")

    def restore(self) -> None:
        """Carry packets again after :meth:`cut`."""
        self._tell(b"restore\n")

    @contextlib.contextmanager
    def connection(self, far: int = 1) -> Iterator[tuple[socket.socket, socket.socket]]:
        """Connect the first namespace to another one over TCP."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(within(self.names[far], lambda: socket.create_server((self.address(far), 0))))
            client = within(self.names[0], lambda: socket.create_connection(server.getsockname(), timeout=20))
            accepted, _ = server.accept()
            for each in (client, accepted):
                stack.enter_context(each)
                each.settimeout(60)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield client, accepted

    def _tell(self, command: bytes) -> None:
        if self.line is None or self.line.stdin is None:
            raise LinkError(
                f"{self.link.text or 'a link without limits'} has no line to cut: add a round trip, as in 1gbit,0ms"
            )
        self.line.stdin.write(command)
        self.line.stdin.flush()

    def _build(self) -> None:
        devices = []
        if not self.link.delayed:
            _ip("netns", "add", self.hub)
            _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.hub, "link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            _ip("netns", "add", name)
            if self.link.delayed:
                devices.append(within(name, _open_device))
                # The queue holds packets while the line is not scheduled, on a busy machine.
                _ip("-n", name, "link", "set", IFACE, "mtu", str(MTU), "txqueuelen", "4000")
            else:
                peer = ["peer", "name", f"p{node}", "netns", self.hub]
                _ip("-n", name, "link", "add", IFACE, "type", "veth", *peer)
                _ip("-n", self.hub, "link", "set", f"p{node}", "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", IFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", IFACE, "up")
            # BBR takes a link with bursts of collectives for a slower one. A route may name cubic where a kernel that prefers
            # BBR lets no namespace choose it.
            net = ["10.77.0.0/24", "dev", IFACE, "proto", "kernel", "scope", "link", "src", self.address(node)]
            _ip("-n", name, "route", "change", *net, "congctl", "cubic")
            within(name, _keep_windows)
            if self.link.rate:
                _command("tc", "-n", name, "qdisc", "add", "dev", IFACE, "root", *_shape(self.link))
        if devices:
            self._start_line(devices)

    def _start_line(self, devices: list[int]) -> None:
        link = self.link
        described = {
            "devices": devices,
            "delay": (link.round_trip or 0.0) / 2,
            "jitter": link.jitter,
            "loss": link.loss,
        }
        described |= {"rate": link.rate, "mtu": MTU, "seed": self.seed}
        words = [sys.executable, "-m", "ch_bench.links.line", json.dumps(described)]
        self.line = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=devices)
        for device in devices:
            os.close(device)

    def _remove(self) -> None:
        if self.line is not None:
            out, _ = self.line.communicate()  # the end of the commands ends the line
            if self.line.returncode == 0:
                self.carried = Carried(*json.loads(out))
            self.line = None
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
        _command("tc", "qdisc", "replace", "dev", IFACE, "root", *_shape(Link.parse(rate)))


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


def _shape(link: Link) -> list[str]:
    """Return tc's words for the limit of a link.

    After an idle time a bucket lets its whole burst through at once. Half a millisecond is enough for a late timer. On a bridge
    the kernel passes on packets of 64 KiB, which must fit.
    """
    rate = link.rate or 0.0
    burst = max(2 * MTU, int(rate / 8 * 5e-4)) if link.delayed else 128 * 1024
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "latency", "50ms"]


def _open_device() -> int:
    """Return the file of a new TUN device ``IFACE`` in this thread's namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", IFACE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _keep_windows() -> None:
    """Let TCP keep its window while a connection is idle.

    Otherwise a message after half a second of silence needs several round trips, and programs whose candidates take turns
    would measure the silence.
    """
    with open("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "w") as switch:
        switch.write("0")


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
