"""Measures what calls take beside their tasks and transfers, on little programs."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doppler_jax.costs.calls import CallCosts, amounts, fit_calls
from doppler_jax.programs.partition import partition
from doppler_jax.programs.trace import trace
from doppler_jax.simulator.oracle import makespan_s
from doppler_jax.types import Plan, ShardedProgram

from .devices import Devices, Options
from .placed import load

LENGTHS = (1 << 10, 1 << 20)
"""Numbers in what is laid or handed over: 4 KiB and 4 MiB."""

COUNT = 8
"""Arguments laid, or outputs."""

NUM_TASKS = 64
"""Of a chain of tiny tasks."""

WARM_UPS = 3
"""Beyond compilation: allocators and caches settle."""

USUAL_ROUNDS = partial(range, WARM_UPS + 9)
"""Nine calls of each program count, where nothing bounds them."""


def measure_calls(
    devices: Devices, rounds: Callable[[], Iterable[int]] = USUAL_ROUNDS
) -> CallCosts:
    """Returns what calls take on devices beyond their makespans.

    Little programs are called that lay, hand over or join much or little, or have many tasks.

    Args:
      devices: where.
      rounds: gives as many numbers as a program is called; the first `WARM_UPS` calls do not
        count, of the others the median does.
    """
    rows, beyond_s = [], []
    for sharded, args in _programs():
        places = np.arange(sharded.graph.num_tasks) % len(devices)
        step = load(sharded, Plan(places), devices, Options())
        found = []
        for _ in rounds():
            began_s = time.perf_counter()
            jax.block_until_ready(step(*args))
            call_s = time.perf_counter() - began_s
            trace_ = step.schedule
            assert trace_ is not None  # it was called
            found.append(call_s - makespan_s(trace_))
        rows.append(amounts(sharded))
        beyond_s.append(max(float(np.median(found[WARM_UPS:])), 1e-9))
    return fit_calls(np.array(rows), np.array(beyond_s))


def _programs() -> Iterator[tuple[ShardedProgram, tuple[Any, ...]]]:
    """Yields programs and their arguments."""

    def lay(row: jax.Array, columns: list[jax.Array]) -> list[jax.Array]:
        return [row @ column for column in columns]

    def hand_over(column: jax.Array, scales: list[jax.Array]) -> list[jax.Array]:
        return [column @ scale for scale in scales]

    def chain(one: jax.Array, scales: list[jax.Array]) -> jax.Array:
        for _ in range(NUM_TASKS):  # products are tasks; what is element-wise would be fused
            one = one @ scales[0]
        return one

    def numbers(*shape: int) -> list[jax.Array]:
        return [jnp.full(shape, 1.0 + k) for k in range(COUNT)]

    small = jnp.ones((1, 1)), numbers(1, 1)
    yield partition(trace(chain, *small), 1), small
    yield partition(trace(hand_over, *small), 1), small
    for length in LENGTHS:
        laid = jnp.ones((1, length)), numbers(length, 1)
        yield partition(trace(lay, *laid, resident=0), 2), laid
        handed = jnp.ones((length, 1)), numbers(1, 1)
        for num_shards in (1, 2):
            yield partition(trace(hand_over, *handed), num_shards), handed
