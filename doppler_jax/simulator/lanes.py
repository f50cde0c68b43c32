"""Executions in lock step, one per lane: operations that compile to tight loops, and batches.

`run_batch` cuts a batch into chunks of lanes, as suits the platform.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

Run = Callable[..., tuple[chex.Array, ...]]
"""`run(shared, placement, rank, handling_s, *, native)` of L lanes: `[L, N + 1]`, or None."""

LANES = 64
"""Lanes of one CPU kernel: of 16, 32, 64 and 128 the fastest."""

FEW_LANES = 8
"""The same for up to 3 x as many placements."""

MAX_LANES = 1 << 16
"""Lanes on other platforms, where a step is a series of kernels over all lanes."""


def at(table: chex.Array, index: chex.Array) -> chex.Array:
    """Returns `table[index]`, which is in bounds."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def pick(table: chex.Array, row: chex.Array) -> chex.Array:
    """Returns `table[row[l], l]` for few rows, by comparisons."""
    picked = table[0]
    for d in range(1, len(table)):
        picked = jnp.where(row == d, table[d], picked)
    return picked


def column(size: int, like: chex.Array) -> chex.Array:
    """Returns 0, 1, ... `[size, 1]`, of the dtype of `like`."""
    return jnp.arange(size, dtype=like.dtype)[:, None]


def larger(a: chex.Array, b: chex.Array) -> chex.Array:
    """Returns the elementwise maximum. There are no NaNs, which `maximum` would pay for."""
    return jnp.where(a > b, a, b)


def least(rows: chex.Array) -> chex.Array:
    """Returns the minimum over rows, by halves: a reduction would not vectorise over lanes."""
    while len(rows) > 1:
        half = -(-len(rows) // 2)
        first, last = rows[:half], rows[len(rows) - half :]  # they overlap at odd sizes
        rows = jnp.where(last < first, last, first)
    return rows[0]


def write(table: chex.Array, index: chex.Array, rows: chex.Array, native: bool) -> chex.Array:
    """Returns the flat table with `rows[l]` from `index[l]` on."""
    if not native:
        columns = index[:, None] + jnp.arange(rows.shape[1], dtype=index.dtype)[None]
        return table.at[columns].set(rows, mode="promise_in_bounds", unique_indices=True)
    index = index.astype(jnp.uint32)  # unsigned: no code for negative ones
    for lane in range(len(rows)):
        table = jax.lax.dynamic_update_slice(table, rows[lane], (index[lane],))
    return table


def run_batch(
    run: Run,
    shared: chex.ArrayTree,
    placements: chex.Array,
    rank: chex.Array | None,
    handling_s: chex.Array | None = None,
    *,
    one_kernel: bool = True,
) -> tuple[chex.Array, ...]:
    """Returns what `run` returns, for a batch `[B, N + 1]`, whatever its size.

    `one_kernel` says whether on a CPU a chunk may be one (XLA aborts at that of `in_order`).

    On the CPU a chunk of lanes is one kernel, loops and all, told so by `native`. XLA
    otherwise dispatches every operation of a loop's body by itself, which is most of the time
    where a body works on a few hundred numbers. The attributes that ask
    for it are XLA's own (its pass for small loops sets them); where they are unknown they do
    nothing. Such a kernel cannot hold scatters or sorts: `native` code writes lane by lane, and
    `vmap` is a loop over kernels.
    """
    leaves, tree = jax.tree.flatten(shared)

    def run_on(some: list[chex.Array], *columns: Any, native: bool) -> tuple[chex.Array, ...]:
        left = iter(some)
        whole = [next(left) if a.size else jnp.zeros(a.shape, a.dtype) for a in leaves]
        return run(jax.tree.unflatten(tree, whole), *columns, native=native)

    elsewhere = partial(run_chunks, run_on, False)
    return jax.lax.platform_dependent(
        # Cut over devices, XLA aborts at arrays without elements here (jaxlib 0.11.2).
        [a for a in leaves if a.size],
        placements,
        rank,
        handling_s,
        cpu=sequential_vmap(partial(run_chunks, run_on, True)) if one_kernel else elsewhere,
        default=elsewhere,
    )


def run_chunks(
    run: Run,
    native: bool,
    shared: chex.ArrayTree,
    placements: chex.Array,
    *others: chex.Array | None,
) -> tuple[chex.Array, ...]:
    """Runs chunks of lanes one after another, each as one kernel where `native`."""
    batch = len(placements)
    if native:
        lanes = FEW_LANES if batch <= 3 * FEW_LANES else LANES
        # Constants that a caller's jit closes over would be sunk into the kernel: XLA aborts.
        shared, placements, others = jax.lax.optimization_barrier((shared, placements, others))
        run_chunk = partial(_one_kernel, partial(run, native=True), shared)
    else:
        # Flat tables hold two numbers per lane and task, and int32 indexes them.
        lanes = max(min(MAX_LANES, (1 << 30) // placements.shape[1], batch), 1)
        run_chunk = partial(run, shared, native=False)

    def cut(array: chex.Array) -> chex.Array:
        padded = jnp.pad(array, ((0, -batch % lanes), (0, 0)))
        return padded.reshape(-1, lanes, array.shape[1])

    chunks = jax.tree.map(cut, (placements, *others))
    out = jax.lax.map(lambda chunk: run_chunk(*chunk), chunks)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:batch], out)


def _one_kernel(fn: Run, *arguments: Any) -> tuple[chex.Array, ...]:
    """Returns `fn(*arguments)`, to be compiled as one kernel."""
    leaves, tree = jax.tree.flatten(arguments)
    traced = jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)))(*leaves)
    # Inside loops JAX passes what is not used, too, and XLA aborts at such a parameter.
    jaxpr, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    kernel = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, traced.consts)), inline=False)
    out = kernel(*itertools.compress(leaves, used))
    return tuple(set_xla_metadata(out, xla_cpu_small_call=True, inlineable=False))
