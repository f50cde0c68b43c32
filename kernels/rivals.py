"""What a plan has to beat: `jax.jit` of the function, as its user would call it."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from doppler_jax.programs.blocks import by_position, num_bytes
from doppler_jax.programs.outputs import Output
from doppler_jax.types import ShardedProgram

from .devices import Devices
from .local import LocalDevices
from .loop import jit_taking

MOST_ARGUMENTS = 2
"""Of which each is sharded alone, the largest."""


def jit_rivals(
    fn: Callable[..., Any], sharded: ShardedProgram, devices: Devices
) -> dict[str, Callable[..., Any]]:
    """Returns `jit` by name, on a device of each kind.

    The devices of `jit` are this process's: plans may run on others.

    Args:
      fn: the function.
      sharded: cut into tasks, which says what is carried.
      devices: where plans run.
    """
    kinds = _kinds(_own(devices))
    jitted = jit_taking(fn, sharded)
    told: Any = jax.config
    usual = told.jax_default_device or jax.local_devices()[0]
    return {
        f"jit on {device}": jitted if device == usual else partial(_call_on, device, jitted)
        for device in kinds.values()
    }


def sharded_jits(
    fn: Callable[..., Any], sharded: ShardedProgram, devices: Devices, *, is_batch_told: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields `jit` over all devices of this process, and its name, by how arguments are cut.

    First the batch: arguments that neither stay nor are carried, and whose leading axis divides
    by the number of devices. Then all by their first axis that divides; one of the largest
    arguments by its longest such axis; all by their last. Devices have to be of one kind.

    Args:
      fn: the function.
      sharded: cut into tasks, which says what stays and what is carried.
      devices: where plans run.
      is_batch_told: whether the user said what stays; else any argument may be of the batch.
    """
    own = _own(devices)
    if len(own) == 1 or len(_kinds(own)) > 1:
        return
    known: list[dict[int, int]] = [{}]
    for way, axes in _ways(sharded, len(own), is_batch_told):
        if axes not in known:
            known.append(axes)
            name = f"jit, sharded{way} over {len(own)} devices"
            yield name, ShardedJit(fn, sharded, own, axes)


def _own(devices: Devices) -> list[jax.Device]:
    """Returns the devices of this process."""
    return list(devices) if isinstance(devices, LocalDevices) else jax.devices()


def _kinds(devices: Sequence[jax.Device]) -> dict[tuple[str, str], jax.Device]:
    """Returns the first device of each kind."""
    return {(device.platform, device.device_kind): device for device in reversed(devices)}


def _ways(
    sharded: ShardedProgram, count: int, is_batch_told: bool
) -> Iterator[tuple[str, dict[int, int]]]:
    """Yields ways to shard arguments over so many devices: their axes, by flat argument."""
    shapes = [aval.shape for aval in sharded.arg_avals]
    dividing = {
        i: axes
        for i, shape in enumerate(shapes)
        if (axes := [k for k, size in enumerate(shape) if size and size % count == 0])
    }
    kept = (_staying(sharded) if is_batch_told else set()) | {i for i, _ in sharded.carried}
    yield "", {i: 0 for i, axes in dividing.items() if i not in kept and axes[0] == 0}
    yield " by rows", {i: axes[0] for i, axes in dividing.items()}

    args, kwargs = jax.tree.unflatten(sharded.in_tree, range(len(shapes)))
    known = dict(enumerate(sharded.parameters))
    named = {known.get(k, str(k)): each for k, each in enumerate(args)} | kwargs
    arguments = {name: jax.tree.leaves(each) for name, each in named.items()}
    sizes = {n: sum(num_bytes(sharded.arg_avals[i]) for i in arguments[n]) for n in arguments}
    for name in sorted(arguments, key=sizes.__getitem__)[: -MOST_ARGUMENTS - 1 : -1]:
        longest = {
            i: max(dividing[i], key=shapes[i].__getitem__)
            for i in arguments[name]
            if i in dividing
        }
        yield f" by {name}", longest
    yield " by columns", {i: axes[-1] for i, axes in dividing.items()}


def _staying(sharded: ShardedProgram) -> set[int]:
    """Returns the flat arguments that are resident."""
    stays = sharded.graph.is_resident.tolist()
    return {block.source for block, is_in in zip(sharded.inputs, stays, strict=True) if is_in}


def _call_on(device: jax.Device, jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with jax.default_device(device):
        return jitted(*args, **kwargs)


class ShardedJit:
    """`jit` of a function whose arguments are cut over devices that have a copy of all else.

    An array that the next call brings again, and that is not carried, is laid once.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        sharded: ShardedProgram,
        devices: Sequence[jax.Device],
        axes: Mapping[int, int],
    ) -> None:
        mesh = Mesh(np.array(devices), ("devices",))
        self._axes = axes
        self._shardings = {None: NamedSharding(mesh, PartitionSpec())} | {
            axis: NamedSharding(mesh, PartitionSpec(*[None] * axis, "devices"))
            for axis in axes.values()
        }
        self._sharded = sharded
        self._carried = {i for i, _ in sharded.carried}
        self._laid: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

        @functools.wraps(fn)
        def same_state(*args: Any, **kwargs: Any) -> Any:
            # What is carried takes the memory of what it was, if it is laid alike.
            leaves, tree = jax.tree.flatten(fn(*args, **kwargs))
            for i, o in sharded.carried:
                leaves[o] = jax.lax.with_sharding_constraint(leaves[o], self._where(i))
            return jax.tree.unflatten(tree, leaves)

        self._jitted = jit_taking(same_state, sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(by_position(args, kwargs, self._sharded.parameters))
        seen: dict[
            tuple[int, int | None], Any
        ] = {}  # an array that is passed twice is laid once
        keys = [(id(leaf), self._axes.get(i)) for i, leaf in enumerate(leaves)]
        for i, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
            if key not in seen:
                seen[key] = self._lay(i, leaf)
        args, kwargs = jax.tree.unflatten(tree, [seen[key] for key in keys])
        return self._jitted(*args, **kwargs)

    def _where(self, i: int) -> NamedSharding:
        """Returns where an argument lies."""
        return self._shardings[self._axes.get(i)]

    def _lay(self, i: int, leaf: Any) -> Any:
        """Returns an argument on the devices; small ones that are no arrays are left to JAX."""
        if isinstance(leaf, Output):
            leaf = leaf.whole()
        is_array = isinstance(leaf, jax.Array)
        if i not in self._axes and not is_array:
            return leaf
        known = self._laid.get(i)
        if known is not None and known[0]() is leaf:
            return known[1]
        where = self._where(i)
        if is_array and leaf.sharding == where:  # a state's hundreds, which JAX is slow to see
            return leaf
        laid = jax.device_put(leaf, where)
        if is_array and i not in self._carried:  # the content of NumPy's may change
            self._laid[i] = weakref.ref(leaf), laid
        return laid
