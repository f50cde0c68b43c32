"""What placements put into memory, and how they are changed until they fit.

For list schedulers that mind memory, and for starts of searches where it is short.
"""

import numpy as np

from doppler_jax.graphs.build import topological_order
from doppler_jax.simulator.memory import peak_memory_bytes
from doppler_jax.simulator.oracle import simulate_oracle
from doppler_jax.types import RESIDENT, Costs, TaskGraph

MOST_TASKS = 20_000
"""Tasks of all the placements that `fit_some` looks at: a second or two of plain Python."""


class Holdings:
    """The tensors and graph inputs on every device.

    A task brings its outputs, and copies of the operands and graph inputs that are not
    there yet; everything stays. So no execution of the placement, whose memory is freed
    after the last reader, holds more at any time.
    """

    def __init__(self, graph: TaskGraph, costs: Costs) -> None:
        t, n = graph.num_tensors, graph.num_tasks
        # Item x below T is tensor x, item T + i is graph input i.
        self._bytes: list[float] = [*costs.tensor_bytes.tolist(), *costs.input_bytes.tolist()]
        self._items: list[list[int]] = [[] for _ in range(n)]  # what a task reads or makes
        made = np.flatnonzero(graph.input_maker >= 0)  # they lie where their makers run
        inputs = np.append(graph.input_edge_input, made)
        item = np.concatenate([np.arange(t), graph.edge_tensor, t + inputs])
        readers = np.append(graph.input_edge_reader, graph.input_maker[made])
        task = np.concatenate([graph.tensor_producer, graph.edge_reader, readers])
        for x, v in zip(item.tolist(), task.tolist(), strict=True):
            self._items[v].append(x)
        self._most = [sum(self._bytes[item] for item in items) for items in self._items]
        self._held: list[set[int]] = [set() for _ in range(costs.num_devices)]
        self.used = [0.0] * costs.num_devices
        self.capacity: list[float] = np.asarray(costs.capacity_bytes, np.float64).tolist()
        for i in np.unique(graph.input_edge_input).tolist():
            if graph.input_home[i] != RESIDENT:
                self._hold([t + i], int(graph.input_home[i]))

    def needed(self, task: int, device: int) -> float:
        """Returns the bytes that a task would add to a device."""
        held = self._held[device]
        return sum(self._bytes[item] for item in self._items[task] if item not in held)

    def fits(self, task: int, device: int) -> bool:
        """Says whether a task fits on a device. Once it does not, it never will.

        An item that comes later and that the task shares lowers its need by what it takes.
        """
        room = self.capacity[device] - self.used[device]
        return self._most[task] <= room or self.needed(task, device) <= room

    def put(self, task: int, device: int) -> None:
        """Puts a task on a device, whether or not it fits."""
        self._hold(self._items[task], device)

    def _hold(self, items: list[int], device: int) -> None:
        held = self._held[device]
        for item in items:
            if item not in held:
                held.add(item)
                self.used[device] += self._bytes[item]


def fit_some(graph: TaskGraph, costs: Costs, placements: np.ndarray) -> np.ndarray:
    """Returns what those of the placements `[S, N]` become that exceed a memory, each once.

    It looks at the first ones alone if all together have more than `MOST_TASKS` tasks.
    """
    fitted = []
    for placement in placements[: max(MOST_TASKS // graph.num_tasks, 1)]:
        peak = peak_memory_bytes(graph, costs, simulate_oracle(graph, costs, placement))
        if (peak > costs.capacity_bytes).any():
            fitted.append(fit_into_memory(graph, costs, placement))
    return np.unique(np.reshape(fitted, (-1, graph.num_tasks)), axis=0).astype(np.int64)


def fit_into_memory(graph: TaskGraph, costs: Costs, placement: np.ndarray) -> np.ndarray:
    """Returns a placement `[N]` with tasks moved off devices that cannot hold them.

    Tasks are gone through in a topological order. Once one does not fit on its device, beside
    what the tasks before it have put there (`Holdings`: nothing is freed), it and those of
    the device that follow spill over to another one, and from that to the next: so what
    belongs together stays together. The other device is one that has room for the task, of
    these one that runs it fastest, of these the one with most room; ties go to the smaller.
    A task for which there is no room stays, so the result may exceed a memory; if there
    always is, no execution of it does. The rule is ours.

    Args:
      graph: the task graph.
      costs: its costs, with capacities.
      placement: `[N]` devices.
    """
    holdings = Holdings(graph, costs)
    compute_s = np.asarray(costs.compute_s)
    devices = range(costs.num_devices)
    instead = list(devices)  # of each device, the one that takes its tasks now
    fitted = np.array(placement, np.int64)
    for v in topological_order(graph).tolist():
        meant = int(fitted[v])
        now = instead[meant]
        if not (np.isfinite(compute_s[v, now]) and holdings.fits(v, now)):
            room = [d for d in devices if np.isfinite(compute_s[v, d]) and holdings.fits(v, d)]
            if room:
                taken = holdings.used
                now = min(
                    room, key=lambda d: (compute_s[v, d], taken[d] - holdings.capacity[d])
                )
                instead[meant] = now
            else:
                now = meant
        holdings.put(v, now)
        fitted[v] = now
    return fitted
