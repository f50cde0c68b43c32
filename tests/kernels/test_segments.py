"""Segments compute the same, move the same, and are as coarse as delays nothing."""

import gc

import chex
import jax
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doppler_jax as dj
from doppler_jax.engine import segments
from doppler_jax.engine.agenda import make_agenda
from doppler_jax.engine.segments import fuse_segments
from doppler_jax.graphs.build import task_edges, topological_order
from doppler_jax.simulator.disciplines import check_ranks
from tests.kernels.conftest import (
    X,
    at_home,
    build,
    check_trace,
    compile_on,
    partitioned,
    random_program,
)


@st.composite
def placed_programs(draw):
    seed, num_tasks = draw(st.integers(0, 10_000)), draw(st.integers(0, 30))
    sharded = random_program(seed, num_tasks) if num_tasks else build([], ["i0", "i2"])
    rng = np.random.default_rng(seed)
    sharded = at_home(sharded, rng.integers(-1, 2, 3))
    placement = rng.integers(0, draw(st.integers(1, 3)), num_tasks)
    priority = rng.permutation(num_tasks).astype(float) if draw(st.booleans()) else None
    return sharded, placement, priority


def transfers_around(sharded, placement):
    """The sets of transfers on paths to and from each task, by walking all paths."""
    graph = sharded.graph
    senders, readers = task_edges(graph)
    dag = nx.DiGraph()
    dag.add_nodes_from(range(graph.num_tasks))
    dag.add_edges_from(zip(senders.tolist(), readers.tolist(), strict=True))
    into = {v: set() for v in dag}
    out_of = {v: set() for v in dag}
    for x, u, v in zip(graph.edge_tensor, senders, readers, strict=True):
        if placement[u] != placement[v]:
            into[v].add((x, placement[v]))
            out_of[u].add((x, placement[v]))
    for i, v in zip(graph.input_edge_input, graph.input_edge_reader, strict=True):
        if graph.input_home[i] not in (-1, placement[v]):
            into[v].add((~i, placement[v]))
    return [
        (
            frozenset().union(*(into[u] for u in {v, *nx.ancestors(dag, v)})),
            frozenset().union(*(out_of[u] for u in {v, *nx.descendants(dag, v)})),
        )
        for v in range(graph.num_tasks)
    ]


def fuse(sharded, placement, priority=None):
    """Returns the fused program, its placement and its ranks."""
    queue = "fifo" if priority is None else "priority"
    fused, plan = fuse_segments(sharded, dj.Plan(placement, priority, queue))
    return fused, plan.placement, plan.priority


def moved(agenda):
    """What leaves each device for which other, by size."""
    return sorted((t.tensor < 0, t.source, t.destination) for t in agenda.transfers)


@settings(deadline=None, max_examples=60)
@given(placed_programs())
def test_same_results_same_transfers_and_no_coarser_grouping(case):
    sharded, placement, priority = case
    fused, places, rank = fuse(sharded, placement, priority)
    expected, out = dj.evaluate(sharded, X), dj.evaluate(fused, X)
    chex.assert_trees_all_equal(out, expected)
    around = transfers_around(sharded, placement)
    groups = {}
    for v, sets in enumerate(around):
        groups.setdefault((placement[v], *sets), set()).add(v)
    found = segments._segments(sharded.graph, placement)
    assert list(map(set, found)) == sorted(groups.values(), key=min)
    assert places.tolist() == [placement[s[0]] for s in found]
    assert len(set(fused.names)) == fused.graph.num_tasks == len(found)
    if priority is not None:
        assert rank.tolist() == [min(priority[v] for v in s) for s in found]
        order = np.argsort(topological_order(sharded.graph, priority))
        same, plan = fuse_segments(sharded, dj.Plan(placement, order, "in_order"))
        assert check_ranks(same.graph, "in_order", plan.priority) is not None
    before, after = (
        make_agenda(program, dj.Plan(where))
        for program, where in ((sharded, placement), (fused, places))
    )
    assert moved(before) == moved(after)
    assert fused.graph.flops.sum() == sharded.graph.flops.sum()


@settings(deadline=None, max_examples=40)
@given(placed_programs())
def test_deterministic_and_idempotent(case):
    sharded, placement, priority = case
    fused, places, rank = fuse(sharded, placement, priority)
    again, again_places, _ = fuse(sharded, placement, priority)
    twice, twice_places, _ = fuse(fused, places, rank)
    assert again.operands == fused.operands
    assert again.names == twice.names == fused.names
    assert again.kernels == twice.kernels == fused.kernels
    np.testing.assert_array_equal(twice_places, again_places)


def test_a_device_alone_is_one_task():
    sharded = random_program(3, 20)
    fused, places, rank = fuse(sharded, np.zeros(20, int), np.arange(20.0)[::-1])
    (first,) = [name for name in sharded.names if fused.names == (f"{name}+19",)]
    assert first
    assert places.tolist() == [0]
    assert rank.tolist() == [0.0]
    outputs = {ref for output in sharded.outputs for ref in output.blocks}
    assert fused.graph.num_tensors == len({ref for ref in outputs if hasattr(ref, "tensor")})


def test_a_tensor_that_leaves_ends_its_segment():
    # Device 1 reads task 1; 2 and 3 need not be ready for that. Task 4 waits for device 1.
    operands = [["t0", "i0"], ["t0", "i1"], ["t2", "t2"], ["t5", "t3"]]
    tasks = [("make", []), *(("mean", pair) for pair in operands), ("split", ["t1"])]
    sharded = build(tasks, ["t4"])
    placement = np.array([0, 0, 0, 0, 0, 1])
    fused, places, _ = fuse(sharded, placement)
    assert fused.names == ("make0+1", "mean2+1", "mean4", "split5")
    assert places.tolist() == [0, 0, 0, 1]
    ends = zip(*map(np.ndarray.tolist, task_edges(fused.graph)), strict=True)
    assert set(ends) == {(0, 1), (0, 3), (1, 2), (3, 2)}
    # What is read in its segment only is no tensor of the program any more: task 2's.
    assert fused.graph.tensor_producer.tolist() == [0, 0, 1, 2, 3, 3]
    assert fused.kernels[3] is sharded.kernels[5]


def test_an_argument_on_its_way_holds_up_only_its_readers():
    sharded = build([("make", []), ("mean", ["t0", "i0"]), ("mean", ["t1", "t1"])], ["t2"])
    places = np.ones(3, int)
    assert fuse(sharded, places)[0].names == ("make0+2",)
    fused, _, _ = fuse(at_home(sharded, [0, -1, -1]), places)
    assert fused.names == ("make0", "mean1+1")
    assert fused.graph.input_home.tolist() == [0, -1, -1]


def test_like_segments_share_a_kernel_while_it_is_in_use():
    gc.collect()
    held = set(segments._composed)  # by other tests
    one = [("mean", ["i0", "i1"]), ("split", ["t0"]), ("mean", [("t1", 0), ("t1", 1)])]
    two = [("mean", ["i1", "i2"]), ("split", ["t3"]), ("mean", [("t4", 0), ("t4", 1)])]
    swapped = [*two[:2], ("mean", [("t4", 1), ("t4", 0)])]
    placement = np.array([0, 0, 0, 1, 1, 1])
    fused, _, _ = fuse(build(one + two, ["t2", "t5"]), placement)
    assert fused.names == ("mean0+2", "mean3+2")
    assert fused.kernels[0] is fused.kernels[1]
    assert fused.kernels[0].name == "mean+2"
    other, _, _ = fuse(build(one + swapped, ["t2", "t5"]), placement)
    assert other.kernels[0] is fused.kernels[0]
    assert other.kernels[1] is not fused.kernels[1]
    more, _, _ = fuse(build(one + two, ["t2", "t5", "t3"]), placement)
    assert more.kernels[1] is not fused.kernels[1]  # another result
    del fused, other, more
    gc.collect()
    assert set(segments._composed) <= held


@pytest.mark.parametrize("mode", ["work_conserving", "in_order", "stream"])
def test_segments_run(local, mode):
    for seed in range(6):
        sharded = random_program(seed, 30)
        placement = np.arange(30) % 7 // 4
        options = {"fuse_segments": True, "priority": range(30) if seed % 2 else None}
        step = compile_on(sharded, placement, local, mode=mode, **options)
        chex.assert_trees_all_close(step(X), dj.evaluate(sharded, X), rtol=1e-5, atol=1e-6)
        assert len(step.names) == len(step.schedule.start_s) == step.graph.num_tasks < 30
        check_trace(step)


def test_a_print_in_a_segment_runs_once(capfd):
    def fn(x):
        y = x * 2.0
        jax.debug.print("total {}", y.sum())
        return y @ y

    x = np.ones((4, 4), np.float32)
    sharded = dj.partition(dj.trace(fn, x), 1)
    placement, devices = np.zeros(sharded.graph.num_tasks, int), jax.devices()[:1]
    step = dj.compile(sharded, placement, devices=devices, fuse_segments=True)
    assert len(step.names) == 1 < sharded.graph.num_tasks
    np.testing.assert_allclose(step(x), fn(x))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("total 32.0\n") == 2  # `fn` printed too


def test_workload_in_segments():
    sizes = {"batch": 32, "features": 32, "hidden": 32, "classes": 16}
    sharded, args, fn = partitioned("ffnn", 4, strategy="uniform", **sizes)
    num_tasks = sharded.graph.num_tasks
    placement = np.arange(num_tasks) * 2 // num_tasks
    fused, _, _ = fuse(sharded, placement)
    assert len(fused.origins) == fused.graph.num_tasks < num_tasks
    count, wanted = (sum(len(o.primitives) for o in p.origins) for p in (fused, sharded))
    assert count == wanted
    np.testing.assert_allclose(dj.evaluate(fused, *args), fn(*args), rtol=1e-4, atol=1e-5)
