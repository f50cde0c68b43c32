"""A schedule as one table: its tasks, then its transfers, and what each of them waits for."""

import dataclasses

import numpy as np

from doppler_jax.simulator.durations import list_reads
from doppler_jax.types import Schedule, TaskGraph


@dataclasses.dataclass(frozen=True)
class Activities:
    """N tasks, then X transfers: those of graph inputs first, each by id and destination."""

    num_tasks: int
    item: np.ndarray  # [N + X] task; tensor of a transfer, or ~i for graph input i
    source: np.ndarray  # [N + X] device that a transfer leaves; a task's own
    device: np.ndarray  # [N + X] where it runs, or arrives
    start_s: np.ndarray  # [N + X]
    finish_s: np.ndarray  # [N + X]

    def describe(self, k: int) -> str:
        """Returns what one is, for messages."""
        what = f"task {k} on device {self.device[k]}"
        if k >= self.num_tasks:
            link = f"from device {self.source[k]} to {self.device[k]}"
            what = f"transfer of {describe_item(self.item[k])} {link}"
        return f"{what} ({self.start_s[k]:.9g} to {self.finish_s[k]:.9g} s)"


def describe_item(x: int) -> str:
    """Returns what is moved, for messages."""
    return f"tensor {x}" if x >= 0 else f"graph input {~x}"


def pairs(item: np.ndarray, device: np.ndarray) -> list[tuple[int, int]]:
    """Returns (item, device) of each row."""
    return list(zip(item.tolist(), device.tolist(), strict=True))


def list_activities(schedule: Schedule) -> Activities:
    """Returns the tasks and transfers of a schedule."""
    item = np.asarray(schedule.transfer_tensor)
    order = np.lexsort((schedule.transfer_destination, np.maximum(item, ~item), item >= 0))
    tasks = np.arange(len(schedule.placement))
    columns = {
        "item": (tasks, item),
        "source": (schedule.placement, schedule.transfer_source),
        "device": (schedule.placement, schedule.transfer_destination),
        "start_s": (schedule.start_s, schedule.transfer_start_s),
        "finish_s": (schedule.finish_s, schedule.transfer_finish_s),
    }
    return Activities(
        num_tasks=tasks.size,
        **{name: np.append(a, np.asarray(b)[order]) for name, (a, b) in columns.items()},
    )


def list_waits(
    graph: TaskGraph, done: Activities, *, need_inputs: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs `[W]` of activities: one, and another that must end before it starts.

    A task waits for the producer of what it reads, or for the transfer that brings it, and a
    transfer for the producer of what it moves.

    Args:
      graph: the task graph.
      done: the activities of its schedule.
      need_inputs: whether the transfer of a graph input may not be left out.

    Raises:
      ValueError: a transfer is missing.
    """
    n, moved, there = done.num_tasks, done.item[done.num_tasks :], done.device[done.num_tasks :]
    bring = dict(zip(pairs(moved, there), range(n, done.item.size), strict=True))
    producer = np.append(graph.tensor_producer, np.full(graph.num_inputs, -1))
    reads = list_reads(graph, done.device[:n])
    cause = producer[reads.item]
    needed = pairs(reads.item[reads.moves], reads.destination[reads.moves])
    cause[reads.moves] = [bring.get(pair, -1) for pair in needed]
    missing = reads.moves & (cause < 0) & ((reads.item >= 0) | need_inputs)
    for r in np.flatnonzero(missing)[:1]:
        raise ValueError(
            f"{describe_item(reads.item[r])} has no transfer to device {reads.destination[r]}, "
            f"where task {reads.reader[r]} reads it"
        )
    waiter = np.append(reads.reader, np.arange(n, done.item.size))
    cause = np.append(cause, producer[moved])
    return waiter[cause >= 0], cause[cause >= 0]
