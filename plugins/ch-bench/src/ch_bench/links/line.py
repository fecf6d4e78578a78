"""A process that joins TUN devices of network namespaces by a line with delay, jitter, loss and a limit of what arrives.

Linux has ``netem`` for this, but many kernels are built without it. This process imports only the standard library. It is
started by :class:`~ch_bench.links.netns.Network`, whose token bucket filters limit what each node sends::

    python -m ch_bench.links.line '{"devices": [3, 4], "delay": 0.04, …}' < commands

Each packet of at most 1,500 bytes is read, kept until its time has come, and written to the device of its destination. The
kernel could hand over several packets as one of 64 KiB (``IFF_VNET_HDR``), which costs less. But its filters must divide
these again to limit a rate exactly, and loss would hit all of them at once.

Commands are lines: ``cut`` drops every packet until ``restore``. The end of the commands ends the process, which then prints
:class:`Carried` as JSON.
"""

import gc
import json
import os
import random
import resource
import select
import sys
import time
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any, NamedTuple

PAUSE = 5e-5  # seconds after work, so that the line wakes up once for several packets
SLACK = (
    2e-3  # seconds: a node may receive so much at once. Otherwise a late wake-up of this process would lower the rate
)
QUEUE = 0.05  # seconds of traffic that wait for a node, or a round trip if that is more; then packets are dropped
DRIFT = 8  # the delay goes from one random jitter to the next in so many times the jitter, so packets keep their order


class Carried(NamedTuple):
    """What a line did.

    Attributes:
        packets: delivered.
        lost: by chance or cut.
        dropped: because too many waited for one node.
        late: mean seconds after its time that a packet was delivered.
        latest: the largest such time.
        cpu: seconds of this process, which include the kernel's work to receive each packet.
    """

    packets: int
    lost: int
    dropped: int
    late: float
    latest: float
    cpu: float


class Drift:
    """Extra delay of one direction: random values in ``[0, jitter]``, and straight lines between them."""

    def __init__(self, jitter: float, seed: str) -> None:
        self.jitter, self.random = jitter, random.Random(seed)
        self.start, self.span = 0.0, max(DRIFT * jitter, 1e-3)
        self.ends = self.random.random(), self.random.random()

    def at(self, now: float) -> float:
        """Return the extra delay of a packet that enters at ``now``, which must not decrease."""
        while now - self.start > self.span:
            behind = now - self.start > 100 * self.span  # after a long pause, or at the start
            self.start = now if behind else self.start + self.span
            self.ends = self.ends[1], self.random.random()
        first, last = self.ends
        return self.jitter * (first + (last - first) * (now - self.start) / self.span)


class Line:
    """Packets under way between the devices.

    Args:
        devices: file descriptors of TUN devices. Device ``i`` has the IPv4 address that ends with ``i + 1``.
        delay: seconds in each direction.
        jitter: see :class:`Drift`.
        loss: share of packets that vanish.
        rate: bits per second that each device receives; ``None`` for no limit.
        mtu: largest packet.
        seed: of jitter and loss.
    """

    def __init__(
        self, devices: list[int], delay: float, jitter: float, loss: float, rate: float | None, mtu: int, seed: int
    ) -> None:
        self.devices, self.delay, self.loss, self.mtu = devices, delay, loss, mtu
        self.second_per_byte = 8 / rate if rate else 0.0
        self.bound = max(QUEUE, 2 * delay)
        self.free = [0.0] * len(devices)  # time at which all that waits for a device has arrived, without the delay
        self.drifts = [Drift(jitter, f"{seed} {i}") for i in range(len(devices))] if jitter else None
        self.random = random.Random(seed)
        self.whole = True
        self.waiting: list[tuple[float, int, int, bytes]] = []  # time, number, destination, packet
        self.packets = self.lost = self.dropped = self.delivered = 0
        self.late = self.latest = 0.0

    def take(self, source: int) -> bool:
        """Read the packets of a device, and return False if there are none."""
        device, taken = self.devices[source], False
        for _ in range(64):
            try:
                packet = os.read(device, self.mtu)
            except BlockingIOError:
                break
            taken, now = True, time.monotonic()
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the IPv4 destination
            if not 0 <= target < len(self.devices) or packet[16] != 10:
                continue  # multicast, or IPv6
            if not self.whole or (self.loss and self.random.random() < self.loss):
                self.lost += 1
                continue
            arrived = max(self.free[target], now - SLACK) + len(packet) * self.second_per_byte
            if arrived - now > self.bound:
                self.dropped += 1
                continue
            self.free[target] = arrived
            due = max(arrived, now) + self.delay + (self.drifts[source].at(now) if self.drifts else 0.0)
            self.packets += 1
            heappush(self.waiting, (due, self.packets, target, packet))
        return taken

    def deliver(self) -> bool:
        """Write the packets whose time has come, and return False if there are none."""
        now, waiting, before = time.monotonic(), self.waiting, self.delivered
        while waiting and waiting[0][0] <= now:
            due, _, target, packet = heappop(waiting)
            with suppress(OSError):  # the device is down
                os.write(self.devices[target], packet)
            self.delivered += 1
            self.late += now - due
            self.latest = max(self.latest, now - due)
        return self.delivered > before

    def run(self, commands: int) -> Carried:
        """Carry packets until the commands end."""
        index = {device: i for i, device in enumerate(self.devices)}
        while True:
            wait = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            ready = select.select([commands, *self.devices], [], [], wait)[0]
            worked = False
            for each in ready:
                if each != commands:
                    worked |= self.take(index[each])
                elif words := os.read(commands, 4096).split():
                    self.whole = words[-1] == b"restore"
                else:
                    used = resource.getrusage(resource.RUSAGE_SELF)
                    late = self.late / max(1, self.delivered)
                    cpu = used.ru_utime + used.ru_stime
                    return Carried(self.delivered, self.lost, self.dropped, late, self.latest, cpu)
            if self.deliver() or worked:
                time.sleep(PAUSE)


def main() -> None:
    """Serve the line that the first argument describes."""
    described: dict[str, Any] = json.loads(sys.argv[1])
    with suppress(OSError):  # otherwise packets would wait until the ranks leave a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # nothing here has cycles, and a collection would make packets late
    print(json.dumps(Line(**described).run(sys.stdin.fileno())))


if __name__ == "__main__":
    main()
