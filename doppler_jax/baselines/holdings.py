"""What a placement that grows puts into each memory, as if nothing were ever freed."""

import numpy as np

from doppler_jax.types import RESIDENT, Costs, TaskGraph


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
        for x, v in enumerate(graph.tensor_producer.tolist()):
            self._items[v].append(x)
        for x, v in zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True):
            self._items[v].append(x)
        for i, v in zip(
            graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True
        ):
            self._items[v].append(t + i)
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
