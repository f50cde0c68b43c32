"""The devices that an experiment of the engine runs on, and runs timed in turns."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike

import doppler_jax as dj
from doppler_jax.types import ShardedProgram
from experiments.problems import local_devices

BackendName = Literal["local", "ray"]


class Machine(contextlib.ExitStack):
    """Devices of both backends, started when first asked for; closed with the context."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.num_devices = num_devices

    def devices(self, backend: BackendName) -> Sequence[Any]:
        """Returns the devices to place on.

        Raises:
          ValueError: there are fewer, or the backend cannot be used here.
        """
        if backend == "ray":
            return self._ray_devices
        return self._local_devices

    @cached_property
    def _local_devices(self) -> Sequence[Any]:
        devices = local_devices()[: self.num_devices]
        if len(devices) < self.num_devices:
            raise ValueError(f"{self.num_devices} devices asked for, {len(devices)} there")
        return dj.LocalDevices(devices)

    @cached_property
    def _ray_devices(self) -> Sequence[Any]:
        return self.enter_context(dj.ray_devices(self.num_devices))

    def compile(
        self,
        sharded: ShardedProgram,
        placement: ArrayLike,
        backend: BackendName,
        mode: str = "work_conserving",
        priority: ArrayLike | None = None,
        *,
        fuse_segments: bool = False,
    ) -> dj.PlacedFunction:
        """Returns the placed function; kernels compiled before are not compiled again."""
        return dj.compile(
            sharded,
            placement,
            devices=self.devices(backend),
            mode=mode,
            priority=priority,
            fuse_segments=fuse_segments,
        )


def cores() -> list[int]:
    """Returns the cores that this process may use.

    Raises:
      ValueError: the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("processes cannot be pinned to cores on this system; Linux can")
    return sorted(os.sched_getaffinity(0))


def makespan_s(step: dj.PlacedFunction, args: Sequence[Any]) -> float:
    """Runs a placed function and returns the makespan of its trace, in seconds."""
    step(*args)
    assert step.trace is not None
    return float(step.trace.finish_s.max(initial=0.0))


def seconds_of(run: Callable[[], Any]) -> float:
    """Runs something, waits for its arrays, and returns the seconds that took."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def in_turns(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Returns what each run measured, `[rounds]`, after one round that does not count.

    The runs take turns, so that drift of a machine hits all alike.
    """
    measured: dict[str, list[float]] = {what: [] for what in runs}
    for turn in range(rounds + 1):
        for what, run in runs.items():
            value = run()
            if turn:
                measured[what].append(value)
    return {what: np.array(values) for what, values in measured.items()}
