"""Examples of the papers, and what any planned schedule must keep to."""

import dataclasses

import numpy as np

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.types import RESIDENT
from tests.generators import random_problem

# Topcuoglu et al. 2002, figure 2: (task, reader, transfer) from 1, seconds per processor.
TOPCUOGLU = (
    [
        *((1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14)),
        *((2, 8, 19), (2, 9, 16), (3, 7, 23), (4, 8, 27), (4, 9, 23)),
        *((5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13)),
    ],
    [
        *((14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10)),
        *((13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16)),
    ],
)
# Arabnejad and Barbosa 2014, figure 1.
ARABNEJAD = (
    [
        *((1, 2, 17), (1, 3, 31), (1, 4, 29), (1, 5, 13), (1, 6, 7)),
        *((2, 8, 3), (2, 9, 30), (3, 7, 16), (4, 8, 11), (4, 9, 7)),
        *((5, 9, 57), (6, 8, 5), (7, 10, 9), (8, 10, 42), (9, 10, 7)),
    ],
    [
        *((22, 21, 36), (22, 18, 18), (32, 27, 43), (7, 10, 4), (29, 27, 35)),
        *((26, 17, 24), (14, 25, 30), (29, 23, 36), (15, 21, 8), (13, 16, 33)),
    ],
)


def paper_example(example):
    """Graph and costs of an example: ten tasks, three devices."""
    edges, compute_s = example
    edges = [(u - 1, v - 1, delay) for u, v, delay in edges]
    return with_compute(edges, compute_s)


def with_compute(edges, compute_s, **changes):
    """Graph and costs from (u, v, delay) and `compute_s` `[N, D]`."""
    compute_s = np.array(compute_s, dtype=np.float64)
    num_tasks, num_devices = compute_s.shape
    graph, costs = from_edge_delays(np.ones(num_tasks), edges, num_devices=num_devices)
    return graph, dataclasses.replace(costs, compute_s=compute_s, **changes)


def uneven_problem(seed, num_tasks, num_devices, dyadic=False):
    """A random problem in which some devices cannot run some tasks."""
    rng = np.random.default_rng(seed)
    graph, costs = random_problem(rng, num_tasks, num_devices, dyadic=dyadic)
    compute_s = costs.compute_s.copy()
    compute_s[rng.random(compute_s.shape) < 0.2] = np.inf
    stuck = np.isinf(compute_s).all(axis=1)
    compute_s[stuck, 0] = costs.compute_s[stuck, 0]
    return graph, dataclasses.replace(costs, compute_s=compute_s)


def arrival_s(graph, costs, schedule, task, device):
    """When the inputs of a task are on a device, edge by edge."""

    def move_s(num_bytes, source):
        return costs.latency_s[source, device] + (
            num_bytes * costs.seconds_per_byte[source, device]
        )

    times = [0.0]
    for i in graph.input_edge_input[graph.input_edge_reader == task]:
        if graph.input_home[i] not in (RESIDENT, device):
            times.append(move_s(costs.input_bytes[i], graph.input_home[i]))
    for x in graph.edge_tensor[graph.edge_reader == task]:
        u = graph.tensor_producer[x]
        source = schedule.placement[u]
        wait_s = move_s(costs.tensor_bytes[x], source) if source != device else 0.0
        times.append(schedule.finish_s[u] + wait_s)
    return max(times)


def check_plan(graph, costs, schedule):
    """Asserts that a plan keeps to durations, precedence, transfers, one task at a time."""
    placement, start_s, finish_s = schedule.placement, schedule.start_s, schedule.finish_s
    assert placement.dtype == np.int64
    assert placement.shape == start_s.shape == finish_s.shape == (graph.num_tasks,)
    tasks = np.arange(graph.num_tasks)
    assert np.isfinite(costs.compute_s[tasks, placement]).all()
    np.testing.assert_array_equal(finish_s, start_s + costs.compute_s[tasks, placement])
    for v in tasks:
        assert start_s[v] >= arrival_s(graph, costs, schedule, v, placement[v])
    for d in range(costs.num_devices):
        here = np.flatnonzero(placement == d)
        here = here[np.lexsort((finish_s[here], start_s[here]))]
        assert (start_s[here[1:]] >= finish_s[here[:-1]]).all()


def replay(graph, costs, schedule, order, inserts=True):
    """Yields, task by task in an order, (task, earliest start per device), naively.

    The task is then taken to be where the schedule has it. A start is tried at every
    point at which one can be earliest: when the inputs are there, when a task ends.
    """
    done = []
    for v in order:
        starts = []
        for d in range(costs.num_devices):
            ready_s, long_s = arrival_s(graph, costs, schedule, v, d), costs.compute_s[v, d]
            busy = [u for u in done if schedule.placement[u] == d]
            points = sorted([ready_s, *(max(ready_s, schedule.finish_s[u]) for u in busy)])
            if not inserts:
                points = points[-1:]
            starts.append(
                next(
                    t
                    for t in points
                    if np.isinf(long_s)
                    or all(
                        t + long_s <= schedule.start_s[u] or t >= schedule.finish_s[u]
                        for u in busy
                    )
                )
            )
        yield v, np.array(starts)
        done.append(v)


def frontier_order(graph, priority):
    """Tasks by largest priority among those whose producers are placed, then id."""
    senders, readers = task_edges(graph)
    order = []
    while len(order) < graph.num_tasks:
        blocked = set(readers[~np.isin(senders, order)].tolist())
        frontier = set(range(graph.num_tasks)) - blocked - set(order)
        order.append(min(frontier, key=lambda v: (-priority[v], v)))
    return order


def held_bytes(graph, costs, tasks, device):
    """Bytes of all that tasks on a device read or make there, each item once."""
    tensors = np.isin(graph.tensor_producer, tasks)
    tensors[graph.edge_tensor[np.isin(graph.edge_reader, tasks)]] = True
    inputs = np.zeros(graph.num_inputs, bool)
    inputs[graph.input_edge_input[np.isin(graph.input_edge_reader, tasks)]] = True
    read = np.isin(np.arange(graph.num_inputs), graph.input_edge_input)
    inputs |= read & (graph.input_home == device) | np.isin(graph.input_maker, tasks)
    return costs.tensor_bytes[tensors].sum() + costs.input_bytes[inputs].sum()


def run_events(graph, costs, favourite=None):
    """Start, device `[N]` of m-SCT, or m-ETF without favourites, by naive event simulation."""
    n, d = graph.num_tasks, costs.num_devices
    favourite = np.full(n, -1) if favourite is None else favourite
    senders, readers = task_edges(graph)
    plan = dataclasses.make_dataclass("Plan", ["placement", "start_s", "finish_s"])(
        np.full(n, -1), np.full(n, np.inf), np.full(n, np.inf)
    )
    free_s, last, now = np.zeros(d), np.full(d, -1), 0.0

    def fits(v, e):
        tasks = [*np.flatnonzero(plan.placement == e), v]
        within = held_bytes(graph, costs, tasks, e) <= costs.capacity_bytes[e]
        return np.isfinite(costs.compute_s[v, e]) and within

    def arrival(v, e):
        return arrival_s(graph, costs, plan, v, e)

    def choice(e, ready):
        mine = [v for v in ready if fits(v, e)]
        child = favourite[last[e]] if last[e] >= 0 else -1
        if child in mine:
            starts = {
                f: max(arrival(child, f), free_s[f], now) for f in range(d) if fits(child, f)
            }
            if starts[e] == min(starts.values()):
                able = np.isfinite(costs.compute_s)
                for v in mine:
                    if max(arrival(v, f) for f in range(d) if able[v, f]) <= now:
                        return v
                return child if arrival(child, e) <= now else None
        return next((v for v in mine if arrival(v, e) <= now), None)

    while (plan.placement < 0).any():
        unfinished = plan.finish_s > now
        waiting = set(readers[unfinished[senders]].tolist())
        ready = [v for v in range(n) if plan.placement[v] < 0 and v not in waiting]
        choices = [(choice(e, ready), e) for e in range(d) if free_s[e] <= now]
        choices = [(v, e) for v, e in choices if v is not None]
        if choices:
            v, e = min(choices)
            plan.placement[v], plan.start_s[v] = e, now
            plan.finish_s[v] = free_s[e] = now + costs.compute_s[v, e]
            last[e] = v
            continue
        events = [*plan.finish_s, *(arrival(v, e) for v in ready for e in range(d))]
        now = min(t for t in events if t > now)
        assert np.isfinite(now), "a task fits nowhere"
    return plan.start_s, plan.placement
