"""Handles of device processes, and what this process knows of them."""

import dataclasses
import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from .ray_shipping import KernelExports

_ANSWER_S = 5.0  # for a live process to answer
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclasses.dataclass(frozen=True, eq=False)
class RayDevice:
    """One device process; `dj.ray_devices` makes them."""

    name: str  # for people: where it runs
    kind: str  # what JAX calls such a device, and the machine: as fast as others of its kind
    index: int  # among all processes of its session
    host: str  # machine, whose processes share a clock
    actor: Any  # Ray's handle
    session: "Session"

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the process's `Worker`; returns Ray's reference to the result."""
        return self.actor.call.remote(method, *args)


class RayDevices(Sequence[RayDevice]):
    """Device processes in order, to be given to `dj.compile(..., backend="ray")`.

    Close them when done, or use them as a context manager.
    """

    def __init__(self, devices: Iterable[RayDevice]) -> None:
        self._devices = tuple(devices)

    def __len__(self) -> int:
        return len(self._devices)

    @overload
    def __getitem__(self, i: int) -> RayDevice: ...

    @overload
    def __getitem__(self, i: slice) -> "RayDevices": ...

    def __getitem__(self, i: int | slice) -> "RayDevice | RayDevices":
        found = self._devices[i]
        return found if isinstance(found, RayDevice) else RayDevices(found)

    def __iter__(self) -> Iterator[RayDevice]:
        return iter(self._devices)

    def __enter__(self) -> "RayDevices":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def alive(self) -> tuple[int, ...]:
        """Returns the positions of the devices that answer; takes seconds if some do not."""
        import ray

        answers = [device.call("process_id") for device in self]
        ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)
        return tuple(i for i, answer in enumerate(answers) if _has_result(answer))

    def without_lost(self) -> "RayDevices":
        """Returns the devices that answer, to place on anew what a lost one had."""
        return RayDevices(self[i] for i in self.alive())

    def close(self) -> None:
        """Ends all processes of the session, and Ray if `ray_devices` started it."""
        for session in {device.session for device in self}:
            session.close()


class Session:
    """What the devices that were started together share in this process."""

    def __init__(self, platform: str, owns_ray: bool) -> None:
        self.actors: list[Any] = []
        self.exports = KernelExports(platform)
        self.one_call = threading.Lock()
        self.forgotten: deque[tuple[str, int]] = deque()  # ("program" or "block", number)
        self._owns_ray = owns_ray
        self._count = 0
        self._blocks: dict[int, dict[Any, int]] = {}  # by id of the array
        self._lock = threading.Lock()

    def new_number(self) -> int:
        """Returns a number that no program, block or call has had."""
        with self._lock:
            self._count += 1
            return self._count

    def blocks_of(self, value: Any) -> dict[Any, int]:
        """Returns the blocks of an array that lie on devices: numbers by place and device.

        They are forgotten when the array is.
        """
        key = id(value)
        if key not in self._blocks:
            self._blocks[key] = {}
            weakref.finalize(value, self._forget_blocks, key).atexit = False
        return self._blocks[key]

    def _forget_blocks(self, key: int) -> None:
        self.forgotten.extend(("block", number) for number in self._blocks.pop(key).values())

    def tell_forgotten(self) -> None:
        """Lets every process drop what is needed no more."""
        dropped: dict[str, list[int]] = {"program": [], "block": []}
        while self.forgotten:
            what, number = self.forgotten.popleft()
            dropped[what].append(number)
        if any(dropped.values()):
            for actor in self.actors:
                actor.call.remote("forget", dropped["program"], dropped["block"])

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()
        if self._owns_ray:
            end_ray()
            self._owns_ray = False


def end_ray() -> None:
    """Ends this process's Ray, daemons included, which Ray itself does not wait for."""
    import ray

    ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def this_host() -> str:
    """Returns what tells this machine, as long as it runs, from others."""
    with open(BOOT_ID) as file:
        return file.read().strip()


def _has_result(reference: Any) -> bool:
    import ray

    try:
        ray.get(reference, timeout=0)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        return False
    return True
