"""What the policies see of a problem, scale-free: static features, made on the host.

FEATURE_VERSION names this module's and `device_features.py`'s features together; a checkpoint
of another version is refused.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from chex import Array

from doppler_jax.costs.handling import as_transfers
from doppler_jax.graphs import levels
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.graphs.padded import PaddedProblem, Sizes, pad_array, pad_problem
from doppler_jax.graphs.relatives import NUM_RELATIVES, nearest_relatives
from doppler_jax.types import Costs, TaskGraph, pytree

FEATURE_VERSION = 3

NORMALISATION = (
    "times over the mean of a task's compute and largest output transfer, then log(1 + |x|) "
    "with the sign; levels over the longest path"
)
"""How features are made scale-free: for the description of a checkpoint."""


@pytree
class PolicyInputs:
    """An `PaddedProblem` and the static features of its tasks; row N belongs to no task."""

    padded: PaddedProblem
    task_features: Array  # [N + 1, 5] see `_task_features`
    edge_sender: Array  # [E] int32, padding N
    edge_receiver: Array  # [E] int32, padding N
    edge_features: Array  # [E, 1] transfer time over `unit_s`, compressed
    next_on_b_path: Array  # [N + 1] int32, on the longest path to an exit, or N
    next_on_t_path: Array  # [N + 1] int32, on the longest path from an entry, or N
    b_rank: Array  # [N + 1] int32, rank of the b-level, equal for (nearly) equal levels
    topological_rank: Array  # [N + 1] int32, position in a topological order
    unit_s: Array  # [] mean of a task's compute and largest output transfer
    succ_transfer_s: Array  # [N + 1, S] mean transfer time of each outgoing edge
    relative_task: Array  # [N + 1, K] int32, tasks that each belongs with, or N
    relative_weight: Array  # [N + 1, K] how much, 0 or adding up to 1
    graph_features: Array  # [2] devices, and mean compute per device over longest path


def make_policy_inputs(
    graph: TaskGraph, costs: Costs, sizes: Sizes | None = None
) -> PolicyInputs:
    """Returns graph and costs as the policies and the simulator take them.

    Times are means over the devices that can run a task and over pairs of devices, and
    are divided by one unit for compute and communication alike, so that their ratio
    survives.

    Args:
      graph: the task graph.
      costs: its costs.
      sizes: to pad to, as in `pad_problem`; they change no feature.

    Raises:
      ValueError: the problem does not fit into `sizes`.
    """
    padded = pad_problem(graph, costs, sizes=sizes)
    costs = as_transfers(costs)  # features know nothing of handling
    n, size = graph.num_tasks, padded.padded_tasks
    senders, receivers = task_edges(graph)
    compute_s = levels.mean_compute_s(costs)
    transfer_s = levels.mean_transfer_s(costs)[graph.edge_tensor]
    largest_s = np.zeros(n)
    np.maximum.at(largest_s, senders, transfer_s)
    unit_s = float(np.mean(compute_s + largest_s)) if n else 1.0
    unit_s = unit_s if unit_s > 0 else 1.0
    b_level_s = levels.b_level(graph, costs)

    features = _task_features(graph, costs, compute_s, transfer_s, b_level_s, unit_s)
    edges = len(padded.edge_reader) - 1
    relative, weight = nearest_relatives(graph, costs)
    rank = np.empty(n, np.int32)
    rank[topological_order(graph)] = np.arange(n)

    def ids(task: np.ndarray, *shape: int) -> np.ndarray:
        """Returns tasks, -1 for none, as padded code has them: N is none."""
        return pad_array(np.where(task < 0, size, task).astype(np.int32), *shape, fill=size)

    def floats(values: np.ndarray, *shape: int) -> np.ndarray:
        return pad_array(values.astype(np.float32), *shape)

    problem = PolicyInputs(
        padded=padded,
        task_features=floats(features, size + 1, features.shape[1]),
        edge_sender=ids(senders, edges),
        edge_receiver=ids(receivers, edges),
        edge_features=floats(np.log1p(transfer_s / unit_s)[:, None], edges, 1),
        next_on_b_path=ids(levels.b_path(graph, costs), size + 1),
        next_on_t_path=ids(levels.t_path(graph, costs), size + 1),
        b_rank=pad_array(_tied_ranks(b_level_s), size + 1),
        topological_rank=ids(rank, size + 1),
        unit_s=np.float32(unit_s),
        succ_transfer_s=_mean_transfer_s(padded, costs.num_devices),
        relative_task=ids(relative, size + 1, NUM_RELATIVES),
        relative_weight=floats(weight, size + 1, NUM_RELATIVES),
        graph_features=_graph_features(compute_s, b_level_s, costs.num_devices),
    )
    return jax.tree.map(jnp.asarray, problem)


def with_features(problem: PolicyInputs, more: Array) -> PolicyInputs:
    """Returns the problem with more features `[N + 1, F]` of its tasks."""
    seen = jnp.concatenate([problem.task_features, more], axis=-1)
    return dataclasses.replace(problem, task_features=seen)


def stack_problems(problems: Sequence[PolicyInputs]) -> PolicyInputs:
    """Returns problems of equal sizes as one, in NumPy, with a leading axis on every array."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *problems)


def _task_features(
    graph: TaskGraph,
    costs: Costs,
    compute_s: np.ndarray,
    transfer_s: np.ndarray,
    b_level_s: np.ndarray,
    unit_s: float,
) -> np.ndarray:
    """Compute, summed input and output communication, b-level and t-level `[N, 5]`.

    The first three are logarithms in units, the levels shares of the longest path.
    """
    senders, receivers = task_edges(graph)
    n = graph.num_tasks
    t_level_s = levels.t_level(graph, costs)
    longest_s = max(float(np.max(b_level_s, initial=0.0)), np.finfo(np.float64).tiny)
    return np.stack(
        [
            np.log1p(compute_s / unit_s),
            np.log1p(np.bincount(receivers, transfer_s, n) / unit_s),
            np.log1p(np.bincount(senders, transfer_s, n) / unit_s),
            b_level_s / longest_s,
            t_level_s / longest_s,
        ],
        axis=1,
    )


def _graph_features(
    compute_s: np.ndarray, b_level_s: np.ndarray, num_devices: int
) -> np.ndarray:
    """Logarithms of the devices, and of the work of each over the longest path `[2]`."""
    longest_s = float(np.max(b_level_s, initial=0.0))
    work_s = float(compute_s.sum()) / num_devices
    share = work_s / longest_s if longest_s > 0 else 0.0
    return np.log1p(np.array([num_devices, share], np.float32))


def _mean_transfer_s(padded: PaddedProblem, d: int) -> np.ndarray:
    pairs = max(d * (d - 1), 1)
    real = padded.succ_task != padded.padded_tasks
    # Without the devices that pad, which handling would let cost something.
    latency_s, seconds_per_byte = (array[:d, :d].sum() / pairs for array in padded.links)
    return np.where(real, latency_s + padded.succ_bytes * seconds_per_byte, 0.0).astype(
        np.float32
    )


def _tied_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal where neighbours in order differ by rounding only."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    steps = np.diff(ordered) > 1e-9 * np.abs(ordered[1:])
    ranks = np.zeros(len(values), np.int32)
    ranks[order] = np.concatenate([[0], np.cumsum(steps)]) if len(values) else []
    return ranks


OCTAVES = 10
"""Frequencies, each twice the one before."""


def sinusoids(turns: Array) -> Array:
    """Returns sines and cosines `[K, 2 * OCTAVES]` of turns `[K]`, each octave twice as fast.

    Numbers below `2**OCTAVES`, divided by it, are told apart by the fastest ones if they are
    neighbours, by the slow ones if they are not.
    """
    rates = 2 * jnp.pi * jnp.exp2(jnp.arange(OCTAVES, dtype=jnp.float32))
    angle = turns[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
