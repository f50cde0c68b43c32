"""The ready queues of D devices in L executions under `fifo`: binary heaps.

Entries are pairs, ready time and task, the least first. An operation moves the entries of all
lanes level by level until none moves any more, so it costs what the fullest of their queues
is deep, whatever the size of the graph.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from doppler_jax.simulator.lanes import Hold, at, column, largest, pick, write
from doppler_jax.types import pytree

_Entry = tuple[chex.Array, chex.Array]
"""Ready time and task `[L]`, both inf where there is none."""


@pytree
class Heaps:
    """The heap of each device; entry i is not behind entries 2 i + 1 and 2 i + 2."""

    pairs: chex.Array  # [L * D * C * 2] what is behind the entries of a heap is of no account
    size: chex.Array  # [D, L] entries, as a float


def make_heaps(lanes: int, devices: int, most: int, dtype: jnp.dtype) -> Heaps:
    """Returns empty heaps for up to `most` entries each."""
    return Heaps(
        pairs=jnp.full(lanes * devices * (most + 1) * 2, jnp.inf, dtype),
        size=jnp.zeros((devices, lanes), dtype),
    )


def put(
    heaps: Heaps, device: chex.Array, task: chex.Array, ready_s: chex.Array, hold: Hold
) -> Heaps:
    """Puts tasks into heaps.

    Args:
      heaps: they.
      device: `[L]` whose heap, as a float.
      task: `[L]` as a float.
      ready_s: `[L]`; where inf, nothing changes.
      hold: see `Hold`.
    """
    first, _ = _places(heaps, device.astype(jnp.int32))
    enters = ready_s < jnp.inf
    size = hold(pick(heaps.size, device))
    entry = ready_s, hold(jnp.where(enters, task, jnp.inf))

    def rise(carry: tuple[chex.Array, ...]) -> tuple[chex.Array, ...]:
        pairs, place, _ = carry
        parent = jnp.where(place > 0, (place - 1) >> 1, 0)
        above = _read(pairs, first + parent, hold)
        rises = (place > 0) & _before(entry, above)
        pairs = _write(pairs, first + place, _choose(rises, above, entry, hold))
        return pairs, jnp.where(rises, parent, place), _any(rises)

    pairs = _until_none(rise, heaps.pairs, size.astype(jnp.int32))
    grows = (column(len(heaps.size), device) == device[None]) & enters[None]
    return Heaps(pairs=pairs, size=jnp.where(grows, size[None] + 1, heaps.size))


def take_first(
    heaps: Heaps, device: chex.Array, hold: Hold
) -> tuple[chex.Array, chex.Array, Heaps]:
    """Takes the first entry of one heap per lane.

    Args:
      heaps: they.
      device: `[L]` int32, whose heap.
      hold: see `Hold`.

    Returns:
      Ready times `[L]` and tasks as floats, inf where a heap is empty; the heaps.
    """
    first, places = _places(heaps, device)
    size = hold(pick(heaps.size, device.astype(heaps.size.dtype)))
    last = jnp.where(size > 0, size - 1, 0).astype(jnp.int32)
    nobody = jnp.full_like(size, jnp.inf), jnp.full_like(size, jnp.inf)
    root = _choose(size > 0, _read(heaps.pairs, first, hold), nobody, hold)
    entry = _choose(size > 1, _read(heaps.pairs, first + last, hold), nobody, hold)

    def sink(carry: tuple[chex.Array, ...]) -> tuple[chex.Array, ...]:
        pairs, place, _ = carry
        child = jnp.where(2 * place + 2 < places, 2 * place + 1, places - 2)
        left = _choose(child < last, _read(pairs, first + child, hold), nobody, hold)
        right = _choose(child + 1 < last, _read(pairs, first + child + 1, hold), nobody, hold)
        swaps = _before(right, left)
        below = _choose(swaps, right, left, hold)
        sinks = _before(below, entry)
        pairs = _write(pairs, first + place, _choose(sinks, below, entry, hold))
        child = jnp.where(swaps, child + 1, child)
        return pairs, jnp.where(sinks, child, place), _any(sinks)

    # Zeros, but not that XLA could tell: it has to read the root before the loop overwrites
    # it, else it copies all heaps.
    top = ((root[0] < 0) | (root[1] < 0)).astype(jnp.int32)
    pairs = _until_none(sink, heaps.pairs, top)
    here = column(len(heaps.size), size) == device.astype(size.dtype)[None]
    shrinks = here & (size > 0)[None]
    return *root, Heaps(pairs=pairs, size=jnp.where(shrinks, size[None] - 1, heaps.size))


def _places(heaps: Heaps, device: chex.Array) -> tuple[chex.Array, int]:
    """Returns where the heap of a device begins `[L]`, in pairs, and the places of a heap."""
    devices, lanes = heaps.size.shape
    places = len(heaps.pairs) // (2 * devices * lanes)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    return (lane * devices + device) * places, places


def _until_none(
    move: Callable[[tuple[chex.Array, ...]], tuple[chex.Array, ...]],
    pairs: chex.Array,
    place: chex.Array,
) -> chex.Array:
    """Moves entries, at least once, until those of no lane move; returns the pairs."""
    carry = pairs, place, jnp.bool_(True)
    return jax.lax.while_loop(lambda carry: carry[2], move, carry)[0]


def _any(lanes: chex.Array) -> chex.Array:
    return largest(lanes.astype(jnp.int32)) > 0


def _before(a: _Entry, b: _Entry) -> chex.Array:
    """Whether the entries of a come before those of b `[L]`."""
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))


def _choose(where: chex.Array, a: _Entry, b: _Entry, hold: Hold) -> _Entry:
    return hold(jnp.where(where, a[0], b[0])), hold(jnp.where(where, a[1], b[1]))


def _read(pairs: chex.Array, place: chex.Array, hold: Hold) -> _Entry:
    return hold(at(pairs, 2 * place)), hold(at(pairs, 2 * place + 1))


def _write(pairs: chex.Array, place: chex.Array, entry: _Entry) -> chex.Array:
    return write(pairs, 2 * place, jnp.stack(entry, axis=-1), True)
