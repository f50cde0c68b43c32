"""What goes from one device process to another: tensors and signals, each with a header."""

import dataclasses
import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np

HEADER = struct.Struct("!qqdq")
"""Call, item, start in seconds, bytes that follow."""


@dataclasses.dataclass(frozen=True)
class Packet:
    """Something to be sent, made ready and accounted for by the thread that sends it."""

    call: int
    item: int
    open: Callable[[], tuple[float, np.ndarray] | None]  # start, uint8 body; None: not wanted
    sent: Callable[[], None]
    failed: Callable[[BaseException], None]  # it cannot be opened or sent


class Inbox(Protocol):
    """Who gets what arrives, from the threads that receive it."""

    def arrived(self, call: int, item: int, start_s: float, body: np.ndarray) -> None:
        """Hands over the body, uint8 `[num_bytes]`; `start_s` is on the sender's clock."""

    def lost(self, peer: int) -> None:
        """Tells that the connection to a peer has ended."""
