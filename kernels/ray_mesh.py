"""One connection between every two device processes, for tensors and signals.

Processes of one machine that compute on the CPU have rings of shared memory (`ray_streams.py`);
others have TCP, and threads that wait at it.

An actor call per tensor, by way of Ray's object store, would do the same; it takes several
messages between processes for each, on the cores that compute.
"""

import hmac
import socket
import struct
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from .ray_packets import HEADER, Inbox, Packet
from .ray_shared import NO_OFFER, OFFER_BYTES, Ring
from .ray_shipping import aligned_bytes
from .ray_streams import Inlet, Outlet

_HELLO = struct.Struct("!q")  # index of who connects
_TIMEOUT_S = 60.0  # of building the mesh
_SMALL = 1 << 16  # bytes up to which header and body go as one
_YES, _NO = b"y", b"n"


class Mesh:
    """This process's connections; peers are known by their index among all processes.

    Args:
      index: of this process.
      host: its address.
      secret: what all processes of the mesh know.
      inbox: who gets what arrives.
      shares_memory: whether it may have rings; then somebody has to `poll`.
    """

    def __init__(
        self, index: int, host: str, secret: bytes, inbox: Inbox, shares_memory: bool
    ) -> None:
        self._index = index
        self._secret = secret
        self._inbox = inbox
        self._shares_memory = shares_memory
        self._queues: dict[int, SimpleQueue[Packet]] = {}  # of the peers that have no rings
        self._outlets: dict[int, Outlet] = {}
        self._inlets: list[Inlet] = []
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_TIMEOUT_S)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where peers may connect."""
        return self._listener.getsockname()[:2]

    @property
    def has_rings(self) -> bool:
        """Whether something may arrive that only `poll` sees."""
        return bool(self._inlets)

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
        """Sends or queues a packet; those to one peer leave in the order in which they came.

        The thread that calls it must be the one that calls `poll`.
        """
        if peer in self._outlets:
            self._outlets[peer].send(packet)
        else:
            self._queues[peer].put(packet)

    def poll(self) -> bool:
        """Moves what can be moved through the rings; returns whether that was anything."""
        has_moved = False
        for outlet in self._outlets.values():
            has_moved |= outlet.flush()
        for inlet in self._inlets:
            while (received := inlet.receive()) is not None:
                self._inbox.arrived(*received)
                has_moved = True
        return has_moved

    def _start(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rings = _agree_on_rings(connection, self._shares_memory)
        connection.settimeout(None)
        if rings is None:
            self._queues[peer] = SimpleQueue()
            threading.Thread(target=self._send, args=(peer, connection), daemon=True).start()
        else:
            outward, inward = rings
            self._outlets[peer] = Outlet(outward)
            self._inlets.append(Inlet(inward))
        # Where there are rings, all that this hears of is the connection's end.
        threading.Thread(target=self._receive, args=(peer, connection), daemon=True).start()

    def _send(self, peer: int, connection: socket.socket) -> None:
        queue = self._queues[peer]
        while True:
            packet = queue.get()
            try:
                opened = packet.sender.open(packet.item)
                if opened is not None:
                    start_s, body = opened
                    header = HEADER.pack(packet.call, packet.item, start_s, body.size)
                    if body.size <= _SMALL:
                        connection.sendall(header + body.tobytes())
                    else:
                        connection.sendall(header)
                        connection.sendall(body.data)
                    packet.sender.sent(packet.item)
            except BaseException as error:
                packet.sender.failed(packet.item, error)
            del packet  # else a waiting sender would keep the tensor

    def _receive(self, peer: int, connection: socket.socket) -> None:
        try:
            while True:
                header = HEADER.unpack(_read(connection, HEADER.size).data)
                call, item, start_s, num_bytes = header
                self._inbox.arrived(call, item, start_s, _read(connection, num_bytes))
        except OSError:
            self._inbox.lost(peer)


def _agree_on_rings(connection: socket.socket, may_share: bool) -> tuple[Ring, Ring] | None:
    """Returns rings outward and inward if both ends, which both ask, can have them."""
    outward, offer = Ring.create() if may_share else (None, NO_OFFER)
    connection.sendall(offer)
    offered = bytes(_read(connection, OFFER_BYTES))
    inward = Ring.attach(offered) if may_share else None
    connection.sendall(_NO if outward is None or inward is None else _YES)
    is_wanted = bytes(_read(connection, len(_YES))) == _YES
    if outward is not None:
        outward.taken()
    if outward is None or inward is None or not is_wanted:
        return None
    return outward, inward


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
