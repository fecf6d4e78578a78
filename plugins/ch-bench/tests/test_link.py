"""Links are read from words, and real packets show that a line has the rate, round trip, jitter and loss of its words."""

import itertools
import socket
import statistics
import subprocess
import time

import pytest

from ch_bench.links import netns
from ch_bench.links.line import Drift, Line
from ch_bench.links.link import Link

REASON = netns.why_not(Link.parse("0ms"))
needs_line = pytest.mark.skipif(bool(REASON), reason=REASON or "runs")


@pytest.mark.parametrize("words", ["", "fast", "10", "1 gbit/s", "-1mbit", "200mbit,80", "200mbit,loss", "80ms,90ms"])
def test_words_that_are_no_link_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="legal is a number and kbit, mbit or gbit"):
        Link.parse_all(words)


def test_words_in_any_order_and_one_link_only() -> None:
    link = Link.parse("200mbit, 1% loss, 20ms jitter, 80ms")
    assert link[1:] == (200e6, 0.08, 0.02, 0.01)
    assert link.filename == "200mbit-1-loss-20ms-jitter-80ms"
    assert Link.parse("1gbit").round_trip is None  # no process delays its packets
    with pytest.raises(ValueError, match="2 links instead of one"):
        Link.parse("1gbit,80ms,200mbit")


def test_the_jitter_spreads_over_its_range_and_keeps_the_order() -> None:
    drift = Drift(0.02, "seed")
    times = [0.001 * i for i in range(200_000)]
    extra = [drift.at(t) for t in times]
    low, middle, high = statistics.quantiles(extra, n=4)
    assert 0 <= min(extra) < 0.002
    assert 0.018 < max(extra) <= 0.02
    assert low == pytest.approx(0.006, abs=0.002)
    assert middle == pytest.approx(0.01, abs=0.002)
    assert high == pytest.approx(0.014, abs=0.002)
    arrivals = [t + e for t, e in zip(times, extra, strict=True)]
    assert arrivals == sorted(arrivals)


class Ends:
    """Two sequenced sockets in the place of TUN devices, as root is not needed for the line alone."""

    def __init__(self, **described: float) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.outer, self.inner = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for each in (*self.outer, *self.inner):
            each.setblocking(False)
        settings = {"delay": 0.0, "jitter": 0.0, "loss": 0.0, "rate": None, "mtu": 1500, "seed": 0} | described
        self.line = Line([each.fileno() for each in self.inner], **settings)  # type: ignore[arg-type]


def packet(target: int, size: int = 1500) -> bytes:
    """Return an IPv4 packet as far as the line reads it."""
    return bytes([0x45, *[0] * 15, 10, 77, 0, target + 1]).ljust(size, b"\0")


def test_loss_is_the_share_that_was_asked_for_and_repeatable() -> None:
    counts = []
    for _ in range(2):
        ends = Ends(loss=0.02)
        for _ in range(400):
            for _ in range(25):
                ends.outer[0].send(packet(1, 40))
            while ends.line.take(0):
                pass
            while ends.line.deliver():
                pass
            for _ in range(25):
                try:
                    ends.outer[1].recv(1500)
                except BlockingIOError:
                    break
        counts.append(ends.line.lost)
    assert counts[0] == counts[1]
    assert counts[0] == pytest.approx(200, abs=56)  # four standard deviations of 10,000 draws


def test_what_waits_for_one_node_is_limited_to_its_rate_and_bounded() -> None:
    ends = Ends(rate=12e6)  # a packet in a millisecond
    for _ in range(100):
        ends.outer[0].send(packet(1))
        ends.line.take(0)
    due = sorted(one[0] for one in ends.line.waiting)
    assert due[-1] - due[0] == pytest.approx(0.05, abs=0.01)  # what waits longer is dropped
    assert ends.line.dropped == 100 - len(due)
    assert ends.line.dropped > 30
    gaps = [later - earlier for earlier, later in itertools.pairwise(due[5:])]
    assert statistics.median(gaps) == pytest.approx(0.001, rel=0.01)


@needs_line
@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", ["100mbit,0.4ms", "100mbit,80ms"])
def test_rate_and_round_trip_are_those_of_the_words(words: str) -> None:
    link = Link.parse(words)
    assert link.rate
    assert link.round_trip
    with netns.Network(2, link) as net:
        trip = net.round_trip(20)
        # 1,448 of 1,500 bytes are data. Other work of the machine can only make a transfer slower, so the best counts.
        rate = max(net.transfer(int(link.rate / 8 * 2)) for _ in range(4))
        names, carried = net.names, net
    assert link.round_trip <= trip < 1.05 * link.round_trip + 1e-3
    assert 0.95 * link.rate < rate * 1500 / 1448 < 1.01 * link.rate
    assert carried.carried is not None
    assert carried.carried.lost == 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    assert not set(names) & set(left)


@needs_line
@pytest.mark.full
@pytest.mark.timeout(120)
def test_jitter_and_loss_of_real_packets() -> None:
    with netns.Network(2, "40ms,20ms jitter") as net:
        trips = net.round_trips(60)
    assert min(trips) >= 0.04
    assert 0.045 < statistics.median(trips) < 0.085  # 40 ms, and up to 20 ms in each direction
    with netns.Network(2, "10ms,1% loss") as net:
        net.transfer(20_000_000)
    assert net.carried is not None
    assert 0.006 < net.carried.lost / (net.carried.packets + net.carried.lost) < 0.014


@needs_line
@pytest.mark.timeout(60)
def test_a_cut_holds_until_it_is_restored() -> None:
    with netns.Network(2, "10ms") as net, net.connection() as (client, server):
        client.send(b"a")
        assert server.recv(1) == b"a"
        net.cut()
        time.sleep(0.1)  # the command reaches the line
        server.settimeout(1.0)
        client.send(b"b")
        with pytest.raises(TimeoutError):
            server.recv(1)
        net.restore()
        server.settimeout(20)  # TCP repeats a lost packet at growing intervals
        assert server.recv(1) == b"b"


@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "runs")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [None, "50mbit", pytest.param("10ms", marks=needs_line)])
def test_connections_use_cubic_on_every_machine(words: str | None) -> None:
    with netns.Network(2, words) as net, net.connection() as ends:
        for each in ends:
            found = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert found.rstrip(b"\0") == b"cubic"


@pytest.mark.full
@needs_line
@pytest.mark.timeout(60)
def test_a_message_after_silence_needs_no_more_round_trips() -> None:
    size = 200_000
    with netns.Network(2, "100ms") as net, net.connection() as (client, server):

        def seconds() -> float:
            begun = time.perf_counter()
            client.sendall(bytes(size))
            arrived = 0
            while arrived < size:
                arrived += len(server.recv(1 << 20))
            return time.perf_counter() - begun

        for _ in range(5):  # the windows grow
            seconds()
        silence = []
        for _ in range(3):
            time.sleep(1.5)
            silence.append(seconds())
    assert min(silence) < 0.15  # one way takes 50 ms; with a window that has shrunk, four round trips


@needs_line
@pytest.mark.timeout(60)
def test_four_nodes_share_a_hub_and_a_link_without_a_line_cannot_be_cut() -> None:
    with netns.Network(4, "20ms") as net:
        for far in (1, 2, 3):
            with net.connection(far) as (client, server):
                client.send(b"x")
                assert server.recv(1) == b"x"
    with netns.Network(2) as net, pytest.raises(netns.LinkError, match="no line to cut"):
        net.cut()
