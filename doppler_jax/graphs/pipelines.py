"""Training steps in a pipeline: P stages, M micro-batches, and schedules written by hand.

Tasks are F (forward), B (the gradient of a stage's input) and W (that of its weights), of one
second each; or F and BW, a whole backward of two. F sends a message to the next stage, and
keeps an activation of one byte for the backward of its own stage; nothing else takes memory.
Times and sizes are plain numbers: of equal stages, as the schedules' authors draw them.

References: Huang et al. 2019 (GPipe), Narayanan et al. 2019 (1F1B), Qi et al. 2024 (zero
bubble, H1).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from doppler_jax.graphs.build import make_graph, task_edges
from doppler_jax.types import Costs, TaskGraph

LIMITS = ("none", "P", "P - i")
"""Activations that stage i of P has room for."""

SCHEDULES = ("gpipe", "1f1b", "zb_h1")
"""Those that `hand_written` knows; the last is of backwards in two halves."""

Task = tuple[str, int, int]
"""Kind, stage and micro-batch."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A training step: its graph and costs, and what the tasks are."""

    graph: TaskGraph
    costs: Costs
    tasks: tuple[Task, ...]  # [N]

    @property
    def names(self) -> list[str]:
        """Names `[N]`, such as `stage1.F_3`."""
        return [f"stage{stage}.{kind}_{micro}" for kind, stage, micro in self.tasks]


def make_pipeline(
    num_stages: int,
    num_micro_batches: int,
    *,
    whole_backward: bool = False,
    pinned: bool = True,
    limit: str = "none",
    latency_s: float = 0.0,
) -> Pipeline:
    """Returns a training step on as many equal devices as stages.

    Args:
      num_stages: P.
      num_micro_batches: M.
      whole_backward: BW in place of B and W.
      pinned: stage i runs on device i alone.
      limit: one of `LIMITS`, of the activations on device i.
      latency_s: seconds that anything takes from device to device.

    Raises:
      ValueError: P or M is below 1, or there is no such limit.
    """
    for name, count in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
        if count < 1:
            raise ValueError(f"{name} is {count}; expected at least 1")
    if limit not in LIMITS:
        raise ValueError(f"unknown limit {limit!r}; known: {', '.join(LIMITS)}")
    kinds = ("F", "BW") if whole_backward else ("F", "B", "W")
    stages, batches = range(num_stages), range(num_micro_batches)
    tasks = tuple((kind, i, m) for kind in kinds for m in batches for i in stages)
    seconds = np.array([float(len(kind)) for kind, _, _ in tasks])
    graph = _make_graph(tasks, seconds)
    stage = np.array([i for _, i, _ in tasks])
    elsewhere = pinned & (stage[:, None] != np.arange(num_stages))
    room = np.full(num_stages, np.inf if limit == "none" else float(num_stages))
    if limit == "P - i":
        room -= np.arange(num_stages)
    costs = Costs(
        compute_s=np.where(elsewhere, np.inf, seconds[:, None]),
        tensor_bytes=graph.tensor_bytes,
        input_bytes=np.empty(0),
        latency_s=latency_s * (1.0 - np.eye(num_stages)),
        seconds_per_byte=np.zeros((num_stages, num_stages)),
        capacity_bytes=room,
    )
    return Pipeline(graph, costs, tasks)


def _make_graph(tasks: Sequence[Task], seconds: np.ndarray) -> TaskGraph:
    """Returns the graph of tasks whose kinds begin with F: a message, and an activation."""
    number = {task: v for v, task in enumerate(tasks)}
    producer: list[int] = []
    edges: list[tuple[int, int]] = []
    sizes: list[float] = []

    def tensor(maker: int, size: float, readers: list[Task]) -> None:
        found = [number[task] for task in readers if task in number]
        edges.extend((len(producer), v) for v in found)
        if found or not size:
            producer.append(maker)
            sizes.append(size)

    for v, (kind, i, m) in enumerate(tasks):
        if kind == "F":
            tensor(v, 0.0, [("F", i + 1, m)])
            tensor(v, 1.0, [("B", i, m), ("W", i, m), ("BW", i, m)])
        else:
            tensor(v, 0.0, [(kind, i - 1, m), ("W", i, m)] if kind != "W" else [])
    ends = np.array(edges).reshape(-1, 2)
    return make_graph(
        flops=seconds,
        tensor_producer=producer,
        tensor_bytes=sizes,
        edge_tensor=ends[:, 0],
        edge_reader=ends[:, 1],
    )


def hand_written(name: str, pipeline: Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """Returns placement and ranks `[N]` of a schedule, for the queue `in_order`.

    Stage i is on device i. With backwards in halves, W follows its B at once in `gpipe` and
    `1f1b`; in `zb_h1` it follows i micro-batches later on stage i, and the rest at the end.

    Raises:
      ValueError: there is no such schedule, or it is of backwards in halves and these are
        whole.
    """
    tasks = pipeline.tasks
    whole = any(kind == "BW" for kind, _, _ in tasks)
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if name == "zb_h1" and whole:
        raise ValueError("zb_h1 is of backwards in two halves; these are whole")
    stages, batches = tasks[-1][1] + 1, tasks[-1][2] + 1
    queues = [_stage_order(name, i, stages, batches, whole=whole) for i in range(stages)]
    rank = _merge(pipeline, queues)
    return np.array([stage for _, stage, _ in tasks]), rank


def _stage_order(name: str, i: int, stages: int, batches: int, *, whole: bool) -> list[Task]:
    """Returns the tasks of stage i in the order in which it runs them."""
    ahead = batches if name == "gpipe" else min(stages - i, batches)  # forwards at first
    late = min(i, batches) if name == "zb_h1" else 0  # micro-batches that a W waits
    order: list[Task] = [("F", i, m) for m in range(ahead)]
    for m in range(batches):
        order.append(("BW" if whole else "B", i, m))
        if not whole and m >= late:
            order.append(("W", i, m - late))
        if m + ahead < batches:
            order.append(("F", i, m + ahead))
    return order + [("W", i, m) for m in range(batches - late, batches)]


def _merge(pipeline: Pipeline, queues: list[list[Task]]) -> np.ndarray:
    """Returns ranks `[N]` by which every device keeps to its queue, producers first."""
    number = {task: v for v, task in enumerate(pipeline.tasks)}
    producers: list[set[int]] = [set() for _ in pipeline.tasks]
    for u, v in zip(*(ends.tolist() for ends in task_edges(pipeline.graph)), strict=True):
        producers[v].add(u)
    rank: dict[int, int] = {}
    left = [[number[task] for task in reversed(queue)] for queue in queues]
    while any(left):
        for queue in left:
            while queue and producers[queue[-1]] <= rank.keys():
                rank[queue.pop()] = len(rank)
    return np.array([rank[v] for v in range(len(rank))])
