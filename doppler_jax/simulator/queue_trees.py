"""The ready queues of D devices in L executions under `priority`: trees of minima.

A queue's leaves are the tasks in the order of their queue positions, and hold the ready times
of those that wait, else inf; a node holds the least of its children that are on the device.
The first task that is ready in time is the leftmost such leaf, found from the root down.
Every tree has three levels, whatever it holds, so all lanes do the same work, and that
grows with the cube root of N alone. (With two levels, blocks of siblings are too long; with
four, writes are too many.)
"""

import chex
import jax
import jax.numpy as jnp

from doppler_jax.simulator.lanes import Hold, at, column, larger, least, write

Trees = tuple[chex.Array, chex.Array, chex.Array]
"""Flat levels: leaves `[L * 2^k]`, which devices share, then nodes `[L * D * 2^j]`, `2^i`."""


def queue_order(rank: chex.Array) -> chex.Array:
    """Returns the tasks `[B, N + 1]` by (rank, id), the one that never runs last.

    To be called outside of native kernels, which cannot sort.
    """
    order = jnp.argsort(rank[:, :-1], axis=-1, stable=True).astype(jnp.int32)
    return jnp.pad(order, ((0, 0), (0, 1)), constant_values=order.shape[1])


def queue_positions(order: chex.Array, base: chex.Array, dtype: jnp.dtype) -> chex.Array:
    """Returns the flat positions `[L * (N + 1)]` of the tasks in `order`, as floats.

    Args:
      order: `[L * (N + 1)]` int32, the tasks of each lane.
      base: `[L]` int32, where they begin.
      dtype: of the positions.
    """
    lanes = len(base)

    def note(i: chex.Array, position: chex.Array) -> chex.Array:
        where = base + at(order, base + i)
        return write(position, where, jnp.broadcast_to(i, (lanes, 1)).astype(dtype), True)

    return jax.lax.fori_loop(0, len(order) // lanes, note, jnp.zeros(len(order), dtype))


def queue_places(tasks: int) -> int:
    """Returns the leaves of a queue of so many tasks: a power of two."""
    return 1 << (tasks - 1).bit_length()


def make_trees(lanes: int, devices: int, tasks: int, dtype: jnp.dtype) -> Trees:
    """Returns empty trees."""
    leaf, middle, top = _level_bits(queue_places(tasks))
    sizes = (1 << leaf + middle + top, devices << middle + top, devices << top)
    leaves, nodes, roots = (jnp.full(lanes * size, jnp.inf, dtype) for size in sizes)
    return leaves, nodes, roots


def put(
    trees: Trees, device: chex.Array, position: chex.Array, ready_s: chex.Array, hold: Hold
) -> Trees:
    """Puts tasks into trees.

    Args:
      trees: they.
      device: `[L]` whose queue, as a float.
      position: `[L]` of the task, as a float.
      ready_s: `[L]`; where inf, nothing changes.
      hold: see `Hold`.
    """
    node, after = position.astype(jnp.int32), []
    for nodes, bits, first in _levels(trees, device.astype(jnp.int32)):
        old_s = at(nodes, first + node)
        new_s = hold(jnp.where(old_s < ready_s, old_s, ready_s))
        after.append(write(nodes, first + node, new_s[:, None], True))
        node = node >> bits
    leaves, nodes, roots = after
    return leaves, nodes, roots


def take_first(
    trees: Trees,
    device: chex.Array,
    device_at: chex.Array,
    *,
    free_s: chex.Array,
    hold: Hold,
) -> tuple[chex.Array, chex.Array, Trees]:
    """Takes what each lane's device would start first.

    Args:
      trees: they.
      device: `[L]` int32, whose queue.
      device_at: `[L * 2^k]` device of the task at each position, as a float.
      free_s: `[L]`; the first position is taken of those that are ready when the device is
        free, or else soonest after.
      hold: see `Hold`.

    Returns:
      Ready times `[L]`, inf where a tree is empty; positions `[L]` as floats; the trees.
    """
    node, due_s, path = jnp.zeros_like(device), None, []
    for nodes, bits, root in reversed(_levels(trees, device)):
        first = root + (node << bits)
        siblings = leaves = _blocks(nodes, first, 1 << bits)
        if nodes is trees[0]:
            devices = _blocks(device_at, first, 1 << bits)
            here = devices == device.astype(nodes.dtype)[None]
            siblings = jnp.where(here, siblings, jnp.inf)
        if due_s is None:
            due_s = hold(larger(least(siblings), free_s))
        children = column(1 << bits, due_s)
        child = hold(least(jnp.where(siblings <= due_s[None], children, 1 << bits)))
        node = (node << bits) + child.astype(jnp.int32)
        path.append((siblings, children == child[None], root + node))

    (_, _, root), (middles, middle, inner), (siblings, chosen, leaf) = path
    ready_s = hold(least(jnp.where(chosen, siblings, jnp.inf)))
    # An empty queue's path ends at any leaf, perhaps of another device: that one stays.
    leaf_s = hold(least(jnp.where(chosen & (ready_s == jnp.inf)[None], leaves, jnp.inf)))
    inner_s = hold(least(jnp.where(chosen, jnp.inf, siblings)))
    root_s = hold(least(jnp.where(middle, inner_s[None], middles)))
    after = (
        write(trees[0], leaf, leaf_s[:, None], True),
        write(trees[1], inner, inner_s[:, None], True),
        write(trees[2], root, root_s[:, None], True),
    )
    return ready_s, node.astype(ready_s.dtype), after


def _levels(trees: Trees, device: chex.Array) -> list[tuple[chex.Array, int, chex.Array]]:
    """Returns each level: nodes, log2 of the siblings, where a device's tree begins `[L]`."""
    lanes = len(device)
    leaf, middle, top = _level_bits(len(trees[0]) // lanes)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    tree = lane * (len(trees[2]) // (lanes << top)) + device
    return [
        (trees[0], leaf, lane << leaf + middle + top),
        (trees[1], middle, tree << middle + top),
        (trees[2], top, tree << top),
    ]


def _level_bits(places: int) -> tuple[int, int, int]:
    """Returns the log2 of the children of a node, from the leaves' parents up to the root."""
    bits = places.bit_length() - 1
    return bits // 3, (bits + 1) // 3, (bits + 2) // 3


def _blocks(nodes: chex.Array, first: chex.Array, size: int) -> chex.Array:
    """Returns `nodes[first[l] + i]` as `[size, L]`; a gather of this would be scalar code."""
    first = first.astype(jnp.uint32)
    rows = jnp.zeros((size, len(first)), nodes.dtype)
    for lane in range(len(first)):
        block = jax.lax.dynamic_slice(nodes, (first[lane],), (size,))
        rows = jax.lax.dynamic_update_slice(rows, block[:, None], (0, lane))
    return rows
