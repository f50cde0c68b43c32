"""Makes `Costs` on the host, and refuses what no simulator can use.

On a cluster a task takes its roofline's seconds, and a transfer a latency plus its bytes over
the link's bandwidth.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.costs.calibration import Calibration, measured_costs
from doppler_jax.costs.clusters import reference_cluster
from doppler_jax.graphs.build import make_graph
from doppler_jax.types import Cluster, Costs, ShardedProgram, TaskGraph


def make_costs(graph: TaskGraph | ShardedProgram, cluster: Cluster | Calibration) -> Costs:
    """Returns the costs of a task graph on a cluster, or of a program as calibrated.

    On a cluster: roofline tasks, linear transfers; memory is limited if the graph `has_bytes`.
    A calibration (`dj.engine.measure_calibration`) has measured seconds of each kernel, so it
    needs the program, which knows its kernels.

    Example:
      >>> costs = dj.make_costs(dj.make_graph(flops=[1e12, 2e12]), dj.make_cluster("p100x4"))
      >>> costs.compute_s.shape
      (2, 4)

    Raises:
      ValueError: a kernel was not measured, a calibration is given with a bare graph, or a
        graph input's home is a device that there is not.
    """
    if isinstance(cluster, Calibration):
        if not isinstance(graph, ShardedProgram):
            raise ValueError("a calibration knows kernels; give the program, not its graph")
        costs, graph = measured_costs(graph, cluster), graph.graph
    else:
        graph = graph.graph if isinstance(graph, ShardedProgram) else graph
        costs = Costs(
            compute_s=roofline_s(graph, cluster),
            tensor_bytes=graph.tensor_bytes.copy(),
            input_bytes=graph.input_bytes.copy(),
            latency_s=cluster.latency_s.copy(),
            seconds_per_byte=1.0 / cluster.link_bytes_per_s,
            capacity_bytes=np.where(graph.has_bytes, cluster.memory_bytes, np.inf),
        )
    check_costs(graph, costs)
    return costs


def reference_costs(graph: TaskGraph, num_devices: int = 4) -> Costs:
    """Returns the costs of the reference's simulator, for the published DOPPLER files.

    A task takes flops / 1e10 seconds on any device and a tensor bytes / 1e10 seconds to
    any other device; there is no latency and no launch overhead.

    Example:
      >>> dj.reference_costs(dj.make_graph(flops=[2e10]), num_devices=2).compute_s
      array([[2., 2.]])

    Raises:
      ValueError: fewer than one device.
    """
    return make_costs(graph, reference_cluster(num_devices))


def from_edge_delays(
    weights: ArrayLike, edges: Iterable[tuple[int, int, float]], num_devices: int = 4
) -> tuple[TaskGraph, Costs]:
    """Returns graph and costs of a DAG with a delay per edge, on equal devices.

    Every edge has a tensor of its own. A task of weight w has w flops and a delay of c is
    c bytes, on devices of 1 flop/s whose links carry 1 byte/s.

    Example:
      >>> graph, costs = dj.from_edge_delays([2.0, 1.0], [(0, 1, 1.0)], num_devices=2)
      >>> dj.simulate(graph, costs, [[0, 0], [0, 1]]).makespan_s
      array([3., 4.])

    Args:
      weights: `[N]` seconds of each task on any device.
      edges: (u, v, delay): v waits `delay` seconds for u's result on another device.
      num_devices: D.

    Raises:
      ValueError: an edge names no task, a number is negative or not finite, the tasks
        form a cycle, or `num_devices` is below 1.
    """
    edges = list(edges)
    graph = make_graph(
        flops=weights,
        tensor_producer=[u for u, _, _ in edges],
        tensor_bytes=[float(delay) for _, _, delay in edges],
        edge_tensor=np.arange(len(edges)),
        edge_reader=[v for _, v, _ in edges],
    )
    return graph, make_costs(graph, reference_cluster(num_devices, rate=1.0))


def check_costs(graph: TaskGraph, costs: Costs) -> None:
    """Raises `ValueError` unless the costs fit the graph and every task can run somewhere.

    `compute_s` may be inf where a device cannot run a task, `capacity_bytes` where memory
    is unlimited; all else is finite and not negative, and the diagonals of the transfers
    are 0. Whether the memory suffices is `check_capacity`'s question.
    """
    compute_s = np.asarray(costs.compute_s)
    if compute_s.ndim != 2 or compute_s.shape[1] == 0:
        raise ValueError(f"compute_s has shape {compute_s.shape}; expected [N, D] with D >= 1")
    d = costs.num_devices
    _check_array("compute_s", compute_s, (graph.num_tasks, d), allow_inf=True)
    _check_array("tensor_bytes", costs.tensor_bytes, (graph.num_tensors,))
    _check_array("input_bytes", costs.input_bytes, (graph.num_inputs,))
    _check_array("capacity_bytes", costs.capacity_bytes, (d,), allow_inf=True)
    _check_handling(costs)
    for name in ("latency_s", "seconds_per_byte"):
        array = np.asarray(getattr(costs, name))
        _check_array(name, array, (d, d))
        diagonal = np.diagonal(array)
        if diagonal.any():
            s = int(np.flatnonzero(diagonal)[0])
            raise ValueError(f"{name}[{s}, {s}] is {diagonal[s]}; expected 0 on the diagonal")
    stuck = np.flatnonzero(np.isinf(compute_s).all(axis=1))
    if stuck.size:
        raise ValueError(f"task {stuck[0]} runs on no device: compute_s[{stuck[0]}] is all inf")
    far = np.flatnonzero(np.asarray(graph.input_home) >= d)
    if far.size:
        raise ValueError(
            f"input_home[{far[0]}] is {graph.input_home[far[0]]}, but there are {d} devices"
        )


def _check_handling(costs: Costs) -> None:
    if (costs.handling_s is None) != (costs.handling_s_per_byte is None):
        raise ValueError("handling_s and handling_s_per_byte go together; one of them is None")
    for name in ("handling_s", "handling_s_per_byte"):
        if (values := getattr(costs, name)) is not None:
            _check_array(name, values, (costs.num_devices,))


def _check_array(
    name: str, values: ArrayLike, shape: tuple[int, ...], *, allow_inf: bool = False
) -> None:
    array = np.asarray(values)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    bad = np.isnan(array) | (array < 0)
    if not allow_inf:
        bad |= np.isinf(array)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        index = ", ".join(map(str, where))
        expected = "a number >= 0" if allow_inf else "a finite number >= 0"
        raise ValueError(f"{name}[{index}] is {array[where]}; expected {expected}")


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
