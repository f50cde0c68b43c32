"""One call from a function to a callable that runs where it should."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import measure_host
from doppler_jax.objective import Objective
from doppler_jax.placing import list_methods, place
from doppler_jax.programs.blocks import flatten_args
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import Resident, trace

from .backend import Options
from .calibration import measure_calibration
from .measure import pair_placements
from .online import OnlineFunction
from .ops import Executables
from .placed import PlacedFunction, check_mode, get_backend, load

_LEAST_PLACING_S = 1.0
"""Seconds that placing gets, however long calibration took."""

_PAIRS = 7
"""Runs in which the placement found must beat the best single device."""


def place_and_compile(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[Any] | None = None,
    backend: str = "local",
    mode: str = "work_conserving",
    budget_s: float = 60.0,
    method: str = "doppler+search",
    key: chex.PRNGKey | None = None,
    num_shards: int | None = None,
    resident: Resident = None,
    online: bool = False,
    max_slowdown: float = 2.0,
) -> "PlacedFunction | OnlineFunction":
    """Returns `fn` cut into tasks that run on the devices where they finish soonest.

    The program is traced and cut, its kernels and transfers are measured on the devices,
    and a placement is searched for. Then it is run in alternation with all tasks on the
    fastest single device; the faster one is returned.

    Args:
      fn: any function that `dj.trace` takes.
      *args: arguments to trace, measure and later call it with; arrays, not shapes.
      devices: where to run, also unequal ones (`jax.devices("cpu") + jax.devices("gpu")`);
        by default all that JAX has.
      backend: of `dj.compile`.
      mode: likewise.
      budget_s: seconds for all of this; calibration takes what it needs of them, placing
        the rest, but at least a second.
      method: of `dj.place`.
      key: of what is random, by default `jax.random.key(0)`; it is consumed.
      num_shards: blocks per tensor, by default the next power of two of the devices.
      resident: of `dj.trace`: which arguments stay on the devices between calls.
      online: whether the result goes on learning from its calls; see `OnlineFunction`.
      max_slowdown: how much longer a call may take when the result tries something.

    Raises:
      ValueError: an argument or option is none; the message says which.
      TaskError: a kernel does not compile, or fails on these arguments.
    """
    began = time.monotonic()
    check_mode(backend, mode)
    if online and mode != "work_conserving":
        raise ValueError(f"online=True learns from work_conserving calls, mode is {mode!r}")
    if not max_slowdown > 1:
        raise ValueError(f"max_slowdown is {max_slowdown}; expected a number above 1")
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    if method not in list_methods():
        raise ValueError(f"unknown method {method!r}; known: {', '.join(list_methods())}")
    devices = list(jax.devices() if devices is None else devices)
    executables = Executables() if backend == "local" else None
    placed_on = get_backend(backend, devices, executables)
    if num_shards is None:
        num_shards = 1 << (len(devices) - 1).bit_length()
    program = trace(fn, *args, resident=resident)
    cluster = measure_host(devices) if backend == "local" else None
    sharded = partition(program, num_shards, cluster=cluster)
    flatten_args(sharded, args, {})  # shapes can be traced but not run
    costs = make_costs(sharded, measure_calibration(sharded, devices, backend=backend))
    placed = place(
        sharded.graph,
        costs,
        method=method,
        objective=Objective("serial"),  # truest to real ones, as measured in docs/fidelity.md
        key=key,
        budget_s=max(budget_s - (time.monotonic() - began), _LEAST_PLACING_S),
    )
    single = np.full(sharded.graph.num_tasks, int(costs.compute_s.sum(axis=0).argmin()))
    options = Options(mode=mode)
    placement = placed.placement
    # Only `exact` orders tasks; other placements were judged first come, first served.
    priority = placed.priority if placed.queue == "priority" else None
    if not np.array_equal(placement, single):
        found = pair_placements(sharded, args, placed_on, options, placement, single, _PAIRS)
        if found.ratio >= 1:
            placement, priority = single, None
    if online:
        return OnlineFunction(sharded, costs, placed_on, placement, max_slowdown)
    return load(sharded, placement, priority, placed_on, options)
