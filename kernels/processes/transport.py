"""How tensors and signals go from one device process to another.

One connection between every two processes. Those of one machine that compute on the CPU have
rings of shared memory, which the thread that computes moves between its tasks: on a core that
computes, threads that wait for packets cost more than the packets (one waits for the core while
a task runs, and has it when the task could go on), a device can use what arrives only between
two tasks, so looking there loses nothing, and loopback TCP copies in the kernel where here each
side copies once. Others have TCP, and threads that wait at it.

A call per tensor by way of the launcher's object store would do the same; it takes several
messages between processes for each, on the cores that compute.

Bottom up: arrays as bytes, packets, rings, their two ends, the mesh.
"""

import ctypes
import hmac
import mmap
import os
import platform
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np

_HEADER = struct.Struct("!qqdq")
"""Call, item, start in seconds, bytes that follow."""

_HELLO = struct.Struct("!q")  # index of who connects
_TIMEOUT_S = 60.0  # of building the mesh
_SMALL = 1 << 16  # bytes up to which header and body go as one
_YES, _NO = b"y", b"n"

_OFFER = struct.Struct("!qq16s")  # process, file descriptor, token
_TOKEN_BYTES = 16
_WRITTEN_AT, _READ_AT, _DATA_AT = 64, 128, 192  # counts of bytes, each in a cache line
_CAPACITY = 8 << 20  # what is on its way at most: little, so that it stays in the caches
_ORDERED = ("x86_64", "AMD64")
"""Machines on which other cores see writes to memory in their order."""

RINGS = "DOPPLER_JAX_RINGS"
"""Environment variable; where it is `off` for a device process, that has TCP alone."""

OFFER_BYTES = _OFFER.size
NO_OFFER = bytes(OFFER_BYTES)


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array's content, that of random keys as integers; a view where possible."""
    if not isinstance(array.dtype, np.dtype):
        array = jax.random.key_data(array)
    return np.asarray(array)


def to_device(host: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the array on this process's device; the inverse of `to_host`."""
    array = jax.device_put(host)
    if not isinstance(aval.dtype, np.dtype):
        impl: Any = jax.random.key_impl(jax.numpy.empty((), aval.dtype))
        return jax.random.wrap_key_data(array, impl=impl)
    return array


def to_bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array's content as uint8 `[bytes]`; a view where possible."""
    try:
        return np.frombuffer(array, np.uint8)  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):  # keys, bfloat16, accelerators
        return np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8)


def from_bytes(body: np.ndarray, aval: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    """Returns an array that kernels here can take as it is; the inverse of `to_bytes`."""
    is_key = not isinstance(aval.dtype, np.dtype)
    data = jax.eval_shape(jax.random.key_data, aval) if is_key else aval
    host = body.view(data.dtype).reshape(data.shape)
    # A CPU kernel reads it where it lies; to make a JAX array of it first is only dispatch.
    if not is_key and jax.default_backend() == "cpu":
        return host
    return jax.block_until_ready(to_device(host, aval))


def aligned_bytes(num_bytes: int) -> np.ndarray:
    """Returns room `[num_bytes]` that JAX can take as an array on a CPU without a copy."""
    room = np.empty(num_bytes + 64, np.uint8)
    # `room.ctypes.data` tells the same by way of more code.
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % 64  # type: ignore[arg-type]
    return room[start : start + num_bytes]


class Sender(Protocol):
    """Who has items to send; called by the thread that sends them."""

    def open(self, item: int) -> tuple[float, np.ndarray] | None:
        """Returns an item's start in seconds and its body, uint8; None if it is not wanted."""

    def sent(self, item: int) -> None:
        """Tells that an item has left."""

    def failed(self, item: int, error: BaseException) -> None:
        """Tells that an item cannot be opened or sent."""


class Packet(NamedTuple):
    """Something to be sent."""

    call: int
    item: int
    sender: Sender

    def open(self) -> tuple[bytes, np.ndarray] | None:
        """Returns header and body, None if it is not wanted or cannot be opened."""
        try:
            opened = self.sender.open(self.item)
        except BaseException as error:
            self.sender.failed(self.item, error)
            return None
        if opened is None:
            return None
        start_s, body = opened
        return _HEADER.pack(self.call, self.item, start_s, body.size), body


class Inbox(Protocol):
    """Who gets what arrives, from the threads that receive it."""

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        """Hands over the body, uint8 `[num_bytes]`; `start_s` is on the sender's clock."""

    def lost(self, peer: int) -> None:
        """Tells that the connection to a peer has ended."""


class Ring:
    """A ring of bytes with one writer and one reader, neither of which ever waits.

    The file has no name, so that nothing is left when both processes have ended, however they
    do.
    """

    def __init__(self, memory: mmap.mmap, file: int | None = None) -> None:
        self._file = file
        whole = memoryview(memory)  # NumPy's views go through more code, seldom in the caches
        self._data = whole[_DATA_AT:]
        self._written, self._read = (
            whole[at : at + 8].cast("q") for at in (_WRITTEN_AT, _READ_AT)
        )
        self._position = 0  # bytes that this end has written or read

    @classmethod
    def create(cls) -> tuple[Self | None, bytes]:
        """Returns the writer's end and the offer to `attach`; None if the system has none."""
        if platform.machine() not in _ORDERED:
            return None, NO_OFFER
        try:
            file = os.memfd_create("doppler")
            os.ftruncate(file, _DATA_AT + _CAPACITY)
            memory = mmap.mmap(file, _DATA_AT + _CAPACITY)
        except (AttributeError, OSError):
            return None, NO_OFFER
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory[:_TOKEN_BYTES] = token
        return cls(memory, file), _OFFER.pack(os.getpid(), file, token)

    @classmethod
    def attach(cls, offer: bytes) -> Self | None:
        """Returns the reader's end, or None if the writer is not within reach."""
        process, file, token = _OFFER.unpack(offer)
        try:
            with open(f"/proc/{process}/fd/{file}", "r+b") as shared:
                memory = mmap.mmap(shared.fileno(), _DATA_AT + _CAPACITY)
        except (OSError, ValueError):
            return None
        # Elsewhere the same number is another process.
        return cls(memory) if memory[:_TOKEN_BYTES] == token else None

    def taken(self) -> None:
        """Tells the writer's end that its offer is answered."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def has_unread(self) -> bool:
        """Returns whether there is something to read, for the reader."""
        return self._written[0] != self._position

    def write(self, data: memoryview) -> int:
        """Copies as many of the first bytes of `data` as fit; returns how many."""
        count = min(len(data), _CAPACITY - (self._position - self._read[0]))
        start = self._position % _CAPACITY
        straight = min(count, _CAPACITY - start)  # up to the end of the ring
        self._data[start : start + straight] = data[:straight]
        if straight < count:
            self._data[: count - straight] = data[straight:count]
        self._position += count
        self._written[0] = self._position
        return count

    def read(self, into: memoryview) -> int:
        """Copies the next bytes to the front of `into`; returns how many."""
        count = min(len(into), self._written[0] - self._position)
        start = self._position % _CAPACITY
        straight = min(count, _CAPACITY - start)  # up to the end of the ring
        into[:straight] = self._data[start : start + straight]
        if straight < count:
            into[straight:count] = self._data[: count - straight]
        self._position += count
        self._read[0] = self._position
        return count


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
            if (opened := packet.open()) is not None:
                self._open = packet
                self._left.extend((memoryview(opened[0]), opened[1].data))
                return True
        return False


class Inlet:
    """Receives what an `Outlet` sends; one thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._header_room = memoryview(bytearray(_HEADER.size))
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
                call, item, start_s, num_bytes = _HEADER.unpack(self._room)
                body = aligned_bytes(num_bytes)
                self._begun, self._room = (call, item, start_s, body), body.data
            else:
                found, self._begun, self._room = self._begun, None, self._header_room
                return found


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
            hello = bytes(read_bytes(connection, len(self._secret) + _HELLO.size))
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
            if (opened := packet.open()) is not None:
                header, body = opened
                try:
                    if body.size <= _SMALL:
                        connection.sendall(header + body.tobytes())
                    else:
                        connection.sendall(header)
                        connection.sendall(body.data)
                    packet.sender.sent(packet.item)
                except BaseException as error:
                    packet.sender.failed(packet.item, error)
                del header, body
            del packet, opened  # else a waiting sender would keep the tensor

    def _receive(self, peer: int, connection: socket.socket) -> None:
        try:
            while True:
                header = read_bytes(connection, _HEADER.size).data
                call, item, start_s, num_bytes = _HEADER.unpack(header)
                self._inbox.arrived(call, item, start_s, read_bytes(connection, num_bytes))
        except OSError:
            self._inbox.lost(peer)


def _agree_on_rings(connection: socket.socket, may_share: bool) -> tuple[Ring, Ring] | None:
    """Returns rings outward and inward if both ends, which both ask, can have them."""
    outward, offer = Ring.create() if may_share else (None, NO_OFFER)
    connection.sendall(offer)
    offered = bytes(read_bytes(connection, OFFER_BYTES))
    inward = Ring.attach(offered) if may_share else None
    connection.sendall(_NO if outward is None or inward is None else _YES)
    is_wanted = bytes(read_bytes(connection, len(_YES))) == _YES
    if outward is not None:
        outward.taken()
    if outward is None or inward is None or not is_wanted:
        return None
    return outward, inward


def read_bytes(connection: socket.socket, num_bytes: int) -> np.ndarray:
    """Returns the next bytes `[num_bytes]`; raises `OSError` if the peer is gone."""
    body = aligned_bytes(num_bytes)
    view = body.data
    filled = 0
    while filled < num_bytes:
        count = connection.recv_into(view[filled:])
        if not count:
            raise ConnectionError("the peer closed the connection")
        filled += count
    return body
