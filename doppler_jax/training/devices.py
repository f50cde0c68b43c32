"""How an update is cut over the local devices: equal parts of its episodes on each."""

from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "episodes"
"""The mesh's axis, along which devices differ."""

WHOLE = PartitionSpec()
"""Of an array that every device holds."""


@cache
def make_mesh(shards: int) -> Mesh:
    """Returns a mesh of the first `shards` local devices."""
    return Mesh(np.array(jax.local_devices()[:shards]), (AXIS,))


def everywhere(shards: int) -> NamedSharding:
    """Returns the sharding of what each of the first `shards` devices holds a copy of."""
    return NamedSharding(make_mesh(shards), WHOLE)


def most_shards(count: int) -> int:
    """Returns over how many local devices `count` things can be cut in equal parts, at most."""
    devices = range(1, jax.local_device_count() + 1)
    return max(shards for shards in devices if count % shards == 0)
