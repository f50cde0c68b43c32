"""What a transfer between two devices costs: latency plus bytes over bandwidth."""

import numpy as np

from doppler_jax.types import Cluster


def link_costs(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """Returns `latency_s` and `seconds_per_byte`, `[D, D]` each, with diagonals 0."""
    seconds_per_byte = 1.0 / np.asarray(cluster.link_bytes_per_s, dtype=np.float64)
    return np.array(cluster.latency_s, dtype=np.float64), seconds_per_byte
