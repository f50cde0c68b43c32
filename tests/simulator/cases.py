"""Small problems made by hand, and schedules made readable."""

import dataclasses

import numpy as np

from doppler_jax.graphs.build import make_graph
from doppler_jax.types import Costs


def small_problem(compute, tensors, num_devices, inputs=()):
    """Tasks of given seconds, tensors (producer, seconds, readers), inputs (home, s, readers).

    All devices are equal, and a byte takes a second from any to any other.
    """
    edges = [(x, v) for x, (_, _, readers) in enumerate(tensors) for v in readers]
    input_edges = [(i, v) for i, (_, _, readers) in enumerate(inputs) for v in readers]
    graph = make_graph(
        flops=np.ones(len(compute)),
        tensor_producer=[u for u, _, _ in tensors],
        tensor_bytes=[seconds for _, seconds, _ in tensors],
        edge_tensor=[x for x, _ in edges],
        edge_reader=[v for _, v in edges],
        input_bytes=[seconds for _, seconds, _ in inputs],
        input_home=[home for home, _, _ in inputs],
        input_edge_input=[i for i, _ in input_edges],
        input_edge_reader=[v for _, v in input_edges],
    )
    costs = Costs(
        compute_s=np.repeat(np.array(compute, float)[:, None], num_devices, axis=1),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=graph.input_bytes,
        latency_s=np.zeros((num_devices, num_devices)),
        seconds_per_byte=1.0 - np.eye(num_devices),
        capacity_bytes=np.full(num_devices, np.inf),
    )
    return graph, costs


def carried(schedule):
    """{(item, destination): (start, finish)} of the transfers."""
    return {
        (x, d): (start, finish)
        for x, d, start, finish in zip(
            schedule.transfer_tensor.tolist(),
            schedule.transfer_destination.tolist(),
            schedule.transfer_start_s.tolist(),
            schedule.transfer_finish_s.tolist(),
            strict=True,
        )
    }


def change(schedule, **entries):
    """The schedule with single entries set: `start_s={3: 1.0}`, or whole fields."""
    fields = {}
    for name, entry in entries.items():
        if isinstance(entry, dict):
            array = np.array(getattr(schedule, name))
            for index, value in entry.items():
                array[index] = value
            entry = array
        fields[name] = entry
    return dataclasses.replace(schedule, **fields)
