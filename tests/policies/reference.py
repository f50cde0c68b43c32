"""Episodes recomputed from graph and costs by plain loops in float64, step by step."""

import dataclasses
import itertools

import numpy as np

from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.relatives import nearest_relatives
from doppler_jax.policies.device_features import SAME


@dataclasses.dataclass
class Step:
    """What the policies see before a task is placed."""

    task: int
    device: int
    frontier: set
    est_s: np.ndarray  # [D] inf where the device cannot run the task
    features: np.ndarray  # [D, 14]
    members: list  # per device, the tasks that are on it


def steps(graph, costs, tasks, devices):
    """Yields the steps of an append-only list schedule under parallel links."""
    d = costs.num_devices
    edges = list(zip(*(ends.tolist() for ends in task_edges(graph)), strict=True))
    num_bytes = costs.tensor_bytes[graph.edge_tensor]
    unit_s, relatives = time_unit_s(graph, costs), nearest_relatives(graph, costs)
    load_s, free_s, members = np.zeros(d), np.zeros(d), [[] for _ in range(d)]
    where, start_s, finish_s = {}, {}, {}
    for v, here in zip(tasks, devices, strict=True):
        frontier = unblocked(graph, where)
        producers = [(u, b) for (u, r), b in zip(edges, num_bytes, strict=True) if r == v]
        arrival_s = inputs_ready_s(graph, costs, v)
        for u, size in producers:
            link_s = costs.latency_s[where[u]] + size * costs.seconds_per_byte[where[u]]
            arrival_s = np.maximum(arrival_s, finish_s[u] + link_s)
        able = np.isfinite(costs.compute_s[v])
        est_s = np.where(able, np.maximum(free_s, arrival_s), np.inf)
        base_s = est_s.min()
        late_s = est_s + costs.compute_s[v] - (est_s + costs.compute_s[v]).min()
        related = [
            sum(w for u, w in zip(*(t[v] for t in relatives), strict=True) if where.get(u) == x)
            for x in range(d)
        ]
        rows = np.zeros((d, 14))
        for x in range(d):
            on = [u for u, _ in producers if where[u] == x]
            affinity_s = sum(
                mean_transfer_s(costs, num_bytes[j])
                for reader in (r for u, r in edges if u == v)
                for j, (u, r) in enumerate(edges)
                if r == reader and where.get(u) == x
            )
            rows[x] = [
                load_s[x] - load_s[able].min(),
                sum(costs.compute_s[u, x] for u in on),
                min(start_s[u] for u in on) - base_s if on else 0.0,
                max(finish_s[u] for u in on) - base_s if on else 0.0,
                est_s[x] - base_s if able[x] else 0.0,
                costs.compute_s[v, x] if able[x] else 0.0,
                affinity_s,
                0.0,
                late_s[x] if able[x] else 0.0,
                0.0,
                est_s[x] - free_s[x] if able[x] else 0.0,
                sum(
                    costs.latency_s[where[u], x] + size * costs.seconds_per_byte[where[u], x]
                    for u, size in producers
                ),
                related[x],
                related[x] / max(sum(related), 1e-6),
            ]
        rows[:, :12] = np.sign(rows[:, :12]) * np.log1p(np.abs(rows[:, :12]) / unit_s)
        rows[:, 7] = rows[:, 6] > 0
        rows[:, 9] = ~able | (late_s <= SAME * unit_s)
        yield Step(v, here, frontier, est_s, rows, [list(tasks) for tasks in members])
        where[v], start_s[v] = here, est_s[here]
        free_s[here] = finish_s[v] = est_s[here] + costs.compute_s[v, here]
        load_s[here] += costs.compute_s[v, here]
        members[here].append(v)


def unblocked(graph, placed):
    """The tasks that are not placed, but all whose predecessors are."""
    waiting = {r for u, r in zip(*task_edges(graph), strict=True) if u not in placed}
    return set(range(graph.num_tasks)) - waiting - set(placed)


def inputs_ready_s(graph, costs, task):
    """When `[D]` the graph inputs of a task can be on each device."""
    ready_s = np.zeros(costs.num_devices)
    pairs = zip(graph.input_edge_input, graph.input_edge_reader, strict=True)
    for i, home in ((i, graph.input_home[i]) for i, reader in pairs if reader == task):
        if home >= 0:
            move_s = costs.input_bytes[i] * costs.seconds_per_byte[home]
            ready_s = np.maximum(ready_s, costs.latency_s[home] + move_s)
    return ready_s


def mean_transfer_s(costs, num_bytes):
    """Mean seconds over all ordered pairs of devices."""
    pairs = itertools.permutations(range(costs.num_devices), 2)
    return np.mean([costs.latency_s[p] + num_bytes * costs.seconds_per_byte[p] for p in pairs])


def time_unit_s(graph, costs):
    """Mean over the tasks of compute and largest output transfer."""
    senders, _ = task_edges(graph)
    sent = costs.tensor_bytes[graph.edge_tensor]
    if graph.num_tasks == 0:
        return 1.0
    total_s = [
        costs.compute_s[v][np.isfinite(costs.compute_s[v])].mean()
        + max((mean_transfer_s(costs, b) for b in sent[senders == v]), default=0.0)
        for v in range(graph.num_tasks)
    ]
    return np.mean(total_s)


def step_log_probs(tables, step):
    """Log-probabilities of every frontier task, and of every device for the step's task."""
    frontier = sorted(step.frontier)
    scores = np.asarray(tables.score, np.float64)
    place = {name: np.asarray(getattr(tables.place, name), np.float64) for name in FIELDS}
    logits = np.full(len(step.members), -np.inf)
    for d, tasks in enumerate(step.members):
        if np.isfinite(step.est_s[d]):
            mean = place["member"][tasks].mean(0) if tasks else np.zeros(MEMBERS)
            features = step.features[d][: len(place["kernel"])] @ place["kernel"]
            hidden = place["task"][step.task] + mean @ place["member_kernel"] + features
            logits[d] = np.where(hidden > 0, hidden, 0.01 * hidden) @ place["out"]
    select = dict(zip(frontier, log_softmax(scores[frontier]), strict=True))
    return select, log_softmax(logits)


def log_prob(tables, step):
    """Log-probability of the step's task and device, and the entropy of both choices."""
    select, place = step_log_probs(tables, step)
    possible = np.array([*select.values(), *place[np.isfinite(place)]])
    return select[step.task] + place[step.device], -(np.exp(possible) * possible).sum()


FIELDS = ("task", "member", "member_kernel", "kernel", "out")
MEMBERS = 4  # width of members in the tests' networks


def log_softmax(values):
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())
