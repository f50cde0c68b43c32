"""Bytes from one process to another of the same machine, through memory that both map.

Loopback TCP copies in the kernel, on the cores that compute; here each side copies once.
"""

import mmap
import os
import secrets
import struct
import time
from typing import Self

import numpy as np

_OFFER = struct.Struct("!qq16s")  # process, file descriptor, token
_TOKEN_BYTES = 16
_READ_AT = 32  # offset of the count of bytes that have been read
_DATA_AT = 64
_CAPACITY = 8 << 20  # what is on its way at most: little, so that it stays in the caches
_POLL_S = 1e-4  # between looks for room

PIECE = 1 << 20
"""Bytes that a writer hands over at a time."""

OFFER_BYTES = _OFFER.size
NO_OFFER = bytes(OFFER_BYTES)


class Ring:
    """A ring of bytes with one writer and one reader.

    The reader must hear otherwise what has been written. The file has no name, so that
    nothing is left when both processes have ended, however they do.
    """

    def __init__(self, memory: mmap.mmap, file: int | None = None) -> None:
        self._file = file
        self._memory = memory
        whole = np.frombuffer(memory, np.uint8)
        self._data = whole[_DATA_AT:]
        self._num_read = whole[_READ_AT : _READ_AT + 8].view(np.int64)
        self._position = 0  # bytes that this end has written or read
        self._is_closed = False

    @classmethod
    def create(cls) -> tuple[Self | None, bytes]:
        """Returns the writer's end and the offer to `attach`; None if the system has none."""
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

    def write(self, piece: np.ndarray) -> None:
        """Copies `piece`, uint8 of at most `PIECE` bytes, into the ring, waiting for room.

        Raises:
          ConnectionError: the ring was closed.
        """
        while self._position + piece.size - int(self._num_read[0]) > _CAPACITY:
            if self._is_closed:
                raise ConnectionError("the peer closed the connection")
            time.sleep(_POLL_S)
        first, second = self._parts(piece.size)
        first[:] = piece[: first.size]
        second[:] = piece[first.size :]
        self._position += piece.size

    def read(self, into: np.ndarray) -> None:
        """Copies as many bytes as `into` `[n]` takes out of the ring; they must be there."""
        first, second = self._parts(into.size)
        into[: first.size] = first
        into[first.size :] = second
        self._position += into.size
        self._num_read[0] = self._position

    def close(self) -> None:
        """Ends a `write` that waits for room."""
        self._is_closed = True

    def _parts(self, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the next bytes are: up to the end of the ring, and from its start."""
        start = self._position % _CAPACITY
        first = self._data[start : start + num_bytes]
        return first, self._data[: num_bytes - first.size]
