"""Problems padded to common sizes: they stack, share a compilation and mix in a batch."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.graphs.padded import (
    Sizes,
    axis_padding,
    fill_columns,
    fill_rows,
    pad_further,
    padded_sizes,
)
from doppler_jax.policies.features import PolicyInputs


def problem_sizes(problem: PolicyInputs) -> Sizes:
    """Returns the sizes that a problem's arrays have."""
    sizes = padded_sizes(problem.padded)
    # Two tables of edges, the simulator's with one row more and a bucket of its own.
    return dataclasses.replace(sizes, edges=max(problem.edge_sender.shape[0], sizes.edges))


def pad_problem(problem: PolicyInputs, sizes: Sizes) -> PolicyInputs:
    """Returns the problem in NumPy arrays of given sizes; no makespan or feature changes.

    Devices that are added can run nothing.

    Raises:
      ValueError: the problem does not fit.
    """
    if not sizes.holds(problem_sizes(problem)):
        raise ValueError(f"a problem of {problem_sizes(problem)} does not fit into {sizes}")
    problem = jax.tree.map(np.asarray, problem)
    old, new = problem.padded.padded_tasks, sizes.tasks

    def rows(array: np.ndarray) -> np.ndarray:
        # The last row is that of no task; repeated, it pads.
        return np.pad(array, axis_padding(array, new + 1), mode="edge")

    def ids(array: np.ndarray) -> np.ndarray:
        return np.where(array == old, np.int32(new), array)

    return dataclasses.replace(
        problem,
        padded=pad_further(problem.padded, sizes),
        task_features=rows(problem.task_features),
        edge_sender=fill_rows(ids(problem.edge_sender), new, sizes.edges),
        edge_receiver=fill_rows(ids(problem.edge_receiver), new, sizes.edges),
        edge_features=fill_rows(problem.edge_features, 0, sizes.edges),
        next_on_b_path=ids(rows(problem.next_on_b_path)),
        next_on_t_path=ids(rows(problem.next_on_t_path)),
        relative_task=ids(rows(problem.relative_task)),
        relative_weight=rows(problem.relative_weight),
        b_rank=rows(problem.b_rank),
        topological_rank=ids(rows(problem.topological_rank)),
        succ_transfer_s=fill_columns(rows(problem.succ_transfer_s), 0, sizes.readers),
    )


def stack_problems(problems: Sequence[PolicyInputs]) -> PolicyInputs:
    """Returns problems of equal sizes as one, with a leading axis on every array."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *problems)
