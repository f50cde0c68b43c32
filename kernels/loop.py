"""Calls in a row that feed back what is carried, and `jit` that takes it as a plan does."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from doppler_jax.programs.blocks import by_position, donated
from doppler_jax.programs.outputs import Output
from doppler_jax.types import ShardedProgram


class Loop:
    """Calls of a function with the same arguments, but for the state, which goes on.

    It begins with copies of what is carried: no array of the caller's is taken.

    Args:
      call: the function.
      sharded: which says what is carried.
      args: its first arguments.
      kwargs: those by keyword.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        sharded: ShardedProgram,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._call, self._pairs = call, sharded.carried
        given = by_position(args, kwargs, sharded.parameters)
        self._leaves, self._tree = jax.tree.flatten(given)
        for i, _ in self._pairs:
            self._leaves[i] = _copy(self._leaves[i])

    def __call__(self) -> Any:
        """Runs the next call, and returns what it returns."""
        args, kwargs = jax.tree.unflatten(self._tree, self._leaves)
        outputs = self._call(*args, **kwargs)
        found = jax.tree.leaves(outputs)
        for i, o in self._pairs:
            self._leaves[i] = found[o]
        return outputs


def jit_taking(fn: Callable[..., Any], sharded: ShardedProgram) -> Callable[..., Any]:
    """Returns `jax.jit` of a function; what is carried is its to keep."""
    taken = donated(sharded)
    if not taken:
        return jax.jit(fn)
    numbers = _whole_arguments(sharded, set(taken))
    whole = None if numbers is None else jax.jit(fn, donate_argnums=numbers)

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
    def run(carried: dict[int, Any], others: dict[int, Any], tree: Any) -> Any:
        leaves = {**carried, **others}
        args, kwargs = jax.tree.unflatten(tree, [leaves[i] for i in range(len(leaves))])
        return fn(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if whole is not None and not kwargs:  # by far the quickest, if there are many leaves
            given = jax.tree.leaves(args)
            if len(set(map(id, given))) == len(given):
                return whole(*args)
        leaves, tree = jax.tree.flatten(by_position(args, kwargs, sharded.parameters))
        others = {i: leaf for i, leaf in enumerate(leaves) if i not in taken}
        seen, carried = {id(leaf) for leaf in others.values()}, {}
        for i in taken:  # XLA takes no array that it is given twice
            carried[i] = _copy(leaves[i]) if id(leaves[i]) in seen else leaves[i]
            seen.add(id(leaves[i]))
        return run(carried, others, tree)

    return call


def _whole_arguments(sharded: ShardedProgram, taken: set[int]) -> tuple[int, ...] | None:
    """Returns the arguments that have the flat ones; None: there are others among theirs."""
    args, _ = jax.tree.unflatten(sharded.in_tree, range(sharded.in_tree.num_leaves))
    leaves = [set(jax.tree.leaves(arg)) for arg in args]
    found = tuple(k for k, own in enumerate(leaves) if own and own <= taken)
    return found if set().union(*(leaves[k] for k in found)) == taken else None


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Output):
        leaf = leaf.whole()
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
