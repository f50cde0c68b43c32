"""Random problems for the tests, from NumPy generators with explicit seeds."""

import jax
import numpy as np
from hypothesis import strategies as st

from doppler_jax.graphs.build import make_graph, task_edges, topological_order
from doppler_jax.types import RESIDENT, Costs, Schedule


def random_problem(rng, num_tasks, num_devices, *, dyadic=False, homes=True, makers=False):
    """A random DAG with costs: several tensors per task, ties and zeros when dyadic.

    With makers some graph inputs are results of the last call, of a tensor's size.
    """
    density = rng.choice([0.02, 0.1, 0.3])
    order = rng.permutation(num_tasks)  # ids need not be topological
    producer, edge_tensor, edge_reader = [], [], []
    for position, v in enumerate(order):
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            readers = order[position + 1 :]
            readers = readers[rng.random(len(readers)) < density]
            edge_tensor += [len(producer)] * len(readers)
            edge_reader += readers.tolist()
            producer.append(v)
    num_inputs = int(rng.integers(0, 4)) if num_tasks else 0
    # Drawn beside `rng`, whose further numbers stay those of older tests.
    other = rng.spawn(1)[0]
    more = other.integers(0, [[max(num_inputs, 1)], [max(num_tasks, 1)]], (2, 4))
    more = more[:, : 4 * bool(num_inputs)]
    is_made = (other.random(num_inputs) < 0.4) & makers
    maker = np.where(is_made, other.integers(0, max(num_tasks, 1), num_inputs), -1)
    graph = make_graph(
        flops=numbers(rng, num_tasks, dyadic),
        tensor_producer=producer,
        tensor_bytes=numbers(rng, len(producer), dyadic),
        edge_tensor=edge_tensor,
        edge_reader=edge_reader,
        input_bytes=numbers(rng, num_inputs, dyadic),
        input_home=np.where(
            is_made, RESIDENT, rng.integers(-1, num_devices if homes else 0, num_inputs)
        ),
        input_maker=maker,
        input_edge_input=np.append(np.arange(num_inputs), more[0]),
        input_edge_reader=np.append(rng.integers(0, max(num_tasks, 1), num_inputs), more[1]),
    )
    of_maker = [graph.tensor_bytes[producer.index(v)] for v in maker[is_made]]
    graph.input_bytes[is_made] = of_maker
    costs = free_costs(graph, numbers(rng, (num_tasks, num_devices), dyadic))
    shape, apart = (num_devices, num_devices), 1.0 - np.eye(num_devices)
    return graph, costs.replace(
        latency_s=apart * numbers(rng, shape, dyadic),
        seconds_per_byte=apart * numbers(rng, shape, dyadic),
    )


def small_graph(flops, tensors=(), inputs=(), **others):
    """A graph of tensors (producer, bytes, readers) and inputs (home, bytes, readers)."""
    return make_graph(
        flops=flops,
        tensor_producer=[u for u, _, _ in tensors],
        tensor_bytes=[size for _, size, _ in tensors],
        edge_tensor=[x for x, (*_, readers) in enumerate(tensors) for _ in readers],
        edge_reader=[v for *_, readers in tensors for v in readers],
        input_bytes=[size for _, size, _ in inputs],
        input_home=[home for home, _, _ in inputs],
        input_edge_input=[i for i, (*_, readers) in enumerate(inputs) for _ in readers],
        input_edge_reader=[v for *_, readers in inputs for v in readers],
        **others,
    )


def free_costs(graph, compute_s, **others):
    """Costs of tasks `[N, D]` seconds, transfers that take no time and memory without limit."""
    d = np.shape(compute_s)[1]
    costs = Costs(
        compute_s=np.array(compute_s, float),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=graph.input_bytes,
        latency_s=np.zeros((d, d)),
        seconds_per_byte=np.zeros((d, d)),
        capacity_bytes=np.full(d, np.inf),
    )
    return costs.replace(**others)


def groups_of_loads(groups=4, size=4):
    """Loads of 90 bytes that a sum reads in groups, and a sum of all, on devices of 400.

    One group after the other fits, with 360 bytes a device; all loads first need 720.
    """
    loads = groups * size
    flops = np.array([2.0] * loads + [0.5] * groups + [0.1])
    graph = make_graph(
        flops=flops,
        tensor_producer=np.arange(loads + groups),
        tensor_bytes=[90.0] * loads + [8e-6] * groups,
        edge_tensor=np.arange(loads + groups),
        edge_reader=[*np.repeat(np.arange(groups) + loads, size), *[loads + groups] * groups],
    )
    links, capacity = (1.0 - np.eye(2)) / 1e3, np.full(2, 400.0)
    compute_s = np.repeat(flops[:, None], 2, axis=1)
    return graph, free_costs(graph, compute_s, seconds_per_byte=links, capacity_bytes=capacity)


def wide_problem(rng, width, depth, num_devices):
    """Layers of tasks with costs that tie: as many chains as a layer is wide."""
    n = width * depth
    senders = np.concatenate([np.arange(n - width), rng.integers(0, width, n - width)])
    readers = np.concatenate([np.arange(width, n), rng.permutation(np.arange(width, n))])
    edges = np.unique(np.stack([senders, readers], axis=1), axis=0)
    graph = make_graph(
        flops=np.ones(n),
        tensor_producer=np.arange(n),
        tensor_bytes=np.ones(n),
        edge_tensor=edges[:, 0],
        edge_reader=edges[:, 1],
    )
    costs = free_costs(graph, rng.integers(0, 9, (n, num_devices)) / 4.0)
    tensor_bytes = rng.integers(0, 9, n) / 4.0
    links = 1.0 - np.eye(num_devices)
    return graph, costs.replace(tensor_bytes=tensor_bytes, seconds_per_byte=links)


def some_unable(rng, costs, share):
    """Returns the costs with that share of (task, device) impossible; one can run each task."""
    num_tasks, num_devices = costs.compute_s.shape
    unable = rng.random((num_tasks, num_devices)) < share
    unable[np.arange(num_tasks), rng.integers(0, num_devices, num_tasks)] = False
    return costs.replace(compute_s=np.where(unable, np.inf, costs.compute_s))


def relabel_devices(graph, costs, new):
    """Returns the problem whose device new[d] is device d of the given one."""
    old, home = np.argsort(new), graph.input_home
    graph = graph.replace(input_home=np.where(home == RESIDENT, home, new[home]))
    links = {
        name: getattr(costs, name)[np.ix_(old, old)]
        for name in ("latency_s", "seconds_per_byte")
    }
    return graph, costs.replace(compute_s=costs.compute_s[:, old], **links)


def scale_costs(costs, factor):
    """Returns the costs with every time multiplied."""
    times = ("compute_s", "latency_s", "seconds_per_byte")
    return costs.replace(**{name: getattr(costs, name) * factor for name in times})


def with_own_inputs(rng, graph, costs):
    """Returns the problem whose tasks each read an input of their own, somewhere.

    So no two devices start a task together, and nothing ties.
    """
    every, home = (
        np.arange(graph.num_tasks),
        rng.integers(0, costs.num_devices, graph.num_tasks),
    )
    inputs = {"input_bytes": rng.lognormal(size=graph.num_tasks), "input_home": home}
    inputs["input_maker"] = np.full(graph.num_tasks, -1)
    graph = graph.replace(input_edge_input=every, input_edge_reader=every, **inputs)
    return graph, costs.replace(input_bytes=graph.input_bytes)


def random_params(init, problem, scale=0.5, seed=0):
    """Parameters without the zeros of fresh ones, which make every choice equally likely."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(init, jax.random.key(0), problem)
    return jax.tree.map(lambda leaf: rng.normal(0, scale, leaf.shape).astype("f4"), shapes)


def make_schedule(placement, start_s, finish_s, transfers=()):
    """A schedule; a transfer is (tensor, source, destination, start_s, finish_s)."""
    times = {"start_s": np.array(start_s, float), "finish_s": np.array(finish_s, float)}
    fields = ("tensor", "source", "destination", "start_s", "finish_s")
    columns = zip(*transfers, strict=True) if transfers else [()] * 5
    moved = {
        f"transfer_{name}": np.array(column, float if name.endswith("_s") else np.int64)
        for name, column in zip(fields, columns, strict=True)
    }
    return Schedule(placement=np.array(placement, np.int64), **times, **moved)


def coarsen(rng, graph, costs):
    """Returns the problem with durations of 0 or 1: much happens at one instant."""
    graph = graph.replace(input_bytes=rng.integers(0, 2, graph.num_inputs) * 1.0)
    costs = costs.replace(
        compute_s=rng.integers(0, 2, costs.compute_s.shape) * 1.0,
        tensor_bytes=rng.integers(0, 2, costs.tensor_bytes.shape) * 1.0,
        input_bytes=graph.input_bytes,
        latency_s=0 * costs.latency_s,
        seconds_per_byte=1.0 - np.eye(costs.num_devices),
    )
    return graph, costs


@st.composite
def problems(draw, max_tasks=30, max_devices=4):
    """A random problem with a placement, and ranks and factors of noise for it.

    Some have costs of 0 and 1 alone, so that much happens at one instant.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tasks, num_devices = draw(st.integers(0, max_tasks)), draw(st.integers(1, max_devices))
    kind = draw(st.sampled_from(["generic", "dyadic", "coarse"]))
    graph, costs = random_problem(
        rng, num_tasks, num_devices, dyadic=kind == "dyadic", makers=True
    )
    if kind == "coarse":
        graph, costs = coarsen(rng, graph, costs)
    if draw(st.booleans()):
        seconds = numbers(rng, (2, num_devices), kind != "generic")
        costs = costs.replace(handling_s=seconds[0], handling_s_per_byte=seconds[1])
    else:  # as arrays, since None compiles afresh
        none = np.zeros(num_devices)
        costs = costs.replace(handling_s=none, handling_s_per_byte=none)
    placement = rng.integers(0, num_devices, num_tasks)
    options = {
        "fifo": {},
        "priority": {"queue": "priority", "priority": rng.integers(0, 9, num_tasks)},
        "in_order": {"queue": "in_order", "priority": topological_ranks(rng, graph)},
        "random": {"queue": "random", "priority": rng.permutation(num_tasks)},
        "noise": random_factors(rng, graph, num_devices),
    }
    return graph, costs, placement, options[draw(st.sampled_from(sorted(options)))]


def random_factors(rng, graph, num_devices):
    """A draw of noise, as the simulators take it."""
    sizes = {
        "compute_factor": (graph.num_tasks,),
        "transfer_factor": (graph.num_tensors, num_devices),
        "input_factor": (graph.num_inputs, num_devices),
    }
    return {name: rng.lognormal(0, 0.3, size) for name, size in sizes.items()}


def topological_ranks(rng, graph):
    """Ranks with which no reader comes before its producer, many of them equal."""
    rank = np.empty(graph.num_tasks)
    rank[topological_order(graph, rng.random(graph.num_tasks))] = np.arange(graph.num_tasks)
    senders, readers = task_edges(graph)
    halved = rank // 2
    return rank if (halved[senders] == halved[readers]).any() else halved


def numbers(rng, shape, dyadic):
    """Random sizes: small multiples of 1/4, zero included, or generic reals."""
    if dyadic:
        return rng.integers(0, 9, shape) / 4.0
    return rng.lognormal(0.0, 1.0, shape)
