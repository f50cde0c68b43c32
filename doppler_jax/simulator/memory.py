"""How much memory a schedule needs on each device, and whether any placement can fit."""

import dataclasses
from collections.abc import Collection

import numpy as np

from doppler_jax.types import RESIDENT, Costs, Schedule, TaskGraph


@dataclasses.dataclass(frozen=True)
class Residency:
    """What lies in which memory when: R stays, each of one item on one device."""

    item: np.ndarray  # [R] tensor, or ~i for graph input i
    device: np.ndarray  # [R]
    num_bytes: np.ndarray  # [R]
    from_s: np.ndarray  # [R]
    until_s: np.ndarray  # [R] inf for what stays


def peak_memory_bytes(
    graph: TaskGraph, costs: Costs, schedule: Schedule, results: Collection[int] | None = None
) -> np.ndarray:
    """Returns the most memory `[D]` that each device holds at any time, in bytes.

    At one instant memory is freed before it is allocated. To exceed the capacity is
    no error here, but for the caller to judge.

    Args:
      graph: the task graph.
      costs: sizes, and the number of devices D.
      schedule: a simulated or measured one, with its transfers (see `residency`).
      results: see `residency`.

    Raises:
      ValueError: a transfer is missing.
    """
    held = residency(graph, costs, schedule, results)
    return np.array([held_bytes(held, d)[1].max(initial=0.0) for d in range(costs.num_devices)])


def held_bytes(held: Residency, device: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns when what lies on a device changes `[K]` s, and its bytes from then on `[K]`."""
    here = (held.device == device) & (held.from_s < held.until_s)
    size = held.num_bytes[here]
    times, at = np.unique(
        np.concatenate([held.from_s[here], held.until_s[here]]), return_inverse=True
    )
    change = np.bincount(at, np.concatenate([size, -size]), times.size)
    return times, np.cumsum(change)


def residency(
    graph: TaskGraph, costs: Costs, schedule: Schedule, results: Collection[int] | None = None
) -> Residency:
    """Returns what lies on which device when: the memory rule.

    - A resident graph input lies on each device that reads it, always.
    - One with a home lies there from time 0 until its last reader there and its last
      transfer from there end; if nothing reads it, nowhere.
    - What is carried lies where its maker runs from time 0 to the end, read or not: a call
      that fails must leave it.
    - A task's tensors lie there from its start until their last readers there and last
      transfers from there end; those that `stay_to_the_end`, always.
    - A received copy lies from its transfer's start until its last reader there ends. A
      graph input whose transfer is not recorded was moved before time 0.
    - What would begin behind a task that cannot run (at inf) is left out.

    Args:
      graph: the task graph.
      costs: the sizes.
      schedule: a simulated or measured one, with its transfers.
      results: tensors, and graph inputs i as ~i, that stay where they are made, or at home,
        and but for what is carried no others do; by default what `stay_to_the_end` says.

    Raises:
      ValueError: the transfer of a tensor to a device that reads it is missing.
    """
    device, finish_s = np.asarray(schedule.placement), np.asarray(schedule.finish_s)
    home = graph.homes(device).tolist()
    begin: dict[tuple[int, int], float] = {}
    end: dict[tuple[int, int], float] = {}

    def hold(item: int, d: int, until_s: float) -> None:
        end[item, d] = max(end.get((item, d), 0.0), until_s)

    for x, v in enumerate(graph.tensor_producer.tolist()):
        begin[x, int(device[v])] = float(schedule.start_s[v])
    made = np.asarray(graph.input_maker) >= 0
    for i in np.union1d(graph.input_edge_input, np.flatnonzero(made)).tolist():
        if home[i] != RESIDENT:
            begin[~i, home[i]] = 0.0
            hold(~i, home[i], np.inf if made[i] else 0.0)
    for k, x in enumerate(schedule.transfer_tensor.tolist()):
        begin[x, int(schedule.transfer_destination[k])] = float(schedule.transfer_start_s[k])
        hold(x, int(schedule.transfer_source[k]), float(schedule.transfer_finish_s[k]))
    for x, v in zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True):
        here = int(device[v])
        if (x, here) not in begin and np.isfinite(schedule.start_s[v]):
            raise ValueError(f"the schedule has no transfer of tensor {x} to device {here}")
        hold(x, here, float(finish_s[v]))
    for i, v in zip(
        graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True
    ):
        here = int(device[v])
        begin.setdefault((~i, here), 0.0)
        hold(~i, here, np.inf if home[i] == RESIDENT else float(finish_s[v]))
    if results is None:
        for x in np.flatnonzero(stay_to_the_end(graph, costs)).tolist():
            hold(x, int(device[graph.tensor_producer[x]]), np.inf)
    else:
        for x, v in enumerate(graph.tensor_producer.tolist()):
            hold(x, int(device[v]), np.inf if x in results else float(finish_s[v]))
        for i in (~x for x in results if x < 0):
            begin.setdefault((~i, max(home[i], 0)), 0.0)
            hold(~i, max(home[i], 0), np.inf)
    sizes = np.concatenate([costs.tensor_bytes, np.asarray(costs.input_bytes)[::-1]])
    stays = [stay for stay, from_s in begin.items() if np.isfinite(from_s)]
    items = np.array([item for item, _ in stays], dtype=np.int64)
    return Residency(
        item=items,
        device=np.array([d for _, d in stays], dtype=np.int64),
        num_bytes=sizes[items].astype(np.float64),  # ~i is entry i from the end
        from_s=np.array([begin[stay] for stay in stays], dtype=np.float64),
        until_s=np.array([end.get(stay, np.inf) for stay in stays], dtype=np.float64),
    )


def stay_to_the_end(graph: TaskGraph, costs: Costs) -> np.ndarray:
    """Returns which tensors stay where they are made until the call ends `[T]`.

    Those that nothing reads, which are results, and those that take the place of a carried
    graph input: of its maker's tensors the ones of its size.
    """
    stays = np.bincount(graph.edge_tensor, minlength=graph.num_tensors) == 0
    state = set(zip(graph.input_maker.tolist(), costs.input_bytes.tolist(), strict=True))
    made = zip(graph.tensor_producer.tolist(), costs.tensor_bytes.tolist(), strict=True)
    return stays | np.fromiter((pair in state for pair in made), bool, graph.num_tensors)


def check_capacity(graph: TaskGraph, costs: Costs) -> None:
    """Raises `ValueError` if no placement can respect the memory of the devices.

    That is so when a task fits on no device that can run it (with its graph inputs, operands
    and outputs, and the state that it replaces), when the graph inputs at home on a device
    exceed it, or when what stays somewhere to the end, the resident and carried inputs and the
    results, exceeds all devices together. Whether a placement that passes these tests exists
    is a packing problem, and left open.
    """
    capacity = np.asarray(costs.capacity_bytes, np.float64)
    input_bytes = np.asarray(costs.input_bytes, np.float64)
    tensor_bytes = np.asarray(costs.tensor_bytes, np.float64)
    made = np.flatnonzero(graph.input_maker >= 0)
    # A maker holds the state before, whether or not it reads it.
    edges = np.stack([graph.input_edge_input, graph.input_edge_reader])
    kept = np.stack([made, graph.input_maker[made]])
    read, reader = np.unique(np.append(edges, kept, axis=1), axis=1)
    need = np.zeros(graph.num_tasks)
    for task, num_bytes in (
        (graph.tensor_producer, tensor_bytes),
        (graph.edge_reader, tensor_bytes[graph.edge_tensor]),
        (reader, input_bytes[read]),
    ):
        need += np.bincount(task, num_bytes, graph.num_tasks)
    able = np.where(np.isfinite(costs.compute_s), capacity, 0.0).max(axis=1, initial=0.0)
    for v in np.flatnonzero(need > able)[:1]:
        raise ValueError(
            f"task {v} needs {need[v]:.6g} bytes for inputs, operands and outputs; the "
            f"largest device that can run it has {able[v]:.6g}"
        )
    read = np.unique(read)
    # The first is of residents, which are everywhere, and of what is carried.
    lies = np.bincount(graph.input_home[read] + 1, input_bytes[read], costs.num_devices + 1)
    for d in np.flatnonzero(lies[1:] > capacity)[:1]:
        raise ValueError(
            f"graph inputs of {lies[d + 1]:.6g} bytes lie on device {d}, which has "
            f"{capacity[d]:.6g}"
        )
    results = tensor_bytes[stay_to_the_end(graph, costs)].sum()
    if lies[0] + results > capacity.sum():
        raise ValueError(
            f"resident and carried graph inputs are {lies[0]:.6g} bytes and results "
            f"{results:.6g}; all devices together have {capacity.sum():.6g}"
        )
