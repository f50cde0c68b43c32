"""The local backend: threads of this process over JAX devices, one runner per mode."""

from collections.abc import Callable

from doppler_jax.types import Schedule

from .job import Job, Slots
from .stream import run_stream
from .work_conserving import run_work_conserving

Runner = Callable[[Job, Slots], Schedule]

MODES: dict[str, Runner] = {"stream": run_stream, "work_conserving": run_work_conserving}
