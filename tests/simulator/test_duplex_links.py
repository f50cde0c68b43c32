from functools import partial

import chex
import hypothesis
import jax
import numpy as np
import pytest

from doppler_jax.costs.build import reference_costs
from doppler_jax.graphs import padded as padded_module
from doppler_jax.graphs.formats import load_graph
from doppler_jax.graphs.padded import pad_problem
from doppler_jax.simulator.duplex_links import run_duplex_links
from doppler_jax.simulator.handling import handling_seconds
from doppler_jax.simulator.lockstep import run_batch
from doppler_jax.simulator.oracle import makespan_s, simulate_oracle
from tests.generators import problems, random_problem
from tests.simulator.cases import small_problem, with_idle_devices


@jax.jit
def run(padded, placements, rank=None, factor=None):
    """Makespans, starts and finishes as they leave the kernels."""
    run_lanes = partial(run_duplex_links, schedule=True)
    handling_s = handling_seconds(padded, placements)
    return run_batch(run_lanes, (padded, factor), placements, rank, handling_s)


def simulate_engine(graph, costs, placements, rank=None, factor=None, simulate=run):
    """Makespans `[B]`, starts and finishes `[B, N]` in float64."""
    with jax.enable_x64(True):
        padded = pad_problem(graph, costs, np.float64)
        padding = ((0, 0), (0, padded.padded_tasks + 1 - graph.num_tasks))
        placements = np.pad(np.asarray(placements, np.int32), padding)
        rank = None if rank is None else np.pad(np.asarray(rank, np.float64), padding)
        result = jax.tree.map(np.asarray, simulate(padded, placements, rank, factor))
    n = graph.num_tasks
    return result[0], result[1][:, :n], result[2][:, :n]


def assert_equals_oracle(found, graph, costs, placements, rtol=0.0, **options):
    for b, placement in enumerate(placements):
        schedule = simulate_oracle(graph, costs, placement, links="duplex", **options)
        wanted = makespan_s(schedule), schedule.start_s, schedule.finish_s
        for array, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(array[b], expected, rtol=rtol)


def one_shape(graph, costs, options):
    """The problem with devices that nothing is on, and factors, for one compilation of all."""
    more = 4 - costs.num_devices
    costs = with_idle_devices(costs, 4)
    compute = options.get("compute_factor", np.ones(graph.num_tasks))
    transfer = options.get("transfer_factor", np.ones((graph.num_tensors, 4 - more)))
    spare = ((0, 128 - graph.num_tensors), (0, more))
    noisy = costs.replace(compute_s=costs.compute_s * compute[:, None])
    return noisy, np.pad(transfer, spare, constant_values=1.0)


@hypothesis.given(problems())
@hypothesis.settings(max_examples=200, deadline=None)
def test_equals_the_oracle_event_by_event(problem):
    graph, costs, placement, options = problem
    hypothesis.assume(options.get("queue") != "in_order")
    sizes = {2: 8, 4: 128, 8: 32, 16: 1024}
    noisy, factor = one_shape(graph, costs, options)
    rank = None if "priority" not in options else [options["priority"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_module, "bucket_size", lambda size, smallest: sizes[smallest])
        found = simulate_engine(graph, noisy, [placement], rank, factor)
    assert_equals_oracle(found, graph, costs, [placement], 1e-12, **options)


def test_batches_on_unequal_devices_and_links():
    rng = np.random.default_rng(0)
    graph, costs = random_problem(rng, 60, 8, dyadic=True)
    placements = rng.integers(0, 8, (30, 60))  # enough for the kernel of many lanes
    found = simulate_engine(graph, costs, placements)
    assert_equals_oracle(found, graph, costs, placements)

    @jax.jit
    def plain(padded, placements, rank, factor):
        shared = padded, factor
        return run_duplex_links(shared, placements, rank, schedule=True, native=False)

    chex.assert_trees_all_equal(
        simulate_engine(graph, costs, placements, simulate=plain), found
    )


def test_engines_take_turns():
    # Tasks 0 and 1 on device 0 end at 1 and 2 s, task 2 on device 2 at 1.75 s, after its
    # input's half second; each sends four seconds of data to device 1, which takes one at a
    # time: the tensors of tasks 0, 2 and 1 arrive at 5, 9 and 13 s.
    graph, costs = small_problem(
        [1, 1, 1.25, 1, 1, 1], [(0, 4, [3]), (1, 4, [4]), (2, 4, [5])], 3, [(0, 0.5, [2])]
    )
    makespans, starts, _ = simulate_engine(graph, costs, [[0, 0, 2, 1, 1, 1]])
    np.testing.assert_array_equal(starts[0], [0, 1, 0.5, 5, 13, 9])
    assert makespans[0] == 14


def test_inputs_go_before_tensors_that_are_requested_at_zero():
    # Task 0 takes no time; its tensor and the input both go from device 0 to device 1.
    graph, costs = small_problem([0, 1, 1], [(0, 2, [1])], 2, [(0, 3, [2])])
    _, starts, _ = simulate_engine(graph, costs, [[0, 1, 1]])
    np.testing.assert_array_equal(starts[0], [0, 5, 3])


def test_tensors_of_one_request_time_go_by_id_not_by_producer():
    # Devices 0 and 1 finish tasks 0 and 1 together; tensor 0 is task 1's.
    graph, costs = small_problem([1, 1, 1, 1], [(1, 2, [2]), (0, 2, [3])], 3)
    _, starts, _ = simulate_engine(graph, costs, [[0, 1, 2, 2]])
    np.testing.assert_array_equal(starts[0], [0, 0, 3, 5])


def test_what_cannot_run_never_finishes():
    graph, costs = small_problem([1, 1, 1], [(0, 1, [1])], 2)
    compute_s = np.array([[1.0, np.inf], [1.0, 1.0], [1.0, 1.0]])
    placements = [[1, 0, 0], [0, 1, 1]]
    makespans, starts, finishes = simulate_engine(
        graph, costs.replace(compute_s=compute_s), placements
    )
    np.testing.assert_array_equal(makespans, [np.inf, 3.0])
    np.testing.assert_array_equal(starts, [[0, np.inf, 0], [0, 2, 0]])
    np.testing.assert_array_equal(finishes, [[np.inf, np.inf, 1], [1, 3, 1]])


def test_one_trace_per_bucket_inside_another_jit():
    rng = np.random.default_rng(0)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def worst(padded, placements, factors):
        run_lanes = partial(run_duplex_links, schedule=False)
        draws = jax.lax.map(
            lambda f: run_batch(run_lanes, (padded, f), placements, None)[0], factors
        )
        return draws.max(axis=0)

    for num_tasks in (22, 23, 24):
        tensors = [(v, 1.0, [v + 1]) for v in range(num_tasks - 1)]
        graph, costs = small_problem(np.ones(num_tasks), tensors, 2)
        placements = rng.integers(0, 2, (4, 25)).astype(np.int32)
        factors = np.ones((3, 23, 2), np.float32)
        factors[1] = 2.0
        moves = (np.diff(placements[:, :num_tasks]) != 0).sum(axis=1)
        found = worst(pad_problem(graph, costs), placements, factors)
        np.testing.assert_array_equal(found, num_tasks + 2 * moves)


def test_a_published_graph(reference_graphs):
    graph = load_graph(reference_graphs / "full_transformer_layer_261nodes.txt")
    costs = reference_costs(graph, num_devices=4)
    placements = np.random.default_rng(0).integers(0, 4, (8, graph.num_tasks))
    found = simulate_engine(graph, costs, placements)
    assert_equals_oracle(found, graph, costs, placements, rtol=1e-12)
