"""Random problems for the tests, from NumPy generators with explicit seeds."""

import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.types import Costs


def random_problem(rng, num_tasks, num_devices, *, dyadic=False, homes=True):
    """A random DAG with costs: several tensors per task, ties and zeros when dyadic."""
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
    graph = make_graph(
        flops=numbers(rng, num_tasks, dyadic),
        tensor_producer=producer,
        tensor_bytes=numbers(rng, len(producer), dyadic),
        edge_tensor=edge_tensor,
        edge_reader=edge_reader,
        input_bytes=numbers(rng, num_inputs, dyadic),
        input_home=rng.integers(-1, num_devices if homes else 0, num_inputs),
        input_edge_input=np.arange(num_inputs),
        input_edge_reader=rng.integers(0, max(num_tasks, 1), num_inputs),
    )
    shape = (num_devices, num_devices)
    off_diagonal = 1.0 - np.eye(num_devices)
    costs = Costs(
        compute_s=numbers(rng, (num_tasks, num_devices), dyadic),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=graph.input_bytes,
        latency_s=off_diagonal * numbers(rng, shape, dyadic),
        seconds_per_byte=off_diagonal * numbers(rng, shape, dyadic),
    )
    return graph, costs


def numbers(rng, shape, dyadic):
    """Random sizes: small multiples of 1/4, zero included, or generic reals."""
    if dyadic:
        return rng.integers(0, 9, shape) / 4.0
    return rng.lognormal(0.0, 1.0, shape)
