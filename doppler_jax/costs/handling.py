"""Seconds that devices spend on transfers themselves, by `Costs.handling_s`; float64."""

import dataclasses

import numpy as np

from doppler_jax.types import RESIDENT, Costs, TaskGraph


def task_handling_s(graph: TaskGraph, costs: Costs, device: np.ndarray) -> np.ndarray:
    """Returns what each task `[N]` is longer by for what it sends and receives.

    Of a graph input's transfer only who receives it pays.

    Args:
      graph: the task graph, N tasks.
      costs: its costs.
      device: `[N]` of each task.
    """
    count, num_bytes = np.zeros(device.size), np.zeros(device.size)
    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return count
    received: set[tuple[int, int]] = set()
    home, size = graph.homes(device), np.concatenate([costs.input_bytes, costs.tensor_bytes])

    def move(item: int, source: int, reader: int, *payers: int) -> None:
        key = (item, int(device[reader]))
        if source not in (RESIDENT, key[1]) and key not in received:
            received.add(key)
            for task in payers:
                count[task] += 1
                num_bytes[task] += size[item]

    inputs = zip(graph.input_edge_input.tolist(), graph.input_edge_reader.tolist(), strict=True)
    for i, reader in sorted(inputs):
        move(i, home[i], reader, reader)
    edges = zip(graph.edge_reader.tolist(), graph.edge_tensor.tolist(), strict=True)
    for reader, tensor in sorted(edges):
        maker = graph.tensor_producer[tensor]
        move(graph.num_inputs + tensor, device[maker], reader, maker, reader)
    each_s = np.asarray(costs.handling_s, np.float64)[device]
    per_byte = np.asarray(costs.handling_s_per_byte, np.float64)[device]
    return count * each_s + num_bytes * per_byte


def as_transfers(costs: Costs) -> Costs:
    """Returns costs for methods that know no handling: transfers take as much longer."""
    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return costs
    return dataclasses.replace(
        costs,
        latency_s=costs.latency_s + _both_ends(np.asarray(costs.handling_s)),
        seconds_per_byte=costs.seconds_per_byte
        + _both_ends(np.asarray(costs.handling_s_per_byte)),
        handling_s=None,
        handling_s_per_byte=None,
    )


def _both_ends(each: np.ndarray) -> np.ndarray:
    return (each[:, None] + each) * (1.0 - np.eye(len(each)))


def ends_s(costs: Costs, source: int, destination: int, num_bytes: float) -> float:
    """Returns what both ends of a transfer spend on it."""
    if costs.handling_s is None or costs.handling_s_per_byte is None:
        return 0.0
    both = [source, destination]
    return float(
        np.sum(costs.handling_s[both]) + num_bytes * np.sum(costs.handling_s_per_byte[both])
    )
