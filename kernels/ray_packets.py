"""What goes from one device process to another: tensors and signals, each with a header."""

import struct
from typing import NamedTuple, Protocol

import numpy as np

HEADER = struct.Struct("!qqdq")
"""Call, item, start in seconds, bytes that follow."""


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


class Inbox(Protocol):
    """Who gets what arrives, from the threads that receive it."""

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        """Hands over the body, uint8 `[num_bytes]`; `start_s` is on the sender's clock."""

    def lost(self, peer: int) -> None:
        """Tells that the connection to a peer has ended."""
