"""Starts devices as Ray actors: one process each, with a core or a GPU of its own.

All that knows of Ray is here.
"""

import gc
import logging
import os
import secrets
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from .driver import ProcessDevices
from .line import Line
from .session import BOOT_ID, ProcessDevice, Session

_START_S = 120.0  # for a process to start and answer
_FREED_S = 10.0  # for Ray to hear that the devices of another session have ended
_SETTINGS = (  # of the compilation cache, which the processes share with this one
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class RaySession(Session):
    """Devices that are Ray actors."""

    backend = "ray"

    def __init__(self, address: str | None, gpus: bool) -> None:
        import ray

        super().__init__("cuda" if gpus else "cpu")
        self._ray = ray
        self._gpus = gpus
        self.actors: list[Any] = []
        self.lines = []
        self._ends: list[Any] = []  # calls that end with their processes
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            start_ray(address)

    @property
    def is_open(self) -> bool:
        # A call of an actor after `ray.shutdown` would start another Ray.
        return bool(self.actors) and self._ray.is_initialized()

    def call(self, index: int, method: str, *args: Any) -> Any:
        return self.actors[index].call.remote(method, *args)

    def wait(
        self, references: Sequence[Any], timeout_s: float, *, for_all: bool = False
    ) -> tuple[list[Any], list[Any]]:
        num_returns = len(references) if for_all else 1
        return self._ray.wait(list(references), num_returns=num_returns, timeout=timeout_s)

    def outcome(self, reference: Any, wait_s: float | None = 0.0) -> Any:
        try:
            return self._ray.get(reference, timeout=wait_s)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            return error

    def lost(self, index: int) -> BaseException | None:
        return self.outcome(self._ends[index])

    def close(self) -> None:
        for line in self.lines:
            line.hang_up()
        for actor in self.actors:
            self._ray.kill(actor)
        self.actors.clear()
        self.num_processes = 0
        if self._owns_ray:
            end_ray()
            self._owns_ray = False

    def start(self, num_devices: int) -> ProcessDevices:
        """Starts the processes, each with a core or a GPU of its own, and returns them."""
        self._check_free("GPU" if self._gpus else "CPU", num_devices)
        process: Any = self._ray.remote(_process_class()).options(
            num_cpus=0 if self._gpus else 1,
            num_gpus=1 if self._gpus else 0,
            max_concurrency=8,
            scheduling_strategy="SPREAD",
        )
        self.actors += [process.remote() for _ in range(num_devices)]
        self.num_processes = num_devices
        places = self._get([actor.where.remote(BOOT_ID) for actor in self.actors])
        cores = [None] * num_devices if self._gpus else _own_cores(places)
        secret = secrets.token_bytes(32)
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        settings |= {"jax_enable_x64": True, "jax_cpu_enable_async_dispatch": False}
        module = f"{__package__}.device"
        starts = enumerate(zip(self.actors, places, cores, strict=True))
        self._get(
            [
                actor.begin.remote(core, module, (index, place[1], secret, settings))
                for index, (actor, place, core) in starts
            ]
        )
        described = self._get([actor.call.remote("describe") for actor in self.actors])
        addresses = [address for address, *_ in described]
        self._get([actor.call.remote("connect", addresses) for actor in self.actors])
        self.lines = [Line(line, secret) for _, line, _, _ in described]
        self._ends = [actor.last.remote() for actor in self.actors]
        found = enumerate(zip(described, cores, places, strict=True))
        return ProcessDevices(
            [
                ProcessDevice(
                    name=f"{name} of {ip}" if self._gpus else f"core {core} of {ip}",
                    kind=f"{kind} of {host}",
                    index=index,
                    host=host,
                    session=self,
                )
                for index, ((_, _, name, kind), core, (host, ip, _)) in found
            ]
        )

    def _check_free(self, resource: str, wanted: int) -> None:
        deadline_s = time.perf_counter() + _FREED_S
        possible = self._ray.cluster_resources().get(resource, 0) >= wanted
        while (free := self._ray.available_resources().get(resource, 0)) < wanted:
            if not possible or time.perf_counter() > deadline_s:
                raise ValueError(
                    f"num_devices is {wanted}, but Ray has {free:g} {resource}s free"
                )
            time.sleep(0.1)

    def _get(self, references: list[Any]) -> list[Any]:
        try:
            return self._ray.get(references, timeout=_START_S)
        except self._ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(f"a device process did not start in {_START_S:g} s") from error


def end_ray() -> None:
    """Ends this process's Ray, daemons included, which Ray itself does not wait for."""
    import ray

    ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def ray_devices(
    num_devices: int, *, address: str | None = None, gpus: bool = False
) -> ProcessDevices:
    """Starts one process per device, each pinned to its own core or with its own GPU.

    A core's process has one CPU device that computes in one thread, so that devices do not
    share cores as those of one process do. On a Ray cluster of several nodes they are
    spread over the nodes, which need this package and the same JAX.

    Example:
      >>> program = dj.partition(dj.trace(lambda x: jnp.tanh(x @ x), jnp.eye(4)), num_shards=1)
      >>> with dj.ray_devices(1) as devices:
      ...     step = dj.compile(program, [0] * program.graph.num_tasks, devices=devices)
      ...     print(step(jnp.eye(4)).shape)
      (4, 4)

    Args:
      num_devices: how many.
      address: of a running Ray cluster, as for `ray.init`; None: the one that this process
        is connected to, or else a Ray of this machine, started here and ended by `close`.
      gpus: whether each device is a GPU rather than a core.

    Raises:
      ValueError: Ray is not installed, cores cannot be had for oneself (on Linux they can),
        `num_devices` is not positive, or there are fewer free cores or GPUs.
      RuntimeError: a process did not start.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices is {num_devices}; expected a positive integer")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "ray_devices needs the extra 'cluster': pip install 'doppler-jax[cluster]'"
        ) from error
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("ray_devices pins processes to cores; expected Linux")
    session = RaySession(address, gpus)
    try:
        return session.start(num_devices)
    except BaseException:
        session.close()
        raise


def start_ray(address: str | None) -> None:
    """Connects this process to the Ray of an address, or starts one of this machine."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 yields to everything else
    options: dict[str, Any] = {} if address else {"include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about its future
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )


def _own_cores(places: Sequence[tuple[str, str, list[int]]]) -> list[int]:
    """Returns a core for each process; several nodes of Ray may be one machine."""
    taken: set[tuple[str, int]] = set()
    cores = []
    for host, ip, allowed in places:
        free = [core for core in allowed if (host, core) not in taken]
        if not free:
            raise ValueError(f"there are more devices on {ip} than its {len(allowed)} cores")
        cores.append(free[0])
        taken.add((host, free[0]))
    return cores


def _process_class() -> type:
    """Returns the actor's class; local, so that it travels by value and imports no JAX."""

    class DeviceProcess:
        def where(self, boot_id: str) -> tuple[str, str, list[int]]:
            import os

            import ray.util

            with open(boot_id) as file:
                host = file.read().strip()
            return host, ray.util.get_node_ip_address(), sorted(os.sched_getaffinity(0))

        def begin(self, core: int | None, module: str, args: tuple[Any, ...]) -> None:
            import importlib
            import os

            if core is not None:
                # Before JAX: its threads stay on the cores of those that start them.
                for thread in os.listdir("/proc/self/task"):
                    os.sched_setaffinity(int(thread), {core})
                os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu"}
                for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):  # may ask for more devices
                    os.environ.pop(name, None)
            self.worker = importlib.import_module(module).Worker(*args)

        def call(self, method: str, *args: Any) -> Any:
            return getattr(self.worker, method)(*args)

        def last(self) -> None:
            import threading

            threading.Event().wait()

    return DeviceProcess
