"""Bytes from one process to another of the same machine, through memory that both map.

Loopback TCP copies in the kernel, on the cores that compute; here each side copies once.
"""

import mmap
import os
import platform
import secrets
import struct
from typing import Self

_OFFER = struct.Struct("!qq16s")  # process, file descriptor, token
_TOKEN_BYTES = 16
_WRITTEN_AT, _READ_AT, _DATA_AT = 64, 128, 192  # counts of bytes, each in a cache line
_CAPACITY = 8 << 20  # what is on its way at most: little, so that it stays in the caches
_ORDERED = ("x86_64", "AMD64")
"""Machines on which other cores see writes to memory in their order."""

OFFER_BYTES = _OFFER.size
NO_OFFER = bytes(OFFER_BYTES)


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
