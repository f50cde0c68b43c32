"""Runs placed programs on real devices."""

from .compile import PlacedFunction, compile
from .errors import TaskError
from .measure import make_measure, measure_s
from .ops import Executables

__all__ = [
    "Executables",
    "PlacedFunction",
    "TaskError",
    "compile",
    "make_measure",
    "measure_s",
]
