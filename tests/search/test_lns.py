"""Ruin and recreate: its list schedules are executions, its values the simulator's."""

import itertools

import numpy as np
import pytest

import doppler_jax as dj
from doppler_jax.objective import Objective
from doppler_jax.search import lns_kernels as kernels
from doppler_jax.search.lns import make_ruins
from doppler_jax.search.problem import make_search_problem
from doppler_jax.simulator.simulate import simulate
from tests.generators import random_problem, some_unable

MOST = 12


def random_ruins(seed, queue):
    """A problem in which some tasks are pinned, and a random plan of it."""
    rng = np.random.default_rng(seed)
    n, devices = int(rng.integers(1, 40)), int(rng.integers(1, 6))
    graph, costs = random_problem(rng, n, devices, dyadic=bool(seed % 2))
    costs = some_unable(rng, costs, 0.3)
    problem = make_search_problem(graph, costs, Objective(), queue=queue)
    able = np.isfinite(costs.compute_s)
    placement = np.array([rng.choice(np.flatnonzero(row)) for row in able])
    ruins = make_ruins(problem, placement, seed, MOST)
    ruins.rank[:] = rng.integers(0, 9, n)
    return problem, ruins


def execute(problem, placement, rank):
    """What the simulator says of a plan."""
    ranked = {"queue": "priority", "priority": rank} if problem.queue == "priority" else {}
    return simulate(problem.graph, problem.costs, placement.astype(int), **ranked)


def look_at(problem, ruins):
    """Lists the plan as it is, and notes its critical chain."""
    ruins.worth[:], ruins.count[kernels.AGE] = np.inf, kernels.TAKEN
    assert kernels.recreate(problem.aim, ruins, 1, 0.5, 0.5, 0.7, 0.0) == 1


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_a_list_schedule_is_the_execution_of_its_plan(queue):
    for seed in range(60):
        problem, ruins = random_ruins(seed, queue)
        plan = ruins.placement.copy(), ruins.rank.copy()
        look_at(problem, ruins)
        result = execute(problem, *plan)
        assert ruins.worth.tolist() == [result.makespan_s[0]] * 3
        np.testing.assert_array_equal(ruins.start_s, result.start_s[0])
        np.testing.assert_array_equal(ruins.finish_s, result.finish_s[0])
        np.testing.assert_array_equal(ruins.placement, plan[0])


@pytest.mark.parametrize("queue", ["fifo", "priority"])
def test_every_step_ends_at_a_plan_and_its_value(queue):
    reached = 0
    for seed in range(20):
        problem, ruins = random_ruins(seed, queue)
        for _ in range(40):
            before, rank = ruins.placement.copy(), ruins.rank.copy()
            assert kernels.recreate(problem.aim, ruins, 1, 0.5, 0.5, 0.7, 0.0) == 1
            assert not ruins.free.any()
            assert ((ruins.placement != before).sum() <= MOST) or not (ruins.rank != rank).any()
            reached += (ruins.placement != before).any() or (ruins.rank != rank).any()
            result = execute(problem, ruins.placement, ruins.rank)
            assert ruins.worth[kernels.ENERGY] == result.makespan_s[0] < np.inf
        best = execute(problem, ruins.best_placement, ruins.best_rank)
        assert ruins.worth[kernels.BEST] == best.makespan_s[0] <= ruins.worth[kernels.ENERGY]
    assert reached > 100


def test_a_chain_is_one_that_the_makespan_waited_for():
    lengths = []
    for seed in range(20):
        problem, ruins = random_ruins(seed, "fifo")
        look_at(problem, ruins)
        chain = ruins.chain[: ruins.count[kernels.LENGTH]].tolist()
        lengths.append(len(chain))
        start_s, finish_s = ruins.start_s, ruins.finish_s
        assert finish_s[chain[0]] == finish_s.max()
        graph, costs, device = problem.graph, problem.costs, ruins.placement.astype(int)
        for v, u in itertools.pairwise(chain):
            read = graph.tensor_producer[graph.edge_tensor[graph.edge_reader == v]]
            moves = [
                finish_s[u] + (
                    costs.latency_s[device[u], device[v]]
                    + costs.tensor_bytes[x] * costs.seconds_per_byte[device[u], device[v]]
                )
                for x in graph.edge_tensor[graph.edge_reader == v]
                if graph.tensor_producer[x] == u
            ]  # fmt: skip
            follows = device[u] == device[v] and finish_s[u] == start_s[v]
            assert follows or (u in read and start_s[v] in moves)
    assert max(lengths) > 5


def test_published_graphs_are_placed_well_within_a_second_or_two(reference_graphs):
    graph = dj.load_graph(reference_graphs / "full_transformer_layer_261nodes.txt")
    costs = dj.reference_costs(graph, num_devices=4)
    placed = dj.place(graph, costs, method="lns", max_evaluations=100_000)
    assert placed.makespan_s < 1.07 * 115.77  # annealing ends at 126.2 (docs/results/search.md)
