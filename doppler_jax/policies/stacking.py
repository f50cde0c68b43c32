"""Problems padded to common sizes: they stack, share a compilation and mix in a batch."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.graphs.padded import PaddedProblem
from doppler_jax.policies.features import PolicyInputs


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a padded problem's arrays; see `PaddedProblem` for the letters."""

    tasks: int  # N
    edges: int  # E
    producers: int  # P
    readers: int  # S
    chains: int  # W
    devices: int  # D
    home_reads: int = 0  # F

    def holds(self, other: "Sizes") -> bool:
        """Returns whether a problem of the other sizes can be padded to these."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return all(own >= theirs for own, theirs in pairs)


def problem_sizes(problem: PolicyInputs) -> Sizes:
    """Returns the sizes that a problem's arrays have."""
    padded = problem.padded
    return Sizes(
        tasks=padded.padded_tasks,
        # Two tables of edges, the simulator's with one row more and a bucket of its own.
        edges=max(problem.edge_sender.shape[0], padded.edge_reader.shape[0] - 1),
        producers=padded.pred_task.shape[1],
        readers=padded.succ_task.shape[1],
        chains=padded.chain_head.shape[0],
        devices=padded.num_devices,
        home_reads=padded.home_reader.shape[0],
    )


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
        return np.pad(array, _before(array, new + 1), mode="edge")

    def ids(array: np.ndarray) -> np.ndarray:
        return np.where(array == old, np.int32(new), array)

    return dataclasses.replace(
        problem,
        padded=_pad_further(problem.padded, sizes),
        task_features=rows(problem.task_features),
        edge_sender=_fill(ids(problem.edge_sender), new, sizes.edges),
        edge_receiver=_fill(ids(problem.edge_receiver), new, sizes.edges),
        edge_features=_fill(problem.edge_features, 0, sizes.edges),
        next_on_b_path=ids(rows(problem.next_on_b_path)),
        next_on_t_path=ids(rows(problem.next_on_t_path)),
        relative_task=ids(rows(problem.relative_task)),
        relative_weight=rows(problem.relative_weight),
        b_rank=rows(problem.b_rank),
        topological_rank=ids(rows(problem.topological_rank)),
        succ_transfer_s=_columns(rows(problem.succ_transfer_s), 0, sizes.readers),
    )


def stack_problems(problems: Sequence[PolicyInputs]) -> PolicyInputs:
    """Returns problems of equal sizes as one, with a leading axis on every array."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *problems)


def _pad_further(padded: PaddedProblem, sizes: Sizes) -> PaddedProblem:
    old, new = padded.padded_tasks, sizes.tasks
    spare = sizes.devices - padded.num_devices

    def rows(array: np.ndarray) -> np.ndarray:
        return np.pad(array, _before(array, new + 1), mode="edge")

    def ids(array: np.ndarray) -> np.ndarray:
        return np.where(array == old, np.int32(new), array)

    def links(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, spare), (0, spare)))

    def devices(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.pad(array, (0, spare))

    return PaddedProblem(
        num_tasks=padded.num_tasks,
        compute_s=_columns(rows(padded.compute_s), np.inf, sizes.devices),
        input_ready_s=_columns(rows(padded.input_ready_s), 0, sizes.devices),
        latency_s=links(padded.latency_s),
        seconds_per_byte=links(padded.seconds_per_byte),
        pred_task=_columns(ids(rows(padded.pred_task)), new, sizes.producers),
        pred_bytes=_columns(rows(padded.pred_bytes), 0, sizes.producers),
        succ_task=_columns(ids(rows(padded.succ_task)), new, sizes.readers),
        succ_bytes=_columns(rows(padded.succ_bytes), 0, sizes.readers),
        num_producers=rows(padded.num_producers),
        num_edges=rows(padded.num_edges),
        first_edge=rows(padded.first_edge),
        edge_reader=_fill(ids(padded.edge_reader), new, sizes.edges + 1),
        edge_tensor=_fill(padded.edge_tensor, 0, sizes.edges + 1),
        edge_bytes=_fill(padded.edge_bytes, 0, sizes.edges + 1),
        edge_opens=_fill(padded.edge_opens, False, sizes.edges + 1),
        home_reader=_fill(ids(padded.home_reader), new, sizes.home_reads),
        home_device=_fill(padded.home_device, 0, sizes.home_reads),
        home_bytes=_fill(padded.home_bytes, 0, sizes.home_reads),
        home_opens=_fill(padded.home_opens, False, sizes.home_reads),
        chain=rows(padded.chain),
        chain_head=_fill(ids(padded.chain_head), new, sizes.chains),
        chain_next=ids(rows(padded.chain_next)),
        handling_s=devices(padded.handling_s),
        handling_s_per_byte=devices(padded.handling_s_per_byte),
    )


def _before(array: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Returns the padding that makes the first axis `size` long."""
    return [(0, size - array.shape[0])] + [(0, 0)] * (array.ndim - 1)


def _fill(array: np.ndarray, value: float, size: int) -> np.ndarray:
    """Returns the array with a first axis of `size`."""
    return np.pad(array, _before(array, size), constant_values=value)


def _columns(array: np.ndarray, value: float, size: int) -> np.ndarray:
    """Returns the table with `size` columns."""
    return np.pad(array, ((0, 0), (0, size - array.shape[1])), constant_values=value)
