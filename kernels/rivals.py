"""What a plan has to beat: `jax.jit` of the function, as its user would call it."""

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from doppler_jax.programs.blocks import by_position
from doppler_jax.programs.outputs import Output
from doppler_jax.types import ShardedProgram

from .devices import Devices
from .local import LocalDevices
from .loop import jit_taking


def jit_rivals(
    fn: Callable[..., Any], sharded: ShardedProgram, devices: Devices, *, is_batch_told: bool
) -> dict[str, Callable[..., Any]]:
    """Returns `jit` by name: on a device of each kind, and over all with the batch sharded.

    The devices of `jit` are this process's: plans may run on others. A batch are arguments that
    neither stay nor are carried, and whose leading axis divides by the number of devices; those
    have to be of one kind.

    Args:
      fn: the function.
      sharded: cut into tasks, which says what stays and what is carried.
      devices: where plans run.
      is_batch_told: whether the user said what stays; else any argument may be of the batch.
    """
    own = list(devices) if isinstance(devices, LocalDevices) else jax.devices()
    kinds = {(device.platform, device.device_kind): device for device in reversed(own)}
    jitted = jit_taking(fn, sharded)
    told: Any = jax.config
    usual = told.jax_default_device or jax.local_devices()[0]
    rivals: dict[str, Callable[..., Any]] = {
        f"jit on {device}": jitted if device == usual else partial(_call_on, device, jitted)
        for device in kinds.values()
    }
    if len(own) > 1 and len(kinds) == 1:
        staying = _staying(sharded) if is_batch_told else set()
        kept = staying | {i for i, _ in sharded.carried}
        batch = {
            i
            for i, aval in enumerate(sharded.arg_avals)
            if i not in kept and aval.shape and aval.shape[0] and aval.shape[0] % len(own) == 0
        }
        if batch:
            rivals[f"jit, sharded over {len(own)} devices"] = _OverBatch(
                fn, sharded, own, batch
            )
    return rivals


def _staying(sharded: ShardedProgram) -> set[int]:
    """Returns the flat arguments that are resident."""
    stays = sharded.graph.is_resident.tolist()
    return {block.source for block, is_in in zip(sharded.inputs, stays, strict=True) if is_in}


def _call_on(device: jax.Device, jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with jax.default_device(device):
        return jitted(*args, **kwargs)


class _OverBatch:
    """`jit` of a function whose batch is cut over devices that have a copy of all else.

    An array that the next call brings again, and that is not carried, is laid once.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        sharded: ShardedProgram,
        devices: Sequence[jax.Device],
        batch: set[int],
    ) -> None:
        mesh = Mesh(np.array(devices), ("batch",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._cut = NamedSharding(mesh, PartitionSpec("batch"))
        self._sharded, self._batch = sharded, batch
        self._carried = {i for i, _ in sharded.carried}
        self._laid: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

        @functools.wraps(fn)
        def same_state(*args: Any, **kwargs: Any) -> Any:
            # What is carried takes the memory of what it was, if it is laid alike.
            leaves, tree = jax.tree.flatten(fn(*args, **kwargs))
            for _, o in sharded.carried:
                leaves[o] = jax.lax.with_sharding_constraint(leaves[o], self._whole)
            return jax.tree.unflatten(tree, leaves)

        self._jitted = jit_taking(same_state, sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(by_position(args, kwargs, self._sharded.parameters))
        seen: dict[tuple[int, bool], Any] = {}  # an array that is passed twice is laid once
        for i, leaf in enumerate(leaves):
            key = id(leaf), i in self._batch
            if key not in seen:
                seen[key] = self._lay(i, leaf)
        laid = [seen[id(leaf), i in self._batch] for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(tree, laid)
        return self._jitted(*args, **kwargs)

    def _lay(self, i: int, leaf: Any) -> Any:
        """Returns an argument on the devices; small ones that are no arrays are left to JAX."""
        if isinstance(leaf, Output):
            leaf = leaf.whole()
        is_array = isinstance(leaf, jax.Array)
        if i not in self._batch and not is_array:
            return leaf
        known = self._laid.get(i)
        if known is not None and known[0]() is leaf:
            return known[1]
        laid = jax.device_put(leaf, self._cut if i in self._batch else self._whole)
        if is_array and i not in self._carried:  # the content of NumPy's may change
            self._laid[i] = weakref.ref(leaf), laid
        return laid
