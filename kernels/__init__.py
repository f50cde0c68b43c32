"""Runs placed programs on real devices."""

from .automatic import place_and_compile
from .calibration import measure_calibration
from .compile import PlacedFunction, compile
from .compile_cache import cache_compilations
from .errors import TaskError
from .measure import make_measure, make_paired_measure, measure_s
from .online import OnlineFunction
from .ops import Executables
from .ray_processes import RayDevices
from .ray_start import ray_devices

__all__ = [
    "Executables",
    "OnlineFunction",
    "PlacedFunction",
    "RayDevices",
    "TaskError",
    "cache_compilations",
    "compile",
    "make_measure",
    "make_paired_measure",
    "measure_calibration",
    "measure_s",
    "place_and_compile",
    "ray_devices",
]
