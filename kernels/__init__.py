"""The engine: runs placed programs on real devices. Its name is `doppler_jax.engine`.

The folder lies beside `doppler_jax/`, which has a link to it; an installation has the files
themselves. Users reach what is public as `dj.compile`, `dj.ray_devices` and so on.

Read `placed.py` (`compile`) and `devices.py` (what runs programs) first, then `agenda.py`: what
a plan has to do, and the rules by which a mode does it. `local.py` has the devices of this
process; `threads.py` runs a call by threads, `stream.py` as one queue of work, with arrays in
`memory.py`, times in `trace.py`, kernels compiled by `ops.py`. `processes/` has devices that
are processes. `segments.py` coarsens a program, `profile.py` explains a call.

On top: `measure.py` times placements, in a loop where state is carried (`loop.py`),
`calibrate.py` kernels and transfers (`python -m doppler_jax.engine` is its command), `calls.py`
what else a call does. `distributed.py` does everything at a function's first call: the stages
in `planning.py`, then the plan beside its `rivals.py`, which `comparing.py` runs in turns.
`stage3.py` trains by measured times.

A mode is a row of `RULES` in `agenda.py`; a sort of devices is a `Devices`; a launcher of
processes is a file beside `processes/ray.py`.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _give_way() -> None:
    """Loads the other package `kernels`, which a checkout's root on `sys.path` hides.

    That name is Hugging Face's, whose distribution other libraries import.

    Raises:
      ModuleNotFoundError: none is installed.
    """
    root = Path(__file__).resolve().parents[1]
    others = [entry for entry in sys.path if Path(entry).resolve() != root]
    spec = PathFinder.find_spec("kernels", others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            "no module named 'kernels'; the engine is imported as doppler_jax.engine",
            name="kernels",
        )
    sys.modules["kernels"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["kernels"])


if __name__ == "kernels":
    _give_way()
else:
    from .calibrate import measure_calibration
    from .distributed import distribute
    from .local import LocalDevices
    from .measure import make_paired_measure, measure_s
    from .placed import PlacedFunction, compile
    from .processes.driver import ProcessDevices
    from .processes.ray import ray_devices
    from .running import TaskError

__all__ = [
    "LocalDevices",
    "PlacedFunction",
    "ProcessDevices",
    "TaskError",
    "compile",
    "distribute",
    "make_paired_measure",
    "measure_calibration",
    "measure_s",
    "ray_devices",
]
