import numpy as np
import pytest

from doppler_jax.costs.build import from_edge_delays
from doppler_jax.graphs.build import task_edges
from doppler_jax.policies.rollout import Actions
from doppler_jax.simulator.simulate import simulate_instance
from doppler_jax.training import elites as elites_module
from doppler_jax.training.state import Elites
from tests.generators import random_problem
from tests.policies.cases import DEVICES, padded_problem, quick_jit

update_elites = quick_jit(elites_module.update_elites)
simulated_order = quick_jit(elites_module.simulated_order)
NUM_ELITES, BATCH, BUCKET = 4, 10, 24


def problem_and_placements(num_tasks, dyadic, batch=BATCH):
    rng = np.random.default_rng([num_tasks, dyadic])
    graph, costs = random_problem(rng, num_tasks, DEVICES, dyadic=dyadic)
    placements = np.zeros((batch, BUCKET), np.int32)
    placements[:, :num_tasks] = rng.integers(0, DEVICES, (batch, num_tasks))
    return graph, padded_problem(graph, costs, BUCKET, 256), placements


def archive(makespan_s):
    """An archive whose entry i has its number as the device of every step."""
    device = np.repeat(np.arange(NUM_ELITES, dtype=np.int32)[:, None], BUCKET, axis=1)
    return Elites(
        actions=Actions(task=np.zeros_like(device), device=device + 100),
        makespan_s=np.array(makespan_s, np.float32),
    )


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ([np.inf] * 4, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3]),
        ([1, 3, 5, 7], [2, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 5]),
        ([1, 3, 5, 7], [3, 3, 3, 3, 3, 3, 4, 9, 1, 6], [1, 3, 4, 5]),
        ([1, 2, 3, 4], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4]),
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [2, np.inf, np.inf, np.inf]),
        # More repeats of the best than the archive has places must not crowd out the rest.
        ([np.inf] * 4, [2, 2, 2, 2, 2, 2, 5, 4, 3, 6], [2, 3, 4, 5]),
        ([1, np.inf, np.inf, np.inf], [np.inf] * 9 + [2], [1, 2, np.inf, np.inf]),
    ],
)
def test_the_best_are_kept_without_repeats(old, new, kept):
    _, problem, placements = problem_and_placements(8, dyadic=False)
    makespan_s = np.array(new, np.float32)
    found = update_elites(archive(old), problem, placements, makespan_s)
    assert found.makespan_s.tolist() == kept
    orders = simulated_order(problem, placements)
    for k, value in enumerate(kept):
        if value in old and value < np.inf:
            assert (found.actions.device[k] == 100 + old.index(value)).all()
        elif value < np.inf:
            source = new.index(value)
            np.testing.assert_array_equal(found.actions.device[k], orders.device[source])
            np.testing.assert_array_equal(found.actions.task[k], orders.task[source])


@pytest.mark.parametrize("dyadic", [True, False])
@pytest.mark.parametrize("num_tasks", [0, 1, 8, 24])
def test_simulated_orders_are_topological_and_replay_the_schedule(num_tasks, dyadic):
    graph, problem, placements = problem_and_placements(num_tasks, dyadic)
    senders, receivers = task_edges(graph)
    actions = simulated_order(problem, placements)
    ranks = np.zeros((BATCH, BUCKET), np.float32)
    for b, (tasks, devices) in enumerate(zip(actions.task, actions.device, strict=True)):
        tasks = np.asarray(tasks)
        assert sorted(tasks[:num_tasks]) == list(range(num_tasks))
        assert (tasks[num_tasks:] == BUCKET).all()
        np.testing.assert_array_equal(devices[:num_tasks], placements[b, tasks[:num_tasks]])
        position = np.argsort(tasks[:num_tasks])
        assert (position[senders] < position[receivers]).all()
        ranks[b, :num_tasks] = position
    fifo = simulate_instance(problem.instance, placements, schedule=True)
    again = simulate_instance(problem.instance, placements, ranks, schedule=True)
    np.testing.assert_array_equal(again.start_s, fifo.start_s)
    np.testing.assert_array_equal(again.makespan_s, fifo.makespan_s)


def test_a_task_of_no_length_keeps_its_turn():
    # On device 0, 4 runs until 1; meanwhile 3, which takes no time, becomes ready before 1.
    weights, edges = [0.5, 1.0, 0.25, 0.0, 1.0], [(0, 1, 0.0), (2, 3, 0.0)]
    graph, costs = from_edge_delays(weights, edges, num_devices=DEVICES)
    placements = np.zeros((BATCH, BUCKET), np.int32)
    placements[:, :5] = [1, 0, 2, 0, 0]
    actions = simulated_order(padded_problem(graph, costs, BUCKET, 256), placements)
    assert actions.task[0, :5].tolist() == [2, 0, 4, 3, 1]
