"""A chain of matrix products."""

import jax

from doppler_jax.programs.workloads.workload import Definition, normal, weight

PRESETS = {"small": {"n": 512}, "medium": {"n": 1024}, "paper": {"n": 10_000}}


def chainmm(n: int) -> Definition:
    """Returns (A @ B) + (C @ (D @ E)) of `n` x `n` float32 matrices."""

    def fn(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, e: jax.Array) -> jax.Array:
        return (a @ b) + (c @ (d @ e))

    left, right = weight(n, n, n), normal(n, n)
    return fn, (left, right, left, left, right)
