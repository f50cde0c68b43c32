"""Roofline seconds of every task on every device."""

import numpy as np

from doppler_jax.types import Cluster, TaskGraph


def bytes_touched(graph: TaskGraph) -> np.ndarray:
    """Returns the bytes `[N]` that each task reads (tensors, graph inputs) and writes."""
    n = graph.num_tasks
    read = np.bincount(graph.edge_reader, graph.tensor_bytes[graph.edge_tensor], n)
    written = np.bincount(graph.tensor_producer, graph.tensor_bytes, n)
    from_inputs = np.bincount(
        graph.input_edge_reader, graph.input_bytes[graph.input_edge_input], n
    )
    return read + written + from_inputs


def roofline_s(graph: TaskGraph, cluster: Cluster) -> np.ndarray:
    """Returns the seconds `[N, D]` of each task on each device.

    launch_s + max(flops / flops_per_s, bytes touched / memory_bytes_per_s): arithmetic
    and memory traffic overlap, the launch does not.
    """
    arithmetic_s = graph.flops[:, None] / cluster.flops_per_s[None, :]
    memory_s = bytes_touched(graph)[:, None] / cluster.memory_bytes_per_s[None, :]
    return np.asarray(cluster.launch_s)[None, :] + np.maximum(arithmetic_s, memory_s)
