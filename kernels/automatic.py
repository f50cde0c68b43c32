"""One call from a function to a callable that runs where it should."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import numpy as np

from doppler_jax.costs.build import make_costs
from doppler_jax.costs.clusters import measure_host
from doppler_jax.costs.pins import Pins, Together
from doppler_jax.costs.pins import pin as pinned
from doppler_jax.methods.registry import DEFAULT_METHOD, find_method
from doppler_jax.methods.request import Method
from doppler_jax.objective import Objective
from doppler_jax.placing import place
from doppler_jax.programs.blocks import flatten_args
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import Resident, trace
from doppler_jax.types import Plan

from .calibrate import measure_calibration
from .devices import Options
from .local import LocalDevices
from .measure import make_paired_measure
from .placed import PlacedFunction, as_devices, load

_LEAST_PLACING_S = 1.0
"""Seconds that placing gets, however long calibration took."""

_PAIRS = 7
"""Runs in which the placement found must beat the best single device."""


def place_and_compile(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[Any] | None = None,
    mode: str | None = None,
    budget_s: float = 60.0,
    method: str | Method = DEFAULT_METHOD,
    key: chex.PRNGKey | None = None,
    num_shards: int | None = None,
    resident: Resident = None,
    unroll_scans: bool | None = None,
    pin: Pins | None = None,
    together: Together = (),
    **kwargs: Any,
) -> PlacedFunction:
    """Returns `fn` cut into tasks that run on the devices where they finish soonest.

    The program is traced and cut, its kernels and transfers are measured on the devices,
    and a placement is searched for. Then it is run in alternation with all tasks on the
    fastest single device; the faster one is returned.

    Args:
      fn: any function that `dj.trace` takes.
      *args: arguments to trace, measure and later call it with; arrays, not shapes.
      devices: where to run, as `dj.compile` takes them, also unequal ones
        (`jax.devices("cpu") + jax.devices("gpu")`); by default all that JAX has.
      mode: of `dj.compile`.
      budget_s: seconds for all of this; calibration takes what it needs of them, placing
        the rest, but at least a second.
      method: of `dj.place`.
      key: of what is random, by default `jax.random.key(0)`; it is consumed.
      num_shards: blocks per tensor, by default the next power of two of the devices.
      resident: of `dj.trace`: which arguments stay on the devices between calls.
      unroll_scans: of `dj.trace`: whether loops are cut by iterations.
      pin: of `dj.place`: devices of tasks, by patterns of their names.
      together: of `dj.place`: patterns of tasks that share a device.
      **kwargs: arguments by keyword, but for those that are called as the options above.

    Raises:
      ValueError: an argument or option is invalid; the message says which.
      TaskError: a kernel does not compile, or fails on these arguments.
    """
    began = time.monotonic()
    options = Options(mode=mode)
    devices = as_devices(jax.devices() if devices is None else devices)
    devices.check_options(options)
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; expected more than 0")
    find_method(method)  # unknown ones are refused before anything is traced
    if num_shards is None:
        num_shards = 1 << (len(devices) - 1).bit_length()
    program = trace(fn, *args, resident=resident, unroll_scans=unroll_scans, **kwargs)
    cluster = measure_host(devices) if isinstance(devices, LocalDevices) else None
    sharded = partition(program, num_shards, cluster=cluster)
    flatten_args(sharded, args, kwargs)  # shapes can be traced but not run
    costs = make_costs(sharded, measure_calibration(sharded, devices))
    costs = pinned(sharded, costs, pin or {})
    placed = place(
        sharded,
        costs,
        method=method,
        # Truest to real ones, as measured: docs/results/fidelity.md.
        objective=Objective("serial"),
        key=key,
        budget_s=max(budget_s - (time.monotonic() - began), _LEAST_PLACING_S),
        together=together,
    )
    total_s = costs.compute_s.sum(axis=0)
    single = Plan(np.full(sharded.graph.num_tasks, int(total_s.argmin())))
    plan, is_rival = placed.plan, np.isfinite(total_s).any()  # pins may forbid it
    if is_rival and not np.array_equal(plan.placement, single.placement):
        pair = make_paired_measure(sharded, args, devices, mode, kwargs=kwargs)
        if pair(plan, single, _PAIRS).ratio >= 1:
            plan = single
    return load(sharded, plan, devices, options)
