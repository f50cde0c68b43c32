"""How a call reaches a device process: a connection, on which a loop there waits.

A launcher's own calls go by way of several processes on the cores that compute, and take
milliseconds. Here a call is one message to each process and one back. Arrays travel as they lie
in memory and are received where JAX can take them without a copy.

What was interrupted leaves a line in the middle of a message. It is hung up then, and the next
message makes another connection.
"""

import contextlib
import hmac
import pickle
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from .transport import read_bytes

_COUNT = struct.Struct("!q")
_SILENCE_S = 60.0  # in the middle of a message, after which the other end is lost
_SMALL = 1 << 14  # bytes up to which a part goes with others


class Line:
    """This process's end.

    Args:
      address: where a process `serve`s.
      secret: what both ends know.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._connection: socket.socket | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, method: str, *args: Any) -> None:
        """Asks for something; raises `OSError` if the process is lost."""
        if self._connection is None:
            self._connection = socket.create_connection(self._address, _SILENCE_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.sendall(self._secret)
        _send(self._connection, (method, args))

    def receive(self) -> Any:
        """Returns an answer to `send`, or an error.

        It is an `OSError` if the process was lost, a `RuntimeError` if it raised something.
        """
        assert self._connection is not None
        try:
            return _receive(self._connection)
        except OSError as error:
            return error

    def hang_up(self) -> None:
        """Ends the connection; answers that are on their way are lost."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def fileno(self) -> int:
        return -1 if self._connection is None else self._connection.fileno()


def wait(lines: Mapping[int, Line], timeout_s: float) -> list[int]:
    """Returns the keys of lines on which there is an answer, or no process any more."""
    waiting = {line.fileno(): key for key, line in lines.items()}
    poll = select.poll()
    for number in waiting:
        poll.register(number, select.POLLIN)
    return [waiting[number] for number, _ in poll.poll(max(0.0, timeout_s) * 1e3)]


def serve(listener: socket.socket, secret: bytes, answer: Callable[..., Any]) -> None:
    """Answers who knows the secret, one connection after another, for ever.

    `answer(method, *args)` returns what goes back; nothing does for None.
    """
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(bytes(read_bytes(connection, len(secret))), secret):
                connection.settimeout(None)
                _answer(connection, answer)


def _answer(connection: socket.socket, answer: Callable[..., Any]) -> None:
    while True:
        method, args = _receive(connection)
        try:
            found = answer(method, *args)
        except Exception as error:
            found = RuntimeError(f"{type(error).__name__}: {error}")
        del args
        if found is not None:
            _send(connection, found)
        del found  # else it would be kept until the next message


def _send(connection: socket.socket, message: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    together = struct.pack(f"!{1 + len(sizes)}q", len(sizes), *sizes)
    for part in parts:
        if part.nbytes <= _SMALL:
            together += part
        else:
            connection.sendall(together)
            connection.sendall(part)
            together = b""
    connection.sendall(together)


def _receive(connection: socket.socket) -> Any:
    """Returns a message; only what comes from who knows the secret may be read so."""
    (count,) = _COUNT.unpack(read_bytes(connection, _COUNT.size).data)
    sizes = struct.unpack(f"!{count}q", read_bytes(connection, count * _COUNT.size).data)
    head, *buffers = [read_bytes(connection, size).data for size in sizes]
    return pickle.loads(head, buffers=buffers)
