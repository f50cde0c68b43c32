"""Coarsening: tasks of one device that wait for the same transfers become one task.

Two tasks of a device are in one segment if the same transfers are before them and the same
ones after them, however far away. So a segment starts no later than its first task could:
none of its tasks waits for a transfer that another does not wait for. And it holds up no
transfer: what leaves the device after one of its tasks needs all of them. No coarser
grouping has both properties. A path that leaves a segment and returns to it would be a
transfer after one task and before another, hence not the same ones: segments form no cycle.

What it costs: a segment is not interrupted, so another segment that becomes ready meanwhile
waits for its end, where it would have waited for the end of one task.
"""

import dataclasses
import weakref
from collections.abc import Sequence

import jax
import numpy as np

from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.programs.blocks import task_graph
from doppler_jax.types import (
    RESIDENT,
    InputRef,
    Kernel,
    Plan,
    Ref,
    ShardedProgram,
    TaskGraph,
    TensorRef,
)

Wire = tuple[int, int]
"""An operand of a part: (part, result), or (-1, operand of the segment)."""

Parts = tuple[tuple[Kernel, tuple[Wire, ...]], ...]

_composed: "weakref.WeakValueDictionary[tuple[Parts, tuple[Wire, ...]], Kernel]" = (
    weakref.WeakValueDictionary()
)
"""The kernels of segments that are in use, so that placements share executables."""


def fuse_segments(sharded: ShardedProgram, plan: Plan) -> tuple[ShardedProgram, Plan]:
    """Returns the program with a task per segment, and its plan.

    A segment's results are what is read outside it; they appear at its end. Segments that
    call the same kernels, wired alike, share one kernel, also between calls of this
    function. A segment of one task stays as it is; others are called "NAME+K", after the
    first of their K + 1 tasks, and rank as their first-ranked one, or under `in_order` as
    early as that lets them after what they read from.

    Args:
      sharded: the program, N tasks.
      plan: that has been checked.
    """
    graph, placement, priority = sharded.graph, plan.placement, plan.priority
    segments = _segments(graph, placement)
    of_task = np.empty(graph.num_tasks, np.int64)
    for s, members in enumerate(segments):
        of_task[members] = s
    leaves = of_task[graph.tensor_producer[graph.edge_tensor]] != of_task[graph.edge_reader]
    read_outside = {ref for output in sharded.outputs for ref in output.blocks}
    read_outside.update(map(TensorRef, graph.edge_tensor[leaves].tolist()))
    made: list[list[int]] = [[] for _ in sharded.names]
    for x, v in enumerate(graph.tensor_producer.tolist()):
        made[v].append(x)
    tasks = [_fuse(sharded, segment, made, read_outside) for segment in segments]
    new_id = {x: new for new, x in enumerate(x for task in tasks for x in task.results)}

    def renumbered(ref: Ref) -> Ref:
        return ref if isinstance(ref, InputRef) else TensorRef(new_id[ref.tensor])

    operands = tuple(tuple(map(renumbered, task.operands)) for task in tasks)
    fused = dataclasses.replace(
        sharded,
        graph=task_graph(
            [task.kernel for task in tasks],
            operands,
            np.bincount(of_task, graph.flops, len(tasks)),
            graph.input_bytes,
            graph.input_home,
            np.append(of_task, -1)[graph.input_maker],
        ),
        names=tuple(task.name for task in tasks),
        kernels=tuple(task.kernel for task in tasks),
        operands=operands,
        outputs=tuple(
            dataclasses.replace(output, blocks=tuple(map(renumbered, output.blocks)))
            for output in sharded.outputs
        ),
        origins=tuple(
            dataclasses.replace(
                sharded.origins[segment[0]],
                primitives=tuple(p for v in segment for p in sharded.origins[v].primitives),
            )
            for segment in segments
            if sharded.origins
        ),
    )
    rank = None if priority is None else np.array([priority[s].min() for s in segments])
    if plan.queue == "in_order":
        rank = np.argsort(topological_order(fused.graph, rank))
    return fused, Plan(placement[[s[0] for s in segments]], rank, plan.queue)


def _segments(graph: TaskGraph, placement: np.ndarray) -> list[list[int]]:
    """Returns the tasks of every segment in topological order, by their smallest task."""
    before, after = _transfers_around(graph, placement)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for v in topological_order(graph).tolist():
        groups.setdefault((int(placement[v]), before[v], after[v]), []).append(v)
    return sorted(groups.values(), key=min)


def _transfers_around(graph: TaskGraph, placement: np.ndarray) -> tuple[list[int], list[int]]:
    """Returns, per task, the sets of transfers on paths to it and from it, as bits."""
    places = placement.tolist()
    edges = list(zip(graph.edge_tensor.tolist(), *_lists(task_edges(graph)), strict=True))
    bits: dict[tuple[int, int], int] = {}

    def transfer(item: int, source: int, reader: int) -> int:
        if source in (RESIDENT, places[reader]):
            return 0
        return bits.setdefault((item, places[reader]), 1 << len(bits))

    before, after = [0] * graph.num_tasks, [0] * graph.num_tasks
    homes = graph.homes(placement).tolist()
    for i, v in zip(*_lists((graph.input_edge_input, graph.input_edge_reader)), strict=True):
        before[v] |= transfer(~i, homes[i], v)
    position = np.argsort(topological_order(graph)).tolist()
    for x, u, v in sorted(edges, key=lambda edge: position[edge[1]]):
        before[v] |= before[u] | transfer(x, places[u], v)
    for x, u, v in sorted(edges, key=lambda edge: -position[edge[2]]):
        after[u] |= after[v] | transfer(x, places[u], v)
    return before, after


def _lists(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    return [array.tolist() for array in arrays]


@dataclasses.dataclass(frozen=True)
class _Fused:
    """The task that a segment becomes; tensors by their ids in the program given."""

    name: str
    kernel: Kernel
    operands: tuple[Ref, ...]
    results: tuple[int, ...]  # tensors, increasing


def _fuse(
    sharded: ShardedProgram, segment: list[int], made: list[list[int]], read_outside: set[Ref]
) -> _Fused:
    """Returns the task that calls the kernels of `segment`, which is topological."""
    name, first = sharded.names[segment[0]], segment[0]
    if len(segment) == 1:
        return _Fused(name, sharded.kernels[first], sharded.operands[first], tuple(made[first]))
    wire_of: dict[Ref, Wire] = {}
    operands: list[Ref] = []
    parts = []
    for part, v in enumerate(segment):
        for ref in sharded.operands[v]:
            if ref not in wire_of:
                wire_of[ref] = (-1, len(operands))
                operands.append(ref)
        parts.append((sharded.kernels[v], tuple(wire_of[ref] for ref in sharded.operands[v])))
        wire_of.update({TensorRef(x): (part, k) for k, x in enumerate(made[v])})
    own = sorted(x for v in segment for x in made[v])
    results = tuple(x for x in own if TensorRef(x) in read_outside)
    kernel = _compose(tuple(parts), tuple(wire_of[TensorRef(x)] for x in results))
    return _Fused(f"{name}+{len(segment) - 1}", kernel, tuple(operands), results)


def _compose(parts: Parts, exported: tuple[Wire, ...]) -> Kernel:
    """Returns the kernel that calls the parts in turn and returns what is exported."""
    if (known := _composed.get((parts, exported))) is not None:
        return known

    def fn(*operands: jax.Array) -> tuple[jax.Array, ...]:
        made: list[tuple[jax.Array, ...]] = []
        for kernel, wires in parts:
            made.append(kernel.fn(*(operands[k] if j < 0 else made[j][k] for j, k in wires)))
        return tuple(made[j][k] for j, k in exported)

    avals = {
        k: aval
        for kernel, wires in parts
        for (j, k), aval in zip(wires, kernel.operands, strict=True)
        if j < 0
    }
    kernel = Kernel(
        name=f"{parts[0][0].name}+{len(parts) - 1}",
        fn=fn,
        operands=tuple(avals[k] for k in range(len(avals))),
        results=tuple(parts[j][0].results[k] for j, k in exported),
    )
    _composed[parts, exported] = kernel
    return kernel
