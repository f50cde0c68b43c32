"""Operations on L executions in lock step, one per lane, that compile to tight loops."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

Hold = Callable[[chex.Array], chex.Array]
"""Keeps XLA from repeating a computation in each of its readers."""


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


def largest(values: chex.Array) -> chex.Array:
    """Returns the maximum over rows."""
    return -least(-values)


def write(table: chex.Array, index: chex.Array, rows: chex.Array, native: bool) -> chex.Array:
    """Returns the flat table with `rows[l]` from `index[l]` on."""
    if not native:
        columns = index[:, None] + jnp.arange(rows.shape[1], dtype=index.dtype)[None]
        return table.at[columns].set(rows, mode="promise_in_bounds", unique_indices=True)
    index = index.astype(jnp.uint32)  # unsigned: no code for negative ones
    for lane in range(len(rows)):
        table = jax.lax.dynamic_update_slice(table, rows[lane], (index[lane],))
    return table
