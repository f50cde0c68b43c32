"""The engine: runs placed programs on real devices. Its name is `doppler_jax.engine`.

The folder lies beside `doppler_jax/`, which has a link to it; an installation has the files
themselves. Users reach what `__all__` names as `dj.compile`, `dj.ray_devices` and so on.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if __name__ != "kernels":
    from .automatic import OnlineFunction, place_and_compile
    from .calibrate import measure_calibration
    from .devices import TaskError
    from .local import LocalDevices
    from .measure import make_measure, make_paired_measure, measure_s
    from .ops import cache_compilations
    from .placed import PlacedFunction, compile
    from .processes.driver import ProcessDevices
    from .processes.ray import ray_devices

    __all__ = [
        "LocalDevices",
        "OnlineFunction",
        "PlacedFunction",
        "ProcessDevices",
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
