"""Which of the engine's backends gives devices that do not share what they compute with."""

import importlib.util
import os
from typing import Literal

import jax

from experiments.machine import BackendName

BackendChoice = Literal["auto", "local", "ray"]


def choose_backend(choice: BackendChoice, num_devices: int) -> BackendName:
    """Returns the backend of a setting, "auto" being what isolates devices best here.

    CPU devices of the backend `local` share the cores of this process; those of `ray` have
    a core each, if there are as many.
    """
    if choice != "auto":
        return choice
    has_accelerator = any(device.platform != "cpu" for device in jax.devices())
    has_ray = importlib.util.find_spec("ray") is not None
    enough = num_devices >= 2 and (os.cpu_count() or 1) >= num_devices
    return "ray" if has_ray and enough and not has_accelerator else "local"
