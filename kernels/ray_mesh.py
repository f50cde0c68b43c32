"""One TCP connection between every two device processes, for tensors and signals.

Large tensors between processes of one machine go through shared memory.

An actor call per tensor, by way of Ray's object store, would do the same; it takes several
messages between processes for each, on the cores that compute.
"""

import dataclasses
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, Self

import numpy as np

from .ray_shared import OFFER_BYTES, PIECE, Ring
from .ray_shipping import aligned_bytes

_HEADER = struct.Struct("!qqdq")  # call, item, start in seconds, bytes that follow
_HELLO = struct.Struct("!q")  # index of who connects
_TIMEOUT_S = 60.0  # of building the mesh
_SMALL = 1 << 16  # bytes up to which header and body go as one
_YES, _NO = b"y", b"n"


class Inbox(Protocol):
    """Who gets what arrives; called from the mesh's own threads, one per peer."""

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        """Hands over the body, uint8 `[num_bytes]`; `start_s` is on the sender's clock."""

    def lost(self, peer: int) -> None:
        """Tells that the connection to a peer has ended."""


@dataclasses.dataclass(frozen=True)
class Packet:
    """Something to be sent, made ready and accounted for by the thread that sends it."""

    call: int
    item: int
    open: Callable[[], tuple[float, np.ndarray] | None]  # start, uint8 body; None: not wanted
    sent: Callable[[], None]
    failed: Callable[[BaseException], None]  # it cannot be opened or sent


class Mesh:
    """This process's connections; peers are known by their index among all processes."""

    def __init__(self, index: int, host: str, secret: bytes, inbox: Inbox) -> None:
        self._index = index
        self._secret = secret
        self._inbox = inbox
        self._queues: dict[int, SimpleQueue[Packet]] = {}
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_TIMEOUT_S)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where peers may connect."""
        return self._listener.getsockname()[:2]

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Links this process with all others; all call it at once.

        Raises:
          OSError: a peer cannot be reached, or did not come.
        """
        for peer in range(self._index):
            connection = socket.create_connection(addresses[peer], timeout=_TIMEOUT_S)
            connection.sendall(self._secret + _HELLO.pack(self._index))
            self._start(peer, connection)
        waiting = len(addresses) - 1 - self._index
        while waiting:
            connection, _ = self._listener.accept()
            connection.settimeout(_TIMEOUT_S)
            hello = bytes(_read(connection, len(self._secret) + _HELLO.size))
            if hmac.compare_digest(hello[: len(self._secret)], self._secret):
                self._start(_HELLO.unpack(hello[len(self._secret) :])[0], connection)
                waiting -= 1
            else:
                connection.close()
        self._listener.close()

    def send(self, peer: int, packet: Packet) -> None:
        """Queues a packet; those to one peer leave in the order in which they came."""
        self._queues[peer].put(packet)

    def _start(self, peer: int, connection: socket.socket) -> None:
        link = _Link.over(connection)
        self._queues[peer] = SimpleQueue()
        loops: tuple[Callable[[int, _Link], None], ...] = (self._send, self._receive)
        for loop in loops:
            threading.Thread(target=loop, args=(peer, link), daemon=True).start()

    def _send(self, peer: int, link: "_Link") -> None:
        queue = self._queues[peer]
        while True:
            packet = queue.get()
            try:
                opened = packet.open()
                if opened is not None:
                    start_s, body = opened
                    link.write(_HEADER.pack(packet.call, packet.item, start_s, body.size), body)
                    packet.sent()
            except BaseException as error:
                packet.failed(error)
            del packet  # else a waiting sender would keep the tensor

    def _receive(self, peer: int, link: "_Link") -> None:
        try:
            while True:
                call, item, start_s, num_bytes = _HEADER.unpack(link.take(_HEADER.size).data)
                self._inbox.arrived(call, item, start_s, link.read(num_bytes))
        except OSError:
            link.close()
            self._inbox.lost(peer)


@dataclasses.dataclass(frozen=True)
class _Link:
    """What connects two processes: the rings for large bodies are None across machines."""

    connection: socket.socket
    outward: Ring | None
    inward: Ring | None

    @classmethod
    def over(cls, connection: socket.socket) -> Self:
        """Agrees with the other end, which does the same, on rings."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outward, offer = Ring.create()
        connection.sendall(offer)
        inward = Ring.attach(bytes(_read(connection, OFFER_BYTES)))
        connection.sendall(_NO if inward is None else _YES)
        is_taken = bytes(_read(connection, len(_YES))) == _YES
        if outward is not None:
            outward.taken()
        connection.settimeout(None)
        return cls(connection, outward if is_taken else None, inward)

    def write(self, header: bytes, body: np.ndarray) -> None:
        """Sends a message of a header of known size and a body."""
        if body.size <= _SMALL:
            self.connection.sendall(header + body.tobytes())
        elif self.outward is None:
            self.connection.sendall(header)
            self.connection.sendall(body.data)
        else:
            for first in range(0, body.size, PIECE):
                self.outward.write(body[first : first + PIECE])
                self.connection.sendall(_YES if first else header)

    def read(self, num_bytes: int) -> np.ndarray:
        """Returns the body of a message whose header has been taken."""
        if num_bytes <= _SMALL or self.inward is None:
            return self.take(num_bytes)
        body = aligned_bytes(num_bytes)
        for first in range(0, num_bytes, PIECE):
            if first:
                self.take(len(_YES))
            self.inward.read(body[first : first + PIECE])
        return body

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns the next bytes of the connection."""
        return _read(self.connection, num_bytes)

    def close(self) -> None:
        """Ends a `write` that waits for the other end."""
        if self.outward is not None:
            self.outward.close()


def _read(connection: socket.socket, num_bytes: int) -> np.ndarray:
    body = aligned_bytes(num_bytes)
    view = body.data
    filled = 0
    while filled < num_bytes:
        count = connection.recv_into(view[filled:])
        if not count:
            raise ConnectionError("the peer closed the connection")
        filled += count
    return body
