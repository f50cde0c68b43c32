"""JAX devices of this process, whose programs its threads run."""

import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from doppler_jax.costs.host import memory_bytes
from doppler_jax.types import ShardedProgram

from .agenda import RULES, Agenda
from .devices import Devices, Options
from .memory import Residents, donated_operands
from .ops import Executable, ExecutableKey, compile_missing
from .running import Calls
from .stream import StreamCall
from .threads import LocalProgram, ThreadsCall, run_ahead


class LocalDevices(Devices):
    """JAX devices of this process, with the kernels compiled for them.

    Wherever the engine takes `devices` it takes a list of JAX devices, too. With one object in
    its place, what one function compiled, or laid as resident, is there for the others.

    Args:
      devices: by default all that JAX has.

    Raises:
      ValueError: `devices` is empty, one occurs twice, or one is not a JAX device.
    """

    backend = "local"
    modes = tuple(sorted(RULES))

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        super().__init__(jax.devices() if devices is None else devices)
        for i, device in enumerate(self._devices):
            if not isinstance(device, jax.Device):
                raise ValueError(
                    f"devices[{i}] is {device!r}; expected a JAX device, or dj.ray_devices(...)"
                )
        self.device_names = tuple(map(str, self._devices))
        self.device_kinds = tuple(device.device_kind for device in self._devices)
        self.capacity_bytes = np.array([memory_bytes(d, self._devices) for d in self._devices])
        self.calls = Calls()
        self.executables: dict[ExecutableKey, Executable] = {}
        self._residents: weakref.WeakKeyDictionary[ShardedProgram, Residents] = (
            weakref.WeakKeyDictionary()
        )

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, slice):
            return self._devices[i]
        found = LocalDevices(self._devices[i])
        found.executables, found.calls = self.executables, self.calls
        return found

    def load(self, sharded: ShardedProgram, agenda: Agenda, options: Options) -> LocalProgram:
        """Returns the program ready to run; placements of one share its resident blocks.

        Raises:
          TaskError: a kernel does not compile.
        """
        started = time.perf_counter()
        wanted = []
        for v, (kernel, d) in enumerate(zip(sharded.kernels, agenda.placement, strict=True)):
            waits = not run_ahead(self._devices[d])
            donated = donated_operands(agenda, v, kernel) if waits else ()
            wanted.append(ExecutableKey(kernel, self._devices[d], donated))
        compile_missing(self.executables, wanted, agenda)
        is_stream = agenda.mode == "in_order" and all(map(run_ahead, self._devices))
        return LocalProgram(
            sharded=sharded,
            agenda=agenda,
            options=options,
            devices=self._devices,
            calls=self.calls,
            executables=tuple(self.executables[key] for key in wanted),
            residents=self._residents.setdefault(sharded, Residents(sharded, self._devices)),
            runner=StreamCall if is_stream else ThreadsCall,
            compile_s=time.perf_counter() - started,
        )
