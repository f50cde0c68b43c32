"""Randomness of an execution: noisy durations, random queues, and what they do to makespans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.types import TaskGraph, pytree

if TYPE_CHECKING:
    import chex


@pytree
class Factors:
    """K draws of what multiplies the seconds of N tasks, of moving T tensors and I inputs."""

    compute: chex.Array  # [K, N]
    transfer: chex.Array  # [K, T, D], the transfer of each tensor to each device
    inputs: chex.Array  # [K, I, D], that of each graph input

    def draws(self) -> list[dict[str, np.ndarray]]:
        """Returns each draw as the simulators take it, float64."""
        arrays = {
            "compute_factor": self.compute, "transfer_factor": self.transfer,
            "input_factor": self.inputs,
        }  # fmt: skip
        count = np.shape(self.compute)[0]
        return [
            {name: np.asarray(a[k], np.float64) for name, a in arrays.items()}
            for k in range(count)
        ]


def draw_factors(
    key: chex.PRNGKey,
    graph: TaskGraph,
    num_devices: int,
    num_noise: int,
    sigma_compute: float,
    sigma_transfer: float,
) -> Factors:
    """Draws independent lognormal factors of mean 1 and given log-standard-deviation.

    A factor is exp(sigma z - sigma^2 / 2) with z standard normal. All placements of a call
    share them, so that a comparison of placements is one of pairs.

    Args:
      key: consumed; the same key gives the same arrays.
      graph: whose N tasks, T tensors and I inputs they are for.
      num_devices: D.
      num_noise: K, the number of draws.
      sigma_compute: log-standard-deviation of the factors of tasks; 0 makes them 1.
      sigma_transfer: that of transfers.

    Returns:
      The factors, float32.

    Raises:
      ValueError: a count is below 1.
    """
    for name, count in (("num_devices", num_devices), ("num_noise", num_noise)):
        if count < 1:
            raise ValueError(f"{name} is {count}; expected at least 1")
    import jax

    compute_key, transfer_key = jax.random.split(key)
    sizes = {"transfer": graph.num_tensors, "inputs": graph.num_inputs}
    keys = {"transfer": transfer_key, "inputs": jax.random.fold_in(transfer_key, 1)}
    return Factors(
        compute=_lognormal(compute_key, (num_noise, graph.num_tasks), sigma_compute),
        **{
            name: _lognormal(keys[name], (num_noise, size, num_devices), sigma_transfer)
            for name, size in sizes.items()
        },
    )


def _lognormal(key: chex.PRNGKey, shape: tuple[int, ...], sigma: float) -> chex.Array:
    import jax
    import jax.numpy as jnp

    z = jax.random.normal(key, shape, jnp.float32)
    return jnp.exp(sigma * z - sigma * sigma / 2)


def random_ranks(key: chex.PRNGKey, num_draws: int, num_tasks: int) -> chex.Array:
    """Draws the ranks `[K, N]` int32 of the `random` queue, a permutation per draw.

    One permutation serves a whole execution: a device starts the ready task of least
    rank, which makes every order of its ready tasks equally likely.

    Args:
      key: consumed; the same key gives the same array.
      num_draws: K.
      num_tasks: N.
    """
    import jax

    keys = jax.random.split(key, num_draws)
    return jax.vmap(lambda k: jax.random.permutation(k, num_tasks))(keys).astype("int32")


@dataclasses.dataclass(frozen=True)
class MakespanStatistics:
    """How the makespans of B placements vary over draws, in seconds."""

    mean_s: np.ndarray  # [B]
    std_s: np.ndarray  # [B] of the draws themselves (divisor K)
    quantiles: tuple[float, ...]  # the Q levels
    quantile_s: np.ndarray  # [Q, B]


def makespan_statistics(
    makespan_s: ArrayLike, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
) -> MakespanStatistics:
    """Returns mean, standard deviation and quantiles of makespans `[K, B]` over the K draws.

    Quantiles between two draws are interpolated linearly. A placement that never finishes
    (inf) has mean and quantiles inf and deviation nan.

    Raises:
      ValueError: the makespans are not `[K, B]` with K >= 1, or a level is outside [0, 1].
    """
    draws = np.asarray(makespan_s, np.float64)
    if draws.ndim != 2 or len(draws) == 0:
        raise ValueError(f"makespan_s has shape {draws.shape}; expected [K, B] with K >= 1")
    for level in quantiles:
        if not 0 <= level <= 1:
            raise ValueError(f"quantile {level} is outside 0 to 1")
    never = np.isinf(draws).any(axis=0)
    finite = np.where(never, 0.0, draws)
    return MakespanStatistics(
        mean_s=np.where(never, np.inf, finite.mean(axis=0)),
        std_s=np.where(never, np.nan, finite.std(axis=0)),
        quantiles=tuple(quantiles),
        quantile_s=np.where(never, np.inf, np.quantile(finite, list(quantiles), axis=0)),
    )
