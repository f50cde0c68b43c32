"""The pipeline workload: right, of the plain graph's structure, and pinned by its scopes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.graphs.build import task_edges
from doppler_jax.graphs.pipelines import make_pipeline
from doppler_jax.programs.workloads.pipeline import LEARNING_RATE
from tests.programs.functions.registry import SUMS, assert_same

SIZES = {"stages": 3, "micro_batches": 4, "batch": 8, "width": 4, "hidden": 12}
WEIGHT_BYTES = 4 * 4 * 12
in_halves_or_whole = pytest.mark.parametrize("backward_tasks", [2, 1])


def cut(backward_tasks, **sizes):
    workload = dj.workloads.make_workload(
        "pipeline", **SIZES | sizes, backward_tasks=backward_tasks
    )
    return workload, dj.partition(dj.trace(workload.fn, *workload.args), num_shards=1)


def plain_step(params, data):
    """One step on the whole batch, without micro-batches or stages' scopes."""

    def loss_fn(params):
        x = data["x"]
        for stage in params:
            x = x + jnp.tanh(x @ stage["up"]) @ stage["down"]
        return jnp.mean((x - data["target"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradient), loss


@in_halves_or_whole
def test_a_step_is_that_of_the_whole_batch(backward_tasks):
    workload, sharded = cut(backward_tasks)
    args = dj.workloads.make_arrays(workload, jax.random.key(0))
    expected = jax.jit(plain_step)(*args)
    assert_same(jax.jit(workload.fn)(*args), expected, SUMS)
    assert_same(jax.jit(functools.partial(dj.evaluate, sharded))(*args), expected, SUMS)


def stage_of(name):
    return int(name.split("stage")[1][0])


def kind_of(name, makes_weight, backward):
    """F, B, W or BW of a task; None for the sum of losses and the update."""
    if "update" in name or "reduce_sum" in name:
        return None
    if "transpose" not in name:
        return "F"
    return "W" if makes_weight and backward == "B" else backward


@in_halves_or_whole
def test_tasks_depend_on_each_other_as_in_the_plain_graph(backward_tasks):
    _, sharded = cut(backward_tasks)
    graph, backward = sharded.graph, "B" if backward_tasks == 2 else "BW"
    weights = set(graph.tensor_producer[graph.tensor_bytes == WEIGHT_BYTES].tolist())
    task = {}
    for v, name in enumerate(sharded.names):
        if kind := kind_of(name, v in weights, backward):
            micro = int(name.removeprefix("micro")[0])
            task[v] = f"stage{stage_of(name)}.{kind}_{micro}"
    pairs = zip(*(ends.tolist() for ends in task_edges(graph)), strict=True)
    found = {(task[u], task[v]) for u, v in pairs if u in task and v in task}
    plain = make_pipeline(3, 4, whole_backward=backward_tasks == 1)
    expected = {
        (plain.names[u], plain.names[v]) for u, v in zip(*task_edges(plain.graph), strict=True)
    }
    # Weights' gradients read what the stage reads and the gradient of what it makes.
    last = "W" if backward_tasks == 2 else "BW"
    for i, m in itertools.product(range(2), range(4)):
        expected |= {(f"stage{i}.F_{m}", f"stage{i + 1}.{last}_{m}")}
        expected |= {(f"stage{i + 1}.{backward}_{m}", f"stage{i}.{last}_{m}")}
    assert {(u, v) for u, v in found if u != v} == expected


def test_pinned_stages_are_placed_on_their_devices_and_ordered():
    _, sharded = cut(2, batch=128, width=64, hidden=128)
    graph = sharded.graph
    free = dj.reference_costs(graph, num_devices=4)
    costs = dj.pin(sharded, free, {f"*stage{i}*": i for i in range(3)})
    stages = [stage_of(name) for name in sharded.names]
    able = np.isfinite(costs.compute_s)
    assert able.tolist() == [[d == stage for d in range(4)] for stage in stages]
    assert (costs.compute_s[able] == free.compute_s[able]).all()
    placed = dj.place(graph, costs, method="lns", max_evaluations=2000)
    assert placed.queue == "in_order"
    assert placed.placement.tolist() == stages
    in_order, fifo = (
        dj.simulator.makespan_s(
            dj.simulator.simulate_oracle(graph, costs, stages, queue=queue, priority=priority)
        )
        for queue, priority in (("in_order", placed.priority), ("fifo", None))
    )
    assert in_order == pytest.approx(placed.makespan_s, rel=1e-5)
    assert in_order < fifo
