"""A line through measured transfers: latency and seconds per byte."""

import numpy as np
from scipy.optimize import nnls

_ROUNDS = 20


def fit_line(num_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Returns (latency in s, seconds per byte), both >= 0, that fit best.

    Minimises the sum of absolute relative errors, so that small and large transfers count
    alike and a few odd ones little, by least squares reweighted some rounds.

    Args:
      num_bytes: `[K]` sizes, K >= 1.
      seconds: `[K]`, positive.
    """
    rows = np.stack([1.0 / seconds, num_bytes / seconds], axis=1)
    scale = np.maximum(rows.max(axis=0), np.finfo(np.float64).tiny)  # bytes are millions
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found, _ = nnls(rows / scale * weights[:, None], weights)
        # Least squares of these weights is least absolute error once they settle.
        weights = np.maximum(np.abs(rows / scale @ found - 1.0), 1e-6) ** -0.5
    latency_s, seconds_per_byte = (found / scale).tolist()
    return latency_s, seconds_per_byte
