"""The event simulation as a SimPy user would write it: processes for devices and transfers.

SimPy is what the published simulator is built on. Its events of one instant have
priorities, which is how the rule of ties is kept: which task starts is decided after all
completions and arrivals of the instant.
"""

import heapq
from collections.abc import Generator

import numpy as np
import simpy
from numpy.typing import ArrayLike
from simpy.events import EventPriority

from doppler_jax.types import RESIDENT, Costs, TaskGraph


def makespan_s(graph: TaskGraph, costs: Costs, placement: ArrayLike) -> float:
    """Returns the makespan of one placement, `parallel` links and `fifo` queues, seconds.

    Args:
      graph: the task graph.
      costs: its costs, seconds.
      placement: `[N]` device of each task.
    """
    env = simpy.Environment()
    execution = _Execution(env, graph, costs, np.asarray(placement).tolist())
    env.run()
    return execution.last_finish_s


class _Decision(simpy.Event):
    """Happens at this instant, after its urgent (0) and normal (1) events."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, EventPriority(2))


class _Execution:
    """One execution of a placement, begun at time 0."""

    def __init__(
        self, env: simpy.Environment, graph: TaskGraph, costs: Costs, device: list[int]
    ) -> None:
        self.env = env
        self.costs = costs
        self.device = device
        self.last_finish_s = 0.0
        self.missing = [0] * graph.num_tasks  # inputs that have not arrived
        self.outputs: list[list[int]] = [[] for _ in range(graph.num_tasks)]
        # Of each tensor, the tasks that read it, by their device.
        self.readers: list[dict[int, list[int]]] = [{} for _ in range(graph.num_tensors)]
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(costs.num_devices)]
        self.idle = [True] * costs.num_devices
        self.orders = [simpy.Store(env) for _ in range(costs.num_devices)]
        self.deciding = False
        for x, u in enumerate(graph.tensor_producer.tolist()):
            self.outputs[u].append(x)
        for x, v in zip(graph.edge_tensor.tolist(), graph.edge_reader.tolist(), strict=True):
            self.readers[x].setdefault(device[v], []).append(v)
            self.missing[v] += 1
        self.send_inputs(graph)
        for d in range(costs.num_devices):
            env.process(self.run_device(d))
        for v, missing in enumerate(self.missing):
            if missing == 0:
                self.enqueue(v)

    def send_inputs(self, graph: TaskGraph) -> None:
        """Requests graph inputs that lie on another device than their reader."""
        edges = zip(
            graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True
        )
        for i, v in edges:
            home, there = int(graph.input_home[i]), self.device[v]
            if home not in (RESIDENT, there):
                self.missing[v] += 1
                size = float(self.costs.input_bytes[i])
                self.env.process(self.transfer(size, home, there, [v]))

    def run_device(self, d: int) -> Generator[simpy.Event, int, None]:
        """A device: runs the tasks it is given, and sends what they make."""
        while True:
            u = yield self.orders[d].get()
            yield self.env.timeout(float(self.costs.compute_s[u, d]))
            self.last_finish_s = self.env.now
            self.idle[d] = True
            self.decide_later()
            for x in self.outputs[u]:
                size = float(self.costs.tensor_bytes[x])
                for there, readers in self.readers[x].items():
                    if there == d:
                        self.arrive(readers)
                    else:
                        self.env.process(self.transfer(size, d, there, readers))

    def transfer(
        self, size: float, source: int, destination: int, readers: list[int]
    ) -> Generator[simpy.Event, None, None]:
        """A transfer, to the tasks that wait for it on one device."""
        latency_s = float(self.costs.latency_s[source, destination])
        per_byte_s = float(self.costs.seconds_per_byte[source, destination])
        yield self.env.timeout(latency_s + size * per_byte_s)
        self.arrive(readers)

    def arrive(self, readers: list[int]) -> None:
        """One of the inputs of some tasks is there."""
        for v in readers:
            self.missing[v] -= 1
            if self.missing[v] == 0:
                self.enqueue(v)

    def enqueue(self, v: int) -> None:
        """A task is ready."""
        heapq.heappush(self.ready[self.device[v]], (self.env.now, v))
        self.decide_later()

    def decide_later(self) -> None:
        """Has a task chosen when nothing else happens any more at this instant."""
        if not self.deciding:
            self.deciding = True
            decision = _Decision(self.env)
            decision.callbacks.append(self.decide)

    def decide(self, event: simpy.Event) -> None:
        """Starts the best ready task over all idle devices, if there is one."""
        self.deciding = False
        firsts = [q[0] for q, idle in zip(self.ready, self.idle, strict=True) if q and idle]
        if firsts:
            _, v = min(firsts)
            d = self.device[v]
            heapq.heappop(self.ready[d])
            self.idle[d] = False
            self.orders[d].put(v)
            self.decide_later()
