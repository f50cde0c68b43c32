"""Devices that are processes: a runtime of our own, which a launcher starts.

From below: `transport.py` moves tensors between processes; `line.py` brings calls to them;
`device.py` is what runs in each of them; `session.py` is how this process asks them;
`driver.py` runs programs on them, as `ProcessDevices`; `ray.py` starts them as Ray actors, and
is all here that knows of Ray.

To add a launcher, write such a file (`session.py` says what it does), give it a row in
`LAUNCHERS`, by which settings, commands and studies know it, a public name in
`doppler_jax/__init__.py`, a test like that of Ray, and a line in docs/how/engine.md. What the
backend `auto` chooses is `choose_backend` in `stage3.py`.
"""

from collections.abc import Callable

from .driver import ProcessDevices
from .ray import ray_devices

LAUNCHERS: dict[str, Callable[[int], ProcessDevices]] = {"ray": ray_devices}
"""What starts so many device processes, by the name of the backend."""
