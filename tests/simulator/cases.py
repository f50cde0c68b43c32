"""Small problems made by hand, and schedules made readable."""

import dataclasses

import numpy as np

from tests.generators import free_costs, small_graph


def small_problem(compute, tensors, num_devices, inputs=()):
    """Tasks of given seconds, tensors (producer, seconds, readers), inputs (home, s, readers).

    All devices are equal, and a byte takes a second from any to any other.
    """
    graph = small_graph(np.ones(len(compute)), tensors, inputs)
    compute_s = np.repeat(np.array(compute, float)[:, None], num_devices, axis=1)
    return graph, free_costs(graph, compute_s, seconds_per_byte=1.0 - np.eye(num_devices))


def carried(schedule):
    """{(item, destination): (start, finish)} of the transfers."""
    names = ("tensor", "destination", "start_s", "finish_s")
    columns = [getattr(schedule, f"transfer_{name}").tolist() for name in names]
    return {(x, d): (start, finish) for x, d, start, finish in zip(*columns, strict=True)}


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


def with_transfers(schedule, rows=()):
    """The schedule with these of its transfers alone."""
    names = [name for name in vars(schedule) if name.startswith("transfer")]
    rows = np.array(rows, int)
    return change(schedule, **{name: getattr(schedule, name)[rows] for name in names})
