"""How an update is cut over the local devices: equal parts of its episodes on each."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "episodes"
"""The mesh's axis, along which devices differ."""

WHOLE = PartitionSpec()
"""Of an array that every device has whole."""

CUT = PartitionSpec(AXIS)
"""Of an array that is cut along its first axis."""

CUT_SECOND = PartitionSpec(None, AXIS)
"""Of one that is cut along its second axis, that of the episodes of minibatches."""


@cache
def make_mesh(shards: int) -> Mesh:
    """Returns a mesh of the first `shards` local devices."""
    return Mesh(np.array(jax.local_devices()[:shards]), (AXIS,))


def cut_over(
    shards: int, run: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns `run` on arguments cut over so many devices; itself if there is one."""
    if shards == 1:
        return run
    return jax.shard_map(
        run,
        mesh=make_mesh(shards),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def everywhere(shards: int) -> NamedSharding:
    """Returns the sharding of what each of the first `shards` devices has a copy of."""
    return NamedSharding(make_mesh(shards), WHOLE)


def most_shards(count: int) -> int:
    """Returns over how many local devices `count` things can be cut in equal parts, at most."""
    devices = range(1, jax.local_device_count() + 1)
    return max(shards for shards in devices if count % shards == 0)
