"""Packets through shared memory, moved by the thread that computes, between its tasks.

On a core that computes, threads that wait for packets cost more than the packets: one waits
for the core while a task runs, and has it when the task could go on. A device can use what
arrives only between two tasks, so looking there loses nothing.
"""

from collections import deque

import numpy as np

from .ray_packets import HEADER, Packet
from .ray_shared import Ring
from .ray_shipping import aligned_bytes


class Outlet:
    """Sends packets in their order, each as soon as there is room; one thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._waiting: deque[Packet] = deque()
        self._open: Packet | None = None
        self._left: deque[memoryview] = deque()  # of the open packet

    def send(self, packet: Packet) -> None:
        """Takes a packet, and sends what there is room for."""
        self._waiting.append(packet)
        self.flush()

    def flush(self) -> bool:
        """Sends what there is room for; returns whether that was anything."""
        if self._open is None and not self._waiting:
            return False
        has_moved = False
        while self._open is not None or self._open_next():
            while self._left:
                piece = self._left[0]
                count = self._ring.write(piece)
                has_moved |= count > 0
                if count < len(piece):
                    self._left[0] = piece[count:]
                    return has_moved
                self._left.popleft()
            packet, self._open = self._open, None
            assert packet is not None
            packet.sender.sent(packet.item)
        return has_moved

    def _open_next(self) -> bool:
        """Opens the next packet that is wanted; returns whether there is one."""
        while self._waiting:
            packet = self._waiting.popleft()
            try:
                opened = packet.sender.open(packet.item)
            except BaseException as error:
                packet.sender.failed(packet.item, error)
                continue
            if opened is not None:
                start_s, body = opened
                header = HEADER.pack(packet.call, packet.item, start_s, body.size)
                self._open = packet
                self._left.extend((memoryview(header), body.data))
                return True
        return False


class Inlet:
    """Receives what an `Outlet` sends; one thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._header_room = memoryview(bytearray(HEADER.size))
        self._begun: tuple[int, int, float, np.ndarray] | None = None  # its header was read
        self._room, self._filled = self._header_room, 0

    def receive(self) -> tuple[int, int, float, np.ndarray] | None:
        """Returns call, item, start and body of the next packet, or None if it is not whole."""
        if not self._ring.has_unread():
            return None
        while True:
            self._filled += self._ring.read(self._room[self._filled :])
            if self._filled < len(self._room):
                return None
            self._filled = 0
            if self._begun is None:
                call, item, start_s, num_bytes = HEADER.unpack(self._room)
                body = aligned_bytes(num_bytes)
                self._begun, self._room = (call, item, start_s, body), body.data
            else:
                found, self._begun, self._room = self._begun, None, self._header_room
                return found
