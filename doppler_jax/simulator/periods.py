"""What a loop takes a step: a call whose state is what the call before made."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from doppler_jax.graphs.build import make_graph
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from doppler_jax.types import Costs, TaskGraph


def period_s(
    graph: TaskGraph,
    costs: Costs,
    placement: ArrayLike,
    order: ArrayLike,
    *,
    links: str = "parallel",
) -> float:
    """Returns the seconds that a call adds to a loop that feeds its state back.

    It is the makespan of four calls less that of three, with each device's order repeated: a
    device goes on with the next call while others are at the last.

    Args:
      graph: the task graph, N tasks.
      costs: its costs.
      placement: `[N]` device of each task.
      order: `[N]` ranks, least first, each task after those that it reads from.
      links: see `simulate`.
    """
    rank = np.argsort(np.argsort(order, kind="stable"))

    def span_s(calls: int) -> float:
        ranks = (rank + np.arange(calls)[:, None] * rank.size).ravel()
        unrolled = *unroll(graph, costs, calls), np.tile(placement, calls)
        return makespan_s(
            simulate_oracle(*unrolled, links=links, queue="in_order", priority=ranks)
        )

    return span_s(4) - span_s(3)


def unroll(graph: TaskGraph, costs: Costs, calls: int) -> tuple[TaskGraph, Costs]:
    """Returns some calls in a row as one graph, and its costs.

    Task v of call k is v + k N. What is carried is a tensor of its own, for it is sent anew to
    those that read it in the next call. Arguments that a call brings are there from the
    beginning.

    Args:
      graph: the task graph, N tasks, T tensors, I graph inputs.
      costs: its costs.
      calls: how many, at least one.
    """
    n, t, count = graph.num_tasks, graph.num_tensors, graph.num_inputs
    read, reader = graph.input_edge_input, graph.input_edge_reader
    made = graph.input_maker >= 0  # [I]
    own = t + np.cumsum(made) - 1  # [I] tensor of each carried input among those of a call
    size, is_made = t + int(made.sum()), made[read]
    producer = np.append(graph.tensor_producer, graph.input_maker[made])
    tasks, ids, inputs = (np.arange(calls)[:, None] * k for k in (n, size, count))

    def repeated(array: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return (array + offsets).ravel()

    carried = repeated(own[read[is_made]], ids[:-1]), repeated(reader[is_made], tasks[1:])
    # To the calls after the first what is carried is no graph input.
    is_input = ~is_made | (np.arange(calls)[:, None] == 0)
    unrolled = make_graph(
        flops=np.tile(graph.flops, calls),
        tensor_producer=repeated(producer, tasks),
        tensor_bytes=np.tile(np.append(graph.tensor_bytes, graph.input_bytes[made]), calls),
        edge_tensor=np.append(repeated(graph.edge_tensor, ids), carried[0]),
        edge_reader=np.append(repeated(graph.edge_reader, tasks), carried[1]),
        input_bytes=np.tile(graph.input_bytes, calls),
        input_home=np.tile(graph.input_home, calls),
        input_maker=np.tile(graph.input_maker, calls),
        input_edge_input=(read + inputs)[is_input],
        input_edge_reader=(reader + tasks)[is_input],
        has_bytes=graph.has_bytes,
    )
    tensor_bytes = np.append(costs.tensor_bytes, np.asarray(costs.input_bytes)[made])
    return unrolled, dataclasses.replace(
        costs,
        compute_s=np.tile(costs.compute_s, (calls, 1)),
        tensor_bytes=np.tile(tensor_bytes, calls),
        input_bytes=np.tile(costs.input_bytes, calls),
    )
